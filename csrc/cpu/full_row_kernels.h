// SPDX-License-Identifier: Apache-2.0
// The loops over elements of full rows. A second table for each instruction set, under the rules of vector_kernels.h.
#pragma once

#include "vector_kernels.h"

namespace fused_topk::cpu {

enum class FullRowKind : u32 { kSoftmax = 0, kLogSoftmax = 1, kLogSumExp = 2 };

// Rows of at most this many elements are solved several at a time, by short_rows. A longer one fills the vector units
// by itself.
constexpr u32 kShortRow = 256;

struct FullRowKernels {
  // The results of whole rows, n <= kShortRow. x: [rows, n]. y: [rows, n] and may be x, or [rows] for kLogSumExp.
  // A row's result does not depend on the rows beside it.
  void (*short_rows)(FullRowKind kind, const float* x, u32 rows, u32 n, const Temperatures& temperatures, float* y);

  // Writes the exponentials of x [n] to terms [n] and returns their sum. `next`: as for sum_exp.
  double (*exp_terms)(const float* x, u32 n, const Exponential& exponential, float* terms, const void* next, u32 bytes);

  // y = factor * terms. y may be terms.
  void (*scale)(const float* terms, u32 n, float factor, float* y);

  // y = factor * e^((x - reference) / T). y may be x.
  void (*exp_scaled)(const float* x, u32 n, const Exponential& exponential, float factor, float* y);

  // y = (x - m) * inverse_temperature - log_d. y may be x.
  void (*log_values)(const float* x, u32 n, float m, float inverse_temperature, float log_d, float* y);

  // y, rounded to the table's dtype (to nearest, ties to even), into adjacent elements.
  void (*store[kDTypes])(const float* y, u32 n, void* destination);
};

extern const FullRowKernels kBaselineFullRowKernels;
#if defined(__x86_64__)
extern const FullRowKernels kAvx2FullRowKernels;
extern const FullRowKernels kAvx512FullRowKernels;
#endif

}  // namespace fused_topk::cpu
