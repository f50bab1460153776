// SPDX-License-Identifier: Apache-2.0
// softmax + top-k of every row in one launch that reads each logit once.
//
//     values[row] = the k largest of softmax(logits[row] / T) (or log_softmax, or the logits), sorted
//     logsumexp[row] = m / T + log d
//
// One algorithm; the template says who owns a row. WARPS = 1: a warp, four rows a block. WARPS > 1: a block, or,
// of 16, the blocks of a column of the grid, of which the last to arrive merges. Beam search merges once more, over the rows of a
// sequence. Reading order: order.h, normalizer.h, platform.cuh, row.cuh, group.cuh, bound.cuh, candidates.cuh,
// problem.cuh, result.cuh, scan.cuh, windows.cuh, merge.cuh, this file.
#include "merge.cuh"
#include "result.cuh"
#include "scan.cuh"
#include "windows.cuh"

namespace fused_topk {

// Which row of which sequence a beam is, and its score.
struct Beam {
  u32 sequence, rank;
  float score;

  Beam() = default;
  __device__ __forceinline__ Beam(const Problem& problem, u32 row)
      : sequence(row / problem.beams), rank(row - sequence * problem.beams) {
    const i64(&strides)[2] = problem.beam_scores_strides;
    score = __ldg(problem.beam_scores + sequence * strides[0] + rank * strides[1]);
  }
};

// Of a row that several blocks read (fused_topk/kernel_choice.py: at most 1024 parts).
constexpr u32 kMaxSteps = 1024 / kPartsOfStep;

// What a group keeps in shared memory, besides its warps' tiles.
template <class GROUP>
struct GroupShared {
  // Entries of a sequence's lists that fit here: all of them, for few beams.
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

__device__ __forceinline__ float logit_of(u64 candidate) { return __uint_as_float(bits_of_key(key_of(candidate))); }

// The normalizer of the k chosen alone. The sum's order depends on k only. Every warp computes it for itself.
__device__ __forceinline__ RowResult among_chosen(const RowResult& row, const u64* chosen, u32 k) {
  const float m = row.is_finite() ? logit_of(chosen[0]) : row.m;
  float d = 0.0f;
  for (u32 i = lane_id(); i < k; i += kWarpSize) d += expf((logit_of(chosen[i]) - m) * row.inverse_temperature);
  return {m, warp_sum(d), row.inverse_temperature};
}

// Writes the sorted `chosen` [k] of a row. All threads of the group call it.
template <class GROUP, class FORMAT, class SCAN>
__device__ __forceinline__ void write_row(const Problem& problem, u32 row, u32 k, const u64* chosen, const SCAN& scan,
                                          const RowResult& result) {
  const RowResult relative_to = problem.normalize_topk ? among_chosen(result, chosen, k) : result;
  const auto raw_logit = [&](u32 index) { return scan.raw_logit(index); };
  for (u32 i = GROUP::thread(); i < k; i += GROUP::kThreads)
    write_chosen<FORMAT>(problem, row, k, i, index_of(chosen[i]), logit_of(chosen[i]), relative_to, raw_logit);
}

// Leaves a row's sorted `chosen` [k] where the sequence's last row finds them. They are sorted by logit, hence by
// accumulated value; among equal values the place in the lists decides: smaller beam first, then the row's own order.
template <class GROUP>
__device__ __forceinline__ void hand_over_beam(const Problem& problem, u32 row, const Beam& beam, u32 k,
                                               const u64* chosen, const RowResult& result) {
  for (u32 i = GROUP::thread(); i < k; i += GROUP::kThreads) {
    const float value = beam.score + result.log_probability(logit_of(chosen[i]));
    problem.beam_lists[i64(row) * k + i] = make_candidate(order_key(value), beam.rank * k + i);
    problem.beam_indices[i64(row) * k + i] = i64(beam.rank) * problem.V + index_of(chosen[i]);
  }
}

// Fetches what `indices` will say of a sequence's lists, `count` entries in all, if they fit into `kept`. The 32 lanes of a
// warp call it.
template <u32 N>
__device__ __forceinline__ void keep_indices(const i64* indices, u32 count, i64 (&kept)[N]) {
  if (count > N) return;
#pragma unroll 1
  for (u32 first = lane_id(); first < count; first += 2 * kWarpSize) {
    const u32 second = first + kWarpSize;
    // Past the end, the last once more: a register that need not outlive a branch.
    const i64 own[2] = {load_from_other_block(indices + first),
                        load_from_other_block(indices + min(second, count - 1))};
    kept[first] = own[0];
    if (second < count) kept[second] = own[1];
  }
}

// Writes the sorted `chosen` [k_of_sequence] of a sequence. index(i) is that of entry i of its lists.
template <class GROUP, class INDEX>
__device__ __forceinline__ void write_sequence(const Problem& problem, u32 sequence, const u64* chosen, INDEX index) {
  for (u32 i = GROUP::thread(); i < problem.k_of_sequence; i += GROUP::kThreads) {
    const i64 out = i64(sequence) * problem.k_of_sequence + i;
    static_cast<float*>(problem.values)[out] = logit_of(chosen[i]);
    problem.indices[out] = index(index_of(chosen[i]));
  }
}

// How a warp's tiles become candidates. fused_topk/kernel_choice.py chooses.
enum Method : u32 {
  kTileByTile = 0,
  kForMany = 1,    // tile by tile, for a large k
  kInWindows = 2,  // a window of tiles at a time; an aligned row, without a mask, in parts of one tile
};

// Whether a tile stays in shared memory while a warp works on it (TileStream): in an aligned row without a mask, if a warp has
// it alone, or 16 warps and the hardware has the room. fused_topk/kernel_choice.py knows it too.
constexpr bool is_in_place(u32 warps, u32 method, u32 mask, bool aligned) {
  const bool has_room = warps == 1 || (warps > 8 && method == kTileByTile && __CUDA_ARCH__ == 900);
  return kHasAsyncCopy && has_room && mask == kNoMask && aligned;
}

// Blocks that must fit on a multiprocessor, which caps a thread's registers: at 64 for 32 warps, 80 for 24, 128 for 16. More
// than 16 where they were measured to be worth it; a mask, and large tiles of unaligned rows, need the registers. On other
// targets there are enough of them that no compiler has to spill (tests/test_cuda_compile.py).
constexpr u32 resident_blocks(u32 warps, u32 method, u32 mask, u32 vectors, bool aligned) {
  const u32 warps_of_block = warps == 1 ? 4 : warps;
  const bool is_plain_warp = warps == 1 && is_in_place(warps, method, mask, aligned);
#if __CUDA_ARCH__ == 900
  if (is_plain_warp) return 32 / warps_of_block;
  return (mask == kNoMask && (aligned || vectors <= 4) ? 24 : 16) / warps_of_block;
#else
  if (is_plain_warp) return 24 / warps_of_block;
  return mask != kNoMask && !aligned && warps_of_block <= 8 ? 8 / warps_of_block : 16 / warps_of_block;
#endif
}

// Tiles that a warp asks for before it takes the first (TileStream). One that has its row alone keeps 4 kB in place, so that 32
// warps fit. Where k may be large the candidates take the room in shared memory; then the registers decide, and again not
// every target has enough of them.
constexpr u32 tiles_ahead(u32 warps, u32 method, u32 mask, u32 vectors, bool aligned) {
  if (is_in_place(warps, method, mask, aligned)) return warps == 1 ? 8 / vectors : 2;
#if __CUDA_ARCH__ == 900
  if (warps > 8) return (mask == kNoMask && aligned) || vectors <= 4 ? 1 : 0;
#endif
  return warps <= 8 ? 2 : 0;
}

template <class FORMAT, u32 WARPS, u32 METHOD, u32 VECTORS, bool ALIGNED, u32 MASK>
struct ScanOf {
  static constexpr u32 kAhead = tiles_ahead(WARPS, METHOD, MASK, VECTORS, ALIGNED);
  static constexpr bool kInPlace = is_in_place(WARPS, METHOD, MASK, ALIGNED);
  using Type = RowScan<FORMAT, VECTORS, ALIGNED, MASK, kAhead, kInPlace, METHOD == kForMany>;
};
template <class FORMAT, u32 WARPS, u32 VECTORS>
struct ScanOf<FORMAT, WARPS, kInWindows, VECTORS, true, kNoMask> {
  static constexpr u32 kAhead = tiles_ahead(WARPS, kInWindows, kNoMask, VECTORS, true);
  // As much as fits beside the candidates of 16 warps; in the 64 kB of compute capability 7.5, less.
  static constexpr u32 kWindow = WARPS <= 8 ? 8 : kHasAsyncCopy ? 4 : 2;
  using Type = WindowScan<FORMAT, WARPS, VECTORS, kAhead, kWindow>;
};

// Grid: (rows, splits), or four rows a block where a warp owns a row. Dynamic shared memory: each warp's kWarpVectors and what
// it keeps of a window, then, if splits is 1, the states of each group's parts.
template <class FORMAT, u32 WARPS, u32 METHOD, u32 VECTORS, bool ALIGNED, u32 MASK>
__global__ void __launch_bounds__(WARPS == 1 ? 128 : WARPS * kWarpSize,
                                  resident_blocks(WARPS, METHOD, MASK, VECTORS, ALIGNED))
    softmax_topk_kernel(const __grid_constant__ Problem problem) {
  constexpr bool kIsForMany = METHOD == kForMany;
  using GROUP = Group<WARPS, kIsForMany>;
  using SCAN = typename ScanOf<FORMAT, WARPS, METHOD, VECTORS, ALIGNED, MASK>::Type;
  constexpr u32 kRowsPerBlock = GROUP::kIsWarp ? 4 : 1;
  __shared__ GroupShared<GROUP> all_shared[kRowsPerBlock];
  // At 16 bytes beyond a multiple of 32, background copies take a fifth longer.
  extern __shared__ __align__(128) Vector tile_slots[];

  const u32 own = GROUP::kIsWarp ? threadIdx.x / kWarpSize : 0;
  const u32 splits = GROUP::kSharesRow ? gridDim.y : 1;
  const u32 split = GROUP::kSharesRow ? blockIdx.y : 0;
  const u32 row = blockIdx.x * kRowsPerBlock + own;
  // Only whole groups leave, so no barrier misses a thread.
  if (row >= problem.rows) return;
  GroupShared<GROUP>& shared = all_shared[own];

  const u32 k = problem.k;
  const u32 parts = problem.parts_per_row;
  u32 first_part = 0, last_part = parts, k_share = k;
  if constexpr (GROUP::kSharesRow) {
    first_part = split * problem.parts_per_split + min(split, problem.splits_with_one_more);
    last_part = first_part + problem.parts_per_split + (split < problem.splits_with_one_more);
    // V < 2^31 and a part has at most 2^21 tokens, so nothing overflows.
    const u32 log2_length = problem.tiles_per_part_log2 + SCAN::RowTile::kLog2Elements;
    k_share = min(k, min(last_part << log2_length, problem.V) - (first_part << log2_length));
    // One number, not the two that it is the least of.
    keep_opaque(k_share);
  }
  using Window = typename SCAN::Shared;
  constexpr bool kHasWindows = METHOD == kInWindows;
  constexpr u32 kWarps = GROUP::kIsWarp ? 4 : WARPS;
  const u32 warp = threadIdx.x / kWarpSize;
  Window* const windows = reinterpret_cast<Window*>(tile_slots + kWarps * SCAN::Stream::kWarpVectors);
  SCAN scan(problem, row, tile_slots + warp * SCAN::Stream::kWarpVectors, windows[kHasWindows ? warp : 0]);
  scan.start_early(TileOrder::first_tile<GROUP>(problem, first_part, last_part),
                   first_part + GROUP::warp() < last_part);

  Candidates<GROUP> candidates(shared.slots, shared.candidates);
  KthBound<GROUP> bound(shared.bound, problem.k_of_warp, problem.warps_of_k);
  // The states of the row's parts [parts]: here if one group reads them all, else where the last block finds them. A mask
  // takes registers: then the address is worked out anew where it is needed.
  float2* const own_parts = reinterpret_cast<float2*>(windows + (kHasWindows ? kWarps : 0)) + own * parts;
  const auto parts_of = [&](u32 row) { return reinterpret_cast<float2*>(problem.parts) + i64(row) * parts; };
  float2* const all_parts = parts_of(row);
  const auto finish_part = [&](u32 part, Normalizer state) {
    if (!kHasWindows && lane_id() != 0) return;
    float2* const states = splits == 1 ? own_parts : MASK == kNoMask ? all_parts : parts_of(row);
    states[part] = {state.m, state.d};
  };
  if constexpr (kHasWindows) {
    scan_windows(problem, row, scan, first_part, last_part, k_share, candidates, bound, finish_part);
  } else {
    scan_parts(problem, row, scan, first_part, last_part, k_share, candidates, bound, finish_part);
  }

  // One warp merges the states, while the others are busy with the candidates; the sort's barrier tells everyone.
  const bool finishes_row = GROUP::warp() == GROUP::kWarps - 1;
  Normalizer state;
  Beam beam;
  const auto merge_row = [&](auto step) {
    // The score is on its way meanwhile.
    if (problem.beams != 0) beam = Beam(problem, row);
    state = merge_parts(parts, scan.scale(), step);
  };
  const auto step_of = [&](u32 i, auto state_of_part) { return merge_step(i, parts, scan.scale(), state_of_part); };
  if (splits == 1 && finishes_row)
    merge_row([&](u32 i) { return step_of(i, [&](u32 part) { return own_parts[part]; }); });

  const u64* chosen;  // [k], best first
  u32 lists = splits;
  u32 length = problem.list_length;
  const u64* source = nullptr;
  const u64* bounds = nullptr;
  u32 bounds_stride = 1;
  u32 sequence = 0;
  // Of the sequence's lists.
  const auto beam_indices = [&] { return problem.beam_indices + i64(sequence) * problem.beams * k; };
  if (splits > 1) {
    // Blocks into a row: whoever is not alone hands over what may be among the best, and a bound; the last to arrive
    // gathers all of it.
    u64* const all_lists = problem.lists + i64(row) * splits * (length + 1);
    u64* const all_bounds = all_lists + splits * length;
    source = all_lists;
    bounds = all_bounds;
    u64* list = all_lists + split * length;
    const auto hand_over_bound = [&](u32 key) {
      if (lane_id() == 0) all_bounds[split] = make_candidate(key, 0);
    };
    if constexpr (kIsForMany) {
      candidates.raise(bound.latest());
      const u32 key = candidates.hand_over(list, length, problem.k_of_split);
      if (finishes_row) hand_over_bound(key);
    } else {
      // Many candidates passed early: what all of the share's elements prove by now drops most of them.
      const bool has_more_tiles = problem.parts_per_split >= GROUP::kWarps || problem.tiles_per_part_log2 > 0;
      if (has_more_tiles && candidates.stored() > length) {
        const bool has_read = GROUP::warp() < problem.parts_per_split + (split < problem.splits_with_one_more);
        if (has_read) bound.publish(scan.proven(bound));
        GROUP::sync();
        candidates.raise(bound.found());
      }
      const u32 count = candidates.shorten(length);
      if (finishes_row) hand_over_bound(candidates.nth_stored(problem.k_of_split));
      for (u32 i = GROUP::thread(); i < length; i += GROUP::kThreads)
        list[i] = i < count && candidates.slots()[i] > candidates.threshold() ? candidates.slots()[i] : kNoCandidate;
    }
    GROUP::sync();
    candidates.restart(k);
    if (!arrives_last<GROUP>(problem.row_tickets + row, splits, shared.is_last)) return;
  }
  const auto step_of_others = [&](u32 i) {
    u32 same_row = row;
    if constexpr (MASK != kNoMask) keep_opaque(same_row);
    const float2* const states = MASK == kNoMask ? all_parts : parts_of(same_row);
    return step_of(i, [&](u32 part) { return load_from_other_block(states + part); });
  };
  // Of a long row, one warp would wait for memory at each step: here each warp makes one, and all wait together. Rarely, so
  // that this code does not lie in the way of the rest.
  const bool has_many_steps = splits > 1 && parts > 2 * kPartsOfStep;
  if (__builtin_expect(has_many_steps, false)) {
#pragma unroll 1
    for (u32 i = GROUP::warp(); i * kPartsOfStep < parts; i += GROUP::kWarps) {
      const Normalizer step = step_of_others(i);
      if (lane_id() == 0) shared.steps[i] = {step.m, step.d};
    }
    GROUP::sync();
    if (finishes_row) merge_row([&](u32 i) { return Normalizer{shared.steps[i].x, shared.steps[i].y}; });
  }
  bool is_sequence = false;
#pragma unroll 1
  while (true) {
    if (splits > 1 || is_sequence) {
      const auto bound_of_all = [&] {
        // What is usual in a row comes first, and a depth that is at hand: registers are few.
        if (!GROUP::kIsWarp && __builtin_expect(is_sequence && lists <= kFewLists, false))
          return bound_of_sorted(source, lists, length, u32(bounds - source) + 1);
        return bound_of_lists<GROUP>(bounds, bounds_stride, lists,
                                     is_sequence ? problem.k_of_sequence : problem.splits_of_k);
      };
      gather(source, lists, length, candidates, bound_of_all, [&](bool is_all) {
        if (is_sequence) {
          // Fetched after the sort, they would keep everyone waiting.
          if (is_all) keep_indices(beam_indices(), problem.beams * k, shared.beam_indices);
          return;
        }
        if (!has_many_steps) merge_row(step_of_others);
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
      write_row<GROUP, FORMAT>(problem, row, k, chosen, scan, result);
      return;
    }
    // Rows into a sequence, likewise.
    sequence = shared.beam.sequence;
    hand_over_beam<GROUP>(problem, row, shared.beam, k, chosen, result);
    GROUP::sync();
    candidates.restart(problem.k_of_sequence);
    if (!arrives_last<GROUP>(problem.beam_tickets + sequence, problem.beams, shared.is_last)) return;
    lists = problem.beams;
    length = k;
    source = problem.beam_lists + i64(sequence) * lists * k;
    // Sorted lists: what a beam vouches for ends with its bound.
    bounds = source + problem.k_of_beam - 1;
    bounds_stride = k;
    is_sequence = true;
  }
  const bool are_kept = !GROUP::kIsWarp && problem.beams * k <= GroupShared<GROUP>::kEntries;
  write_sequence<GROUP>(problem, sequence, chosen, [&](u32 i) {
    return are_kept ? shared.beam_indices[i] : load_from_other_block(beam_indices() + i);
  });
}

}  // namespace fused_topk
