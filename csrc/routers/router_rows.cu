// SPDX-License-Identifier: Apache-2.0
// softmax + top-k of rows of at most 256 logits, k <= 8, as an expert router has them: four rows a warp.
//
// 8 lanes have a row, 8, 16 or 32 logits each, as vectors of 16 bytes. The 8 best tokens lie in the 8 vectors with the
// greatest maxima. So there are two steps. Each step leaves one of 8 best vectors or tokens in each lane:
//
//     1. the 8 best vectors, by their maxima; needed if a lane has several vectors
//     2. the 8 best tokens of the vectors that are left, one vector in each lane
//
// In each step a lane sorts what it has, then merges with other lanes three times. The instructions do not depend on
// the logits.
#include "../topk/short_row.cuh"

namespace fused_topk {

constexpr u32 kRouterLanes = 8;

// Tokens are ranked by words, or by candidates where words do not suffice. make_all() makes a word, or a candidate, of
// each logit of a vector, as ShortRow::make_words() does.
struct ByWord {
  using Type = u32;
  static __device__ __forceinline__ u32 make(u32 key, u32 index) { return make_word(key, index); }
  static __device__ __forceinline__ u32 index_of(u32 word) { return index_of_word(word); }
  template <class ROW, u32 N>
  static __device__ __forceinline__ void make_all(const Vector& vector, u32 allowed, u32 first, u32 (&own)[N],
                                                  u32 place = 0) {
    ROW::make_words(vector, allowed, first, own, place);
  }
};
struct ByCandidate {
  using Type = u64;
  static __device__ __forceinline__ u64 make(u32 key, u32 index) { return make_candidate(key, index); }
  static __device__ __forceinline__ u32 index_of(u64 candidate) { return fused_topk::index_of(candidate); }
  template <class ROW, u32 N>
  static __device__ __forceinline__ void make_all(const Vector& vector, u32 allowed, u32 first, u64 (&own)[N],
                                                  u32 place = 0) {
#pragma unroll
    for (u32 e = 0; e < ROW::kPerVector; ++e)
      own[place + e] = make_candidate(order_key(ROW::choosable(vector, allowed, e)), first + e);
  }
};

// Sorts the eight words of two lanes, the better half into the even lane. The eight words must be a bitonic sequence.
// REVERSED: they are one if the odd lane's four words are read backwards.
template <bool REVERSED, class WORD>
__device__ __forceinline__ void order_pair(WORD (&x)[4]) {
  const bool is_even = lane_id() % 2 == 0;
  WORD other[4];
#pragma unroll
  for (u32 j = 0; j < 4; ++j) other[j] = __shfl_xor_sync(kAllLanes, x[REVERSED ? 3 - j : j], 1);
#pragma unroll
  for (u32 j = 0; j < 4; ++j) x[j] = is_even ? max(x[j], other[j]) : min(x[j], other[j]);
  put_greater_first(x[0], x[2]);
  put_greater_first(x[1], x[3]);
  put_greater_first(x[0], x[1]);
  put_greater_first(x[2], x[3]);
}

// The best 8 of what 8 lanes have, one in each lane; IN_ORDER: the i-th best in lane i. `own`: each lane's sorted
// words. All 32 lanes of a warp call it.
template <bool IN_ORDER, class WORD, u32 N>
__device__ __forceinline__ WORD best_of_lanes(const WORD (&own)[N]) {
  const u32 lane = lane_id() % kRouterLanes;
  WORD list[4];
  // The best 8 of two sorted lists of 8: the greater of one list's i-th best and the other's i-th worst, for each i.
#pragma unroll
  for (u32 j = 0; j < 4; ++j) list[j] = N == 8 ? max(own[j], __shfl_xor_sync(kAllLanes, own[N - 1 - j], 1)) : own[j];
  order_pair<true>(list);
#pragma unroll
  for (u32 step = 2; step < kRouterLanes; step *= 2) {
    WORD other[4];
#pragma unroll
    for (u32 j = 0; j < 4; ++j) other[j] = __shfl_xor_sync(kAllLanes, list[3 - j], step + 1);
#pragma unroll
    for (u32 j = 0; j < 4; ++j) list[j] = max(list[j], other[j]);
    // Lanes 0 to 3: the even ones have one half of the list, the odd ones the other. Lanes 4 to 7 have it backwards.
    if (!IN_ORDER && 2 * step == kRouterLanes) return lane & 2 ? list[1] : list[0];
    order_pair<false>(list);
  }
  // Every pair of lanes has the list.
  const WORD mine = lane & 4 ? (lane & 2 ? list[3] : list[2]) : (lane & 2 ? list[1] : list[0]);
  return __shfl_sync(kAllLanes, mine, lane_id() - lane + lane % 4 * 2 + lane / 4);
}

// Whether comparing words gives the same result as comparing `key` with each of `keys`.
template <u32 N>
__device__ __forceinline__ bool words_agree(const u32 (&keys)[N], u32 key) {
  bool result = true;
#pragma unroll
  for (u32 j = 0; j < N; ++j) result &= words_agree(keys[j], key);
  return result;
}

// Returns the i-th best token of a row in its lane i, i < k. Clears `is_right` if words may order it otherwise than
// keys do, among the tokens that the lane knows. All lanes of the warp call it.
template <class BY, class ROW>
__device__ __forceinline__ typename BY::Type best_token(const ROW& x, u32 k, bool& is_right) {
  using Word = typename BY::Type;
  constexpr u32 kPerVector = ROW::kPerVector;
  constexpr bool kChecks = ROW::kWordsSayLess && sizeof(Word) == sizeof(u32);
  Word best;
  const auto check = [&](const auto& keys) {
    const u32 key = x.key_of(best);
    const u32 last = __shfl_sync(kAllLanes, key, lane_id() - x.sub + k - 1);
    const u32 next = __shfl_down_sync(kAllLanes, key, 1);
    is_right &= words_agree(keys, last) && (x.sub + 1 >= k || words_agree(key, next));
  };
  if constexpr (ROW::kVectors * kPerVector == 8) {
    Word own[8];
#pragma unroll
    for (u32 i = 0; i < 8; i += kPerVector)
      BY::template make_all<ROW>(x.vectors[i / kPerVector], x.allowed >> i, x.index(i), own, i);
    sort_of_lane(own);
    best = best_of_lanes<true>(own);
    if constexpr (kChecks) {
      u32 keys[8];
#pragma unroll
      for (u32 i = 0; i < 8; ++i) keys[i] = x.key(i);
      check(keys);
    }
  } else {
    constexpr u32 kVectors = ROW::kVectors < 4 ? 4 : ROW::kVectors;
    u32 keys_of_vectors[ROW::kVectors];
    Word vectors[kVectors] = {};
#pragma unroll
    for (u32 u = 0; u < ROW::kVectors; ++u) {
      keys_of_vectors[u] = order_key(x.choosable_maximum(u));
      vectors[u] = BY::make(keys_of_vectors[u], x.index(u * kPerVector));
    }
    sort_of_lane(vectors);
    const u32 first = BY::index_of(best_of_lanes<false>(vectors));

    const Vector vector = x.vector(first);
    const u32 allowed = x.allowed_of(first);
    Word own[kPerVector];
    BY::template make_all<ROW>(vector, allowed, first, own);
    sort_of_lane(own);
    best = best_of_lanes<true>(own);
    if constexpr (kChecks) {
      u32 keys[kPerVector];
      u32 greatest = kNoKey;
#pragma unroll
      for (u32 e = 0; e < kPerVector; ++e) {
        keys[e] = order_key(ROW::choosable(vector, allowed, e));
        greatest = max(greatest, keys[e]);
      }
      const u32 least = combine_lanes(greatest, kRouterLanes, [](u32 a, u32 b) { return min(a, b); });
      is_right &= words_agree(keys_of_vectors, least);
      check(keys);
    }
  }
  return best;
}

// Grid: (rows / 16).
template <class FORMAT, u32 VECTORS, bool ALIGNED, u32 MASK>
__global__ void __launch_bounds__(128, tuned_blocks(tuning::kRouters, 128, has_mask(MASK)))
    router_rows_topk_kernel(const __grid_constant__ Problem problem) {
  const u32 k = problem.k;
  const u32 warp_row = (blockIdx.x * 4 + threadIdx.x / kWarpSize) * (kWarpSize / kRouterLanes);
  // Whole warps leave, never single lanes.
  if (warp_row >= problem.rows) return;
  // Lanes without a row repeat the last row, and write nothing.
  const u32 of_warp = lane_id() / kRouterLanes;
  const u32 row = min(warp_row + of_warp, problem.rows - 1);
  const bool is_writer = warp_row + of_warp < problem.rows;
  using Row = ShortRow<FORMAT, VECTORS, ALIGNED, MASK>;
  const Row x(problem, row, kRouterLanes);

  const Temperature temperature = problem.temperature_of(row);
  const Normalizer state = x.normalizer(temperature.scale());
  const RowResult result(state.m, state.d, temperature);

  bool is_right = true;
  u32 word = best_token<ByWord>(x, k, is_right);
  if (Row::kWordsSayLess && !__all_sync(kAllLanes, is_right)) {
    // Loads the row again here, so that it takes no registers until then.
    u32 same_row = row;
    keep_opaque(same_row);
    const u64 candidate = best_token<ByCandidate>(Row(problem, same_row, kRouterLanes), k, is_right);
    word = make_word(key_of(candidate), index_of(candidate));
  }
  const float logit = x.logit_of(word);
  RowResult relative_to = result;
  if (problem.normalize_topk) {
    // In the order of among_chosen().
    const float greatest = __shfl_sync(kAllLanes, logit, lane_id() - x.sub);
    const float m = result.is_finite() ? greatest : result.m;
    const float d = x.sub < k ? temperature.weight(logit, m) : 0.0f;
    relative_to = {m, combine_lanes(d, kRouterLanes, [](float a, float b) { return a + b; }), temperature};
  }
  if (!is_writer) return;
  const auto raw_logit = [&](u32 index) { return x.stream.raw_logit(index); };
  if (x.sub < k) write_chosen<FORMAT>(problem, row, k, x.sub, index_of_word(word), logit, relative_to, raw_logit);
  if (x.sub == 0) {
    problem.logsumexp[row] = result.logsumexp();
    if (problem.value_kind == kState) write_state(problem.logsumexp, problem.rows, row, result);
  }
}

}  // namespace fused_topk
