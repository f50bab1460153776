// SPDX-License-Identifier: Apache-2.0
// A request for full rows. FullRows of binding.cpp fills it in, and full_rows.cpp computes it.
#pragma once

#include "full_row_kernels.h"
#include "logit_rows.h"

namespace fused_topk::cpu {

struct FullRowProblem : LogitRows {
  DType out_dtype;  // kFloat32 for kLogSumExp
  FullRowKind kind;
  char* out;  // [sizes..., vocab_size], or [sizes...] for kLogSumExp; contiguous
};

// Throws std::bad_alloc.
void solve(const FullRowProblem& problem);

}  // namespace fused_topk::cpu
