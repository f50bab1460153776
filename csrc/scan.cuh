// SPDX-License-Identifier: Apache-2.0
// One read of a row: the paper's Algorithm 4, a tile at a time.
//
// A row is cut into parts, each read by one warp, tile by tile; where the cuts are depends on V alone. For every tile
// the warp updates its part's (m, d) and offers what may be among the best k to its group's candidates:
//
//     m' = max(m, tile)     d' = d e^((m - m')/T) + sum e^((x - m')/T)     T' = best k of T and the tile
//
// Elements are never rescaled one by one, and most are compared with the threshold many at a time, through their maximum.
// Comes after row.cuh and candidates.cuh.
#pragma once

#include "candidates.cuh"
#include "problem.cuh"

namespace fused_topk {

// Which tokens a mask takes part for. kMaskChoice ("all"): a token that is not allowed still counts in (m, d).
enum MaskUse : u32 { kNoMask = 0, kMaskBoth = 1, kMaskChoice = 2 };

template <class FORMAT, u32 VECTORS, bool ALIGNED, u32 MASK>
class RowScan {
 public:
  using RowTile = Tile<FORMAT, VECTORS>;
  static constexpr u32 kPerVector = RowTile::kPerVector;

  __device__ __forceinline__ RowScan(const Problem& problem, u32 row) : V_(problem.V) {
    const Problem::Offsets offsets = problem.offsets(row);
    row_ = static_cast<const typename FORMAT::Bits*>(problem.logits) + offsets.logits;
    inverse_temperature_ = problem.inverse_temperature(offsets.temperature);
    scale_ = kLog2E * inverse_temperature_;
    if constexpr (MASK != kNoMask) mask_ = problem.row_mask(offsets.mask);
  }

  // log2(e) / T of the row.
  __device__ __forceinline__ float scale() const { return scale_; }
  __device__ __forceinline__ float inverse_temperature() const { return inverse_temperature_; }
  __device__ __forceinline__ typename FORMAT::Bits raw_logit(u32 index) const { return __ldg(row_ + index); }

  __device__ __forceinline__ void begin_row() {
#pragma unroll
    for (u32 u = 0; u < VECTORS; ++u) best_[u] = -FUSED_TOPK_INFINITY;
  }
  __device__ __forceinline__ void begin_part() { part_ = Normalizer{}; }

  // Reads a tile, folds it into the part's (m, d) and finds the maxima of its vectors.
  __device__ __forceinline__ void read(u32 first) {
    tile_.template load<ALIGNED>(row_, V_, first);
    if constexpr (MASK != kNoMask) {
      allowed_ = 0;
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u)
        allowed_ |= mask_.template allowed<kPerVector>(tile_.index(u, 0), V_) << (u * kPerVector);
    }
    float tile_max = -FUSED_TOPK_INFINITY;
    lane_max_ = -FUSED_TOPK_INFINITY;
#pragma unroll
    for (u32 u = 0; u < VECTORS; ++u) {
      float vector_max = choosable(u, 0);
#pragma unroll
      for (u32 e = 1; e < kPerVector; ++e) vector_max = max_nan(vector_max, choosable(u, e));
      best_[u] = max_nan(best_[u], vector_max);
      lane_max_ = max_nan(lane_max_, vector_max);
      if constexpr (MASK == kMaskChoice)
#pragma unroll
        for (u32 e = 0; e < kPerVector; ++e) tile_max = max_nan(tile_max, tile_.logit(u, e));
    }
    if constexpr (MASK != kMaskChoice) tile_max = lane_max_;

    // The same m in every lane of the warp, so that the lanes' sums need no exponentials to be added up.
    const u32 max_key = warp_max(order_key(__float_as_uint(tile_max)));
    const float m = max_nan(part_.m, __uint_as_float(bits_of_key(max_key)));
    const float base = reference_point(m);
    tile_.forget_decoded();
    // Four chains of additions, so that none waits for another.
    float d[4] = {part_.d * exp2_approx((part_.m - base) * scale_), 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (u32 u = 0; u < VECTORS; ++u)
#pragma unroll
      for (u32 e = 0; e < kPerVector; ++e) d[e % 4] += exp2_approx((normalized(u, e) - base) * scale_);
    part_ = {m, (d[0] + d[1]) + (d[2] + d[3])};
    tile_.forget_decoded();
  }

  // (m, d) of the part, the same in every lane. All 32 lanes call it.
  __device__ __forceinline__ Normalizer end_part() const { return {part_.m, warp_sum(part_.d)}; }

  // A bound such that at least `wanted` of the elements read so far have keys >= it.
  __device__ __forceinline__ u32 lower_bound(u32 wanted) const {
    // The maxima of 32 lanes are enough while few of them are wanted; past that they are too loose.
    if (VECTORS == 1 || wanted <= kWarpSize / 4) {
      float best = best_[0];
#pragma unroll
      for (u32 u = 1; u < VECTORS; ++u) best = max_nan(best, best_[u]);
      const u32 keys[1] = {order_key(__float_as_uint(best))};
      return warp_lower_bound(keys, wanted);
    }
    u32 keys[VECTORS];
#pragma unroll
    for (u32 u = 0; u < VECTORS; ++u) keys[u] = order_key(__float_as_uint(best_[u]));
    return warp_lower_bound(keys, wanted);
  }

