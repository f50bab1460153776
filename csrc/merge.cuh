// SPDX-License-Identifier: Apache-2.0
// Merging finished states: blocks into a row, rows (beams) into a sequence. The same two steps at both scopes: the last
// group to arrive takes a ticket, then reads the sorted lists that the others left in global memory.
// Comes after candidates.cuh.
#pragma once

#include "candidates.cuh"

namespace fused_topk {

// True in every thread of the group that is the last of `expected` to arrive; what the others wrote before they arrived
// can then be read (load_from_other_block). The ticket is zero again afterwards, so the next launch, or the next replay
// of a graph, needs no memset. Nobody waits for anybody. All threads of the group call it.
template <class GROUP>
__device__ __forceinline__ bool arrives_last(u32* ticket, u32 expected, u32& shared_flag) {
  // All of the group's writes come before its one ticket.
  GROUP::sync();
  u32 is_last = 0;
  if (GROUP::thread() == 0) {
    __threadfence();
    is_last = atomicAdd(ticket, 1u) == expected - 1;
    if (is_last) atomicExch(ticket, 0u);
    __threadfence();
  }
  if constexpr (GROUP::kIsWarp) return __shfl_sync(kAllLanes, is_last, 0);
  if (GROUP::thread() == 0) shared_flag = is_last;
  GROUP::sync();
  return shared_flag;
}

// The smallest 64-bit value over the warp, in every lane. All 32 lanes call it.
__device__ __forceinline__ u64 warp_min_candidate(u64 value) {
#pragma unroll
  for (u32 step = kWarpSize / 2; step > 0; step /= 2) value = min(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

// Leaves the best k of `lists` sorted lists of `length` candidates (kNoCandidate where shorter), and a few more,
// unsorted, in `candidates`; a barrier has followed the last offer.
// All threads of the group call it, after a barrier that follows the last use of `candidates`.
template <class GROUP>
__device__ __forceinline__ void merge_lists(const u64* source, u32 lists, u32 length, u32 k,
                                            Candidates<GROUP>& candidates) {
  candidates.restart(k);
  GROUP::sync();
  // If each list has this many candidates above a bound, all have k together.
  const u32 wanted = (k + lists - 1) / lists;
  if (wanted <= length) {
    u64 least = ~0ull;
    for (u32 list = lane_id(); list < lists; list += kWarpSize)
      least = min(least, load_from_other_block(source + u64(list) * length + wanted - 1));
    candidates.raise_candidate(warp_min_candidate(least));
  }
  const u32 total = lists * length;
  for (u32 start = 0; start < total; start += GROUP::kThreads) {
    const u32 i = start + GROUP::thread();
    const u64 candidate = i < total ? load_from_other_block(source + i) : kNoCandidate;
    bool fits = false;
    while (true) {
      if (!fits) fits = candidates.offer(candidate);
      if (!GROUP::any(!fits || candidates.is_crowded())) break;
      candidates.trim();
    }
  }
}

}  // namespace fused_topk
