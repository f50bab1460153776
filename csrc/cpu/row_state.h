// SPDX-License-Identifier: Apache-2.0
// What is known of a row while it is read, and where it lies: shared by rows.cpp and full_rows.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "../normalizer.h"
#include "vector_kernels.h"

namespace fused_topk::cpu {

constexpr u32 kItemSize[kDTypes] = {4, 2, 2};

// The normalizer of a block: d in float64, so that the blocks of a row add no error.
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

// A row's temperature in the forms that the arithmetic wants.
struct Temperature {
  double inverse;
  Exponential exponential;  // all but its reference

  // One that is not positive makes a NaN of everything but the indices. Others are brought within what float32
  // arithmetic can multiply and divide by.
  explicit Temperature(double t) {
    t = t > 0.0 ? std::clamp(t, 0x1p-120, 0x1p126) : std::numeric_limits<double>::quiet_NaN();
    inverse = 1.0 / t;
    const double c = t * 0.6931471805599453;
    // The upper 16 of 24 bits.
    const float rounded = float(c);
    u32 bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    bits &= 0xFFFFFF00u;
    float high;
    std::memcpy(&high, &bits, sizeof high);
    // Not -inf, so that a logit of -inf is always below.
    const double lowest = std::max(-125.0 * c, -double(std::numeric_limits<float>::max()));
    exponential = {0.0f, float(1.0 / c), high, float(c - high), std::isnan(t) ? float(t) : float(lowest)};
  }
};

inline i64 offset_of(u64 row, const std::vector<i64>& sizes, const std::vector<i64>& strides) {
  i64 offset = 0;
  for (size_t dim = sizes.size(); dim-- > 0 && row != 0;) {
    const u64 size = u64(sizes[dim]);
    // Mostly there is one dimension, or the others are 1: no division then.
    const u64 outer = row < size ? 0 : row / size;
    offset += i64(row - outer * size) * strides[dim];
    row = outer;
  }
  return offset;
}

}  // namespace fused_topk::cpu
