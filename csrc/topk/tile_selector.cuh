// SPDX-License-Identifier: Apache-2.0
// The selector of a scan: a tile's elements to the candidates. In the loop of Algorithm 4 it is:
//
//     T' = best k of T and the tile
//
// A hit is an element that the threshold lets pass. Most tiles have none, which one vote shows. A hit is found as `not less`
// instead of `greater or equal`, so that a NaN passes.
#pragma once

#include "bound.cuh"
#include "candidates.cuh"
#include "tile_reader.cuh"

namespace fused_topk {

// FOR_MANY: also keeps what proves a bound for a large k: the best keys of kSets sets of each lane's elements.
template <class READER, bool FOR_MANY>
class TileSelector {
  using Format = typename READER::Format;
  using Stream = typename READER::Stream;
  using RowTile = typename READER::RowTile;
  static constexpr u32 VECTORS = READER::kVectors;
  static constexpr u32 kPerVector = READER::kPerVector;
  static constexpr bool kHasMask = has_mask(READER::kMask);

 public:
  static constexpr u32 kSets = 8;
  // With hits in at most so many lanes, the warp goes from lane to lane.
  static constexpr u32 kFewLanes = 4;
  // With hits in at least so many lanes, a tile's own best k are found first.
  static constexpr u32 kManyLanes = 24;
  // A tile with at most k + kFewMore hits offers all of them.
  static constexpr u32 kFewMore = 32;

  __device__ __forceinline__ TileSelector() : offered_(0), best_(-FUSED_TOPK_INFINITY) {}

  // The reader has read a tile.
  __device__ __forceinline__ void begin_tile(const READER& x) {
    best_ = max_nan(best_, x.lane_max());
    offered_of_tile_ = 0;
  }

  // A key that at least j elements of this warp reach (j: see KthBound). FOR_MANY counts only the tiles on which this was
  // called.
  template <class GROUP>
  __device__ __forceinline__ u32 proven(READER& x, KthBound<GROUP>& bound, bool is_first = false) {
    if (!bound.needs_many()) return proven_by_lanes(bound);
    u32 keys[kSets];
    best_keys(x, keys, bound, is_first);
    return bound.key_to_publish(keys);
  }
  template <class GROUP>
  __device__ __forceinline__ u32 proven_by_lanes(const KthBound<GROUP>& bound) const {
    return bound.key_to_publish(order_key(best_));
  }
  // FOR_MANY: publishes a new bound early, so that the other warps have it when they offer their tiles.
  template <class GROUP>
  __device__ __forceinline__ void update(READER& x, KthBound<GROUP>& bound) {
    if (!FOR_MANY || offered_ < bound.worth()) return;
    offered_ = 0;
    bound.update(proven(x, bound));
  }

  // Offers the tile's hits to the candidates. Returns false if these are full: the call must be repeated after a cut. has_next:
  // whether the warp has another tile, which would profit from a tighter bound. All 32 lanes call it.
  template <class GROUP>
  __device__ __forceinline__ bool offer(READER& x, Candidates<GROUP>& candidates, KthBound<GROUP>& bound,
                                        bool has_next) {
    float least = candidates.least();
    u32 lanes = lanes_with_hits(x, least);
    if (lanes == 0) return true;
    if (candidates.is_at_token()) {
      if (!candidates.has_room_from(x.tile().first)) return true;
      least = candidates.least_from(x.tile().first);
      lanes = lanes_with_hits(x, least);
      if (lanes == 0) return true;
    }
    offered_ += __popc(lanes);
    // FOR_MANY: update() has published what the tile adds.
    const bool is_worth = has_next && offered_ >= bound.worth() && !bound.needs_many();
    if (FOR_MANY || is_worth) {
      if (!FOR_MANY) bound.update(proven(x, bound));
      if (candidates.raise(bound.latest())) least = candidates.least();
      lanes = lanes_with_hits(x, least);
      if (lanes == 0) return true;
      if (!FOR_MANY) offered_ = __popc(lanes);
    }
    u32 todo = hits(x, lanes, least) & ~offered_of_tile_;
    if (x.V() - x.tile().first < RowTile::kElements) todo &= RowTile::is_element(x.tile().first, x.V());
    if (__popc(lanes) >= kManyLanes && warp_sum(u32(__popc(todo))) > candidates.k() + kFewMore)
      todo = best_of(x, todo, candidates);
    return store(x, todo, candidates);
  }

  // The lane's hits of the tile, every element compared: bit u * n + e for element e of vector u.
  __device__ __forceinline__ u32 hits_unrolled(READER& x, float least) {
    u32 result = 0;
#pragma unroll
    for (u32 u = 0; u < VECTORS; ++u) result |= hits_of_vector(x.tile().vector(u), least) << (u * kPerVector);
    x.forget_decoded();
    return without_hidden(x, result, least);
  }
  static __device__ __forceinline__ u32 hits_of_vector(const Vector& vector, float least) {
    u32 result = 0;
#pragma unroll
    for (u32 e = 0; e < kPerVector; ++e)
      if (!(Format::decode(vector.words, e) < least)) result |= 1u << e;
    return result;
  }

