// SPDX-License-Identifier: Apache-2.0
// The argument of a launch: one struct, passed by value. fused_topk/layout/topk_launch.py fills it by field names.
#pragma once

#include "mask.cuh"
#include "row.cuh"
#include "scale.cuh"

namespace fused_topk {

// The most leading dimensions that rows may be spread over, where no single stride describes them.
constexpr u32 kLeadingDims = 4;

// What `values` holds. kState: `values` holds logits, and `logsumexp` holds m and d. A kind whose two lowest bits are 0 holds
// logits. The CPU numbers the kinds otherwise (router_kernels.h).
enum ValueKind : u32 { kLogits = 0, kProbabilities = 1, kLogProbabilities = 2, kState = 4 };
__device__ __forceinline__ bool has_logits(u32 value_kind) { return (value_kind & 3) == kLogits; }

// The fields that every launch reads come first. Blocks fetch the struct from memory 64 bytes at a time, the first time 48.
// These 48 bytes suffice to request the logits.
struct Problem {
  const void* logits;  // [rows, V]
  i64 row_stride;      // of the logits, in elements; used if leading_dims is 1
  u32 rows;
  u32 V;
  u32 k;  // of a row
  u32 parts_per_row;
  u16 tiles_per_part_log2;
  u16 lead;                  // how many of a group's last tiles are read first
  u32 parts_per_split;       // parts_per_row / splits; the first splits take one more
  u32 splits_with_one_more;  // how many those are
  u32 leading_dims;          // described by the strides below, innermost first
  // For KthBound: each warp publishes its k_of_warp-th best key, and warps_of_k = ceil(k / k_of_warp) warps prove a bound.
  // k_of_split and splits_of_k: the same for splits.
  u16 k_of_warp, warps_of_k;
  u16 k_of_split, list_length;
  u32 splits_of_k;
  RowScale scale;     // its temperatures have strides, below
  u64* lists;         // nullable; [rows, splits * (list_length + 1)]: the splits' lists and bounds
  Normalizer* parts;  // nullable; [rows, parts]: their states
  u32* row_tickets;   // nullable; [rows], zero before and after each launch
  float* logsumexp;   // [rows]; for kState [2, rows]: m, d
  void* values;       // [rows, k] float, or the logits' format for kLogits and kState; [rows / beams, k] with beams
  i64* indices;       // like values
  u32 value_kind;
  u32 normalize_topk;  // 1: values are relative to the k chosen
  u32 beams;           // 0: no beam search; else the number of rows of a sequence
  u32 k_of_beam;       // each beam's list is bounded by its candidate of this rank
  u32 sizes[kLeadingDims];
  u32 mask_kind;      // MaskKind
  u32 k_of_sequence;  // with beams
  i64 logits_strides[kLeadingDims];
  i64 mask_strides[kLeadingDims];
  i64 temperature_strides[kLeadingDims];
  const void* mask;  // nullable; see RowMask
  i64 mask_element_stride;
  const float* beam_scores;  // nullable; [rows / beams, beams]
  i64 beam_scores_strides[2];
  u64* beam_lists;      // nullable; [rows, k]: the lists of a sequence's beams
  i64* beam_indices;    // nullable; [rows, k]: the results' `indices` for these lists
  u32* beam_tickets;    // nullable; [rows / beams], zero before and after each launch
  const void* lengths;  // nullable; [rows] of int32 or int64: tokens from a row's length on are -inf, and are not read
  u32 lengths_are_long;
  i64 lengths_strides[kLeadingDims];

  // The offset of a row's first logit, in elements.
  __device__ __forceinline__ i64 logits_offset(u32 row) const {
    // Rows almost always have one stride, and need no division.
    if (leading_dims != 1) return offset(row, logits_strides);
    return row * row_stride;
  }

  // How many tokens a row has. MASK: MaskUse.
  template <u32 MASK>
  __device__ __forceinline__ u32 length(u32 row) const {
    if (!may_have_lengths<MASK>()) return V;
    return length_at(lengths, lengths_are_long, offset(row, lengths_strides), V);
  }
  template <u32 MASK>
  __device__ __forceinline__ bool may_have_lengths() const {
    return MASK == kLengths || (has_mask(MASK) && lengths);
  }

  __device__ __forceinline__ RowMask row_mask(u32 row) const {
    const i64 start = offset(row, mask_strides) * (mask_kind == kMaskBits ? 4 : 1);
    return {static_cast<const char*>(mask) + start, mask_element_stride, mask_kind};
  }

  __device__ __forceinline__ Temperature temperature_of(u32 row) const {
    return Temperature::of(scale.given([&] { return offset(row, temperature_strides); }));
  }

 private:
  __device__ __forceinline__ i64 offset(u32 row, const i64 (&strides)[kLeadingDims]) const {
    i64 result = 0;
#pragma unroll 1
    for (u32 d = 0; d + 1 < leading_dims; ++d) {
      const u32 outer = row / sizes[d];
      result += (row - outer * sizes[d]) * strides[d];
      row = outer;
    }
    return result + row * strides[leading_dims - 1];
  }
};

}  // namespace fused_topk
