// SPDX-License-Identifier: Apache-2.0
// A request for the sums of fused_topk/token_sums.py. binding.cpp fills it in, and token_sums.cpp computes it.
#pragma once

#include "logit_rows.h"

namespace fused_topk::cpu {

constexpr u32 kSums = 5;

struct TokenSumsProblem : LogitRows {
  const i64* tokens;  // nullable; [sizes..., num_tokens], contiguous; none where it is out of range
  u32 num_tokens;
  bool sums_all;       // whether m, d and s are of the whole row, or of what the mask leaves
  bool has_rest;       // whether the last two sums are wanted
  float* sums;         // [sizes..., kSums]: m, d, s and the m and d of the rest. The row is added to what they hold
  char* token_logits;  // [sizes..., num_tokens], in the logits' dtype; written where the token is in the row
};

// Throws std::bad_alloc.
void solve(const TokenSumsProblem& problem);

}  // namespace fused_topk::cpu
