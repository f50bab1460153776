// SPDX-License-Identifier: Apache-2.0
// A request to merge the states of a row's parts. binding.cpp fills it in, and merge.cpp computes it.
#pragma once

#include <vector>

#include "logit_rows.h"
#include "router_kernels.h"

namespace fused_topk::cpu {

// Where a tensor of [parts, sizes...] or [parts, sizes..., width] lies. Strides count elements and may be anything.
struct OfParts {
  const char* base;
  i64 part_stride;
  std::vector<i64> row_strides;
  i64 element_stride;
};

struct MergeProblem {
  const VectorKernels* kernels;
  u32 threads;  // at most this many, the caller's included

  u32 parts;
  std::vector<i64> sizes;  // of the leading dimensions; their product is the number of rows
  u32 width;               // entries of a part's list, best first; those with index -1 come last and do not count
  DType dtype;
  u32 k;  // at most parts * width
  ValueKind value_kind;
  bool normalize_topk;

  OfParts logits;   // [parts, sizes..., width] of dtype
  OfParts indices;  // [parts, sizes..., width] i64
  OfParts m, d;     // [parts, sizes...] float

  const int* part_lengths;  // nullable; [parts]: the number of tokens of each; indices count from the part's first
  i64 part_lengths_stride;

  Scale scale;

  char* values;         // [sizes..., k] float, or dtype for kLogits and kState
  i64* result_indices;  // [sizes..., k]
  float* logsumexp;     // [sizes...]; [2, sizes...] for kState: m, d
};

// The k best of every row over its parts, and the row's normalizer. Throws std::bad_alloc.
void solve(const MergeProblem& problem);

}  // namespace fused_topk::cpu
