// SPDX-License-Identifier: Apache-2.0
// softmax + top-k of every row in one launch that reads each logit once.
//
//     values[row] = the k largest of softmax(logits[row] / T) (or log_softmax, or the logits), sorted
//     logsumexp[row] = m / T + log d
//
// One algorithm; the template says who owns a row. WARPS = 1: a warp, four rows a block. WARPS > 1: a block, or, with
// problem.splits > 1, several blocks, of which the last to arrive merges. Beam search merges once more, over the rows of
// a sequence. Reading order: order.h, normalizer.h, platform.cuh, row.cuh, group.cuh, candidates.cuh, problem.cuh,
// scan.cuh, merge.cuh, this file.
#include "merge.cuh"
#include "scan.cuh"

namespace fused_topk {

template <u32 WARPS>
struct GroupShared {
  CandidatesShared<WARPS> candidates;
  float2 lanes[kWarpSize];
  u32 is_last;
};

// m and d of the row, and the values that they make of its logits.
struct RowResult {
  float m, d;
  float inverse_temperature;

  __device__ __forceinline__ bool is_finite() const { return fabsf(m) < FUSED_TOPK_INFINITY; }
  // A row with NaN or +inf, or of only -inf, has no probabilities, as in torch.
  __device__ __forceinline__ float log_probability(float x) const {
    return is_finite() ? (x - m) * inverse_temperature - logf(d) : __uint_as_float(0x7FC00000u);
  }
  __device__ __forceinline__ float probability(float x) const {
    return is_finite() ? expf((x - m) * inverse_temperature) / d : __uint_as_float(0x7FC00000u);
  }
  __device__ __forceinline__ float logsumexp() const {
    return m * inverse_temperature + (is_finite() ? logf(d) : 0.0f);
  }
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
  for (u32 i = GROUP::thread(); i < k; i += GROUP::kThreads) {
    const u64 candidate = chosen[i];
    const i64 out = i64(row) * k + i;
    problem.indices[out] = index_of(candidate);
    if (problem.value_kind == kLogits) {
      // The input's own bits: a key forgets the sign of zero and the payload of a NaN. What the mask hides is -inf.
      static_cast<typename FORMAT::Bits*>(problem.values)[out] =
          key_of(candidate) == kNegativeInfinityKey ? FORMAT::kNegativeInfinity : scan.raw_logit(index_of(candidate));
    } else {
      const float x = logit_of(candidate);
      static_cast<float*>(problem.values)[out] =
          problem.value_kind == kProbabilities ? relative_to.probability(x) : relative_to.log_probability(x);
    }
  }
}

// Leaves a row's sorted `chosen` [k] where the sequence's last row finds them. They are sorted by logit, hence by
// accumulated value; among equal values the place in the lists decides: smaller beam first, then the row's own order.
template <class GROUP>
__device__ __forceinline__ void hand_over_beam(const Problem& problem, u32 row, u32 k, const u64* chosen,
                                               const RowResult& result) {
  const u32 beam = u32(row % problem.beams);
  const float score = __ldg(problem.beam_scores + i64(row / problem.beams) * problem.beam_scores_strides[0] +
                            beam * problem.beam_scores_strides[1]);
  for (u32 i = GROUP::thread(); i < k; i += GROUP::kThreads) {
    const float value = score + result.log_probability(logit_of(chosen[i]));
    problem.beam_lists[i64(row) * k + i] = make_candidate(order_key(__float_as_uint(value)), beam * k + i);
    problem.beam_tokens[i64(row) * k + i] = index_of(chosen[i]);
  }
}

// Writes the sorted `chosen` [problem.k] of a sequence, whose beams handed over k each.
template <class GROUP>
__device__ __forceinline__ void write_sequence(const Problem& problem, u32 sequence, u32 k, const u64* chosen) {
  const u32* tokens = problem.beam_tokens + i64(sequence) * problem.beams * k;
  for (u32 i = GROUP::thread(); i < problem.k; i += GROUP::kThreads) {
    const u32 place = index_of(chosen[i]);
    const i64 out = i64(sequence) * problem.k + i;
    static_cast<float*>(problem.values)[out] = logit_of(chosen[i]);
    problem.indices[out] = i64(place / k) * problem.V + load_from_other_block(tokens + place);
  }
}

// What a group's candidates are the best of.
enum Scope : u32 { kShareOfRow, kRow, kSequence };

// Warps that must fit on a multiprocessor, which caps a thread's registers: at 80 up to compute capability 9.0. A mask
// needs some more, and later compilers' targets too: with fewer, NVRTC 13.4 spills (tests/test_cuda_compile.py).
constexpr u32 resident_warps(u32 mask) {
#if __CUDA_ARCH__ >= 1000
  return 16;
#else
  return mask == kNoMask ? 24 : 16;
#endif
}

template <class FORMAT, u32 WARPS, u32 VECTORS, bool ALIGNED, u32 MASK>
__global__ void __launch_bounds__(WARPS == 1 ? 128 : WARPS * kWarpSize, resident_warps(MASK) / (WARPS == 1 ? 4 : WARPS))
    softmax_topk_kernel(const __grid_constant__ Problem problem) {
  using GROUP = Group<WARPS>;
  using Bits = typename FORMAT::Bits;
  constexpr u32 kRowsPerBlock = GROUP::kIsWarp ? 4 : 1;
  extern __shared__ __align__(16) u64 all_slots[];  // [kRowsPerBlock, problem.capacity]
  __shared__ GroupShared<WARPS> all_shared[kRowsPerBlock];

  const u32 own = GROUP::kIsWarp ? threadIdx.x / kWarpSize : 0;
  const u32 splits = GROUP::kIsWarp ? 1 : problem.splits;
  const u32 split = blockIdx.x % splits;
  const u32 row = blockIdx.x / splits * kRowsPerBlock + own;
  // Only whole groups leave, so no barrier misses a thread.
  if (row >= problem.rows) return;
  GroupShared<WARPS>& shared = all_shared[own];
  u64* slots = all_slots + own * problem.capacity;

  // With beams, k is the sequence's; a row gives at most its V.
  const u32 k = problem.beams ? min(problem.k, problem.V) : problem.k;
  const u32 parts = problem.parts_per_row;
  // There are at most 1024 parts, so nothing overflows.
  const u32 first_part = parts * split / splits;
  const u32 last_part = parts * (split + 1) / splits;
  const u64 part_length = u64(Tile<FORMAT, VECTORS>::kElements) << problem.tiles_per_part_log2;
  const u64 share = min(last_part * part_length, u64(problem.V)) - first_part * part_length;
  const u32 k_share = u32(min(u64(k), share));

  RowScan<FORMAT, VECTORS, ALIGNED, MASK> scan(problem, row);
  const float scale = scan.scale();
  Candidates<GROUP> candidates(slots, problem.capacity, problem.trim_at, shared.candidates);
  // Lane a holds the merge of parts a, a + 32, ... in that order, however many warps and blocks the row has: so the same
  // row gives the same bits.
  Normalizer lane_state;
  scan_parts(problem, scan, first_part, last_part, k_share, candidates, [&](u32 part, Normalizer state) {
    if (splits > 1) {
      if (lane_id() == 0) problem.parts[i64(row) * parts + part] = state;
    } else if (lane_id() == part % kWarpSize) {
      lane_state = merge(lane_state, state, scale, exp2_approx);
    }
  });

  if constexpr (!GROUP::kIsWarp) {
    if (splits == 1) {
      // Warps into a block: each warp holds the lanes whose parts it read.
      if (lane_id() % WARPS == GROUP::warp()) shared.lanes[lane_id()] = {lane_state.m, lane_state.d};
      GROUP::sync();
      lane_state = {shared.lanes[lane_id()].x, shared.lanes[lane_id()].y};
    }
  }

  // Blocks into a row, rows into a sequence: the group sorts what it has; unless that is the answer, it hands its list
  // over, and the last group to arrive merges all of them and goes round again.
  RowResult result = {0.0f, 0.0f, scan.inverse_temperature()};
  Scope scope = splits > 1 ? kShareOfRow : kRow;
  while (true) {
    candidates.trim(/*must_sort=*/true);
    const u64* lists;
    u32 num_lists, wanted;
    if (scope == kShareOfRow) {
      u64* list = problem.lists + (i64(row) * splits + split) * k;
      for (u32 i = GROUP::thread(); i < k; i += GROUP::kThreads) list[i] = i < k_share ? slots[i] : kNoCandidate;
      if (!arrives_last<GROUP>(problem.row_tickets + row, splits, shared.is_last)) return;
      for (u32 part = lane_id(); part < parts; part += kWarpSize) {
        const float2 state =
            load_from_other_block(reinterpret_cast<const float2*>(problem.parts) + i64(row) * parts + part);
        lane_state = merge(lane_state, {state.x, state.y}, scale, exp2_approx);
      }
      lists = problem.lists + i64(row) * splits * k;
      num_lists = splits;
      wanted = k;
      scope = kRow;
    } else if (scope == kRow) {
      const Normalizer state = warp_merge(lane_state, scale);
      result.m = state.m;
      result.d = state.d;
      if (GROUP::thread() == 0) problem.logsumexp[row] = result.logsumexp();
      if (problem.beams == 0) {
        write_row<GROUP, FORMAT>(problem, row, k, slots, scan, result);
        return;
      }
      hand_over_beam<GROUP>(problem, row, k, slots, result);
      const u32 sequence = row / problem.beams;
      if (!arrives_last<GROUP>(problem.beam_tickets + sequence, problem.beams, shared.is_last)) return;
      lists = problem.beam_lists + i64(sequence) * problem.beams * k;
      num_lists = problem.beams;
      wanted = problem.k;
      scope = kSequence;
    } else {
      write_sequence<GROUP>(problem, row / problem.beams, k, slots);
      return;
    }
    merge_lists(lists, num_lists, k, wanted, candidates);
  }
}

}  // namespace fused_topk
