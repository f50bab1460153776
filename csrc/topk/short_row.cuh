// SPDX-License-Identifier: Apache-2.0
// A row of at most 256 logits, held by a few lanes of a warp, and words to choose its best by.
//
// A word is a candidate in 32 bits: the upper 24 bits of a float32 logit's key, or all 16 of a shorter one's, above the
// complement of the index. Two float32 logits may differ only in the 8 bits that a word lacks. If that may change which
// are chosen, the row is chosen from again, by whole keys.
#pragma once

#include "result.cuh"

namespace fused_topk {

constexpr u32 kIndexBits = 0xFFu;

__device__ __forceinline__ u32 make_word(u32 key, u32 index) { return (key & ~kIndexBits) | (kIndexBits - index); }
__device__ __forceinline__ u32 index_of_word(u32 word) { return kIndexBits - (word & kIndexBits); }
// -inf is the only float32 logit whose key has these upper 24 bits.
__device__ __forceinline__ bool is_word_of_lowest(u32 word) {
  return (word & ~kIndexBits) == (kNegativeInfinityKey & ~kIndexBits);
}
// Whether comparing words gives the same result as comparing these two keys.
__device__ __forceinline__ bool words_agree(u32 key, u32 other) { return (key ^ other) - 1 >= kIndexBits; }

// Combines the values of a row's lanes, in each of these lanes. All 32 lanes of a warp call it.
template <class T, class COMBINE>
__device__ __forceinline__ T combine_lanes(T value, u32 lanes, COMBINE combine) {
#pragma unroll
  for (u32 step = kWarpSize / 2; step > 0; step /= 2)
    if (step < lanes) value = combine(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}
template <class WORD>
__device__ __forceinline__ void put_greater_first(WORD& a, WORD& b) {
  const WORD greater = max(a, b);
  b = min(a, b);
  a = greater;
}

// Sorts a lane's words, greatest first. The networks are minimal: 19 comparisons for 8 words, 5 for 4.
template <class WORD>
__device__ __forceinline__ void sort_of_lane(WORD (&x)[8]) {
  constexpr u32 kPairs[19][2] = {{0, 2}, {1, 3}, {4, 6}, {5, 7}, {0, 4}, {1, 5}, {2, 6}, {3, 7}, {0, 1}, {2, 3},
                                 {4, 5}, {6, 7}, {2, 4}, {3, 5}, {1, 4}, {3, 6}, {1, 2}, {3, 4}, {5, 6}};
#pragma unroll
  for (u32 i = 0; i < 19; ++i) put_greater_first(x[kPairs[i][0]], x[kPairs[i][1]]);
}
template <class WORD>
__device__ __forceinline__ void sort_of_lane(WORD (&x)[4]) {
  constexpr u32 kPairs[5][2] = {{0, 2}, {1, 3}, {0, 1}, {2, 3}, {1, 2}};
#pragma unroll
  for (u32 i = 0; i < 5; ++i) put_greater_first(x[kPairs[i][0]], x[kPairs[i][1]]);
}

// A lane's vectors of a row that `lanes` lanes share, and which of their logits the mask allows. The lanes take the
// row's vectors in turn. Past the end logits are -inf.
template <class FORMAT, u32 VECTORS, bool ALIGNED, u32 MASK>
struct ShortRow {
  static constexpr u32 kVectors = VECTORS;
  static constexpr u32 kPerVector = FORMAT::kPerVector;
  // A word has fewer bits than a float32 key.
  static constexpr bool kWordsSayLess = sizeof(typename FORMAT::Bits) == 4;

  TileStream<FORMAT, 8 / kPerVector, ALIGNED, 0> stream;
  RowMask mask;
  u32 V, lanes, sub;  // the number of lanes that share the row, and this lane's rank among them
  Vector vectors[VECTORS];
  u32 allowed;  // bit i: the mask allows logit i of the lane

  __device__ __forceinline__ ShortRow(const Problem& problem, u32 row, u32 lanes)
      : stream(static_cast<const typename FORMAT::Bits*>(problem.logits) + problem.logits_offset(row),
               problem.length<MASK>(row), nullptr),
        V(problem.length<MASK>(row)),
        lanes(lanes),
        sub(lane_id() & (lanes - 1)),
        allowed(~0u) {
    if (is_full()) {
      const char* const own = stream.address(sub * kPerVector);
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u) vectors[u] = load_16_bytes(own + u * lanes * sizeof(Vector));
    } else {
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u) vectors[u] = stream.load(index(u * kPerVector));
    }
    if constexpr (has_mask(MASK)) {
      mask = problem.row_mask(row);
      allowed = 0;
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u) allowed |= allowed_of(index(u * kPerVector)) << (u * kPerVector);
    }
  }

  __device__ __forceinline__ u32 index(u32 i) const {
    return (i / kPerVector * lanes + sub) * kPerVector + i % kPerVector;
  }
  // Whether the row is aligned and no vector reaches past its end.
  __device__ __forceinline__ bool is_full() const { return ALIGNED && V == VECTORS * kPerVector * lanes; }
  __device__ __forceinline__ Vector vector(u32 first) const {
    return is_full() ? load_16_bytes(stream.address(first)) : stream.load(first);
  }
  // The allowed logits of the vector that starts at token `first`, a bit each.
  __device__ __forceinline__ u32 allowed_of(u32 first) const {
    return !has_mask(MASK) ? ~0u : mask.template allowed<kPerVector>(first, V);
  }
  // Logit e of a vector as the choice sees it, given the vector's allowed logits.
  static __device__ __forceinline__ float choosable(const Vector& vector, u32 allowed, u32 e) {
    return !has_mask(MASK) || (allowed >> e) & 1 ? FORMAT::decode(vector.words, e) : -FUSED_TOPK_INFINITY;
  }
  // Logit i of the lane, as the choice sees it, and as (m, d) sees it.
  __device__ __forceinline__ float choosable(u32 i) const {
    return choosable(vectors[i / kPerVector], allowed >> (i / kPerVector * kPerVector), i % kPerVector);
  }
  __device__ __forceinline__ float normalized(u32 i) const {
    return MASK == kMaskChoice ? FORMAT::decode(vectors[i / kPerVector].words, i % kPerVector) : choosable(i);
  }
  // The greatest logit of vector u, as the choice sees it, and as (m, d) sees it.
  __device__ __forceinline__ float choosable_maximum(u32 u) const {
    if constexpr (!has_mask(MASK)) return Tile<FORMAT, 8 / kPerVector>::maximum(vectors[u]);
    float greatest = choosable(u * kPerVector);
#pragma unroll
    for (u32 e = 1; e < kPerVector; ++e) greatest = max_nan(greatest, choosable(u * kPerVector + e));
    return greatest;
  }
  __device__ __forceinline__ float normalized_maximum(u32 u) const {
    return MASK == kMaskChoice ? Tile<FORMAT, 8 / kPerVector>::maximum(vectors[u]) : choosable_maximum(u);
  }
  // Elements past the end count as -inf. Their indices are greater than the row's, so none is among the best k <= V.
  __device__ __forceinline__ u32 key(u32 i) const { return order_key(choosable(i)); }

  // Makes the words of a vector's logits, given which of them are allowed. `first`: the token of the first one.
  template <u32 N>
  static __device__ __forceinline__ void make_words(const Vector& vector, u32 allowed, u32 first, u32 (&words)[N],
                                                    u32 place = 0) {
    if constexpr (kWordsSayLess) {
#pragma unroll
      for (u32 e = 0; e < kPerVector; ++e)
        words[place + e] = make_word(order_key(choosable(vector, allowed, e)), first + e);
    } else {
#pragma unroll
      for (u32 e = 0; e < kPerVector; e += 2) {
        u32 pair = vector.words[e / 2];
        if constexpr (has_mask(MASK)) {
          const u32 shown = (allowed >> e & 1) * 0xFFFFu | (allowed >> e & 2) * 0x7FFF8000u;
          pair = (pair & shown) | (FORMAT::kNegativeInfinity * 0x10001u & ~shown);
        }
        const u32 keys = FORMAT::pair_keys(pair);
        words[place + e] = keys << 16 | (kIndexBits - (first + e));
        words[place + e + 1] = (keys & 0xFFFF0000u) | (kIndexBits - (first + e + 1));
      }
    }
  }
  // A word's logit, -inf if the mask hides it, and its whole key.
  __device__ __forceinline__ float logit_of(u32 word) const {
    if constexpr (!kWordsSayLess) return FORMAT::decode(bits_of_short_key(word >> 16));
    return is_word_of_lowest(word) ? -FUSED_TOPK_INFINITY : FORMAT::decode(stream.raw_logit(index_of_word(word)));
  }
  __device__ __forceinline__ u32 key_of(u32 word) const { return order_key(logit_of(word)); }

  // (m, d) of the row, in each of its lanes. Adds in RowScan's order, so the bits are the same.
  __device__ __forceinline__ Normalizer normalizer(Scale scale) const {
    float m = normalized_maximum(0);
#pragma unroll
    for (u32 u = 1; u < VECTORS; ++u) m = max_nan(m, normalized_maximum(u));
    m = combine_lanes(m, lanes, max_nan);
    // RowScan sums in 32 lanes and then adds the lanes. Here one lane holds the vectors of several of those lanes, so it
    // keeps a sum for each. In a full float32 row, two vectors belong to one sum.
    constexpr u32 kSummands = VECTORS < kWarpSize / 8 ? VECTORS : kWarpSize / 8;
    const float sum = lanes == kWarpSize ? sum_of_lane<1>(m, scale) : sum_of_lane<kSummands>(m, scale);
    return {m, combine_lanes(sum, lanes, [](float a, float b) { return a + b; })};
  }

 private:
  // What the lane adds to d. It keeps SUMMANDS sums, one for each lane of RowScan: vector u goes to sum u % SUMMANDS.
  template <u32 SUMMANDS>
  __device__ __forceinline__ float sum_of_lane(float m, Scale scale) const {
    const float base = reference_point(m);
    const OffsetScale relative(scale, base);
    float sums[SUMMANDS];
    if (relative.is_correctable()) {
      const float regained = relative.regained();
#pragma unroll
      for (u32 s = 0; s < SUMMANDS; ++s) {
        float d[4];
#pragma unroll
        for (u32 u = s; u < VECTORS; u += SUMMANDS)
#pragma unroll
          for (u32 e = 0; e < kPerVector; ++e) {
            const float summand = relative.weight(normalized(u * kPerVector + e));
            d[e % 4] = u == s && e < 4 ? summand : d[e % 4] + summand;
          }
        // Rounded as in RowScan, not fused with the addition that follows.
        sums[s] = __fmul_rn((d[0] + d[1]) + (d[2] + d[3]), regained);
      }
    } else {
#pragma unroll
      for (u32 s = 0; s < SUMMANDS; ++s) {
        sums[s] = 0.0f;
#pragma unroll
        for (u32 u = s; u < VECTORS; u += SUMMANDS)
#pragma unroll
          for (u32 e = 0; e < kPerVector; ++e)
            if (const u32 i = u * kPerVector + e; index(i) < V) sums[s] += scale.weight(normalized(i), base);
      }
    }
#pragma unroll
    for (u32 step = SUMMANDS / 2; step > 0; step /= 2)
#pragma unroll
      for (u32 s = 0; s < step; ++s) sums[s] += sums[s + step];
    return sums[0];
  }
};

}  // namespace fused_topk
