// SPDX-License-Identifier: Apache-2.0
// A request for ranks. binding.cpp fills it in, and ranks.cpp computes it.
#pragma once

#include "logit_rows.h"

namespace fused_topk::cpu {

struct RankProblem : LogitRows {
  const i64* targets;  // [sizes..., num_targets], contiguous; negative: none
  u32 num_targets;
  bool counts_ties;  // whether a rank counts all tokens that tie with the target, or those up to it
  i64* ranks;        // [sizes..., num_targets]; 0 where there is no target
};

// Throws std::bad_alloc.
void solve(const RankProblem& problem);

}  // namespace fused_topk::cpu
