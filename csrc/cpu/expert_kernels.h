// SPDX-License-Identifier: Apache-2.0
// The k experts of each row. Another table for each instruction set, under the rules of vector_kernels.h.
#pragma once

#include "../routers/scores.h"
#include "vector_kernels.h"

namespace fused_topk::cpu {

struct ExpertRows {
  const float* x;  // [rows, n]; -inf where an expert is not allowed
  u32 rows;
  u32 n;  // at most routers::kMostExperts
  u32 k;  // at most routers::kMostChosen
  routers::Scoring scoring;
  const float* bias;  // nullable; [n]
  u32 groups;         // n is a multiple of it
  u32 topk_groups;
  bool sums_two;  // a group's score is the sum of its two best
  bool normalizes;
  float scale;

  float* weights;  // [rows, k]
  void* experts;   // [rows, k], i64 or int
  bool are_short;  // whether experts are int
};

struct ExpertKernels {
  // A row's result does not depend on the rows beside it.
  void (*route)(const ExpertRows& rows);
};

extern const ExpertKernels kBaselineExpertKernels;
#if defined(__x86_64__)
extern const ExpertKernels kAvx2ExpertKernels;
extern const ExpertKernels kAvx512ExpertKernels;
#endif

}  // namespace fused_topk::cpu
