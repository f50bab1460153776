// SPDX-License-Identifier: Apache-2.0
// The state of a row while it is read, and where it lies. Shared by the files that read or merge rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "../algebra/normalizer.h"
#include "logit_rows.h"

namespace fused_topk::cpu {

constexpr u32 kItemSize[kDTypes] = {4, 2, 2};

// The normalizer of a block. d is float64, so that merging the blocks of a row adds no error.
struct BlockNormalizer {
  float m;
  double d;
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

// What float32 can multiply and divide by. arguments.py refuses other temperatures.
constexpr double kLeastTemperature = 0x1p-120, kGreatestTemperature = 0x1p126;

// A row's temperature, as the loops take it.
struct Temperature {
  double inverse;
  Exponential exponential;  // all but its reference

  // A temperature that is not positive makes NaN of all results but the indices. Others are clamped to what float32 can
  // multiply and divide by.
  explicit Temperature(double t) {
    t = t > 0.0 ? std::clamp(t, kLeastTemperature, kGreatestTemperature) : std::numeric_limits<double>::quiet_NaN();
    inverse = 1.0 / t;
    const double c = t * 0.6931471805599453;
    // The upper 16 of 24 bits.
    const float rounded = float(c);
    u32 bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    bits &= 0xFFFFFF00u;
    float high;
    std::memcpy(&high, &bits, sizeof high);
    // Finite, so that a logit of -inf is always below.
    const double lowest = std::max(-125.0 * c, -double(std::numeric_limits<float>::max()));
    exponential = {0.0f, float(1.0 / c), high, float(c - high), std::isnan(t) ? float(t) : float(lowest)};
  }
};

inline i64 offset_of(u64 row, const std::vector<i64>& sizes, const std::vector<i64>& strides) {
  i64 offset = 0;
  for (size_t dim = sizes.size(); dim-- > 0 && row != 0;) {
    const u64 size = u64(sizes[dim]);
    // With one dimension, or others of size 1, there is no division. That is the usual case.
    const u64 outer = row < size ? 0 : row / size;
    offset += i64(row - outer * size) * strides[dim];
    row = outer;
  }
  return offset;
}

// Rows whose temperatures are prepared together: a multiple of those that lie side by side in vectors.
constexpr u32 kTemperaturesAtOnce = 64;

// The temperatures of some rows, as the loops over short rows take them.
class PreparedTemperatures {
 public:
  // Of rows first .. first + count of [sizes...]; count <= kTemperaturesAtOnce.
  PreparedTemperatures(const LogitRows& rows, u64 first, u32 count) {
    double last = 0.0;
    for (u32 i = 0; i < count; ++i) {
      const double t = rows.row_temperature[offset_of(first + i, rows.sizes, rows.temperature_strides)];
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
  if (!rows.row_temperature) {
    do_rows(0, count, Temperatures{&temperature.exponential, &temperature.inverse, false});
    return;
  }
  for (u32 begin = 0; begin < count; begin += kTemperaturesAtOnce) {
    const u32 some = std::min(count - begin, kTemperaturesAtOnce);
    const PreparedTemperatures prepared(rows, first + begin, some);
    do_rows(begin, some, prepared.view());
  }
}

inline const char* logits_of(const LogitRows& rows, u64 row) {
  return rows.logits + offset_of(row, rows.sizes, rows.logits_strides) * kItemSize[rows.dtype];
}

// Null where there is no mask.
inline const char* mask_of(const LogitRows& rows, u64 row) {
  const u32 item_size = rows.mask_kind == MaskKind::kBits ? 4 : 1;
  return rows.mask ? rows.mask + offset_of(row, rows.sizes, rows.mask_strides) * item_size : nullptr;
}

// Writes -inf to those of tokens begin .. begin + n that the row's mask forbids. begin is a multiple of 32. x: [n]
inline void apply_mask(const LogitRows& rows, const char* mask, u32 begin, u32 n, float* x) {
  const i64 stride = rows.mask_element_stride;
  if (rows.mask_kind == MaskKind::kBools) {
    rows.kernels->mask_bools(reinterpret_cast<const u8*>(mask) + begin * stride, stride, n, x);
  } else {
    rows.kernels->mask_bits(mask + begin / 32 * stride * 4, stride, n, x);
  }
}

// Whether the logits are adjacent, aligned float32, which is read where it lies.
inline bool is_read_in_place(const LogitRows& rows, const char* logits) {
  return rows.dtype == kFloat32 && rows.logits_element_stride == 1 &&
         reinterpret_cast<std::uintptr_t>(logits) % alignof(float) == 0;
}

// Whether all elements of [sizes..., width] lie one after the other.
inline bool are_adjacent(const std::vector<i64>& sizes, i64 width, const std::vector<i64>& strides,
                         i64 element_stride) {
  i64 stride = width;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    if (sizes[dim] != 1 && strides[dim] != stride) return false;
    stride *= sizes[dim];
  }
  return element_stride == 1;
}

// Whether all logits do.
inline bool are_adjacent(const LogitRows& rows) {
  return are_adjacent(rows.sizes, rows.vocab_size, rows.logits_strides, rows.logits_element_stride);
}

// Rows first .. first + count as floats, [count, vocab_size]: where they lie, or in the buffer, which holds them all.
inline const float* read_rows(const LogitRows& rows, u64 first, u32 count, float* buffer) {
  const u32 n = rows.vocab_size;
  const auto load = rows.kernels->load[rows.dtype];
  if (!are_adjacent(rows)) {
    for (u32 i = 0; i < count; ++i) load(logits_of(rows, first + i), rows.logits_element_stride, n, buffer + i * n);
    return buffer;
  }
  const char* const source = logits_of(rows, first);
  if (is_read_in_place(rows, source)) return reinterpret_cast<const float*>(source);
  load(source, 1, count * n, buffer);
  return buffer;
}

}  // namespace fused_topk::cpu
