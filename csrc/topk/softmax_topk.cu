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
// WARPS = 1: a warp is a group and owns a row; a block has four. WARPS > 1: a block is a group. It owns a row. A block
// of 16 warps may own a split of a row: blocks with the same blockIdx.x share that row. README.md has the reading
// order.
#include "hand_over.cuh"
#include "windows.cuh"

namespace fused_topk {

// The loop: reads a share of a row, parts [first_part, last_part), with all threads of a group. Leaves T, the best k of
// the share and a few more candidates, unsorted, in `candidates`. A barrier has followed the last add. The warp that
// has read a part calls finish_part(part, (m, d)) with all its lanes.
//
// For every tile a warp updates its part's (m, d): scan.folder.fold() of part_folder.cuh. It offers the tile's hits to
// T: scan.selector.offer() of tile_selector.cuh. The warps wait for each other only for the first bound and for cuts.
template <class GROUP, class SCAN, class SHARE, class FINISH_PART>
__device__ __forceinline__ void scan_parts(const Problem& problem, u32 row, SCAN& scan, const SHARE& share,
                                           Candidates<GROUP>& candidates, KthBound<GROUP>& bound,
                                           FINISH_PART finish_part) {
  const TileOrder order = TileOrder::of<GROUP>(problem, share, scan.reader.tiles());
  const u32 log2 = problem.tiles_per_part_log2;
  u32 turn = order.begin + (GROUP::warp() << log2);
  const auto request = [&](u32 ahead) { scan.reader.request(order.tile(ahead), order.has(ahead)); };
  const auto read = [&](u32 next) { scan.read(order.tile(turn), order.tile(next), order.has(next)); };
  // A tile in shared memory is folded after its hits are offered. Few warps have hits, and their offers then do not
  // wait for the others' exponentials.
  constexpr bool kOffersFirst = SCAN::Stream::kInPlace && !GROUP::kIsWarp;
  const u32 second = order.after(turn);
  scan.reader.start(order.tile(turn), order.has(turn), order.tile(second), order.has(second));
  scan.prepare(problem, row);
  candidates.restart(share.k);
  bool is_open = order.has(turn);
  scan.folder.begin_part();
  if (is_open) {
    read(second);
    bound.publish(scan.proven(bound, true));
    if constexpr (!kOffersFirst) scan.folder.fold(scan.reader);
  } else {
    bound.abstain();
  }
  GROUP::sync();
  candidates.raise(bound.found());
  while (true) {
    while (is_open) {
      if (!scan.selector.offer(scan.reader, candidates, bound, GROUP::kIsWarp || order.has(order.after(turn)))) break;
      // What follows is recomputed: values kept during the offer cost registers.
      keep_opaque(turn);
      if constexpr (kOffersFirst) scan.folder.fold(scan.reader);
      const u32 next = order.after(turn);
      const u32 after_next = order.after(next);
      if constexpr (SCAN::Stream::kInBackground) request(SCAN::Stream::kAhead == 1 ? next : after_next);
      const bool ends_part = order.ends_part(turn);
      if (ends_part) finish_part(scan.reader.tile_number() >> log2, scan.folder.end_part());
      turn = next;
      is_open = order.has(turn);
      if (!is_open) break;
      read(after_next);
      scan.selector.update(scan.reader, bound);
      if (ends_part) scan.folder.begin_part();
      if constexpr (!kOffersFirst) scan.folder.fold(scan.reader);
    }
    // A warp that is still open has found the candidates full.
    if (!GROUP::any(is_open)) break;
    candidates.cut(candidates.enough());
  }
}

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
  alignas(16) u64 slots[Candidates<GROUP>::kSlots];
  CandidatesShared<GROUP> candidates;
  RowResult row;
  Beam beam;
  i64 beam_indices[kEntries];
  float2 steps[GROUP::kIsWarp ? 1 : kMaxSteps];
  u32 is_last;
};

// The warps that must fit on a multiprocessor. A row's length takes a register, and some kernels have none left for it.
constexpr u32 resident_warps(const Tuning& tuning, u32 mask, u32 method, u32 bits, bool aligned) {
  const u32 most = mask != kLengths ? 32 : method == kInWindows && !aligned ? 16 : bits == 32 ? 24 : 32;
  return tuning.resident_warps < most ? tuning.resident_warps : most;
}

