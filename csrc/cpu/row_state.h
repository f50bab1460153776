// SPDX-License-Identifier: Apache-2.0
// The state of a row while it is read, and where it lies. Shared by rows.cpp and full_rows.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "../normalizer.h"
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

// A row's temperature, as the loops take it.
struct Temperature {
  double inverse;
  Exponential exponential;  // all but its reference

  // A temperature that is not positive makes NaN of all results but the indices. Others are clamped to what float32 can
  // multiply and divide by.
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

inline const char* logits_of(const LogitRows& rows, u64 row) {
  return rows.logits + offset_of(row, rows.sizes, rows.logits_strides) * kItemSize[rows.dtype];
}

// Whether the logits are adjacent, aligned float32, which is read where it lies.
inline bool is_read_in_place(const LogitRows& rows, const char* logits) {
  return rows.dtype == kFloat32 && rows.logits_element_stride == 1 &&
         reinterpret_cast<std::uintptr_t>(logits) % alignof(float) == 0;
}

// Whether all logits lie one after the other.
inline bool are_adjacent(const LogitRows& rows) {
  i64 stride = rows.vocab_size;
  for (size_t dim = rows.sizes.size(); dim-- > 0;) {
    if (rows.sizes[dim] != 1 && rows.logits_strides[dim] != stride) return false;
    stride *= rows.sizes[dim];
  }
  return rows.logits_element_stride == 1;
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
