// SPDX-License-Identifier: Apache-2.0
// The rows of logits of a request.
#pragma once

#include <algorithm>
#include <vector>

#include "vector_kernels.h"

namespace fused_topk::cpu {

// Each thread gets at least so many elements. A team of threads wakes as a whole, which takes the longer the larger it is.
// Measured with two threads (Xeon model 207, 2026-11-25), 4096 elements beside 16384: 2048 x 8 k = 2 23.8 us and 35.7,
// 128 x 128 k = 8 15.7 and 22.2, 1 x 32000 k = 8 12.3 and 14.7. With more threads a guess.
constexpr u64 kFewestElements = 4096, kMostElements = 16384;

// How many of the threads are worth waking.
inline u32 useful_threads(u64 elements, u32 threads) {
  const u64 of_thread = std::clamp<u64>(kFewestElements / 2 * threads, kFewestElements, kMostElements);
  return u32(std::clamp<u64>(elements / of_thread, 1, threads));
}

// Strides count elements. Those of the leading dimensions may be anything, zero included.
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
};

}  // namespace fused_topk::cpu
