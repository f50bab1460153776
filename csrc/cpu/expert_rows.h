// SPDX-License-Identifier: Apache-2.0
// A request for the k experts of each row. Router of binding.cpp fills it in, and expert_rows.cpp computes it.
#pragma once

#include "expert_kernels.h"
#include "logit_rows.h"

namespace fused_topk::cpu {

// `wanted` has all fields of ExpertRows but x and rows.
struct RouterProblem : LogitRows {
  ExpertRows wanted;  // experts and weights: [sizes..., k]
};

// Throws std::bad_alloc.
void solve(const RouterProblem& problem);

}  // namespace fused_topk::cpu
