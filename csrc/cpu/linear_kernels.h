// SPDX-License-Identifier: Apache-2.0
// The product of a few hidden states and the weight of an LM head, a block of the vocabulary at a time: one instruction
// set's part of linear_rows.cpp. linear_kernels.cpp is compiled once per instruction set, like vector_kernels.cpp.
#pragma once

#include "vector_kernels.h"

namespace fused_topk::cpu {

// The logits of this many tokens are computed, and then folded into the rows' states: 4 KB a row. A multiple of 32, the
// tokens of a packed mask's word.
constexpr u32 kLinearBlock = 1024;
// From a row's logits to the next row's. With 4 KB the same token's logits of all rows would compete for one set of the
// first-level cache.
constexpr u32 kLogitsStride = kLinearBlock + 16;
// With more rows than this, arithmetic limits the speed and not memory. A BLAS library is then faster.
constexpr u32 kMostLinearRows = 32;

// Some tokens' logits, without the bias.
struct Products {
  const float* hidden;  // [rows * padded_depth], as `arrange` leaves it
  u32 rows;
  u32 depth;           // the size of a hidden state
  const char* weight;  // [tokens, depth], of the dtype that the function is for
  i64 weight_stride;   // in elements
  u32 tokens;
  float* logits;  // [rows, tokens], rows kLogitsStride apart
};

// For weights of one dtype.
struct LinearKernels {
  // The elements that an arranged hidden state of `depth` elements takes.
  u32 (*padded_depth)(u32 depth);

  // Puts the hidden state [depth] of a row into `arranged` [rows * padded_depth], in the order in which `multiply` reads
  // all of them.
  void (*arrange)(const float* hidden, u32 depth, u32 row, u32 rows, float* arranged);

  // Sums in float32. The order of a logit's sum follows from depth alone.
  void (*multiply)(const Products& products);

  // Adds the bias to x [n], and rounds to the dtype of the weight. bias: nullable, [n]
  void (*finish)(float* x, const float* bias, u32 n);
};

// By the dtype of the weight. Those of float16 are null: that product is left to a library.
extern const LinearKernels kBaselineLinearKernels[kDTypes];
#if defined(__x86_64__)
extern const LinearKernels kAvx2LinearKernels[kDTypes];
extern const LinearKernels kAvx512LinearKernels[kDTypes];
#endif

}  // namespace fused_topk::cpu
