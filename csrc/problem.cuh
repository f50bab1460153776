// SPDX-License-Identifier: Apache-2.0
// What a launch is asked to do: one struct, passed by value. fused_topk/launch.py packs it field by field, in this order.
#pragma once

#include "row.cuh"

namespace fused_topk {

// Rows may be spread over up to this many leading dimensions that no single stride describes.
constexpr u32 kLeadingDims = 4;

// Times log2(e) still finite.
constexpr float kLargestInverse = 2e38f;

// Of the row's maximum times log2(e) / T. Past it, its rounding error would exceed 1/4.
constexpr float kLargestOffset = 4194304.0f;

// Which tokens a mask takes part for. kMaskChoice ("all"): a token that is not allowed still counts in (m, d).
enum MaskUse : u32 { kNoMask = 0, kMaskBoth = 1, kMaskChoice = 2 };

// What `values` holds.
enum ValueKind : u32 { kLogits = 0, kProbabilities = 1, kLogProbabilities = 2 };

// What every launch needs comes first, close together: each 64 bytes of the struct (less 16, the first time) cost the first
// block that asks for them a fetch from memory. The first 48 are enough to ask for the logits.
struct Problem {
  const void* logits;  // [rows, V]
  i64 row_stride;      // of the logits, in elements, if leading_dims is 1
  u32 rows;
  u32 V;
  u32 k;  // of a row
  u32 parts_per_row;
  u16 tiles_per_part_log2;
  u16 lead;             // of a group's tiles, so many of the last are read first
  u32 parts_per_split;  // parts_per_row / splits, and the remainder: the first blocks of a row take one more
  u32 splits_with_one_more;
  u32 leading_dims;  // that the strides below describe, innermost first
  // Which best a warp of a block publishes, and how many such warps have k (KthBound); the same of the blocks of a row.
  u16 k_of_warp, warps_of_k;
  u16 k_of_split, list_length;
  u32 splits_of_k;
  float temperature;
  const float* row_temperature;  // nullable; [rows]
  u64* lists;         // nullable; [rows, splits * (list_length + 1)]: candidates and bounds that blocks hand over
  Normalizer* parts;  // nullable; [rows, parts] likewise
  u32* row_tickets;   // nullable; [rows], zero before and after each launch
  float* logsumexp;   // [rows]
  void* values;       // [rows, k] float, or the logits' format for kLogits; [rows / beams, k] with beams
  i64* indices;       // like values
  u32 value_kind;
  u32 normalize_topk;  // 1: values are relative to the k chosen
  u32 beams;           // 0: no beam search; else that many rows make a sequence
  u32 k_of_beam;       // how many of a sequence's k each of them vouches for
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
  u64* beam_lists;    // nullable; [rows, k_row] like `lists`, from the rows (beams) of a sequence
  i64* beam_indices;  // nullable; [rows, k_row]: what `indices` will say of them
  u32* beam_tickets;  // nullable; [rows / beams], like row_tickets

  // Where a row's logits start, in elements.
  __device__ __forceinline__ i64 logits_offset(u32 row) const {
    // Almost always there is one dimension: no division then.
    if (leading_dims != 1) return offset(row, logits_strides);
    return row * row_stride;
  }

  __device__ __forceinline__ RowMask row_mask(u32 row) const {
    const i64 start = offset(row, mask_strides) * (mask_kind == kMaskBits ? 4 : 1);
    return {static_cast<const char*>(mask) + start, mask_element_stride, mask_kind};
  }

  // 1 / T of a row. A temperature that is not positive makes a NaN of everything but the indices; one so small that
  // 1 / T overflows acts like the smallest whose inverse is finite, so that (m - m) / T stays 0.
  __device__ __forceinline__ float inverse_temperature(u32 row) const {
    const float t = row_temperature ? __ldg(row_temperature + offset(row, temperature_strides)) : temperature;
    const float inverse = __frcp_rn(t);
    return t > 0.0f ? (inverse < kLargestInverse ? inverse : kLargestInverse) : __uint_as_float(0x7FC00000u);
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
static_assert(sizeof(Problem) == 320, "fused_topk/launch.py packs 320 bytes");

}  // namespace fused_topk
