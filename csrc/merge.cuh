// SPDX-License-Identifier: Apache-2.0
// Merging finished states: blocks into a row, rows (beams) into a sequence. The same two steps at both scopes: the last
// group to arrive takes a ticket, then gathers what the others left in global memory.
// Comes after bound.cuh and candidates.cuh.
#pragma once

#include "bound.cuh"
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
  if (GROUP::thread() == 0) is_last = take_ticket(ticket, expected) == expected - 1;
  if constexpr (GROUP::kIsWarp) {
    is_last = __shfl_sync(kAllLanes, is_last, 0);
    __syncwarp();
    return is_last;
  }
  if (GROUP::thread() == 0) shared_flag = is_last;
  GROUP::sync();
  return shared_flag;
}

// Leaves the best k of `lists` lists of `length` candidates (kNoCandidate where shorter), and a few more, unsorted, in
// `candidates`; a barrier has followed the last add. At bounds[i * bounds_stride] is a candidate whose key bounds the
// ceil(k / lists)-th best of list i: if each list has that many, all have k. All threads of the group call it, after a
// barrier that follows the last use of `candidates`. `meanwhile()` is called while the first loads are on their way.
template <class GROUP, class MEANWHILE>
__device__ __forceinline__ void gather(const u64* source, u32 lists, u32 length, const u64* bounds, u32 bounds_stride,
                                       u32 k, Candidates<GROUP>& candidates, MEANWHILE meanwhile) {
  constexpr u32 kAtATime = 8;
  candidates.restart(k);
  GROUP::sync();
#pragma unroll 1
  for (u32 start = 0; start < lists * length; start += kAtATime * GROUP::kThreads) {
    u64 own[kAtATime];
#pragma unroll
    for (u32 c = 0; c < kAtATime; ++c) {
      const u32 i = start + c * GROUP::kThreads + GROUP::thread();
      own[c] = i < lists * length ? load_from_other_block(source + i) : kNoCandidate;
    }
    if (start == 0) {
      // Or, where k < lists, the k-th greatest of the bounds, if a warp holds them all.
      const bool by_rank = k < lists && lists <= kWarpSize;
      u32 least = by_rank ? kNoKey : kNanKey;
      for (u32 list = lane_id(); list < lists; list += kWarpSize) {
        const u32 key = key_of(load_from_other_block(bounds + list * bounds_stride));
        least = by_rank ? key : min(least, key);
      }
      meanwhile();
      candidates.raise(by_rank ? nth_greatest(least, k) : warp_min(least));
    }
    while (GROUP::any(!candidates.add(own))) candidates.cut(candidates.enough());
  }
}

}  // namespace fused_topk