  // Which of the lane's elements may be among the best: bit u * n + e for element e of vector u.
  __device__ __forceinline__ u32 hits(u64 threshold) const {
    // Behind the k-th best so far an equal logit has lost already: its index is greater.
    const u32 key = key_of(threshold);
    const bool is_behind = tile_.first > index_of(threshold);
    const float least = __uint_as_float(bits_of_key(is_behind && key < kNanKey ? key + 1 : key));
    // `not less` instead of `greater or equal`: a NaN must pass.
    if (!__any_sync(kAllLanes, !(lane_max_ < least))) return 0;
    u32 result = 0;
#pragma unroll
    for (u32 u = 0; u < VECTORS; ++u)
#pragma unroll
      for (u32 e = 0; e < kPerVector; ++e)
        if (!(choosable(u, e) < least)) result |= 1u << (u * kPerVector + e);
    return result;
  }

  // Offers the lane's elements in `todo` and returns those that did not fit.
  template <class CANDIDATES>
  __device__ __forceinline__ u32 offer(CANDIDATES& candidates, u32 todo) const {
    while (__any_sync(kAllLanes, todo != 0)) {
      u64 candidate = kNoCandidate;
      if (todo != 0) {
        const u32 bit = __ffs(todo) - 1;
        const u32 index = tile_.index(bit / kPerVector, bit % kPerVector);
        // Read again, from L1: registers cannot be indexed, and hits are few.
        if (index < V_) candidate = make_candidate(key_at(index, bit), index);
      }
      if (!candidates.offer(candidate)) break;
      todo &= todo - 1;
    }
    return todo;
  }

 private:
  __device__ __forceinline__ bool is_allowed(u32 u, u32 e) const {
    return MASK == kNoMask || (allowed_ >> (u * kPerVector + e)) & 1;
  }
  __device__ __forceinline__ u32 key_at(u32 index, u32 bit) const {
    if (MASK != kNoMask && !((allowed_ >> bit) & 1)) return kNegativeInfinityKey;
    return order_key(__float_as_uint(FORMAT::decode(raw_logit(index))));
  }
  // The logit as the choice of tokens sees it, and as (m, d) sees it.
  __device__ __forceinline__ float choosable(u32 u, u32 e) const {
    return is_allowed(u, e) ? tile_.logit(u, e) : -FUSED_TOPK_INFINITY;
  }
  __device__ __forceinline__ float normalized(u32 u, u32 e) const {
    return MASK == kMaskChoice ? tile_.logit(u, e) : choosable(u, e);
  }

  const typename FORMAT::Bits* row_;  // [V]
  u32 V_;
  float inverse_temperature_;
  float scale_;
  RowMask mask_;
  RowTile tile_;
  u32 allowed_;
  float best_[VECTORS];  // the maxima of all that each of the lane's vectors has held
  float lane_max_;       // of this tile
  Normalizer part_;      // m: of the part so far; d: of this lane's share of it
};

// Reads parts [first_part, last_part) of a row with all threads of a group and leaves the best k of them (and a few
// more, unsorted) in `candidates`; a barrier has followed the last offer. `finish_part(part, normalizer)` is called once for each part, by the whole warp that read it.
template <class GROUP, class SCAN, class FINISH_PART>
__device__ __forceinline__ void scan_parts(const Problem& problem, SCAN& scan, u32 first_part, u32 last_part, u32 k,
                                           Candidates<GROUP>& candidates, FINISH_PART finish_part) {
  constexpr u32 kTile = SCAN::RowTile::kElements;
  constexpr u32 kMaxima = kWarpSize * (SCAN::RowTile::kPerLane / SCAN::kPerVector);
  const u32 tiles = (problem.V + kTile - 1) / kTile;
  // If each warp that reads anything has this many elements above a bound, the group has k.
  const u32 warps = min(GROUP::kWarps, last_part - first_part);
  const u32 wanted = (k + warps - 1) / warps;
  const bool is_bounded = wanted <= kMaxima;
  candidates.restart(k);
  GROUP::sync();
  scan.begin_row();
  u32 turn = 0;
  for (u32 round = first_part; round < last_part; round += GROUP::kWarps) {
    const u32 part = round + GROUP::warp();
    scan.begin_part();
    for (u32 t = 0; t < 1u << problem.tiles_per_part_log2; ++t) {
      // Only the row's last part can be short of tiles.
      if ((round << problem.tiles_per_part_log2) + t >= tiles) break;
      const u32 tile = (part << problem.tiles_per_part_log2) + t;
      const bool has_tile = part < last_part && tile < tiles;
      if (has_tile) scan.read(tile * kTile);

      // A new bound each time twice as much has been read: as the bound improves, ever fewer elements pass it.
      ++turn;
      bool is_raising = is_bounded && (turn & (turn - 1)) == 0;
      bool is_first_try = true;
      u32 todo = ~0u;
      while (true) {
        if (is_raising) candidates.raise_together(GROUP::warp() < warps ? scan.lower_bound(wanted) : ~0u);
        todo = has_tile ? todo & scan.hits(candidates.threshold()) : 0;
        // So many hits call for a better bound first (a row in ascending order, where every element beats the last).
        const bool is_flood = is_first_try && is_bounded && !is_raising && warp_count(todo) > kWarpSize + 2 * wanted;
        if (!is_flood) todo = scan.offer(candidates, todo);
        if (!GROUP::any(todo != 0 || candidates.is_crowded())) break;
        candidates.trim();
        is_raising = is_first_try && is_bounded && !is_raising;
        is_first_try = false;
      }
    }
    if (part < last_part) finish_part(part, scan.end_part());
  }
}

}  // namespace fused_topk
