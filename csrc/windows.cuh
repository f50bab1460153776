// SPDX-License-Identifier: Apache-2.0
// The same read in two phases, for warps that have several tiles of a row: first a window of tiles is read, of which each lane
// keeps its sum of exponentials and its greatest logit; then the bound that all windows prove forbids almost every lane's, and
// the few lanes that may have one of the best read their elements once more. No tile is looked into on its way.
// Comes after scan.cuh.
#pragma once

#include "scan.cuh"

namespace fused_topk {

// What a warp keeps of a window.
template <u32 WINDOW>
struct WindowShared {
  static constexpr u32 kLanesOfTile = kWarpSize / WINDOW;  // that add up its sums
  float maxima[WINDOW][kWarpSize];
  float sums[WINDOW][kWarpSize + kLanesOfTile];  // no two lanes of finish_window() in one bank
  float m[WINDOW];
  // Between two calls of offer_window() only, for the registers.
  u32 left[kWarpSize], offered[kWarpSize], current[kWarpSize];
};

// WARPS: the group's, between two tiles of a warp. A part of the row has one tile.
template <class FORMAT, u32 WARPS, u32 VECTORS, u32 AHEAD, u32 WINDOW>
class WindowScan : public RowScan<FORMAT, VECTORS, true, kNoMask, AHEAD, false, false> {
  using Base = RowScan<FORMAT, VECTORS, true, kNoMask, AHEAD, false, false>;

 public:
  using typename Base::RowTile;
  using Shared = WindowShared<WINDOW>;
  using Base::kPerVector;

  // slots: [Stream::kWarpVectors], window: this warp's own
  __device__ __forceinline__ WindowScan(const Problem& problem, u32 row, Vector* slots, Shared& window)
      : Base(problem, row, slots), window_(window) {}

  // Begins with the warp's first tile; `end`: of the row's tiles, or of the block's.
  __device__ __forceinline__ void start(u32 first, u32 end) {
    next_ = first;
    end_ = end;
    Base::start(first, first < end, first + WARPS, first + WARPS < end);
  }
  __device__ __forceinline__ bool has_more() const { return next_ < end_; }

  // RowScan's, but what needs many of a lane is read tile by tile (KernelChoice.method() of fused_topk/kernel_choice.py).
  template <class GROUP>
  __device__ __forceinline__ u32 proven(const KthBound<GROUP>& bound) const {
    return bound.of_warp(order_key(this->best_));
  }

  // Reads the warp's next tiles, a window at most.
  __device__ __forceinline__ void read_window() {
    first_ = next_;
    u32 t = 0;
    // All lanes have added up the last window's sums.
    __syncwarp();
#pragma unroll 1
    for (; t < WINDOW && next_ < end_; ++t, next_ += WARPS) {
      Base::begin_part();
      Base::read(next_, next_ + WARPS, next_ + WARPS < end_);
      window_.maxima[t][lane_id()] = this->lane_max_;
      Base::fold();
      window_.sums[t][lane_id()] = this->part_.d;
      if (lane_id() == 0) window_.m[t] = this->part_.m;
      if constexpr (Base::Stream::kAhead == 2) Base::request(next_ + 2 * WARPS, next_ + 2 * WARPS < end_);
    }
    window_.left[lane_id()] = (1u << t) - 1;
    window_.offered[lane_id()] = 0;
    window_.current[lane_id()] = 0;
  }

  // Calls finish_part(part, (m, d)) for each of the window's tiles. All 32 lanes call it.
  template <class FINISH_PART>
  __device__ __forceinline__ void finish_window(FINISH_PART finish_part) const {
    const u32 count = (next_ - first_) / WARPS;
    const u32 t = lane_id() / Shared::kLanesOfTile;
    const u32 rank = lane_id() % Shared::kLanesOfTile;
    // The other lanes' sums too.
    __syncwarp();
    // In the order of warp_sum(), for the same bits: lanes 16 apart first.
    float d[WINDOW];
#pragma unroll
    for (u32 i = 0; i < WINDOW; ++i) d[i] = t < count ? window_.sums[t][i * Shared::kLanesOfTile + rank] : 0.0f;
#pragma unroll
    for (u32 half = WINDOW / 2; half > 0; half /= 2)
#pragma unroll
      for (u32 i = 0; i < half; ++i) d[i] += d[i + half];
#pragma unroll
    for (u32 step = Shared::kLanesOfTile / 2; step > 0; step /= 2) d[0] += __shfl_xor_sync(kAllLanes, d[0], step);
    if (t < count && rank == 0) finish_part(tile_of(t), Normalizer{window_.m[t], d[0]});
  }

