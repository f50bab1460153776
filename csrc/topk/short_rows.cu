// SPDX-License-Identifier: Apache-2.0
// softmax + top-k of rows of at most 256 logits, 8 < k <= 32: up to four rows a warp.
//
// 8, 16 or 32 lanes have a row, 8 logits each. There is no threshold and no search. Each lane sorts its words; then the
// k best are taken one after the other, each time the greatest of the lanes' first words. The instructions do not
// depend on the logits.
#include "short_row.cuh"

namespace fused_topk {

constexpr u32 kShortK = 32;
constexpr u32 kPerShortLane = 8;

// Moves the k greatest words of the lanes' sorted `own` to `chosen` [k]. Returns true in a lane if two neighbours among
// the row's best k + 1 differ in the index alone, and words have fewer bits than keys: the order may then be wrong. All
// lanes of the warp call it.
template <bool WORDS_SAY_LESS, bool WHOLE_WARP>
__device__ __forceinline__ bool take_best(u32 (&own)[kPerShortLane], u32 k, u32 lanes, u32 sub, u32* chosen) {
  const auto greatest_top = [&] {
    // One instruction, if the row has the whole warp.
    return WHOLE_WARP ? warp_max(own[0]) : combine_lanes(own[0], lanes, [](u32 a, u32 b) { return max(a, b); });
  };
  u32 before = 0;
  u32 least_difference = ~0u;
#pragma unroll 1
  for (u32 first = 0; first < k; first += lanes) {
    // The word that this lane stores.
    u32 kept = 0;
    const u32 count = min(k - first, lanes);
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) {
      const u32 best = greatest_top();
      if (WORDS_SAY_LESS) least_difference = min(least_difference, before ^ best);
      before = best;
      kept = sub == i ? best : kept;
      // Words differ, so exactly one lane has it.
      const bool is_taken = own[0] == best;
#pragma unroll
      for (u32 j = 0; j + 1 < kPerShortLane; ++j) own[j] = is_taken ? own[j + 1] : own[j];
      own[kPerShortLane - 1] = is_taken ? 0 : own[kPerShortLane - 1];
    }
    if (sub < count) chosen[first + sub] = kept;
  }
  __syncwarp();
  if (WORDS_SAY_LESS) least_difference = min(least_difference, before ^ greatest_top());
  return WORDS_SAY_LESS && least_difference <= kIndexBits;
}

// Whether words tell each of the chosen [k] from all other logits. Their order is then right. All lanes of the warp
// call it.
template <class ROW>
__device__ __forceinline__ bool words_are_keys(const ROW& x, const u32* chosen, u32 k) {
  bool is_right = true;
#pragma unroll 1
  for (u32 i = 0; i < k; ++i) {
    const u32 key = x.key_of(chosen[i]);
#pragma unroll
    for (u32 j = 0; j < kPerShortLane; ++j) is_right &= words_agree(x.key(j), key);
  }
  return __all_sync(kAllLanes, is_right);
}

// The k best by whole keys: repeatedly the best of those that rank behind the last. All lanes of the warp call it.
template <class ROW>
__device__ __forceinline__ void choose_by_keys(const ROW& x, u32* chosen, u32 k) {
  // Every lane has read the words.
  __syncwarp();
  u64 last = ~u64(0);
#pragma unroll 1
  for (u32 i = 0; i < k; ++i) {
    u64 best = kNoCandidate;
#pragma unroll
    for (u32 j = 0; j < kPerShortLane; ++j) {
      const u64 candidate = make_candidate(x.key(j), x.index(j));
      if (candidate < last) best = max(best, candidate);
    }
    last = combine_lanes(best, x.lanes, [](u64 a, u64 b) { return max(a, b); });
    if (x.sub == 0) chosen[i] = make_word(key_of(last), index_of(last));
  }
  __syncwarp();
}

// The normalizer of the k chosen alone, in the order of among_chosen(). All lanes of the row call it.
template <class LOGIT>
__device__ __forceinline__ RowResult among_words(const RowResult& row, u32 k, u32 lanes, u32 sub, LOGIT logit) {
  const float m = row.is_finite() ? logit(0) : row.m;
  // A lane here stands for several lanes of a warp.
  float d[kWarpSize / 8];
#pragma unroll
  for (u32 j = 0; j < kWarpSize / 8; ++j) {
    const u32 i = j * lanes + sub;
    d[j] = i < k ? row.temperature.weight(logit(i), m) : 0.0f;
  }
  const float sum = lanes == 8 ? (d[0] + d[2]) + (d[1] + d[3]) : lanes == 16 ? d[0] + d[1] : d[0];
  return {m, combine_lanes(sum, lanes, [](float a, float b) { return a + b; }), row.temperature};
}

// Grid: (rows / rows of a block).
template <class FORMAT, u32 VECTORS, bool ALIGNED, u32 MASK>
__global__ void __launch_bounds__(128, tuned_blocks(tuning::kShort, 128, has_mask(MASK)))
    short_rows_topk_kernel(const __grid_constant__ Problem problem) {
  // Each row's best words in order. Only the row's own lanes touch them.
  __shared__ u32 words[4][kWarpSize / 8][kShortK];
  const u32 k = problem.k;
  const u32 log2_lanes = problem.V <= 64 ? 3 : problem.V <= 128 ? 4 : 5;
  const u32 lanes = 1u << log2_lanes;
  const u32 of_warp = lane_id() >> log2_lanes;
  const u32 warp_row = (blockIdx.x * 4 + threadIdx.x / kWarpSize) << (5 - log2_lanes);
  // Whole warps leave, never single lanes.
  if (warp_row >= problem.rows) return;
  // Lanes without a row repeat the last row, and write nothing.
  const u32 row = min(warp_row + of_warp, problem.rows - 1);
  const bool is_writer = warp_row + of_warp < problem.rows;
  using Row = ShortRow<FORMAT, VECTORS, ALIGNED, MASK>;
  const Row x(problem, row, lanes);
  u32* const chosen = words[threadIdx.x / kWarpSize][of_warp];

  const Temperature temperature = problem.temperature_of(row);
  const Normalizer state = x.normalizer(temperature.scale());
  const RowResult result(state.m, state.d, temperature);

  u32 own[kPerShortLane];
#pragma unroll
  for (u32 i = 0; i < kPerShortLane; i += Row::kPerVector)
    Row::make_words(x.vectors[i / Row::kPerVector], x.allowed >> i, x.index(i), own, i);
  sort_of_lane(own);
  const bool may_be_wrong = lanes == kWarpSize ? take_best<Row::kWordsSayLess, true>(own, k, lanes, x.sub, chosen)
                                               : take_best<Row::kWordsSayLess, false>(own, k, lanes, x.sub, chosen);
  if (__any_sync(kAllLanes, may_be_wrong) && !words_are_keys(x, chosen, k)) choose_by_keys(x, chosen, k);

  const auto raw_logit = [&](u32 index) { return x.stream.raw_logit(index); };
  const auto logit = [&](u32 i) { return x.logit_of(chosen[i]); };
  const RowResult relative_to = problem.normalize_topk ? among_words(result, k, lanes, x.sub, logit) : result;
  if (!is_writer) return;
  for (u32 i = x.sub; i < k; i += lanes)
    write_chosen<FORMAT>(problem, row, k, i, index_of_word(chosen[i]), logit(i), relative_to, raw_logit);
  if (x.sub == 0) {
    problem.logsumexp[row] = result.logsumexp();
    if (problem.value_kind == kState) write_state(problem.logsumexp, problem.rows, row, result);
  }
}

}  // namespace fused_topk