  // Keeps those of the hits `todo` of all lanes that can be among their best k, and few more. Raises the threshold to what they
  // prove. This keeps the candidates from filling up where logits ascend or are equal: there every tile has hits. All 32 lanes
  // call it.
  template <class GROUP, bool UNROLL = !Stream::kInBackground || (Stream::kInPlace && !GROUP::kIsWarp)>
  __device__ __forceinline__ u32 best_of(READER& x, u32 todo, Candidates<GROUP>& candidates) {
    const float greatest_logit = warp_max(x.lane_max());
    // The elements are compared as floats. With a NaN no count below would be right.
    if (greatest_logit != greatest_logit) return todo;
    const u32 k = candidates.k();
    const u32 greatest = order_key(greatest_logit);
    // Another warp may have seen better ones.
    candidates.exchange_with_other_warps();
    if (make_candidate(greatest, x.tile().first) <= candidates.threshold()) return 0;
    // Bounds known so far: the threshold, and what the lanes' maxima prove. 32 elements are at least the least maximum. For
    // small k, finding the k-th maximum is quicker than bisection.
    const u32 lane_key = order_key(x.lane_max());
    u32 least = key_of(candidates.threshold() + 1);
    if (k <= kWarpSize) least = max(least, warp_min(lane_key));
    if (k <= kWarpSize / 2) least = max(least, nth_greatest(lane_key, k));
    // Bisects from the first bit in which they differ.
    const u32 below_differing = greatest == least ? 0 : ~0u >> __clz(greatest ^ least);
    u32 bound = greatest & ~below_differing;
    u32 count = ~0u;
#pragma unroll 1
    for (u32 bit = below_differing - below_differing / 2; bit >= Format::kLowestKeyBit && count > k + kFewMore;
         bit /= 2) {
      const u32 trial = bound | bit;
      if (trial > greatest) continue;
      if (trial > least) {
        const u32 passing = warp_sum(u32(__popc(todo & hits_of_key<UNROLL>(x, trial))));
        if (passing < k) continue;
        count = passing;
      }
      bound = trial;
    }
    // The key of a negative 16-bit logit has its lowest bits set.
    if (bound < kZeroKey) bound |= Format::kLowestKeyBit - 1;
    todo &= hits_of_key<UNROLL>(x, bound);
    candidates.raise(bound);
    if (warp_sum(u32(__popc(todo))) <= k + kFewMore) {
      candidates.exchange_with_other_warps();
      return todo;
    }
    // Too many are equal to the k-th best.
    const u32 greater = bound == greatest ? 0 : todo & hits_of_key<UNROLL>(x, bound + 1);
    return greater | first_of(x, todo & ~greater, bound, candidates);
  }

 private:
  __device__ __forceinline__ u32 lanes_with_hits(const READER& x, float least) const {
    return __ballot_sync(kAllLanes, !(x.lane_max() < least));
  }

  // The lane's hits, none if it is not one of `lanes`. All 32 lanes call it.
  __device__ __forceinline__ u32 hits(READER& x, u32 lanes, float least) {
    if constexpr (Stream::kInBackground)
      if (__popc(lanes) <= kFewLanes) return hits_of_few(x, lanes, least);
    return hits_of_lane(x, least);
  }
  // Usually a lane has few hits. So it compares only the vectors whose maximum is a hit. Registers cannot be indexed: the tile
  // must be in shared memory. With four logits in a vector, the maximum costs as much as the comparisons.
  __device__ __forceinline__ u32 hits_of_lane(READER& x, float least) {
    if constexpr (!Stream::kInBackground || (Stream::kInPlace && kPerVector == 4)) return hits_unrolled(x, least);
    u32 vectors = 0;
#pragma unroll
    for (u32 u = 0; u < VECTORS; ++u)
      if (!(x.choosable_maximum(u) < least)) vectors |= 1u << u;
    u32 result = 0;
    for (; vectors != 0; vectors &= vectors - 1) {
      const u32 u = __ffs(vectors) - 1;
      result |= hits_of_vector(x.stream().vector_again(x.tile(), u), least) << (u * kPerVector);
    }
    return without_hidden(x, result, least);
  }
  // For a tile in shared memory. All 32 lanes look at one lane's elements, one each, then at the next lane's.
  __device__ __forceinline__ u32 hits_of_few(const READER& x, u32 lanes, float least) const {
    static_assert(RowTile::kPerLane == kWarpSize, "one for each lane");
    u32 result = 0;
#pragma unroll 1
    for (; lanes != 0; lanes &= lanes - 1) {
      const u32 lane = __ffs(lanes) - 1;
      const u32 of_lane =
          __ballot_sync(kAllLanes, !(Format::decode(x.stream().element_of_lane(lane, lane_id())) < least));
      if (lane_id() == lane) result = of_lane;
    }
    return without_hidden(x, result, least);
  }
  // hits_unrolled() with fewer registers, where the tile is in shared memory.
  __device__ __forceinline__ u32 hits_rolled(READER& x, float least) {
    u32 result = 0;
#pragma unroll(Stream::kInBackground ? 1 : VECTORS)
    for (u32 u = 0; u < VECTORS; ++u)
      result |= hits_of_vector(x.stream().vector_again(x.tile(), u), least) << (u * kPerVector);
    x.forget_decoded();
    return without_hidden(x, result, least);
  }
  // Elements whose keys are >= key. With 32 warps on a multiprocessor there are too few registers to UNROLL.
  template <bool UNROLL>
  __device__ __forceinline__ u32 hits_of_key(READER& x, u32 key) {
    const float least = __uint_as_float(bits_of_key(key));
    return UNROLL ? hits_unrolled(x, least) : hits_rolled(x, least);
  }
  // Drops the elements that the mask hides, unless even -inf is a hit.
  __device__ __forceinline__ u32 without_hidden(const READER& x, u32 hits, float least) const {
    if (!kHasMask) return hits;
    return hits & (-FUSED_TOPK_INFINITY < least ? x.allowed() : ~0u);
  }