  // Offers the window's elements that may be among the best. False if the candidates are full: to be called again after a
  // cut. All 32 lanes call it.
  template <class GROUP>
  __device__ __forceinline__ bool offer_window(Candidates<GROUP>& candidates) {
    u32 left = window_.left[lane_id()];        // tiles of which the lane may have something to offer
    u32 offered = window_.offered[lane_id()];  // elements of its tile `current` that it has, if not all of them
    u32 current = window_.current[lane_id()];
    while (true) {
      left = possible_of(left, candidates);
      if (!(left >> current & 1)) offered = 0;
      const u32 lanes = __ballot_sync(kAllLanes, left != 0);
      if (lanes == 0) return true;
      u32 t = 0;
      u32 todo = 0;
      if (__popc(lanes) >= Base::kManyLanes && !__any_sync(kAllLanes, offered != 0)) {
        // Of one tile for all lanes, the one with the greatest logit: its best k then forbid most of the others.
        t = greatest_tile(left);
        todo = best_of_tile(t, left >> t & 1, candidates);
      } else if (left != 0) {
        // Of a tile of the lane's own.
        t = offered != 0 ? current : __ffs(left) - 1;
        todo = hits_of_lane(t, candidates.least()) & ~offered;
      }
      u32 place;
      const bool is_enough = candidates.reserve(__popc(todo), place);
      const bool is_maximum = (todo & (todo - 1)) == 0 && offered == 0;
      for (; todo != 0; todo &= todo - 1) {
        const u32 bit = __ffs(todo) - 1;
        const u32 index = tile_of(t) * RowTile::kElements + RowTile::offset(bit);
        const float logit = is_maximum ? window_.maxima[t][lane_id()] : FORMAT::decode(this->stream_.raw_logit(index));
        if (!candidates.store(place++, make_candidate(order_key(logit), index))) break;
        offered |= 1u << bit;
      }
      current = t;
      if (todo == 0) {
        left &= ~(1u << t);
        offered = 0;
      }
      // Apart, lanes would run all that follows one after the other.
      __syncwarp();
      if (is_enough) continue;
      window_.left[lane_id()] = left;
      window_.offered[lane_id()] = offered;
      window_.current[lane_id()] = current;
      return false;
    }
  }

 private:
  __device__ __forceinline__ u32 tile_of(u32 t) const { return first_ + t * WARPS; }

  // Of the tiles `left`, those of which an element of the lane may be among the best.
  template <class CANDIDATES>
  __device__ __forceinline__ u32 possible_of(u32 left, const CANDIDATES& candidates) const {
    u32 possible = 0;
    // `not less` instead of `greater or equal`: a NaN must pass.
#pragma unroll
    for (u32 t = 0; t < WINDOW; ++t)
      if (left >> t & 1 && !(window_.maxima[t][lane_id()] < candidates.least())) possible |= 1u << t;
    if (candidates.is_at_token()) {
      // Behind the threshold's own token, an equal logit has lost already.
#pragma unroll 1
      for (u32 rest = possible; rest != 0; rest &= rest - 1) {
        const u32 t = __ffs(rest) - 1;
        const u32 key = order_key(window_.maxima[t][lane_id()]);
        if (make_candidate(key, tile_of(t) * RowTile::kElements) <= candidates.threshold()) possible &= ~(1u << t);
      }
      __syncwarp();
    }
    return possible;
  }

  // Of all lanes' tiles, the one with the greatest logit; of equal ones the first.
  __device__ __forceinline__ u32 greatest_tile(u32 left) const {
    u64 best = kNoCandidate;
    for (; left != 0; left &= left - 1) {
      const u32 t = __ffs(left) - 1;
      best = max(best, make_candidate(order_key(window_.maxima[t][lane_id()]), t));
    }
    __syncwarp();
    return index_of(warp_max(best));
  }

  // Of tile t, read again by all lanes, what may be among the best, of a lane that is not done with it.
  template <class GROUP>
  __device__ __forceinline__ u32 best_of_tile(u32 t, bool is_left, Candidates<GROUP>& candidates) {
    this->stream_.load(this->tile_, tile_of(t));
    this->lane_max_ = window_.maxima[t][lane_id()];
    u32 todo = is_left ? Base::hits_of_all(candidates.least()) : 0;
    todo &= RowTile::is_element(this->tile_.first, this->V_);
    if (warp_sum(u32(__popc(todo))) > candidates.k() + Base::kFewMore)
      todo = this->template best_of<GROUP, true>(todo, candidates);
    return todo;
  }

  // The same of the lane's own elements of tile t.
  __device__ __forceinline__ u32 hits_of_lane(u32 t, float least) const {
    const u32 first = tile_of(t) * RowTile::kElements;
    u32 result = 0;
#pragma unroll 4
    for (u32 u = 0; u < VECTORS; ++u) {
      const Vector vector = this->stream_.load(first + (u * kWarpSize + lane_id()) * kPerVector);
      result |= Base::not_below(vector, least) << (u * kPerVector);
    }
    return result & RowTile::is_element(first, this->V_);
  }

  Shared& window_;
  u32 first_, next_, end_;  // of the window, after it, of all: tiles
};

// scan_parts() in two phases.
template <class GROUP, class SCAN, class FINISH_PART>
__device__ __forceinline__ void scan_windows(const Problem& problem, u32 row, SCAN& scan, u32 first_part, u32 last_part,
                                             u32 k, Candidates<GROUP>& candidates, KthBound<GROUP>& bound,
                                             FINISH_PART finish_part) {
  scan.start(first_part + GROUP::warp(), last_part);
  scan.prepare(problem, row);
  candidates.restart(k);
  bool is_open = scan.has_more();
  if (is_open) {
    scan.read_window();
    bound.publish(scan.proven(bound));
  } else {
    bound.abstain();
  }
  GROUP::sync();
  candidates.raise(bound.found());
  while (true) {
    while (is_open) {
      if (!scan.offer_window(candidates)) break;
      scan.finish_window(finish_part);
      is_open = scan.has_more();
      if (!is_open) break;
      scan.read_window();
      bound.update(scan.proven(bound));
      candidates.raise(bound.latest());
    }
    // Whoever still has something to offer has found the candidates full.
    if (!GROUP::any(is_open)) break;
    candidates.cut(candidates.enough());
  }
}

}  // namespace fused_topk
