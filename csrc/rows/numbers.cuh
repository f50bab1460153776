// SPDX-License-Identifier: Apache-2.0
// The numbers of each row, its temperature and its length: a part of the argument of every kernel whose rows lie at one stride.
// The top-k kernels have such fields in their own argument (problem.cuh). fused_topk/layout/kernel_arguments.py reads the fields
// from here.
#pragma once

#include "mask.cuh"
#include "scale.cuh"

namespace fused_topk {

// FLOAT: the type of a temperature
template <class FLOAT>
struct NumbersOfRows {
  const FLOAT* row_temperature;  // nullable; [rows]
  // nullable; [rows] of int32 or int64: tokens from a row's length on are -inf, and are not read. The rows of LM heads
  // have none.
  const void* lengths;
  FLOAT temperature;  // where row_temperature is null
  u32 lengths_are_long;

  __device__ __forceinline__ FLOAT given_temperature(u32 row) const {
    return row_temperature ? __ldg(row_temperature + row) : temperature;
  }
  // Draws have a rule of their own (sample_request.cuh).
  __device__ __forceinline__ Temperature temperature_of(u32 row) const {
    return Temperature::of(given_temperature(row));
  }
  __device__ __forceinline__ u32 length_of(u32 row, u32 V) const {
    return lengths ? length_at(lengths, lengths_are_long, row, V) : V;
  }
};

using RowNumbers = NumbersOfRows<float>;
using DrawNumbers = NumbersOfRows<double>;

}  // namespace fused_topk
