// SPDX-License-Identifier: Apache-2.0
// What a call for full rows is asked to do. binding.cpp fills it in; full_rows.cpp does it.
#pragma once

#include <vector>

#include "vector_kernels.h"

namespace fused_topk::cpu {

enum class FullRowKind : u32 { kSoftmax = 0, kLogSoftmax = 1, kLogSumExp = 2 };

// Strides count elements. Those of the leading dimensions may be anything, zero included.
struct FullRowProblem {
  const VectorKernels* kernels;
  u32 threads;  // at most this many, the caller's included

  std::vector<i64> sizes;  // of the leading dimensions; their product is the number of rows
  u32 vocab_size;
  DType dtype;
  DType out_dtype;  // kFloat32 for kLogSumExp
  FullRowKind kind;

  const char* logits;  // [sizes..., vocab_size]
  std::vector<i64> logits_strides;
  i64 logits_element_stride;

  double temperature;
  const float* row_temperature;  // nullable; [sizes...]
  std::vector<i64> temperature_strides;

  char* out;  // [sizes..., vocab_size], or [sizes...] for kLogSumExp; contiguous
};

// Throws std::bad_alloc.
void solve(const FullRowProblem& problem);

}  // namespace fused_topk::cpu
