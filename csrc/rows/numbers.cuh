// SPDX-License-Identifier: Apache-2.0
// The numbers of each row, its temperature and its length: a part of the argument of every kernel whose rows lie at one stride.
// The top-k kernels have such fields in their own argument (problem.cuh). fused_topk/layout/kernel_arguments.py reads the fields
// from here.
#pragma once

#include "mask.cuh"
#include "scale.cuh"

namespace fused_topk {

// SCALE: RowScale or DrawScale
template <class SCALE>
struct NumbersOfRows {
  SCALE scale;
  // nullable; [rows] of int32 or int64: tokens from a row's length on are -inf, and are not read. The rows of LM heads
  // have none.
  const void* lengths;
  u32 lengths_are_long;

  __device__ __forceinline__ auto given_temperature(u32 row) const {
    return scale.given([&] { return row; });
  }
  // Draws have a rule of their own (sample_request.cuh).
  __device__ __forceinline__ Temperature temperature_of(u32 row) const {
    return Temperature::of(given_temperature(row));
  }
  __device__ __forceinline__ u32 length_of(u32 row, u32 V) const {
    return lengths ? length_at(lengths, lengths_are_long, row, V) : V;
  }
};

using RowNumbers = NumbersOfRows<RowScale>;
using DrawNumbers = NumbersOfRows<DrawScale>;

}  // namespace fused_topk
