// SPDX-License-Identifier: Apache-2.0
// A request for the k best logits of an LM head: hidden states in, and no tensor of logits; or for the logits themselves.
// binding.cpp fills it in, and linear_rows.cpp computes it.
#pragma once

#include "linear_kernels.h"
#include "problem.h"

namespace fused_topk::cpu {

// The rows' logits are hidden @ weight.T + bias, rounded to their dtype. `sizes` is {rows}, and nothing is read from
// `logits`. No row has beam scores.
struct LinearProblem : Problem {
  u32 depth;  // the size of a hidden state

  // Both have adjacent elements of `dtype`: float32 or bfloat16, aligned to it. Strides count elements.
  const char* hidden;  // [rows, depth], rows <= kMostLinearRows
  i64 hidden_stride;
  const char* weight;  // [vocab_size, depth]
  i64 weight_stride;
  const char* bias;  // nullable; [vocab_size], of `dtype`
  i64 bias_stride;

  float* state;   // nullable; [rows, 2]: the row's m and d
  char* product;  // nullable; [rows, vocab_size], of `dtype`: all logits. Then nothing else is written.
};

// Throws std::bad_alloc.
void solve(const LinearProblem& problem);

}  // namespace fused_topk::cpu
