// SPDX-License-Identifier: Apache-2.0
// One read of a group's share of a row, a window at a time, for warps that have several tiles.
//
// A warp reads a window of tiles and keeps each lane's sum and maximum of each tile. No tile is searched yet. Then the bound
// that all warps' windows prove rules out almost every lane. The few lanes with hits read their elements again.
#pragma once

#include "scan.cuh"

namespace fused_topk {

// What a warp keeps of a window. A lane has a hit if one of its elements may be among the best.
template <u32 WINDOW>
struct WindowShared {
  static constexpr u32 kLanesOfTile = kWarpSize / WINDOW;  // the lanes that add up a tile's sums
  float maxima[WINDOW][kWarpSize];
  float sums[WINDOW][kWarpSize + kLanesOfTile];  // padded: in finish_window() no two lanes read the same bank
  float m[WINDOW];
  // The lanes' state between two calls of offer_window(). In registers it would take too many.
  u32 left[kWarpSize], offered[kWarpSize], current[kWarpSize];
};

// WARPS: the group's warps, which is the distance between two tiles of a warp. A part has one tile.
template <class FORMAT, u32 WARPS, u32 VECTORS, bool ALIGNED, u32 MASK, u32 AHEAD, u32 WINDOW>
class WindowScan {
 public:
  using Reader = TileReader<FORMAT, VECTORS, ALIGNED, MASK, AHEAD, false>;
  using Stream = typename Reader::Stream;
  using RowTile = typename Reader::RowTile;
  using Selector = TileSelector<Reader, false>;
  using Shared = WindowShared<WINDOW>;
  static constexpr u32 kPerVector = Reader::kPerVector;

  Reader reader;
  PartFolder<Reader> folder;
  Selector selector;

  // slots: [Stream::kWarpVectors], window: the warp's own
  __device__ __forceinline__ WindowScan(const Problem& problem, u32 row, u32 length, Vector* slots, Shared& window)
      : reader(problem, row, length, slots), window_(window) {}

  // What can wait until the first tiles are in flight.
  __device__ __forceinline__ void prepare(const Problem& problem, u32 row) {
    folder.set_scale(problem.temperature_of(row).scale());
  }

  // Requests the warp's first tiles. `end`: the end of the group's tiles.
  __device__ __forceinline__ void start(u32 first, u32 end) {
    next_ = first;
    end_ = end;
    reader.start(first, first < end, first + WARPS, first + WARPS < end);
  }
  __device__ __forceinline__ bool has_more() const { return next_ < end_; }

  // See TileSelector. A large k, which needs more, is read tile by tile (KernelChoice.method()).
  template <class GROUP>
  __device__ __forceinline__ u32 proven(const KthBound<GROUP>& bound) const {
    return selector.proven_by_lanes(bound);
  }

