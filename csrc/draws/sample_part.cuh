// SPDX-License-Identifier: Apache-2.0
// A part of a row, and the search in it.
#pragma once

#include "sample_request.cuh"

namespace fused_topk::sampling {

// A part of a row: its tokens.
struct Part {
  u32 begin, end;
};

// The first token of a part at which the running sum of measure(logit, token), which is 0 for a logit of -inf, exceeds `aim`;
// the last token if it never does. The 32 lanes of a warp call it.
template <class FORMAT, class MEASURE>
__device__ __forceinline__ u32 find_in_part(const PartReader<FORMAT>& reader, Part part, u64 aim,
                                            const MEASURE& measure) {
  constexpr u32 kVectors = PartReader<FORMAT>::kVectors, kElements = PartReader<FORMAT>::kElements;
  u64 before = 0;
#pragma unroll 1
  for (u32 first = part.begin; first < part.end; first += kElements) {
    Vector vectors[kVectors];
    reader.load(first, vectors);
    // The vector in which the sum passes the aim, and what is before it.
    u32 found = kVectors;
    u64 sums = 0;
#pragma unroll
    for (u32 u = 0; u < kVectors; ++u) {
      if (found != kVectors) continue;
      u64 mine = 0;
#pragma unroll
      for (u32 e = 0; e < FORMAT::kPerVector; ++e)
        mine += measure(FORMAT::decode(vectors[u].words, e), PartReader<FORMAT>::token(first, u) + e);
      sums = before + warp_inclusive_sum(mine);
      before = __shfl_sync(kAllLanes, sums, kWarpSize - 1);
      sums -= mine;
      if (before <= aim) continue;
      found = u;
    }
    if (found == kVectors) continue;
    const u32 lane = __popc(__ballot_sync(kAllLanes, sums <= aim)) - 1;
    u32 token = first + (found * kWarpSize + lane) * FORMAT::kPerVector;
    sums = __shfl_sync(kAllLanes, sums, lane);
    // Every lane walks the vector: it is read again, and takes no registers until then.
#pragma unroll 1
    for (const u32 last = token + FORMAT::kPerVector - 1; token < last; ++token) {
      sums += measure(reader.row(token), token);
      if (sums > aim) break;
    }
    return token;
  }
  return part.end - 1;
}

}  // namespace fused_topk::sampling
