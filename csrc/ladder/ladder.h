// SPDX-License-Identifier: Apache-2.0
// The rungs of ladder.cu on the CPU: the same passes over memory, in vectors. For demos/ladder.py.
#pragma once

#include "../cpu/vector_kernels.h"

namespace fused_topk::cpu {

// The numbers are those of _ON_CPU in demos/ladder_rungs.py.
enum class Rung : u32 {
  kNaive = 0,
  kSafe = 1,
  kOnline = 2,
  kKept = 3,
  kSplit = 4,
  kSafeThenTopK = 5,
  kSafeTopK = 6,
  kOnlineThenTopK = 7,
  kOnlineTopK = 8,
};

struct LadderProblem {
  const VectorKernels* kernels;
  u32 threads;
  Rung rung;
  u64 rows;
  u32 V;
  u32 k;
  const float* x;  // [rows, V]
  float* y;        // [rows, V]: the probabilities of softmax, and of rungs that do top-k afterwards
  float* values;   // [rows, k]
  i64* indices;    // [rows, k]
};

void climb(const LadderProblem& problem);

}  // namespace fused_topk::cpu
