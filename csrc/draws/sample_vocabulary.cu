// SPDX-License-Identifier: Apache-2.0
// Draws tokens from whole rows, without filters: one launch, and one read of the logits.
//
// A row is cut into parts, whose length depends on V alone. The warps of one block or of several sum the parts, and
// leave (m, d) of each part. The last block to arrive weighs the parts. A uniform number says which part has the token.
// Then a warp reads that part again, a few kB, and draws the token. With noise of the caller's the tokens race (race.cuh): each
// warp in its parts, and the last block compares the winners of all parts.
#pragma once

#include "../full_rows/full_row.cuh"
#include "race.cuh"

namespace fused_topk::sampling {

constexpr u32 kSummingThreads = 256;  // of a block
constexpr u32 kSummingWarps = kSummingThreads / kWarpSize;
constexpr u32 kMostParts = 1024;  // of a row

// m of a part; d at temperature 1 (own) and at the row's temperature (tempered); the number of logits that are not -inf
// (finite), counted only where the caller wants it.
struct alignas(16) PartState {
  float m, own, tempered, finite;
};

// V: the row's length. A part behind it is empty.
__device__ __forceinline__ Part part_of(const SampleRows& p, u32 V, u32 part) {
  return {part << p.part_length_log2, u32(min(u64(V), (u64(part) + 1) << p.part_length_log2))};
}

// (m, d) of a part, in every lane. The 32 lanes of a warp call it.
template <class FORMAT>
__device__ __forceinline__ PartState sum_part(const PartReader<FORMAT>& reader, Part part, Scale scale) {
  Normalizer own, tempered;
#pragma unroll 1
  for (u32 first = part.begin; first < part.end; first += PartReader<FORMAT>::kElements) {
    Vector vectors[PartReader<FORMAT>::kVectors];
    reader.load(first, vectors);
    fold<FORMAT>(own, vectors, Scale());
    if (!scale.is_one()) fold<FORMAT>(tempered, vectors, scale);
  }
  own = warp_merge(own, Scale());
  return {own.m, own.d, scale.is_one() ? own.d : warp_merge(tempered, scale).d, 0.0f};
}

// The number of a part's logits that are not -inf. The 32 lanes of a warp call it, right after the part has been read.
template <class FORMAT>
__device__ __forceinline__ u32 finite_of(const PartReader<FORMAT>& reader, Part part) {
  u32 count = 0;
  reader.for_each(part.begin, part.end, [&](float x, u32) { count += x != -FUSED_TOPK_INFINITY; });
  return warp_sum(count);
}

// The token of a part at which the running sum passes `rest`, a fraction of the part's sum. The 32 lanes of a warp call
// it.
template <class FORMAT>
__device__ __forceinline__ u32 draw_from_part(const PartReader<FORMAT>& reader, Part part, const Weights& weight,
                                              double rest) {
  // The exact sum of the part: d is a rounded sum.
  u64 total = 0;
  reader.for_each(part.begin, part.end, [&](float x, u32) { total += weight(x); });
  total = warp_sum(total);
  return find_in_part(reader, part, min(u64(rest * double(total)), total - 1), [&](float x, u32) { return weight(x); });
}

// The first token of a part with this key. The 32 lanes of a warp call it.
template <class FORMAT>
__device__ __forceinline__ u32 find_key(const RowLogits<FORMAT>& row, Part part, u32 key) {
#pragma unroll 1
  for (u32 first = part.begin; first < part.end; first += kWarpSize) {
    const u32 index = first + lane_id();
    const u32 found = __ballot_sync(kAllLanes, index < part.end && order_key(row(min(index, part.end - 1))) == key);
    if (found) return first + __ffs(found) - 1;
  }
  return part.begin;
}

// Where a running sum passes an aim: the place, and the sum before it.
struct Place {
  u32 index;
  u64 before;
};

// The first of `values` [count] in shared memory at which their running sum exceeds `aim`, which is below the total.
// All 32 lanes of a warp call it.
__device__ __forceinline__ Place find_in(const u64* values, u32 count, u64 aim) {
  u64 before = 0;
#pragma unroll 1
  for (u32 first = 0;; first += kWarpSize) {
    const u64 own = first + lane_id() < count ? values[first + lane_id()] : 0;
    const u64 sums = before + warp_inclusive_sum(own);
    const u32 beyond = __ballot_sync(kAllLanes, sums > aim);
    if (beyond) {
      const u32 lane = __ffs(beyond) - 1;
      return {first + lane, __shfl_sync(kAllLanes, sums - own, lane)};
    }
    before = __shfl_sync(kAllLanes, sums, kWarpSize - 1);
  }
}

struct VocabularyShared {
  float maxima[kMostParts];
  float own[kMostParts];
  float tempered[kMostParts];
  float finite[kMostParts];
  u64 weights[kMostParts];
  float maximum_of_warp[kSummingWarps];
  u64 own_of_warp[kSummingWarps];
  u64 racer_of_warp[kSummingWarps];
  u32 answer;
};

// Grid: (rows, blocks_per_row). NOISE is no check at run time, because a race takes registers, which are warps.
template <class FORMAT, bool NOISE>
__global__ void __launch_bounds__(kSummingThreads, tuned_blocks(tuning::kDraws, kSummingThreads))
    sample_vocabulary_kernel(const __grid_constant__ SampleRows p) {
  __shared__ VocabularyShared shared;
  const u32 row = blockIdx.x, warp = threadIdx.x / kWarpSize;
  const RowLogits<FORMAT> logits = logits_of<FORMAT>(p, row);
  const PartReader<FORMAT> reader{logits};
  const RowTemperature temperature(p, row);
  const u32 parts = u32((u64(p.V) + (1ull << p.part_length_log2) - 1) >> p.part_length_log2);
  PartState* const left = reinterpret_cast<PartState*>(p.scratch) + i64(row) * parts;
  // With noise, the best racer of each part, relative to the part's m. In shared memory they lie where the weights come later.
  u64* const left_racers = p.scratch + (i64(p.rows) * 2 + row) * parts;
  const bool shares_row = p.blocks_per_row > 1;

#pragma unroll 1
  for (u32 part = warp * p.blocks_per_row + blockIdx.y; part < parts; part += p.blocks_per_row * kSummingWarps) {
    PartState state = sum_part(reader, part_of(p, logits.V, part), temperature.scale());
    if (p.kept_counts) state.finite = float(finite_of(reader, part_of(p, logits.V, part)));
    if constexpr (NOISE) {
      const Race race(p, row, state.m, temperature);
      const u64 racer = race.best_of(PartReader<FORMAT, 16 / FORMAT::kPerVector>{logits}, part_of(p, logits.V, part),
                                     [](float x, u32) { return x != -FUSED_TOPK_INFINITY; });
      if (lane_id() == 0) (shares_row ? left_racers : shared.weights)[part] = racer;
    }
    if (lane_id() == 0 && shares_row) {
      *reinterpret_cast<float4*>(left + part) = {state.m, state.own, state.tempered, state.finite};
    } else if (lane_id() == 0) {
      shared.maxima[part] = state.m;
      shared.own[part] = state.own;
      shared.tempered[part] = state.tempered;
      shared.finite[part] = state.finite;
    }
  }
  __syncthreads();
  if (shares_row) {
    if (threadIdx.x == 0) shared.answer = take_ticket(p.tickets + row, p.blocks_per_row) == p.blocks_per_row - 1;
    __syncthreads();
    if (!shared.answer) return;
  }

  float m = -FUSED_TOPK_INFINITY;
#pragma unroll 1
  for (u32 part = threadIdx.x; part < parts; part += kSummingThreads) {
    if (shares_row) {
      const float4 state = load_from_other_block(reinterpret_cast<const float4*>(left + part));
      shared.maxima[part] = state.x;
      shared.own[part] = state.y;
      shared.tempered[part] = state.z;
      shared.finite[part] = state.w;
      if constexpr (NOISE) shared.weights[part] = load_from_other_block(left_racers + part);
    }
    m = max_nan(m, shared.maxima[part]);
  }
  m = warp_max(m);
  if (lane_id() == 0) shared.maximum_of_warp[warp] = m;
  __syncthreads();
  m = warp_max(shared.maximum_of_warp[lane_id() % kSummingWarps]);
  const bool has_distribution = is_finite(m);
  const Weights weight{m, temperature.scale(), p.one}, own_weight{m, Scale(), p.one};

  u64 own = 0, racer = 0;
#pragma unroll 1
  for (u32 part = threadIdx.x; has_distribution && part < parts; part += kSummingThreads) {
    const float x = shared.maxima[part];
    if constexpr (NOISE) racer = max(racer, moved(shared.weights[part], temperature.log_weight(x, m)));
    // A part of -inf alone has d = 0.
    shared.weights[part] = u64(shared.tempered[part] * weight.scale.weight(x, m) * p.one);
    own += u64(shared.own[part] * own_weight.scale.weight(x, m) * p.one);
  }
  own = warp_sum(own);
  if constexpr (NOISE) racer = warp_max(racer);
  if (lane_id() == 0) {
    shared.own_of_warp[warp] = own;
    shared.racer_of_warp[warp] = racer;
  }
  __syncthreads();
  const float log_d = log_of_sum(p, warp_sum(lane_id() < kSummingWarps ? shared.own_of_warp[lane_id()] : 0ull));

  if (!has_distribution || temperature.is_greedy) {
    if (warp == 0) {
      const u32 key = order_key(m);
      u32 part = 0;
#pragma unroll 1
      for (u32 first = 0; first < parts; first += kWarpSize) {
        const u32 i = min(first + lane_id(), parts - 1);
        const u32 found = __ballot_sync(kAllLanes, order_key(shared.maxima[i]) == key);
        if (found) {
          part = min(first + __ffs(found) - 1, parts - 1);
          break;
        }
      }
      const u32 best = find_key(logits, part_of(p, logits.V, part), key);
      if (lane_id() == 0) shared.answer = best;
    }
    __syncthreads();
    const float of_best = p.truncated ? (temperature.is_zero ? 0.0f : not_a_number()) : -log_d;
    write_best(p, row, shared.answer, has_distribution ? of_best : not_a_number(),
               has_distribution && temperature.is_zero ? m : not_a_number());
    return;
  }

  u64 total = 0, finite = 0;
#pragma unroll 1
  for (u32 part = lane_id(); part < parts; part += kWarpSize) {
    total += shared.weights[part];
    finite += u64(shared.finite[part]);
  }
  total = warp_sum(total);
  finite = warp_sum(finite);
  if (threadIdx.x == 0) write_kept(p, row, finite, total, temperature.scaled(m));
#pragma unroll 1
  for (u32 sample = warp; sample < p.num_samples; sample += kSummingWarps) {
    u32 token;
    if constexpr (NOISE) {
      token = index_of(warp_max(shared.racer_of_warp[lane_id() % kSummingWarps]));
    } else {
      const u64 aim = aim_of(p, row, sample, total);
      const Place place = find_in(shared.weights, parts, aim);
      const double rest = double(aim - place.before) / double(shared.weights[place.index]);
      const Weights within{shared.maxima[place.index], temperature.scale(), p.one};
      token = draw_from_part(reader, part_of(p, logits.V, place.index), within, rest);
    }
    if (lane_id() == 0) {
      const float x = logits(token) - m;
      const i64 at = i64(row) * p.num_samples + sample;
      p.tokens[at] = token;
      p.log_probs[at] = p.truncated ? temperature.scaled(x) - log_of_sum(p, total) : x - log_d;
    }
  }
}

}  // namespace fused_topk::sampling
