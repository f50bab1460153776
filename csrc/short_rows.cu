// SPDX-License-Identifier: Apache-2.0
// softmax + top-k of rows of at most 256 logits, k <= 32, as an expert router has them: up to four rows a warp.
//
// A row lies in 8, 16 or 32 lanes, 8 logits in each. There is no threshold here, and nothing to search for: each lane
// sorts its 8, and the k best come off the tops, one after the other. The same instructions, whatever the logits.
//
// A candidate is one word: the upper 24 bits of the logit's key, and below them the complement of its index. 16-bit logits
// have no more bits than that. Where two different float32 logits that could be chosen agree in all 24, the row is chosen
// from once more, by whole keys.
// Comes after result.cuh and row.cuh.
#include "result.cuh"

namespace fused_topk {

constexpr u32 kShortRow = 256;
constexpr u32 kShortK = 32;
constexpr u32 kPerShortLane = 8;
constexpr u32 kIndexBits = 0xFFu;

// Over the lanes of a row, in each of them. All 32 lanes of a warp call it.
template <class T, class COMBINE>
__device__ __forceinline__ T combine_lanes(T value, u32 lanes, COMBINE combine) {
#pragma unroll
  for (u32 step = kWarpSize / 2; step > 0; step /= 2)
    if (step < lanes) value = combine(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}
__device__ __forceinline__ void put_greater_first(u32& a, u32& b) {
  const u32 greater = max(a, b);
  b = min(a, b);
  a = greater;
}

// Greatest first: 19 comparisons, the fewest for 8.
__device__ __forceinline__ void sort_of_lane(u32 (&x)[kPerShortLane]) {
  constexpr u32 kPairs[19][2] = {{0, 2}, {1, 3}, {4, 6}, {5, 7}, {0, 4}, {1, 5}, {2, 6}, {3, 7}, {0, 1}, {2, 3},
                                 {4, 5}, {6, 7}, {2, 4}, {3, 5}, {1, 4}, {3, 6}, {1, 2}, {3, 4}, {5, 6}};
#pragma unroll
  for (u32 i = 0; i < 19; ++i) put_greater_first(x[kPairs[i][0]], x[kPairs[i][1]]);
}

// A lane's 8 logits of a row, and what the mask says of them. -inf past the end.
template <class FORMAT, bool ALIGNED, u32 MASK>
struct ShortRow {
  static constexpr u32 kPerVector = FORMAT::kPerVector;
  static constexpr u32 kVectors = kPerShortLane / kPerVector;

  TileStream<FORMAT, kVectors, ALIGNED, 0> stream;
  u32 V, lanes, sub;  // lanes that have the row, and which of them this is
  Vector vectors[kVectors];
  u32 allowed;  // bit i: logit i of the lane

  __device__ __forceinline__ ShortRow(const Problem& problem, u32 row, u32 lanes)
      : stream(static_cast<const typename FORMAT::Bits*>(problem.logits) + problem.logits_offset(row), problem.V,
               nullptr),
        V(problem.V),
        lanes(lanes),
        sub(lane_id() & (lanes - 1)),
        allowed(~0u) {
#pragma unroll
    for (u32 u = 0; u < kVectors; ++u) vectors[u] = stream.load(index(u * kPerVector));
    if constexpr (MASK != kNoMask) {
      const RowMask mask = problem.row_mask(row);
      allowed = 0;
#pragma unroll
      for (u32 u = 0; u < kVectors; ++u)
        allowed |= mask.template allowed<kPerVector>(index(u * kPerVector), V) << (u * kPerVector);
    }
  }

  __device__ __forceinline__ u32 index(u32 i) const {
    return (i / kPerVector * lanes + sub) * kPerVector + i % kPerVector;
  }
  __device__ __forceinline__ float logit(u32 i) const {
    return FORMAT::decode(vectors[i / kPerVector].words, i % kPerVector);
  }
  __device__ __forceinline__ bool is_allowed(u32 i) const { return MASK == kNoMask || (allowed >> i) & 1; }
  // The logit as the choice of tokens sees it, and as (m, d) sees it.
  __device__ __forceinline__ float choosable(u32 i) const { return is_allowed(i) ? logit(i) : -FUSED_TOPK_INFINITY; }
  __device__ __forceinline__ float normalized(u32 i) const { return MASK == kMaskChoice ? logit(i) : choosable(i); }
  // Past the end there is -inf, behind every -inf of the row: never among the best k <= V.
  __device__ __forceinline__ u32 key(u32 i) const { return order_key(choosable(i)); }
  __device__ __forceinline__ u32 word(u32 i) const { return (key(i) & ~kIndexBits) | (kIndexBits - index(i)); }

  // The whole key of a word's logit: of what it was chosen as, -inf if the mask hides it.
  __device__ __forceinline__ u32 key_of(u32 word) const {
    constexpr u32 kLowest = kNegativeInfinityKey & ~kIndexBits;
    return (word & ~kIndexBits) == kLowest
               ? kNegativeInfinityKey
               : order_key(FORMAT::decode(stream.raw_logit(kIndexBits - (word & kIndexBits))));
  }

  // (m, d) of the row in each of its lanes, added up in the order in which RowScan does it.
  __device__ __forceinline__ Normalizer normalizer(float scale) const {
    float m = normalized(0);
#pragma unroll
    for (u32 i = 1; i < kPerShortLane; ++i) m = max_nan(m, normalized(i));
    m = combine_lanes(m, lanes, max_nan);
    const float base = reference_point(m);
    const float offset = base * scale;
    const float lost = fmaf(base, scale, -offset);
    float d[kVectors][4] = {};
    float sum = 0.0f;
    if (fabsf(offset) < kLargestOffset) {
#pragma unroll
      for (u32 i = 0; i < kPerShortLane; ++i)
        d[i / kPerVector][i % 4] += exp2_approx(fmaf(normalized(i), scale, -offset));
      const float regained = exp2_approx(-lost);
      // A tile's lane adds up its vectors; in fewer lanes, each vector is another lane of the tile. The products are rounded
      // as they are there, not made one with the addition that follows.
      if (kVectors == 2 && lanes < kWarpSize) {
        sum =
            __fmul_rn((d[0][0] + d[0][1]) + (d[0][2] + d[0][3]), regained) +
            __fmul_rn((d[kVectors - 1][0] + d[kVectors - 1][1]) + (d[kVectors - 1][2] + d[kVectors - 1][3]), regained);
      } else {
#pragma unroll
        for (u32 c = 0; kVectors == 2 && c < 4; ++c) d[0][c] += d[kVectors - 1][c];
        sum = __fmul_rn((d[0][0] + d[0][1]) + (d[0][2] + d[0][3]), regained);
      }
    } else {
      const bool is_another_lane = kVectors == 2 && lanes < kWarpSize;
      float of_first = 0.0f;
#pragma unroll
      for (u32 i = 0; i < kPerShortLane; ++i) {
        if (i == kPerVector && is_another_lane) {
          of_first = sum;
          sum = 0.0f;
        }
        if (index(i) < V) sum += exp2_approx((normalized(i) - base) * scale);
      }
      if (is_another_lane) sum = of_first + sum;
    }
    return {m, combine_lanes(sum, lanes, [](float a, float b) { return a + b; })};
  }
};

// Takes the k best words off the tops of the lanes' sorted `own`, and leaves them in `chosen` [k]. True in a lane of a row
// of which two neighbours among the best k + 1 agree in all but the index, where words say less than keys. All lanes of the
// warp call it.
template <class FORMAT, bool WHOLE_WARP>
__device__ __forceinline__ bool take_best(u32 (&own)[kPerShortLane], u32 k, u32 lanes, u32 sub, u32* chosen) {
  constexpr bool kMayDiffer = sizeof(typename FORMAT::Bits) == 4;
  const auto greatest_top = [&] {
    // One instruction, if the row has the whole warp.
    return WHOLE_WARP ? warp_max(own[0]) : combine_lanes(own[0], lanes, [](u32 a, u32 b) { return max(a, b); });
  };
  u32 before = 0;
  u32 least_difference = ~0u;
#pragma unroll 1
  for (u32 first = 0; first < k; first += lanes) {
    // The word that this lane will store.
    u32 kept = 0;
    const u32 count = min(k - first, lanes);
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) {
      const u32 best = greatest_top();
      if (kMayDiffer) least_difference = min(least_difference, before ^ best);
      before = best;
      kept = sub == i ? best : kept;
      // Words differ, so there is one lane whose top this was.
      const bool is_taken = own[0] == best;
#pragma unroll
      for (u32 j = 0; j + 1 < kPerShortLane; ++j) own[j] = is_taken ? own[j + 1] : own[j];
      own[kPerShortLane - 1] = is_taken ? 0 : own[kPerShortLane - 1];
    }
    if (sub < count) chosen[first + sub] = kept;
  }
  __syncwarp();
  if (kMayDiffer) least_difference = min(least_difference, before ^ greatest_top());
  return kMayDiffer && least_difference <= kIndexBits;
}

// Whether two words of a row that agree in all but the index always stand for equal logits, as far as the choice goes: then
// their order is right. All lanes of the warp call it.
template <class ROW>
__device__ __forceinline__ bool words_are_keys(const ROW& x, const u32* chosen, u32 k) {
  bool is_right = true;
#pragma unroll 1
  for (u32 i = 0; i < k; ++i) {
    const u32 word = chosen[i];
    const u32 key = x.key_of(word);
#pragma unroll
    for (u32 j = 0; j < kPerShortLane; ++j) is_right &= (x.key(j) ^ key) - 1 >= kIndexBits;
  }
  return __all_sync(kAllLanes, is_right);
}

// The k best by whole keys: each time, the best of those that rank behind the last. All lanes of the warp call it.
template <class ROW>
__device__ __forceinline__ void choose_by_keys(const ROW& x, u32* chosen, u32 k) {
  // Everyone has read the words.
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
    if (x.sub == 0) chosen[i] = (key_of(last) & ~kIndexBits) | (kIndexBits - index_of(last));
  }
  __syncwarp();
}

