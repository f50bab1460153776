// SPDX-License-Identifier: Apache-2.0
// softmax + top-k of every row, in one launch that reads each logit once: Algorithm 4 of the paper, by a group of threads.
//
//     (m, d, T) = (-inf, 0, {})                                      T: the best k so far
//     for each tile x of the group's share of the row:               scan_parts() or scan_windows()
//         m' = max(m, max x)
//         d' = d e^((m - m') / t) + sum e^((x - m') / t)             t: the temperature
//         T' = best k of T and x
//     if other groups share the row: leave (m, d, T) to the last     hand_over_share()
//         of them to arrive, which merges all                        gather()
//     sort T; values = e^((T - m) / t) / d; indices; logsumexp       sort(), write_row()
//     with beams: leave T to the last row of the sequence,           hand_over_beam()
//         which merges all and sorts; values = scores; indices       gather(), sort(), write_sequence()
//
// WARPS = 1: a warp is a group and owns a row; a block has four. WARPS > 1: a block is a group. It owns a row. A block of 16
// warps may own a split of a row: blocks with the same blockIdx.x share that row. README.md has the reading order.
#include "merge.cuh"
#include "row_output.cuh"
#include "windows.cuh"

namespace fused_topk {

// The states of a row's parts are merged in steps of kPartsOfStep parts (merge.cuh). A row has at most kMaxParts parts
// (fused_topk/layout/topk_choice.py).
constexpr u32 kMaxParts = 1024;
constexpr u32 kMaxSteps = kMaxParts / kPartsOfStep;

// What a group keeps in shared memory, besides its warps' tiles.
template <class GROUP>
struct GroupShared {
  // Room for entries of a sequence's lists: for all of them, if there are few beams.
  static constexpr u32 kEntries = GROUP::kIsWarp ? 1 : 4 * kWarpSize;
  static_assert(kEntries < GROUP::kThreads - (GROUP::kIsWarp ? 0 : kWarpSize), "gather() loads them all at once");

  typename KthBound<GROUP>::Shared bound;
  alignas(16) u64 slots[Candidates<GROUP>::kCapacity];
  CandidatesShared<GROUP> candidates;
  RowResult row;
  Beam beam;
  i64 beam_indices[kEntries];
  float2 steps[GROUP::kIsWarp ? 1 : kMaxSteps];
  u32 is_last;
};

// How a warp scans its tiles.
template <class FORMAT, u32 WARPS, u32 METHOD, u32 VECTORS, bool ALIGNED, u32 MASK>
struct ScanOf {
  static constexpr Policy kPolicy =
      policy_of(WARPS, METHOD, 8 * sizeof(typename FORMAT::Bits), MASK != kNoMask, ALIGNED);
  static constexpr u32 kResidentBlocks = kPolicy.resident_warps / (WARPS == 1 ? 4 : WARPS);
  using Type = RowScan<FORMAT, VECTORS, ALIGNED, MASK, kPolicy.tiles_ahead, kPolicy.in_place, METHOD == kForMany>;
};
template <class FORMAT, u32 WARPS, u32 VECTORS, bool ALIGNED>
struct ScanOf<FORMAT, WARPS, kInWindows, VECTORS, ALIGNED, kNoMask> {
  static constexpr Policy kPolicy = policy_of(WARPS, kInWindows, 8 * sizeof(typename FORMAT::Bits), false, ALIGNED);
  static constexpr u32 kResidentBlocks = kPolicy.resident_warps / WARPS;
  using Type = WindowScan<FORMAT, WARPS, VECTORS, ALIGNED, kPolicy.tiles_ahead, window_tiles(WARPS)>;
};

// A split's share of a row: parts [first_part, last_part), and how many of the k best it may have.
template <class GROUP, u32 LOG2_TILE>
struct Share {
  u32 first_part, last_part, k;

