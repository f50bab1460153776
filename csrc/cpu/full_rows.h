// SPDX-License-Identifier: Apache-2.0
// A request for full rows. FullRows of binding.cpp fills it in, and full_rows.cpp computes it.
#pragma once

#include "full_row_kernels.h"
#include "logit_rows.h"
#include "router_kernels.h"

namespace fused_topk::cpu {

// The gradients of a loss with respect to the k best of rows and to their logsumexp. All tensors are contiguous.
struct TopkGradient {
  u32 k;
  ValueKind value_kind;  // kProbabilities or kLogProbabilities
  NormalizeOver normalize_over;
  const float* values;          // [sizes..., k]
  const i64* indices;           // like values
  const float* grad_values;     // nullable; like values
  const float* grad_logsumexp;  // nullable; [sizes...]
};

struct FullRowProblem : LogitRows {
  DType out_dtype;  // kFloat32 for kLogSumExp
  FullRowKind kind;
  char* out;                     // [sizes..., vocab_size], or [sizes...] for kLogSumExp; contiguous
  const TopkGradient* gradient;  // nullable; with kSoftmax: the result is the gradient of the logits instead
};

// Throws std::bad_alloc.
void solve(const FullRowProblem& problem);

}  // namespace fused_topk::cpu
