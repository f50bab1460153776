// SPDX-License-Identifier: Apache-2.0
// A part of a row, and the search in it.
#pragma once

#include "sample_request.cuh"

namespace fused_topk::sampling {

// The tokens begin .. end - 1 of a row.
struct Part {
  u32 begin, end;
};

// The first token of a part at which the running sum of measure(logit, token) exceeds `aim`; the last token of the part
// if the sum never does. measure must be 0 for a logit of -inf. The 32 lanes of a warp call it.
template <class FORMAT, u32 VECTORS, class MEASURE>
__device__ __forceinline__ u32 find_in_part(const PartReader<FORMAT, VECTORS>& reader, Part part, u64 aim,
                                            const MEASURE& measure) {
  using Reader = PartReader<FORMAT, VECTORS>;
  u64 before = 0;
#pragma unroll 1
  for (u32 first = part.begin; first < part.end; first += Reader::kElements) {
    Vector vectors[VECTORS];
    reader.load(first, vectors);
    // This lane's vector of those in which the sum passes the aim; the vector's first token; and the sum before that
    // token.
    Vector passed = {{0, 0, 0, 0}};
    u32 token = part.end;
    u64 sums = 0;
#pragma unroll
    for (u32 u = 0; u < VECTORS; ++u) {
      if (before > aim) continue;
      passed = vectors[u];
      token = Reader::token(first, u);
      u64 mine = 0;
#pragma unroll
      for (u32 e = 0; e < FORMAT::kPerVector; ++e) mine += measure(FORMAT::decode(passed.words, e), token + e);
      sums = before + warp_inclusive_sum(mine);
      before = __shfl_sync(kAllLanes, sums, kWarpSize - 1);
      sums -= mine;
    }
    if (before <= aim) continue;
    const u32 lane = __popc(__ballot_sync(kAllLanes, sums <= aim)) - 1;
    // Every lane walks its own vector. The result of one lane is used: the sum passes the aim in its vector.
    u32 passes = 0;
#pragma unroll
    for (u32 e = 0; e + 1 < FORMAT::kPerVector; ++e) {
      sums += measure(FORMAT::decode(passed.words, e), token + e);
      passes += sums <= aim;
    }
    return __shfl_sync(kAllLanes, token + passes, lane);
  }
  return part.end - 1;
}

}  // namespace fused_topk::sampling
