// SPDX-License-Identifier: Apache-2.0
// The k best candidates of a row, or of a part of one, found block by block.
//
// A list takes every candidate that may be among the k best: those with a logit >= a threshold. The threshold rises
// whenever the list is trimmed to its k best. A low threshold costs time, never a candidate. The list is in the order
// of the indices at any time, so a stable sort by logit alone gives the final order.
#pragma once

#include <vector>

#include "vector_kernels.h"

namespace fused_topk::cpu {

class Selection {
 public:
  // For at most row_length elements between two calls of `restart`.
  Selection(const VectorKernels& kernels, u32 k, u64 row_length);

  void restart();

  // Blocks come in the order of their indices. `greatest`: the maximum of x without its NaNs.
  void add_block(const float* x, u32 n, u32 first_index, float greatest, bool may_have_nan);

  // Candidates with indices beyond all those seen so far.
  void add_candidates(const u64* candidates, u32 count);

  // The k best in the order of their indices; fewer where fewer were seen. Valid until the next non-const call.
  const u64* trimmed(u32* count);

  // The k best, best first. If fewer than k elements were seen, they must be the row's first ones. The elements that
  // follow them then count as -inf.
  const u64* sorted();

 private:
  void trim();
  void raise_threshold(float least);

  const VectorKernels& kernels_;
  u32 k_;
  u32 trim_at_;
  u32 capacity_;
  u32 size_ = 0;
  float threshold_;
  std::vector<u64> list_;
  std::vector<u64> scratch_;
  std::vector<int> keys_;
};

}  // namespace fused_topk::cpu
