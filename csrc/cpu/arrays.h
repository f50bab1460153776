// SPDX-License-Identifier: Apache-2.0
// A framework's arrays, as DLPack shows them.
#pragma once

#include <cstdint>
#include <utility>

#include "dlpack.h"
#include "row_state.h"

namespace fused_topk::cpu {

using dlpack::Array;

constexpr int kMostDims = 8;

inline i64 stride_of(const Array& array, int dim) { return i64(array.strides[dim]); }

inline u64 elements_of(const Array& array) {
  u64 elements = 1;
  for (int dim = 0; dim < array.dims; ++dim) elements *= u64(array.shape[dim]);
  return elements;
}

inline bool is_contiguous(const Array& array) {
  i64 stride = 1;
  for (int dim = array.dims; dim-- > 0;) {
    if (array.shape[dim] != 1 && stride_of(array, dim) != stride) return false;
    stride *= array.shape[dim];
  }
  return true;
}

// The addresses of an array's first byte and of the byte after its last. No stride is negative.
inline std::pair<std::uintptr_t, std::uintptr_t> bytes_of(const Array& array) {
  const auto first = reinterpret_cast<std::uintptr_t>(array.data);
  if (elements_of(array) == 0) return {first, first};
  i64 last = 0;
  for (int dim = 0; dim < array.dims; ++dim) last += (array.shape[dim] - 1) * stride_of(array, dim);
  return {first, first + std::uintptr_t(last + 1) * (array.type.bits / 8)};
}

inline bool has_type(const Array& array, dlpack::TypeCode code, u32 bits) {
  return array.type.code == code && array.type.bits == bits && array.type.lanes == 1;
}

inline bool has_type(const Array& array, DType dtype) {
  if (dtype == kFloat32) return has_type(array, dlpack::kFloat, 32);
  return has_type(array, dtype == kFloat16 ? dlpack::kFloat : dlpack::kBFloat, 16);
}

// Whether all of a float32 array's elements are temperatures that arguments.py accepts. A NaN fails both comparisons.
inline bool are_temperatures(const Array& array) {
  const float* const base = static_cast<const float*>(array.data);
  i64 place[kMostDims] = {};
  for (u64 left = elements_of(array); left > 0; --left) {
    i64 offset = 0;
    for (int dim = 0; dim < array.dims; ++dim) offset += place[dim] * stride_of(array, dim);
    if (!(base[offset] >= kLeastTemperature && base[offset] <= kGreatestTemperature)) return false;
    for (int dim = array.dims; dim-- > 0;) {
      if (++place[dim] < array.shape[dim]) break;
      place[dim] = 0;
    }
  }
  return true;
}

}  // namespace fused_topk::cpu
