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
// of a graph, needs no memset. Nobody waits for anybody. All threads of the group call it, after a barrier that follows
// what they wrote.
template <class GROUP>
__device__ __forceinline__ bool arrives_last(u32* ticket, u32 expected, u32& shared_flag) {
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

// The states of a row's parts [parts], which its blocks left in global memory, as one warp merges them.
class PartStates {
 public:
  // Asks for the first of them; `merged` waits.
  __device__ __forceinline__ PartStates(const Normalizer* states, u32 parts)
      : states_(reinterpret_cast<const float2*>(states)), parts_(parts) {
#pragma unroll
    for (u32 i = 0; i < kAtATime; ++i) first_[i] = load(lane_id() + i * kWarpSize);
  }
  // Lane a's merge of parts a, a + 32, ..., in that order.
  __device__ __forceinline__ Normalizer merged(float scale) const {
    Normalizer result;
#pragma unroll
    for (u32 i = 0; i < kAtATime; ++i) result = merge(result, {first_[i].x, first_[i].y}, scale, exp2_approx);
#pragma unroll 8
    for (u32 part = lane_id() + kAtATime * kWarpSize; part < parts_; part += kWarpSize) {
      const float2 state = load(part);
      result = merge(result, {state.x, state.y}, scale, exp2_approx);
    }
    return result;
  }

 private:
  static constexpr u32 kAtATime = 2;
  __device__ __forceinline__ float2 load(u32 part) const {
    return part < parts_ ? load_from_other_block(states_ + part) : float2{-FUSED_TOPK_INFINITY, 0.0f};
  }
  const float2* states_;
  u32 parts_;
  float2 first_[kAtATime];
};

// Leaves the best k of `lists` lists of `length` candidates (kNoCandidate where shorter), and a few more, unsorted, in
// `candidates`; a barrier has followed the last add. At bounds[i * bounds_stride] is a candidate whose key bounds the
// ceil(k / lists)-th best of list i: if each list has that many, all have k. All threads of the group call it, after
// candidates.restart(k) and a barrier. `meanwhile()` is called before the last barrier.
template <class GROUP, class MEANWHILE>
__device__ __forceinline__ void gather(const u64* source, u32 lists, u32 length, const u64* bounds, u32 bounds_stride,
                                       u32 k, Candidates<GROUP>& candidates, MEANWHILE meanwhile) {
  const u32 total = lists * length;
  const auto load = [&](u32 i) { return i < total ? load_from_other_block(source + i) : kNoCandidate; };
  // On its way while the bounds are.
  u64 own[1] = {load(GROUP::thread())};
  // The least bound, or, where k < lists, the k-th greatest of what a warp's lanes hold.
  const bool by_rank = k < lists && k <= kWarpSize;
  u32 bound = by_rank ? kNoKey : kNanKey;
  for (u32 list = lane_id(); list < lists; list += kWarpSize) {
    u32 key = key_of(load_from_other_block(bounds + list * bounds_stride));
    // Of a beam whose score is +inf, NaN comes last though it ranks first: as a bound it says nothing.
    if (key == kNanKey) key = kNoKey;
    bound = by_rank ? max(bound, key) : min(bound, key);
  }
  candidates.raise(by_rank ? nth_greatest(bound, k) : warp_min(bound));
  // There is room for one of each thread, as long as nobody adds more.
  candidates.add(own);
  if (total > GROUP::kThreads) GROUP::sync();
  constexpr u32 kAtATime = 5;
#pragma unroll 1
  for (u32 start = GROUP::kThreads; start < total; start += kAtATime * GROUP::kThreads) {
    u64 more[kAtATime];
#pragma unroll
    for (u32 c = 0; c < kAtATime; ++c) more[c] = load(start + c * GROUP::kThreads + GROUP::thread());
    while (GROUP::any(!candidates.add(more))) candidates.cut(candidates.enough());
  }
  meanwhile();
  GROUP::sync();
}

}  // namespace fused_topk
