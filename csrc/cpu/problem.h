// SPDX-License-Identifier: Apache-2.0
// A request for top-k. Topk of binding.cpp fills it in, and rows.cpp computes it.
#pragma once

#include "logit_rows.h"
#include "router_kernels.h"

namespace fused_topk::cpu {

struct Problem : LogitRows {
  u32 k;
  ValueKind value_kind;
  NormalizeOver normalize_over;

  void* values;      // [sizes..., k] float, or dtype for kLogits and kState; [batch, k] with beams
  i64* indices;      // like values
  float* logsumexp;  // [sizes...]; [2, sizes...] for kState: m, d; not written for kLogits

  const float* beam_scores;  // nullable; [batch, beams] where sizes = {batch, beams}
  i64 beam_scores_strides[2];
};

// The k best of every row; with beam_scores, of every batch entry over its beams. Throws std::bad_alloc.
void solve(const Problem& problem);

}  // namespace fused_topk::cpu
