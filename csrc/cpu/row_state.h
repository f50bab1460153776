// SPDX-License-Identifier: Apache-2.0
// The state of a row while it is read. Shared by the files that read or merge rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "../algebra/normalizer.h"
#include "logit_rows.h"

namespace fused_topk::cpu {

// The normalizer of a block. d is float64, so that merging the blocks of a row adds no error.
struct BlockNormalizer {
  float m;  // NaN if the block has a NaN
  double d;

  bool has_nan() const { return m != m; }
};

// `merge` of normalizer.h.
inline BlockNormalizer merge(const BlockNormalizer& a, const BlockNormalizer& b, double inverse_temperature) {
  const float m = max_or_nan(a.m, b.m);
  const double base = reference_point(m);
  const auto relative_to_m = [&](const BlockNormalizer& x) {
    return x.m == m ? x.d : x.d * std::exp((x.m - base) * inverse_temperature);
  };
  return {m, relative_to_m(a) + relative_to_m(b)};
}

// The normalizer of a row, given those of its blocks in their order.
inline BlockNormalizer merged(const BlockNormalizer* of_blocks, u32 blocks, double inverse_temperature) {
  BlockNormalizer sum = of_blocks[0];
  for (u32 i = 1; i < blocks; ++i) sum = merge(sum, of_blocks[i], inverse_temperature);
  return sum;
}

// The normalizer of a block x [n], given its maximum without NaNs and the sum of its exponentials. A NaN in x makes d NaN. So
// does a maximum of +inf or a bad temperature: only then is x searched for a NaN.
inline BlockNormalizer normalizer_of(const VectorKernels& kernels, const float* x, u32 n, float greatest, double d) {
  return {d != d && kernels.has_nan(x, n) ? kNaN : greatest, d};
}

// The normalizer of a whole row.
struct FinishedRow {
  double m, d, log_d;
  double inverse_temperature;

  FinishedRow(const BlockNormalizer& sum, double inverse)
      : m(sum.m), d(sum.d), log_d(std::log(d)), inverse_temperature(inverse) {}

  // A row without a finite normalizer has no probabilities. As in torch.softmax, they are NaN.
  bool is_finite() const { return std::isfinite(m) && std::isfinite(log_d); }

  // Relative to a maximum of +inf, d is NaN. The logsumexp is +inf, or NaN if the temperature is.
  float logsumexp() const { return float(std::isinf(m) ? m * inverse_temperature : m * inverse_temperature + log_d); }
};

// What float32 can multiply and divide by. row_arguments.py refuses other temperatures.
constexpr double kLeastTemperature = 0x1p-120, kGreatestTemperature = 0x1p126;

// A row's temperature, as the loops take it.
struct Temperature {
  double inverse;
  Exponential exponential;  // all but its reference

  // With a temperature that is not positive all results but the indices are NaN. Others are clamped to what float32 can
  // multiply and divide by.
  explicit Temperature(double t) {
    t = t > 0.0 ? std::clamp(t, kLeastTemperature, kGreatestTemperature) : double(kNaN);
    inverse = 1.0 / t;
    const double c = t * 0.6931471805599453;
    // The upper 16 of 24 bits.
    const float high = float_of(bits_of(float(c)) & 0xFFFFFF00u);
    // Finite, so that a logit of -inf is always below.
    const double lowest = std::max(-125.0 * c, -double(std::numeric_limits<float>::max()));
    exponential = {0.0f, float(1.0 / c), high, float(c - high), std::isnan(t) ? float(t) : float(lowest)};
  }
};

// The temperature of a row of [sizes...].
inline double temperature_of(const Scale& scale, const std::vector<i64>& sizes, u64 row) {
  if (!scale.row_temperature) return scale.temperature;
  return scale.row_temperature[offset_of(row, sizes, scale.strides)];
}
inline double temperature_of(const LogitRows& rows, u64 row) { return temperature_of(rows.scale, rows.sizes, row); }

// The temperatures of so many rows are prepared together. A multiple of the rows that lie side by side in vectors.
constexpr u32 kTemperaturesAtOnce = 64;

// The temperatures of some rows, as the loops over short rows take them.
class PreparedTemperatures {
 public:
  // Of rows first .. first + count of [sizes...]; count <= kTemperaturesAtOnce.
  PreparedTemperatures(const LogitRows& rows, u64 first, u32 count) {
    double last = 0.0;
    for (u32 i = 0; i < count; ++i) {
      const double t = temperature_of(rows, first + i);
      // Rows are often given in runs of equal temperatures. A NaN is not equal.
      if (i > 0 && t == last) {
        exponentials_[i] = exponentials_[i - 1];
        inverses_[i] = inverses_[i - 1];
        continue;
      }
      const Temperature temperature(last = t);
      exponentials_[i] = temperature.exponential;
      inverses_[i] = temperature.inverse;
    }
  }

  Temperatures view() const { return {exponentials_, inverses_, true}; }

 private:
  Exponential exponentials_[kTemperaturesAtOnce];
  double inverses_[kTemperaturesAtOnce];
};

// Calls do_rows(begin, how many, Temperatures) for rows first .. first + count: all at once if they have one temperature.
template <class ROWS>
inline void for_each_temperature(const LogitRows& rows, const Temperature& temperature, u64 first, u32 count,
                                 const ROWS& do_rows) {
  if (!rows.scale.row_temperature) {
    do_rows(0, count, Temperatures{&temperature.exponential, &temperature.inverse, false});
    return;
  }
  for (u32 begin = 0; begin < count; begin += kTemperaturesAtOnce) {
    const u32 some = std::min(count - begin, kTemperaturesAtOnce);
    const PreparedTemperatures prepared(rows, first + begin, some);
    do_rows(begin, some, prepared.view());
  }
}

}  // namespace fused_topk::cpu
