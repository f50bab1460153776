// SPDX-License-Identifier: Apache-2.0
// The numbers that each row has: a part of the argument of every kernel whose rows lie at one stride. The argument of the top-k
// kernels (problem.cuh) has the same fields, with a stride for each. kernel_arguments.py of fused_topk/layout reads them from here.
#pragma once

#include "mask.cuh"
#include "scale.cuh"

namespace fused_topk {

// FLOAT: of a temperature
template <class FLOAT>
struct NumbersOfRows {
  const FLOAT* row_temperature;  // nullable; [rows]
  // nullable; [rows] of int32 or int64: tokens from a row's length on are -inf, and are not read. The rows of LM heads have none.
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
