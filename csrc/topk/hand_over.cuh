// SPDX-License-Identifier: Apache-2.0
// What a group leaves for the last group to arrive of its row or of its sequence. That group merges it (merge.cuh).
#pragma once

#include "merge.cuh"
#include "row_output.cuh"
#include "scan.cuh"

namespace fused_topk {

// The states of a row's parts, [parts]: in shared memory if one group reads them all, else in global memory, where the
// last block finds them.
template <u32 MASK>
struct RowStates {
  const Problem& problem;
  u32 row, splits;
  float2* own;
  float2* left;  // in global memory

  __device__ __forceinline__ RowStates(const Problem& problem, u32 row, u32 splits, float2* own)
      : problem(problem), row(row), splits(splits), own(own), left(left_of(row)) {}

  __device__ __forceinline__ void put(u32 part, Normalizer state) const {
    // A mask and lengths take registers. With them, the address is recomputed where it is needed.
    float2* const states = splits == 1 ? own : MASK == kNoMask ? left : left_of(row);
    states[part] = {state.m, state.d};
  }
  // Merges step i of the row's parts: merge_step(). The 32 lanes of a warp call it.
  __device__ __forceinline__ Normalizer step_of_own(u32 i, u32 parts, Scale scale) const {
    return merge_step(i, parts, scale, [&](u32 part) { return own[part]; });
  }
  __device__ __forceinline__ Normalizer step_of_left(u32 i, u32 parts, Scale scale) const {
    u32 same_row = row;
    if constexpr (MASK != kNoMask) keep_opaque(same_row);
    const float2* const states = MASK == kNoMask ? left : left_of(same_row);
    return merge_step(i, parts, scale, [&](u32 part) { return load_from_other_block(states + part); });
  }
  // A long row has many steps. One warp would wait for memory at each step. So each warp takes one step, and all wait
  // together.
  __device__ __forceinline__ bool has_many_steps(u32 parts) const { return splits > 1 && parts > 2 * kPartsOfStep; }