__device__ __forceinline__ u32 lanes_of_short_row(u32 V) { return V <= 64 ? 8 : V <= 128 ? 16 : 32; }

// The normalizer of the k chosen alone, added up as among_chosen() does it. All lanes of the row call it.
template <class LOGIT>
__device__ __forceinline__ RowResult among_words(const RowResult& row, u32 k, u32 lanes, u32 sub, LOGIT logit) {
  const float m = row.is_finite() ? logit(0) : row.m;
  // A lane here stands for several of a warp.
  float d[kWarpSize / 8];
#pragma unroll
  for (u32 j = 0; j < kWarpSize / 8; ++j) {
    const u32 i = j * lanes + sub;
    d[j] = i < k ? expf((logit(i) - m) * row.inverse_temperature) : 0.0f;
  }
  const float sum = lanes == 8 ? (d[0] + d[2]) + (d[1] + d[3]) : lanes == 16 ? d[0] + d[1] : d[0];
  return {m, combine_lanes(sum, lanes, [](float a, float b) { return a + b; }), row.inverse_temperature};
}

// Blocks that must fit on a multiprocessor; 0 leaves it to the compiler, as it was measured on compute capability 9.0. With a
// mask, and for 12.0, it then spills although it has registers left.
constexpr u32 resident_short_blocks(u32 mask) {
#if __CUDA_ARCH__ == 900
  if (mask == kNoMask) return 0;
#endif
  return 8;
}

