// SPDX-License-Identifier: Apache-2.0
// A request for top-k. Topk of prepared.h fills it in, and rows.cpp computes it.
#pragma once

#include <vector>

#include "logit_rows.h"
#include "router_kernels.h"

namespace fused_topk::cpu {

enum class MaskKind : u32 { kNone = 0, kBools = 1, kBits = 2 };

struct Problem : LogitRows {
  u32 k;
  ValueKind value_kind;
  NormalizeOver normalize_over;

  // Strides count elements, as in LogitRows. With kBits they count words.
  const char* mask;  // null for kNone; [sizes..., vocab_size] bytes, or [sizes..., ceil(vocab_size / 32)] words
  MaskKind mask_kind;
  std::vector<i64> mask_strides;
  i64 mask_element_stride;

  void* values;      // [sizes..., k] float, or dtype for kLogits and kState; [batch, k] with beams
  i64* indices;      // like values
  float* logsumexp;  // [sizes...]; [2, sizes...] for kState: m, d

  const float* beam_scores;  // nullable; [batch, beams] where sizes = {batch, beams}
  i64 beam_scores_strides[2];
};

// The k best of every row; with beam_scores, of every batch entry over its beams. Throws std::bad_alloc.
void solve(const Problem& problem);

}  // namespace fused_topk::cpu