// How a warp scans its tiles.
template <class FORMAT, u32 WARPS, u32 METHOD, u32 VECTORS, bool ALIGNED, u32 MASK>
struct ScanOf {
  static constexpr u32 kBits = 8 * sizeof(typename FORMAT::Bits);
  static constexpr Tuning kTuning = tuned(tuning::kTopk, WARPS, METHOD, kBits, has_mask(MASK), ALIGNED);
  static constexpr u32 kResidentBlocks =
      resident_warps(kTuning, MASK, METHOD, kBits, ALIGNED) / (WARPS == 1 ? 4 : WARPS);
  using Type = RowScan<FORMAT, VECTORS, ALIGNED, MASK, kTuning.ahead, kTuning.in_place, METHOD == kForMany>;
};
template <class FORMAT, u32 WARPS, u32 VECTORS, bool ALIGNED, u32 MASK>
struct ScanOf<FORMAT, WARPS, kInWindows, VECTORS, ALIGNED, MASK> {
  static constexpr u32 kBits = 8 * sizeof(typename FORMAT::Bits);
  static constexpr Tuning kTuning = tuned(tuning::kTopk, WARPS, kInWindows, kBits, false, ALIGNED);
  static constexpr u32 kResidentBlocks = resident_warps(kTuning, MASK, kInWindows, kBits, ALIGNED) / WARPS;
  using Type = WindowScan<FORMAT, WARPS, VECTORS, ALIGNED, MASK, kTuning.ahead, kTuning.window>;
};

// Grid: (rows, splits), or four rows a block where a warp owns a row. Dynamic shared memory: each warp's kWarpVectors,
// each warp's window, then, if splits is 1, the states of each group's parts.
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
  const u32 length = problem.length<MASK>(row);
  const Share<GROUP, SCAN::RowTile::kLog2Elements, MASK> share(problem, split, splits, length);
  const u32 warp = threadIdx.x / kWarpSize;
  Window* const windows = reinterpret_cast<Window*>(tile_slots + kWarps * SCAN::Stream::kWarpVectors);
  SCAN scan(problem, row, length, tile_slots + warp * SCAN::Stream::kWarpVectors, windows[kHasWindows ? warp : 0]);
  scan.reader.start_early(TileOrder::first_tile<GROUP>(problem, share),
                          share.first_part + GROUP::warp() < share.last_part);
  Candidates<GROUP> candidates(shared.slots, shared.candidates);
  KthBound<GROUP> bound(shared.bound, share.k_of_warp, share.warps_of_k);
  const RowStates<MASK> states(
      problem, row, splits,
      reinterpret_cast<float2*>(windows + (kHasWindows ? kWarps : 0)) + own * problem.parts_per_row);
  const auto finish_part = [&](u32 part, Normalizer state) {
    if (kHasWindows || lane_id() == 0) states.put(part, state);
  };
  if constexpr (kHasWindows) {
    scan_windows(problem, row, scan, share, candidates, bound, finish_part);
  } else {
    scan_parts(problem, row, scan, share, candidates, bound, finish_part);
  }

  // What follows from the length is recomputed: values kept during the scan cost registers.
  u32 parts = problem.parts_per_row;
  if (problem.may_have_lengths<MASK>()) {
    u32 same_length = scan.reader.V();
    keep_opaque(same_length);
    parts = parts_of<SCAN::RowTile::kLog2Elements>(problem, same_length);
    if (same_length < k && split == 0) offer_missing(same_length, k, candidates);
  }

  // One warp merges the states while the others work on the candidates. The sort's barrier tells every thread the
  // result.
  const bool finishes_row = GROUP::warp() == GROUP::kWarps - 1;
  Normalizer state;
  Beam beam;
  const auto merge_row = [&](auto step) {
    // The score is in flight meanwhile.
    if (problem.beams != 0) beam = Beam(problem, row);
    state = merge_parts(parts, scan.folder.scale(), step);
  };
  if (splits == 1 && finishes_row) merge_row([&](u32 i) { return states.step_of_own(i, parts, scan.folder.scale()); });

  Lists lists = {splits, problem.list_length, nullptr, nullptr, 1};
  if (splits > 1 && !hand_over_share(problem, row, k, splits, split, scan, candidates, bound, lists, shared.is_last))
    return;

  // Rows with many steps are rare. The hint keeps this code out of the usual path.
  const auto step_of_left = [&](u32 i) { return states.step_of_left(i, parts, scan.folder.scale()); };
  const bool has_many_steps = states.has_many_steps(parts);
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
      shared.row = RowResult(state.m, state.d, problem.temperature_of(row));
      if (problem.beams != 0) shared.beam = beam;
    }
    chosen = candidates.sort(is_sequence ? Spread{0, 0} : spread_of_row<FORMAT>(problem));
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