 private:
  __device__ __forceinline__ float2* left_of(u32 row) const {
    return reinterpret_cast<float2*>(problem.parts) + i64(row) * problem.parts_per_row;
  }
};

// Offers tokens past the row's length, which are all -inf: as many as the best k lack. All threads of the group call
// it, after a barrier. Ends with a barrier.
template <class GROUP>
__device__ __forceinline__ void offer_missing(u32 length, u32 k, Candidates<GROUP>& candidates) {
#pragma unroll 1
  for (u32 first = length; first < k; first += GROUP::kThreads) {
    const u32 token = first + GROUP::thread();
    u64 own[1] = {token < k ? make_candidate(kNegativeInfinityKey, token) : kNoCandidate};
    while (GROUP::any(!candidates.add(own))) candidates.cut(candidates.enough());
  }
}

// Lists that a group gathers: of a row's splits, or of a sequence's beams.
struct Lists {
  u32 count, length;
  const u64* source;  // [count, length]
  const u64* bounds;  // [count] at distance bounds_stride
  u32 bounds_stride;
};

// How the candidates of a row spread.
template <class FORMAT>
__device__ __forceinline__ Spread spread_of_row(const Problem& problem) {
  return {u32(__ffs(FORMAT::kLowestKeyBit)) - 1, u32(__clz(problem.V))};
}

// Leaves a split's list [length] of the candidates that may be among the row's best k, and its bound. All threads of
// the group call it.
template <class GROUP, class SCAN>
__device__ __forceinline__ void leave_list(const Problem& problem, u32 split, SCAN& scan, Candidates<GROUP>& candidates,
                                           KthBound<GROUP>& bound, u64* list, u32 length, u64* all_bounds) {
  const bool leaves_bound = GROUP::warp() == GROUP::kWarps - 1;
  const auto leave_bound = [&](u32 key) {
    if (lane_id() == 0) all_bounds[split] = make_candidate(key, 0);
  };
  if constexpr (GROUP::kForMany) {
    candidates.raise(bound.latest());
    const u32 key =
        candidates.hand_over(list, length, problem.k_of_split, spread_of_row<typename SCAN::Reader::Format>(problem));
    if (leaves_bound) leave_bound(key);
  } else {
    // Early candidates passed a loose bound. Now the whole share is read, and its bound drops most of them.
    const bool has_more_tiles = problem.parts_per_split >= GROUP::kWarps || problem.tiles_per_part_log2 > 0;
    if (has_more_tiles && candidates.stored() > length) {
      const bool has_read = GROUP::warp() < problem.parts_per_split + (split < problem.splits_with_one_more);
      if (has_read) bound.publish(scan.proven(bound));
      GROUP::sync();
      candidates.raise(bound.found());
    }
    const u32 count = candidates.shorten(length);
    if (leaves_bound) leave_bound(candidates.nth_stored(problem.k_of_split));
    for (u32 i = GROUP::thread(); i < length; i += GROUP::kThreads)
      list[i] = i < count && candidates.slots()[i] > candidates.threshold() ? candidates.slots()[i] : kNoCandidate;
  }
}

// Blocks into a row: leaves a list of the candidates that may be among the row's best k, and a bound. True in the last
// block to arrive, which has `lists` to gather. All threads of the group call it.
template <class GROUP, class SCAN>
__device__ __forceinline__ bool hand_over_share(const Problem& problem, u32 row, u32 k, u32 splits, u32 split,
                                                SCAN& scan, Candidates<GROUP>& candidates, KthBound<GROUP>& bound,
                                                Lists& lists, u32& is_last) {
  const u32 length = problem.list_length;
  u64* const all_lists = problem.lists + i64(row) * splits * (length + 1);
  u64* const all_bounds = all_lists + splits * length;
  lists.source = all_lists;
  lists.bounds = all_bounds;
  leave_list<GROUP>(problem, split, scan, candidates, bound, all_lists + split * length, length, all_bounds);
  GROUP::sync();
  candidates.restart(k);
  return arrives_last<GROUP>(problem.row_tickets + row, splits, is_last);
}

// Rows into a sequence: leaves the row's sorted list. True in the last row to arrive, which has `lists` to gather. All
// threads of the group call it.
template <class GROUP>
__device__ __forceinline__ bool hand_over_beam(const Problem& problem, u32 row, u32 k, const Beam& beam,
                                               const u64* chosen, const RowResult& result,
                                               Candidates<GROUP>& candidates, Lists& lists, u32& sequence,
                                               u32& is_last) {
  sequence = beam.sequence;
  leave_beam_list<GROUP>(problem, row, beam, k, chosen, result);
  GROUP::sync();
  candidates.restart(problem.k_of_sequence);
  if (!arrives_last<GROUP>(problem.beam_tickets + sequence, problem.beams, is_last)) return false;
  lists.count = problem.beams;
  lists.length = k;
  lists.source = problem.beam_lists + i64(sequence) * problem.beams * k;
  // The lists are sorted: the candidate of rank k_of_beam bounds what precedes it.
  lists.bounds = lists.source + problem.k_of_beam - 1;
  lists.bounds_stride = k;
  return true;
}

// A bound of the best k of the lists. The 32 lanes of a warp call it.
template <class GROUP>
__device__ __forceinline__ u32 bound_of(const Problem& problem, const Lists& lists, bool is_sequence) {
  // The usual row comes first, and the depth is recomputed: registers are few.
  if (!GROUP::kIsWarp && __builtin_expect(is_sequence && lists.count <= kFewLists, false))
    return bound_of_sorted(lists.source, lists.count, lists.length, u32(lists.bounds - lists.source) + 1);
  return bound_of_lists<GROUP>(lists.bounds, lists.bounds_stride, lists.count,
                               is_sequence ? problem.k_of_sequence : problem.splits_of_k);
}

}  // namespace fused_topk