  // equal: elements whose key is `bound`. Returns the first k of all lanes' in the order of tokens. Raises the threshold to the
  // last of them. All 32 lanes call it.
  template <class GROUP>
  __device__ __forceinline__ u32 first_of(const READER& x, u32 equal, u32 bound, Candidates<GROUP>& candidates) {
    const u32 k = candidates.k();
    u32 kept = 0;
    u32 before = 0;
#pragma unroll 1
    for (u32 first = 0; first < RowTile::kPerLane && before < k; first += kPerVector) {
      u32 of_vector = equal & (((1u << kPerVector) - 1) << first);
      const u32 with_own = before + warp_inclusive_sum(u32(__popc(of_vector)));
      before = __shfl_sync(kAllLanes, with_own, kWarpSize - 1);
      for (u32 excess = with_own > k ? with_own - k : 0; excess != 0 && of_vector != 0; --excess)
        of_vector &= ~(1u << (31 - __clz(of_vector)));
      kept |= of_vector;
    }
    const u32 last = kept == 0 ? 0 : 31 - __clz(kept);
    const u32 last_index = warp_max(kept == 0 ? 0 : x.tile().index(last / kPerVector, last % kPerVector));
    candidates.raise_to(make_candidate(bound, last_index));
    candidates.exchange_with_other_warps();
    return kept;
  }

  // Stores the lane's elements `todo`. Returns false if the candidates are full. All 32 lanes call it.
  template <class GROUP>
  __device__ __forceinline__ bool store(READER& x, u32 todo, Candidates<GROUP>& candidates) {
    u32 place;
    const bool is_enough = candidates.reserve(__popc(todo), place);
    // A lane's only hit must be its maximum.
    const bool is_maximum =
        (!Stream::kInBackground || Stream::kInPlace) && (todo & (todo - 1)) == 0 && offered_of_tile_ == 0;
    if (FOR_MANY && is_enough) {
      // Many hits are stored sooner if every element is taken from the registers in turn than if each is read again.
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u)
#pragma unroll
        for (u32 e = 0; e < kPerVector; ++e) {
          const u32 is_hit = todo >> (u * kPerVector + e) & 1;
          const u64 candidate = make_candidate(order_key(x.choosable(u, e)), x.tile().index(u, e));
          if (is_hit) candidates.store_reserved(place, candidate);
          place += is_hit;
        }
      offered_of_tile_ |= todo;
    } else {
      for (; todo != 0; todo &= todo - 1) {
        const u32 bit = __ffs(todo) - 1;
        const u32 index = x.tile().index(bit / kPerVector, bit % kPerVector);
        const u32 key = is_maximum ? order_key(x.lane_max()) : x.key_again(index, bit);
        if (!candidates.store(place++, make_candidate(key, index))) break;
        offered_of_tile_ |= 1u << bit;
      }
    }
    // The lanes meet again. Otherwise they would run all that follows one after the other.
    __syncwarp();
    return is_enough;
  }

  template <class GROUP>
  __device__ __forceinline__ void best_keys(READER& x, u32 (&keys)[kSets], KthBound<GROUP>& bound, bool is_first) {
#pragma unroll
    for (u32 i = 0; i < kSets; ++i) keys[i] = order_key(set_maximum(x, i));
    x.forget_decoded();
    if constexpr (FOR_MANY) bound.add_earlier(keys, is_first);
  }
  // The greatest of set i of the lane's elements.
  static __device__ __forceinline__ float set_maximum(const READER& x, u32 i) {
    constexpr u32 kOfVector = kSets / VECTORS;
    float greatest = x.choosable(i / kOfVector, i % kOfVector);
#pragma unroll
    for (u32 e = i % kOfVector + kOfVector; e < kPerVector; e += kOfVector)
      greatest = max_nan(greatest, x.choosable(i / kOfVector, e));
    return greatest;
  }

  u32 offered_of_tile_;  // the lane's elements of the tile that it has stored
  u32 offered_;          // lanes with hits since the warp last updated the bound
  float best_;           // the greatest logit that the lane has read
};

}  // namespace fused_topk