  // Reads the warp's next tiles: a window, or fewer at the end.
  __device__ __forceinline__ void read_window() {
    first_ = next_;
    u32 t = 0;
    // Waits until all lanes have added up the last window's sums.
    __syncwarp();
#pragma unroll 1
    for (; t < WINDOW && next_ < end_; ++t, next_ += WARPS) {
      folder.begin_part();
      reader.read(next_, next_ + WARPS, next_ + WARPS < end_);
      selector.begin_tile(reader);
      window_.maxima[t][lane_id()] = reader.lane_max();
      folder.fold(reader);
      window_.sums[t][lane_id()] = folder.lane_state().d;
      if (lane_id() == 0) window_.m[t] = folder.lane_state().m;
      if constexpr (Stream::kAhead == 2) reader.request(next_ + 2 * WARPS, next_ + 2 * WARPS < end_);
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
    // Waits for the other lanes' sums.
    __syncwarp();
    // Adds in the order of warp_sum(), lanes 16 apart first, so that the bits are the same.
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

  // Offers the window's hits. Returns false if the candidates are full: the call must be repeated after a cut. All 32 lanes
  // call it.
  template <class GROUP>
  __device__ __forceinline__ bool offer_window(Candidates<GROUP>& candidates) {
    u32 left = window_.left[lane_id()];        // tiles in which the lane may have hits
    u32 offered = window_.offered[lane_id()];  // elements of tile `current` that are stored
    u32 current = window_.current[lane_id()];
    while (true) {
      left = possible_of(left, candidates);
      if (!(left >> current & 1)) offered = 0;
      const u32 lanes = __ballot_sync(kAllLanes, left != 0);
      if (lanes == 0) return true;
      u32 t = 0;
      u32 todo = 0;
      if (__popc(lanes) >= Selector::kManyLanes && !__any_sync(kAllLanes, offered != 0)) {
        // All lanes look at the tile with the greatest logit. Its best k rule out most other hits.
        t = greatest_tile(left);
        todo = best_of_tile(t, left >> t & 1, candidates);
      } else if (left != 0) {
        // Each lane looks at a tile of its own.
        t = offered != 0 ? current : __ffs(left) - 1;
        todo = hits_of_lane(t, candidates.least()) & ~offered;
      }
      u32 place;
      const bool is_enough = candidates.reserve(__popc(todo), place);
      const bool is_maximum = (todo & (todo - 1)) == 0 && offered == 0;
      for (; todo != 0; todo &= todo - 1) {
        const u32 bit = __ffs(todo) - 1;
        const u32 index = tile_of(t) * RowTile::kElements + RowTile::offset(bit);
        const float logit = is_maximum ? window_.maxima[t][lane_id()] : FORMAT::decode(reader.raw_logit(index));
        if (!candidates.store(place++, make_candidate(order_key(logit), index))) break;
        offered |= 1u << bit;
      }
      current = t;
      if (todo == 0) {
        left &= ~(1u << t);
        offered = 0;
      }
      // The lanes meet again. Otherwise they would run all that follows one after the other.
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

  // Those of the tiles `left` in which the lane may have a hit: its maximum is one.
  template <class CANDIDATES>
  __device__ __forceinline__ u32 possible_of(u32 left, const CANDIDATES& candidates) const {
    u32 possible = 0;
    // `not less` instead of `greater or equal`, so that a NaN passes.
#pragma unroll
    for (u32 t = 0; t < WINDOW; ++t)
      if (left >> t & 1 && !(window_.maxima[t][lane_id()] < candidates.least())) possible |= 1u << t;
    if (candidates.is_at_token()) {
      // Behind the threshold's own token an equal logit loses.
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

  // The tile with the greatest logit of all lanes; the first of equal ones.
  __device__ __forceinline__ u32 greatest_tile(u32 left) const {
    u64 best = kNoCandidate;
    for (; left != 0; left &= left - 1) {
      const u32 t = __ffs(left) - 1;
      best = max(best, make_candidate(order_key(window_.maxima[t][lane_id()]), t));
    }
    __syncwarp();
    return index_of(warp_max(best));
  }

  // The lane's hits of tile t, or the best of them. All lanes read the tile again. is_left: the lane is not done with it.
  template <class GROUP>
  __device__ __forceinline__ u32 best_of_tile(u32 t, bool is_left, Candidates<GROUP>& candidates) {
    reader.reload(tile_of(t), window_.maxima[t][lane_id()]);
    u32 todo = is_left ? selector.hits_unrolled(reader, candidates.least()) : 0;
    todo &= RowTile::is_element(reader.tile().first, reader.V());
    if (warp_sum(u32(__popc(todo))) > candidates.k() + Selector::kFewMore)
      todo = selector.template best_of<GROUP, true>(reader, todo, candidates);
    return todo;
  }

  // The lane's hits of tile t, of which it reads its own elements again.
  __device__ __forceinline__ u32 hits_of_lane(u32 t, float least) const {
    const u32 first = tile_of(t) * RowTile::kElements;
    u32 result = 0;
#pragma unroll 4
    for (u32 u = 0; u < VECTORS; ++u) {
      const Vector vector = reader.stream().load(first + (u * kWarpSize + lane_id()) * kPerVector);
      result |= Selector::hits_of_vector(vector, least) << (u * kPerVector);
    }
    return result & RowTile::is_element(first, reader.V());
  }

  Shared& window_;
  u32 first_;  // the window's first tile
  u32 next_;   // the warp's next tile after the window
  u32 end_;    // the end of the group's tiles
};

// scan_parts() of softmax_topk.cu in windows.
template <class GROUP, class SCAN, class SHARE, class FINISH_PART>
__device__ __forceinline__ void scan_windows(const Problem& problem, u32 row, SCAN& scan, const SHARE& share,
                                             Candidates<GROUP>& candidates, KthBound<GROUP>& bound,
                                             FINISH_PART finish_part) {
  scan.start(share.first_part + GROUP::warp(), share.last_part);
  scan.prepare(problem, row);
  candidates.restart(share.k);
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
    // A warp that is still open has found the candidates full.
    if (!GROUP::any(is_open)) break;
    candidates.cut(candidates.enough());
  }
}

}  // namespace fused_topk
