// SPDX-License-Identifier: Apache-2.0
// Merges finished states: parts into a row, blocks into a row, rows (beams) into a sequence. The last two scopes take
// the same two steps: each group takes a ticket, and the last to arrive gathers what the others left in global memory.
#pragma once

#include "../rows/scale.cuh"
#include "bound.cuh"
#include "candidates.cuh"

namespace fused_topk {

// True in every thread of the last group of `expected` to arrive. That group may then read what the others wrote before
// they arrived (load_from_other_block). The ticket is zero again afterwards, so the next launch, or the next replay of
// a graph, needs no memset. Nobody waits. All threads of the group call it, after a barrier that follows what they
// wrote.
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

// The number of parts merged in a step, relative to their greatest m.
constexpr u32 kPartsOfStep = 4 * kWarpSize;

// Merges step `i` of a row's parts. state(part) returns a part's state. The result is the same in every lane. All 32
// lanes of a warp call it.
template <class STATE>
__device__ __forceinline__ Normalizer merge_step(u32 i, u32 parts, Scale scale, STATE state) {
  constexpr u32 kOfLane = kPartsOfStep / kWarpSize;
  float2 own[kOfLane];
  float m = -FUSED_TOPK_INFINITY;
#pragma unroll
  for (u32 c = 0; c < kOfLane; ++c) {
    const u32 part = i * kPartsOfStep + c * kWarpSize + lane_id();
    own[c] = part < parts ? state(part) : float2{-FUSED_TOPK_INFINITY, 0.0f};
  }
#pragma unroll
  for (u32 c = 0; c < kOfLane; ++c) m = max_nan(m, own[c].x);
  m = warp_max(m);
  const float base = reference_point(m);
  float d = 0.0f;
#pragma unroll
  for (u32 c = 0; c < kOfLane; ++c) d = fmaf(own[c].y, scale.weight(own[c].x, base), d);
  return {m, warp_sum(d)};
}

// Parts into a row: merges step(0), step(1), and so on in this order, whoever has read the parts and made the steps. So
// a row has the same bits in every regime.
template <class STEP>
__device__ __forceinline__ Normalizer merge_parts(u32 parts, Scale scale, STEP step) {
  Normalizer row;
#pragma unroll 1
  for (u32 i = 0; i * kPartsOfStep < parts; ++i) row = merge(row, step(i), scale);
  return row;
}

// A list's candidate as a bound. In a beam with score +inf a NaN ranks first by logit but last by value: it proves
// nothing.
__device__ __forceinline__ u32 bound_of_list(const u64* candidate) {
  const u32 key = key_of(load_from_other_block(candidate));
  return key == kNanKey ? kNoKey : key;
}

// A key that the best k of `lists` lists reach, kNoKey if unknown. The key of bounds[i * stride] bounds the j-th best
// of list i. If `needed` lists are enough for k, the result is the needed-th greatest key, as in bound.cuh, where that
// is cheap; else the least. All 32 lanes of a warp call it.
template <class GROUP>
__device__ __forceinline__ u32 bound_of_lists(const u64* bounds, u32 stride, u32 lists, u32 needed) {
  constexpr u32 kHalf = kWarpSize / 2;
  if (GROUP::kSharesRow && lists <= kHalf) {
    const u32 list = lane_id() % kHalf;
    const u32 key = list < lists ? bound_of_list(bounds + list * stride) : kNoKey;
    // Each half of the warp compares with half of the lists.
    u32 greater = 0;
#pragma unroll
    for (u32 step = 0; step < kHalf / 2; ++step)
      greater += __shfl_sync(kAllLanes, key, list ^ (lane_id() / kHalf * (kHalf / 2) + step)) > key;
    greater += __shfl_xor_sync(kAllLanes, greater, kHalf);
    return warp_min(list < lists && greater < needed ? key : kNanKey);
  }
  // With more lists, a lane has several.
  const bool by_rank = needed < lists && needed <= kWarpSize;
  u32 bound = by_rank ? kNoKey : kNanKey;
  for (u32 list = lane_id(); list < lists; list += kWarpSize) {
    const u32 key = bound_of_list(bounds + list * stride);
    bound = by_rank ? max(bound, key) : min(bound, key);
  }
  return by_rank ? nth_greatest(bound, needed) : warp_min(bound);
}

// A bound from few sorted lists of `length`. `depth` entries from every list are at least k entries. So are 2^g depth
// entries from each of ceil(lists / 2^g) lists. For each g, take the lists whose entry at that depth is greatest. The
// smallest of those entries is a bound. Returns the best bound of g = 0 .. 3. All 32 lanes of a warp call it.
constexpr u32 kFewLists = 8;
__device__ __forceinline__ u32 bound_of_sorted(const u64* source, u32 lists, u32 length, u32 depth) {
  const u32 g = lane_id() / kFewLists;
  const u32 list = lane_id() % kFewLists;
  const bool is_one = list < lists && depth << g <= length;
  const u32 key = is_one ? bound_of_list(source + list * length + (depth << g) - 1) : kNoKey;
  u32 rank = 0;
#pragma unroll
  for (u32 step = 1; step < kFewLists; ++step) {
    const u32 other = __shfl_xor_sync(kAllLanes, key, step);
    rank += other > key || (other == key && (lane_id() ^ step) < lane_id());
  }
  const u32 lists_needed = ((lists - 1) >> g) + 1;
  return warp_max(rank == lists_needed - 1 ? key : kNoKey);
}

// Leaves in `candidates` the best k of `lists` lists of `length` candidates, and a few more, unsorted. A list may end
// with kNoCandidate. A barrier has followed the last add. All threads of the group call it, after candidates.restart(k)
// and a barrier. Each helping warp calls bound(), which returns a bound of the best k. The last warp of a block does
// not help: it calls meanwhile(is_all), where is_all says that the others load everything at once.
template <class GROUP, class BOUND, class MEANWHILE>
__device__ __forceinline__ void gather(const u64* source, u32 lists, u32 length, Candidates<GROUP>& candidates,
                                       BOUND bound, MEANWHILE meanwhile) {
  constexpr u32 kHelpers = GROUP::kIsWarp ? kWarpSize : GROUP::kThreads - kWarpSize;
  const bool helps = GROUP::thread() < kHelpers;
  const u32 total = lists * length;
  const auto load = [&](u32 i) { return helps && i < total ? load_from_other_block(source + i) : kNoCandidate; };
  const auto raise = [&](bool is_all) {
    if (!helps) return meanwhile(is_all);
    candidates.raise(bound());
  };
  const auto add = [&](auto& own) {
    while (GROUP::any(!candidates.add(own))) candidates.cut(candidates.enough());
  };
  // The usual case: the candidates are in flight while the bound is found.
  if (total <= kHelpers) {
    u64 own[1] = {load(GROUP::thread())};
    raise(true);
    add(own);
    return;
  }
  constexpr u32 kAtATime = GROUP::kWarps > 8 ? 7 : 3;
#pragma unroll 1
  for (u32 start = 0; start < total; start += kAtATime * kHelpers) {
    u64 own[kAtATime];
#pragma unroll
    for (u32 c = 0; c < kAtATime; ++c) own[c] = load(start + c * kHelpers + GROUP::thread());
    if (start == 0) raise(false);
    add(own);
  }
}

}  // namespace fused_topk
