// SPDX-License-Identifier: Apache-2.0
// Draws with noise of the caller's. Of the tokens that are kept, the one with the greatest quotient of weight and noise wins:
// that with the greatest log weight less log noise, its score. Of equal ones the smallest token wins.
//
// A racer is a token's score as a key (order.h) above its inverted index, so the greatest racer wins in any order. No racer is 0.
#pragma once

#include "sample_part.cuh"

namespace fused_topk::sampling {

__device__ __forceinline__ u64 racer_of(float score, u32 token) { return make_candidate(order_key(score), token); }

// The racer with another score.
__device__ __forceinline__ u64 moved(u64 racer, float by) {
  return racer ? racer_of(__uint_as_float(bits_of_key(key_of(racer))) + by, index_of(racer)) : 0;
}

// Whether tokens race in a kernel that is compiled for it. The check at run time is always true. Without it NVRTC spills
// registers of sample_rows_kernel for compute capability 12.0.
template <bool NOISE>
__device__ __forceinline__ bool races(const SampleRows& p) {
  return NOISE && p.noise;
}

// The race in a row. Scores are relative to the logit `base`.
struct Race {
  const float* noise;  // [V]
  float base;
  Temperature temperature;

  __device__ __forceinline__ Race(const SampleRows& p, u32 row, float base, Temperature temperature)
      : noise(p.noise + i64(row) * p.V), base(base), temperature(temperature) {}

  // The maximum with -inf is no NaN: noise that is NaN or less than 0 loses.
  __device__ __forceinline__ float score(float x, float noise) const {
    return fmaxf(temperature.log_weight(x, base) - logf(noise), -FUSED_TOPK_INFINITY);
  }
  __device__ __forceinline__ u64 racer(float x, u32 token) const {
    return racer_of(score(x, __ldg(noise + token)), token);
  }

  // The best racer of the tokens first, first + step, .. of a row, below `end`, for which kept(logit, token) holds. One by
  // one: a kernel that has no registers left reads them so.
  template <class FORMAT, class KEPT>
  __device__ __forceinline__ u64 best_of(const RowLogits<FORMAT>& row, u32 first, u32 end, u32 step,
                                         const KEPT& kept) const {
    u64 best = 0;
#pragma unroll 4
    for (u32 token = first; token < end; token += step) {
      const float x = row(token);
      if (kept(x, token)) best = max(best, racer(x, token));
    }
    return best;
  }

  // The best racer of those tokens of a part for which kept(logit, token) holds, in every lane. The 32 lanes of a warp call
  // it, right after the part has been read.
  template <class FORMAT, u32 VECTORS, class KEPT>
  __device__ __forceinline__ u64 best_of(const PartReader<FORMAT, VECTORS>& reader, Part part, const KEPT& kept) const {
    using Reader = PartReader<FORMAT, VECTORS>;
    using NoiseReader = PartReader<Float32, 1>;
    constexpr u32 kOfVector = FORMAT::kPerVector / Float32::kPerVector;
    const RowLogits<Float32> numbers{reinterpret_cast<const u32*>(noise), {nullptr, 0, kMaskBytes}, reader.row.V};
    const NoiseReader noise_reader{numbers};
    float best = -FUSED_TOPK_INFINITY;
    u32 winner = ~0u;
#pragma unroll 1
    for (u32 first = part.begin; first < part.end; first += Reader::kElements) {
      Vector vectors[VECTORS], noises[VECTORS][kOfVector][1] = {};
      reader.load(first, vectors);
      // All noise is requested before any is used. That of a vector without a kept token is not read.
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u) {
        bool has_kept = false;
#pragma unroll
        for (u32 e = 0; e < FORMAT::kPerVector; ++e)
          has_kept |= kept(FORMAT::decode(vectors[u].words, e), Reader::token(first, u) + e);
        if (!has_kept) continue;
#pragma unroll
        for (u32 i = 0; i < kOfVector; ++i)
          // The noise reader adds the place of the lane.
          noise_reader.load(Reader::token(first, u) + (i - lane_id()) * Float32::kPerVector, noises[u][i]);
      }
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u) {
        // Keeping the decoded floats would take a register each (fold()).
        Vector v = vectors[u];
#pragma unroll
        for (u32 w = 0; w < 4; ++w) keep_opaque(v.words[w]);
#pragma unroll
        for (u32 e = 0; e < FORMAT::kPerVector; ++e) {
          const float x = FORMAT::decode(v.words, e);
          const u32 token = Reader::token(first, u) + e;
          const Vector& of_token = noises[u][e / Float32::kPerVector][0];
          const float own = score(x, Float32::decode(of_token.words, e % Float32::kPerVector));
          // Of equal scores the lane's first stays.
          if (kept(x, token) && (own > best || winner == ~0u)) {
            best = own;
            winner = token;
          }
        }
      }
    }
    return warp_max(winner == ~0u ? 0 : racer_of(best, winner));
  }
};

}  // namespace fused_topk::sampling
