// SPDX-License-Identifier: Apache-2.0
// What a launch is asked to do: one struct, passed by value. fused_topk/cuda.py packs it field by field, in this order.
#pragma once

#include "row.cuh"

namespace fused_topk {

// Rows may be spread over up to this many leading dimensions that no single stride describes.
constexpr u32 kLeadingDims = 4;

// Times log2(e) still finite.
constexpr float kLargestInverse = 2e38f;

// What `values` holds.
enum ValueKind : u32 { kLogits = 0, kProbabilities = 1, kLogProbabilities = 2 };

struct Problem {
  const void* logits;            // [rows, V], see logits_strides
  void* values;                  // [rows, k] float, or the logits' format for kLogits; [rows / beams, k] with beams
  i64* indices;                  // like values
  float* logsumexp;              // [rows]
  const void* mask;              // nullable; see RowMask
  const float* row_temperature;  // nullable; [rows]
  const float* beam_scores;      // nullable; [rows / beams, beams]
  u64* lists;                    // nullable; [rows, splits, k_share] candidates that the blocks of a row hand over
  Normalizer* parts;             // nullable; [rows, parts] likewise
  u64* beam_lists;               // nullable; [rows, k_row] likewise, from the rows (beams) of a sequence
  u32* beam_tokens;              // nullable; [rows, k_row]
  u32* row_tickets;              // nullable; [rows], zero before and after each launch
  u32* beam_tickets;             // nullable; [rows / beams], zero before and after each launch
  i64 logits_strides[kLeadingDims];
  i64 mask_strides[kLeadingDims];
  i64 temperature_strides[kLeadingDims];
  i64 beam_scores_strides[2];
  i64 mask_element_stride;
  u32 sizes[kLeadingDims];  // leading dimensions, innermost last, 1 where there are fewer
  u32 rows;
  u32 V;
  u32 k;
  float temperature;
  u32 value_kind;
  u32 normalize_topk;  // 1: values are relative to the k chosen
  u32 mask_kind;       // MaskKind
  u32 beams;           // 0: no beam search; else that many rows make a sequence
  u32 splits;          // blocks that share a row
  u32 parts_per_row;
  u32 tiles_per_part_log2;
  u32 capacity;  // slots for candidates in shared memory, a power of two
  u32 trim_at;

  // Where a row's logits, mask and temperature start, in elements.
  struct Offsets {
    i64 logits, mask, temperature;
  };

  __device__ __forceinline__ Offsets offsets(u32 row) const {
    Offsets result = {0, 0, 0};
    u32 rest = row;
#pragma unroll
    for (u32 d = kLeadingDims; d-- > 0;) {
      // Almost always there is one dimension: no division then.
      if (rest == 0) break;
      const u32 outer = sizes[d] == rows ? 0 : rest / sizes[d];
      const u32 i = rest - outer * sizes[d];
      result.logits += i * logits_strides[d];
      result.mask += i * mask_strides[d];
      result.temperature += i * temperature_strides[d];
      rest = outer;
    }
    return result;
  }

  __device__ __forceinline__ RowMask row_mask(i64 offset) const {
    return {static_cast<const char*>(mask) + offset * (mask_kind == kMaskBits ? 4 : 1), mask_element_stride, mask_kind};
  }

  // 1 / T of a row. A temperature that is not positive makes a NaN of everything but the indices; one so small that
  // 1 / T overflows acts like the smallest whose inverse is finite, so that (m - m) / T stays 0.
  __device__ __forceinline__ float inverse_temperature(i64 offset) const {
    const float t = row_temperature ? __ldg(row_temperature + offset) : temperature;
    const float inverse = __frcp_rn(t);
    return t > 0.0f ? (inverse < kLargestInverse ? inverse : kLargestInverse) : __uint_as_float(0x7FC00000u);
  }
};
static_assert(sizeof(Problem) == 296, "fused_topk/cuda.py packs 296 bytes");

}  // namespace fused_topk
