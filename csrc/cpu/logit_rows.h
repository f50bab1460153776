// SPDX-License-Identifier: Apache-2.0
// The rows of logits of a request: what is read, the same for every family.
#pragma once

#include <vector>

#include "vector_kernels.h"

namespace fused_topk::cpu {

enum class MaskKind : u32 { kNone = 0, kBools = 1, kBits = 2 };

// Strides count elements; the strides of a mask of kBits count words. A stride of a leading dimension may be any number.
struct LogitRows {
  const VectorKernels* kernels;
  u32 threads;  // at most this many, the caller's included

  std::vector<i64> sizes;  // of the leading dimensions; their product is the number of rows
  u32 vocab_size;
  DType dtype;

  const char* logits;  // [sizes..., vocab_size]
  std::vector<i64> logits_strides;
  i64 logits_element_stride;

  double temperature;
  const float* row_temperature;  // nullable; [sizes...]
  std::vector<i64> temperature_strides;

  const char* mask;  // null for kNone; [sizes..., vocab_size] bytes, or [sizes..., ceil(vocab_size / 32)] words
  MaskKind mask_kind;
  std::vector<i64> mask_strides;
  i64 mask_element_stride;
};

}  // namespace fused_topk::cpu