  __device__ __forceinline__ Share(const Problem& problem, u32 split)
      : first_part(0), last_part(problem.parts_per_row), k(problem.k) {
    if constexpr (GROUP::kSharesRow) {
      first_part = split * problem.parts_per_split + min(split, problem.splits_with_one_more);
      last_part = first_part + problem.parts_per_split + (split < problem.splits_with_one_more);
      // V < 2^31 and a part has at most 2^21 tokens, so nothing overflows.
      const u32 log2_length = problem.tiles_per_part_log2 + LOG2_TILE;
      k = min(k, min(last_part << log2_length, problem.V) - (first_part << log2_length));
      // One register for k, not two for the numbers that it is the minimum of.
      keep_opaque(k);
    }
  }
};

// Leaves a split's list [length] of what may be among the row's best k, and its bound. All threads of the group call it.
template <class GROUP, class SCAN>
__device__ __forceinline__ void leave_list(const Problem& problem, u32 split, SCAN& scan, Candidates<GROUP>& candidates,
                                           KthBound<GROUP>& bound, u64* list, u32 length, u64* all_bounds) {
  const bool leaves_bound = GROUP::warp() == GROUP::kWarps - 1;
  const auto leave_bound = [&](u32 key) {
    if (lane_id() == 0) all_bounds[split] = make_candidate(key, 0);
  };
  if constexpr (GROUP::kForMany) {
    candidates.raise(bound.latest());
    const u32 key = candidates.hand_over(list, length, problem.k_of_split);
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

// The states of a row's parts, [parts]: in shared memory if one group reads them all, else in global memory, where the last
// block finds them.
template <u32 MASK>
struct RowStates {
  const Problem& problem;
  u32 row, parts, splits;
  float2* own;
  float2* left;  // in global memory

  __device__ __forceinline__ RowStates(const Problem& problem, u32 row, u32 splits, float2* own)
      : problem(problem), row(row), parts(problem.parts_per_row), splits(splits), own(own), left(left_of(row)) {}

  __device__ __forceinline__ void put(u32 part, Normalizer state) const {
    // A mask takes registers. With one, the address is recomputed where it is needed.
    float2* const states = splits == 1 ? own : MASK == kNoMask ? left : left_of(row);
    states[part] = {state.m, state.d};
  }
  // Merges step i of the row's parts: merge_step(). The 32 lanes of a warp call it.
  __device__ __forceinline__ Normalizer step_of_own(u32 i, float scale) const {
    return merge_step(i, parts, scale, [&](u32 part) { return own[part]; });
  }
  __device__ __forceinline__ Normalizer step_of_left(u32 i, float scale) const {
    u32 same_row = row;
    if constexpr (MASK != kNoMask) keep_opaque(same_row);
    const float2* const states = MASK == kNoMask ? left : left_of(same_row);
    return merge_step(i, parts, scale, [&](u32 part) { return load_from_other_block(states + part); });
  }
  // A long row has many steps. One warp would wait for memory at each. So each warp makes one, and all wait together.
  __device__ __forceinline__ bool has_many_steps() const { return splits > 1 && parts > 2 * kPartsOfStep; }

 private:
  __device__ __forceinline__ float2* left_of(u32 row) const {
    return reinterpret_cast<float2*>(problem.parts) + i64(row) * parts;
  }
};

// Lists that a group gathers: of a row's splits, or of a sequence's beams.
struct Lists {
  u32 count, length;
  const u64* source;  // [count, length]
  const u64* bounds;  // [count] at distance bounds_stride
  u32 bounds_stride;
};

// Blocks into a row: leaves a list of what may be among the row's best k, and a bound. True in the last block to arrive, which
// has `lists` to gather. All threads of the group call it.
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

// Rows into a sequence: leaves the row's sorted list. True in the last row to arrive, which has `lists` to gather. All threads
// of the group call it.
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

// Grid: (rows, splits), or four rows a block where a warp owns a row. Dynamic shared memory: each warp's kWarpVectors, each
// warp's window, then, if splits is 1, the states of each group's parts.
template <class FORMAT, u32 WARPS, u32 METHOD, u32 VECTORS, bool ALIGNED, u32 MASK>
__global__ void __launch_bounds__(WARPS == 1 ? 128 : WARPS * kWarpSize,
                                  ScanOf<FORMAT, WARPS, METHOD, VECTORS, ALIGNED, MASK>::kResidentBlocks)
    softmax_topk_kernel(const __grid_constant__ Problem problem) {
  using GROUP = Group<WARPS, METHOD == kForMany>;
  using SCAN = typename ScanOf<FORMAT, WARPS, METHOD, VECTORS, ALIGNED, MASK>::Type;
  using Window = typename SCAN::Shared;
  constexpr u32 kRowsPerBlock = GROUP::kIsWarp ? 4 : 1;
  constexpr u32 kWarps = GROUP::kIsWarp ? 4 : WARPS;
  constexpr bool kHasWindows = METHOD == kInWindows;
  __shared__ GroupShared<GROUP> all_shared[kRowsPerBlock];
  // Background copies to other addresses than multiples of 32 bytes are slower.
  extern __shared__ __align__(128) Vector tile_slots[];

  const u32 own = GROUP::kIsWarp ? threadIdx.x / kWarpSize : 0;
  const u32 splits = GROUP::kSharesRow ? gridDim.y : 1;
  const u32 split = GROUP::kSharesRow ? blockIdx.y : 0;
  const u32 row = blockIdx.x * kRowsPerBlock + own;
  // Whole groups leave, so no barrier misses a thread.
  if (row >= problem.rows) return;
  GroupShared<GROUP>& shared = all_shared[own];

  // Scan the share: the first tile is requested before all else.
  const u32 k = problem.k;
  const u32 parts = problem.parts_per_row;
  const Share<GROUP, SCAN::RowTile::kLog2Elements> share(problem, split);
  const u32 warp = threadIdx.x / kWarpSize;
  Window* const windows = reinterpret_cast<Window*>(tile_slots + kWarps * SCAN::Stream::kWarpVectors);
  SCAN scan(problem, row, tile_slots + warp * SCAN::Stream::kWarpVectors, windows[kHasWindows ? warp : 0]);
  scan.reader.start_early(TileOrder::first_tile<GROUP>(problem, share.first_part, share.last_part),
                          share.first_part + GROUP::warp() < share.last_part);
  Candidates<GROUP> candidates(shared.slots, shared.candidates);
  KthBound<GROUP> bound(shared.bound, problem.k_of_warp, problem.warps_of_k);
  const RowStates<MASK> states(problem, row, splits,
                               reinterpret_cast<float2*>(windows + (kHasWindows ? kWarps : 0)) + own * parts);
  const auto finish_part = [&](u32 part, Normalizer state) {
    if (kHasWindows || lane_id() == 0) states.put(part, state);
  };
  if constexpr (kHasWindows) {
    scan_windows(problem, row, scan, share.first_part, share.last_part, share.k, candidates, bound, finish_part);
  } else {
    scan_parts(problem, row, scan, share.first_part, share.last_part, share.k, candidates, bound, finish_part);
  }

  // One warp merges the states while the others work on the candidates. The sort's barrier tells every thread the result.
  const bool finishes_row = GROUP::warp() == GROUP::kWarps - 1;
  Normalizer state;
  Beam beam;
  const auto merge_row = [&](auto step) {
    // The score is in flight meanwhile.
    if (problem.beams != 0) beam = Beam(problem, row);
    state = merge_parts(parts, scan.folder.scale(), step);
  };
  if (splits == 1 && finishes_row) merge_row([&](u32 i) { return states.step_of_own(i, scan.folder.scale()); });

  Lists lists = {splits, problem.list_length, nullptr, nullptr, 1};
  if (splits > 1 && !hand_over_share(problem, row, k, splits, split, scan, candidates, bound, lists, shared.is_last))
    return;

  // Rows with many steps are rare. The hint keeps this code out of the usual path.
  const auto step_of_left = [&](u32 i) { return states.step_of_left(i, scan.folder.scale()); };
  const bool has_many_steps = states.has_many_steps();
  if (__builtin_expect(has_many_steps, false)) {
#pragma unroll 1
    for (u32 i = GROUP::warp(); i * kPartsOfStep < parts; i += GROUP::kWarps) {
      const Normalizer step = step_of_left(i);
      if (lane_id() == 0) shared.steps[i] = {step.m, step.d};
    }
    GROUP::sync();
    if (finishes_row) merge_row([&](u32 i) { return Normalizer{shared.steps[i].x, shared.steps[i].y}; });
  }

  // Finish the row and, with beams, once more the sequence: one copy of the code serves both.
  const u64* chosen;  // [k], best first
  bool is_sequence = false;
  u32 sequence = 0;
  const auto beam_indices = [&] { return problem.beam_indices + i64(sequence) * problem.beams * k; };
#pragma unroll 1
  while (true) {
    if (splits > 1 || is_sequence) {
      const auto bound_of_all = [&] { return bound_of<GROUP>(problem, lists, is_sequence); };
      gather(lists.source, lists.count, lists.length, candidates, bound_of_all, [&](bool is_all) {
        if (is_sequence) {
          // Fetched after the sort, the indices would keep every thread waiting.
          if (is_all) keep_indices(beam_indices(), problem.beams * k, shared.beam_indices);
          return;
        }
        if (!has_many_steps) merge_row(step_of_left);
      });
    }
    if (finishes_row && lane_id() == 0 && !is_sequence) {
      shared.row = RowResult(state.m, state.d, problem.inverse_temperature(row));
      if (problem.beams != 0) shared.beam = beam;
    }
    chosen = candidates.sort();
    if (is_sequence) break;
    const RowResult result = shared.row;
    if (GROUP::thread() == GROUP::kThreads - 1) problem.logsumexp[row] = result.logsumexp();
    if (problem.beams == 0) {
      write_row<GROUP>(problem, row, k, chosen, scan.reader, result);
      // Last, when no register is taken: a branch before it makes some kernels spill.
      if (problem.value_kind == kState && GROUP::thread() == GROUP::kThreads - 1)
        write_state(problem.logsumexp, problem.rows, row, shared.row);
      return;
    }
    if (!hand_over_beam(problem, row, k, shared.beam, chosen, result, candidates, lists, sequence, shared.is_last))
      return;
    is_sequence = true;
  }
  const bool are_kept = !GROUP::kIsWarp && problem.beams * k <= GroupShared<GROUP>::kEntries;
  write_sequence<GROUP>(problem, sequence, chosen, [&](u32 i) {
    return are_kept ? shared.beam_indices[i] : load_from_other_block(beam_indices() + i);
  });
}

}  // namespace fused_topk
