// SPDX-License-Identifier: Apache-2.0
// The k best of rows as short as an expert router's. Another table for each instruction set, under the rules of
// vector_kernels.h.
#pragma once

#include "vector_kernels.h"

namespace fused_topk::cpu {

// kLogits: without the row's normalizer. kState: logits, and (m, d) of the row in place of its logsumexp.
enum class ValueKind : u32 { kLogits = 0, kProbabilities = 1, kLogProbabilities = 2, kState = 3 };
// What the probabilities are relative to: the allowed tokens, the whole row, or the k chosen.
enum class NormalizeOver : u32 { kAllowed = 0, kAll = 1, kTopK = 2 };

// The longest rows, so that an index has 8 bits, and the greatest k of the router kernel.
constexpr u32 kMostExperts = 256;
constexpr u32 kMostChosen = 8;

struct RouterRows {
  const float* x;  // [rows, n]; -inf where a token is not allowed
  u32 rows;
  u32 n;
  u32 k;
  Temperatures temperatures;
  ValueKind value_kind;  // never kState
  NormalizeOver normalize_over;

  float* values;     // [rows, k]; not written for kLogits
  i64* indices;      // [rows, k]
  float* logsumexp;  // [rows]; like values
};

struct RouterKernels {
  // A row's result does not depend on the rows beside it.
  void (*route)(const RouterRows& rows);
};

extern const RouterKernels kBaselineRouterKernels;
#if defined(__x86_64__)
extern const RouterKernels kAvx2RouterKernels;
extern const RouterKernels kAvx512RouterKernels;
#endif

}  // namespace fused_topk::cpu