// Grid: (rows / rows of a block).
template <class FORMAT, bool ALIGNED, u32 MASK>
__global__ void __launch_bounds__(128, resident_short_blocks(MASK))
    short_rows_topk_kernel(const __grid_constant__ Problem problem) {
  // As the k best are found. Of each row, by its lanes alone.
  __shared__ u32 words[4][kWarpSize / 8][kShortK];
  const u32 k = problem.k;
  const u32 log2_lanes = problem.V <= 64 ? 3 : problem.V <= 128 ? 4 : 5;
  const u32 lanes = 1u << log2_lanes;
  const u32 of_warp = lane_id() >> log2_lanes;
  const u32 warp_row = (blockIdx.x * 4 + threadIdx.x / kWarpSize) << (5 - log2_lanes);
  // Only whole warps leave.
  if (warp_row >= problem.rows) return;
  // Lanes without a row do what the last row's do, and write nothing.
  const u32 row = min(warp_row + of_warp, problem.rows - 1);
  const bool is_writer = warp_row + of_warp < problem.rows;
  const ShortRow<FORMAT, ALIGNED, MASK> x(problem, row, lanes);
  u32* const chosen = words[threadIdx.x / kWarpSize][of_warp];

  const float inverse_temperature = problem.inverse_temperature(row);
  const Normalizer state = x.normalizer(kLog2E * inverse_temperature);
  const RowResult result(state.m, state.d, inverse_temperature);

  u32 own[kPerShortLane];
#pragma unroll
  for (u32 i = 0; i < kPerShortLane; ++i) own[i] = x.word(i);
  sort_of_lane(own);
  const bool may_be_wrong = lanes == kWarpSize ? take_best<FORMAT, true>(own, k, lanes, x.sub, chosen)
                                               : take_best<FORMAT, false>(own, k, lanes, x.sub, chosen);
  if (__any_sync(kAllLanes, may_be_wrong) && !words_are_keys(x, chosen, k)) choose_by_keys(x, chosen, k);

  // -inf is the only logit whose word begins as its does.
  const auto index_of_word = [&](u32 word) { return kIndexBits - (word & kIndexBits); };
  const auto raw_logit = [&](u32 index) { return x.stream.raw_logit(index); };
  const auto logit = [&](u32 i) {
    const u32 word = chosen[i];
    return (word & ~kIndexBits) == (kNegativeInfinityKey & ~kIndexBits)
               ? -FUSED_TOPK_INFINITY
               : FORMAT::decode(raw_logit(index_of_word(word)));
  };
  const RowResult relative_to = problem.normalize_topk ? among_words(result, k, lanes, x.sub, logit) : result;
  if (!is_writer) return;
  for (u32 i = x.sub; i < k; i += lanes)
    write_chosen<FORMAT>(problem, row, k, i, index_of_word(chosen[i]), logit(i), relative_to, raw_logit);
  if (x.sub == 0) problem.logsumexp[row] = result.logsumexp();
}

}  // namespace fused_topk
