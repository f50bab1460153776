// SPDX-License-Identifier: Apache-2.0
// One read of a row: the paper's Algorithm 4, a tile at a time.
//
// A row is cut into parts, each read by one warp, tile by tile; where the cuts are depends on V alone. For every tile
// the warp updates its part's (m, d) and offers what may be among the best k to its group's candidates:
//
//     m' = max(m, tile)     d' = d e^((m - m')/T) + sum e^((x - m')/T)     T' = best k of T and the tile
//
// Elements are never rescaled one by one, and most are compared with the threshold many at a time, through their maximum.
// Comes after row.cuh, bound.cuh and candidates.cuh.
#pragma once

#include "bound.cuh"
#include "candidates.cuh"
#include "problem.cuh"

namespace fused_topk {

// FOR_MANY: also keeps what proves a bound for a large k: of each lane the bests of kSets sets of elements.
template <class FORMAT, u32 VECTORS, bool ALIGNED, u32 MASK, u32 AHEAD, bool IN_PLACE, bool FOR_MANY>
class RowScan {
 public:
  using Stream = TileStream<FORMAT, VECTORS, ALIGNED, AHEAD, IN_PLACE>;
  using RowTile = typename Stream::RowTile;
  static constexpr u32 kPerVector = RowTile::kPerVector;
  static constexpr u32 kSets = 8;

  struct Shared {};  // what a warp keeps of its tiles

  // slots: [Stream::kWarpVectors], this warp's own
  __device__ __forceinline__ RowScan(const Problem& problem, u32 row, Vector* slots, Shared&)
      : RowScan(problem, row, slots) {}

  // In place: begins to fetch the warp's first tile before all else. Each tile comes with whether it is one.
  __device__ __forceinline__ void start_early(u32 first, bool is_first) {
    if constexpr (Stream::kInPlace) request(first, is_first);
  }
  // Begins to fetch the warp's first tiles, as many as can be on their way and are not.
  __device__ __forceinline__ void start(u32 first, bool is_first, u32 second, bool is_second) {
    if constexpr (Stream::kAhead > 0 && !Stream::kInPlace) request(first, is_first);
    if constexpr (Stream::kAhead == 2) request(second, is_second);
  }
  // What there is time for then.
  __device__ __forceinline__ void prepare(const Problem& problem, u32 row) {
    scale_ = kLog2E * problem.inverse_temperature(row);
    if constexpr (MASK != kNoMask) mask_ = problem.row_mask(row);
  }

  // log2(e) / T of the row.
  __device__ __forceinline__ float scale() const { return scale_; }
  __device__ __forceinline__ typename FORMAT::Bits raw_logit(u32 index) const { return stream_.raw_logit(index); }
  __device__ __forceinline__ u32 tiles() const { return (V_ - 1) / RowTile::kElements + 1; }

  // Asks for the tile after the next, or, if that is none, for nothing: the slot of the last tile read is free again.
  __device__ __forceinline__ void request(u32 tile, bool is_tile) {
    if (is_tile) {
      stream_.request(tile);
    } else {
      stream_.to_next_slot();
    }
  }

  // The tile read last.
  __device__ __forceinline__ u32 tile() const { return tile_.first / RowTile::kElements; }

  __device__ __forceinline__ void begin_part() { part_ = Normalizer{}; }

  // Takes the next requested tile and finds each lane's maximum. `next` is the warp's next after it, if it has one.
  __device__ __forceinline__ void read(u32 tile, u32 next, bool has_next) {
    stream_.take(tile_, tile, !has_next);
    if constexpr (Stream::kToRegisters) request(next, has_next);
    if constexpr (MASK != kNoMask) {
      allowed_ = 0;
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u)
        allowed_ |= mask_.template allowed<kPerVector>(tile_.index(u, 0), V_) << (u * kPerVector);
    }
    lane_max_ = -FUSED_TOPK_INFINITY;
#pragma unroll
    for (u32 u = 0; u < VECTORS; ++u) lane_max_ = max_nan(lane_max_, choosable_maximum(u));
    best_ = max_nan(best_, lane_max_);
    offered_of_tile_ = 0;
  }

  // Folds the tile into the part's (m, d). m is the same in every lane of the warp, so that the lanes' sums need no
  // exponentials to be added up.
  __device__ __forceinline__ void fold() {
    float tile_max = lane_max_;
    if constexpr (MASK == kMaskChoice) {
      tile_max = -FUSED_TOPK_INFINITY;
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u) tile_max = max_nan(tile_max, tile_.maximum(u));
    }
    const float m = max_nan(part_.m, warp_max(tile_max));
    const float base = reference_point(m);
    // (x - base) * scale as one multiply-add, x * scale - offset. What rounding took from the offset is the same for all
    // elements, and known exactly: it is put back into the sum.
    const float offset = base * scale_;
    const float lost = fmaf(base, scale_, -offset);
    tile_.forget_decoded();
#if __CUDA_ARCH__ >= 1000
    // Or the compiler keeps what the mask leaves of each element from when it found the maximum. NVRTC 12.9 then spills.
    if constexpr (MASK == kMaskBoth && !FOR_MANY && is_bfloat16(FORMAT())) keep_opaque(allowed_);
#endif
    // Four chains of additions, so that none waits for another.
    float d[4];
    if (fabsf(offset) < kLargestOffset) {
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u)
#pragma unroll
        for (u32 e = 0; e < kPerVector; ++e) {
          const float summand = exp2_approx(fmaf(normalized(u, e), scale_, -offset));
          d[e % 4] = u == 0 && e < 4 ? summand : d[e % 4] + summand;
        }
      d[0] = ((d[0] + d[1]) + (d[2] + d[3])) * exp2_approx(-lost);
    } else {
      // Infinite, NaN, or so large that `lost` would be too: rare, so short rather than quick.
      d[0] = 0.0f;
#pragma unroll 1
      for (u32 bit = 0; bit < RowTile::kPerLane; ++bit)
        if (const u32 index = tile_.index(bit / kPerVector, bit % kPerVector); index < V_)
          d[0] += exp2_approx((normalized_again(index, bit) - base) * scale_);
    }
    part_ = {m, part_.d * exp2_approx((part_.m - base) * scale_) + d[0]};
    tile_.forget_decoded();
  }

  // (m, d) of the part, the same in every lane. All 32 lanes call it.
  __device__ __forceinline__ Normalizer end_part() const { return {part_.m, warp_sum(part_.d)}; }

  // A key that as many of what the warp has read as `bound` wants are >=. If those are many, of this tile, and FOR_MANY of
  // those for which it was called before.
  template <class GROUP>
  __device__ __forceinline__ u32 proven(KthBound<GROUP>& bound, bool is_first = false) {
    if (!bound.needs_many()) return bound.of_warp(order_key(best_));
    u32 keys[kSets];
    best_keys(keys, bound, is_first);
    return bound.of_warp(keys);
  }
  // FOR_MANY: publishes it anew, early, so that the other warps find it when they offer their tiles.
  template <class GROUP>
  __device__ __forceinline__ void update(KthBound<GROUP>& bound) {
    if (!FOR_MANY || offered_ < bound.worth()) return;
    offered_ = 0;
    bound.update(proven(bound));
  }

  // Offers the tile's elements that may be among the best. False if the candidates are full: to be called again after a
  // cut. has_next: whether the warp has another tile, which a tighter bound would serve. All 32 lanes call it.
  template <class GROUP>
  __device__ __forceinline__ bool offer(Candidates<GROUP>& candidates, KthBound<GROUP>& bound, bool has_next) {
    float least = candidates.least();
    u32 lanes = lanes_with_hits(least);
    if (lanes == 0) return true;
    if (candidates.is_at_token()) {
      if (!candidates.has_room_from(tile_.first)) return true;
      least = candidates.least_from(tile_.first);
      lanes = lanes_with_hits(least);
      if (lanes == 0) return true;
    }
    offered_ += __popc(lanes);
    // FOR_MANY: update() has published what the tile adds.
    const bool is_worth = has_next && offered_ >= bound.worth() && !bound.needs_many();
    if (FOR_MANY || is_worth) {
      if (!FOR_MANY) bound.update(proven(bound));
      if (candidates.raise(bound.latest())) least = candidates.least();
      lanes = lanes_with_hits(least);
      if (lanes == 0) return true;
      if (!FOR_MANY) offered_ = __popc(lanes);
    }
    u32 todo = hits(lanes, least) & ~offered_of_tile_;
    if (V_ - tile_.first < RowTile::kElements) todo &= RowTile::is_element(tile_.first, V_);
    if (__popc(lanes) >= kManyLanes && warp_sum(u32(__popc(todo))) > candidates.k() + kFewMore)
      todo = best_of(todo, candidates);
    u32 place;
    const bool is_enough = candidates.reserve(__popc(todo), place);
    // If it is one, it is the lane's maximum.
    const bool is_maximum =
        (!Stream::kInBackground || Stream::kInPlace) && (todo & (todo - 1)) == 0 && offered_of_tile_ == 0;
    if (FOR_MANY && is_enough) {
      // From the registers, all in turn: many are stored sooner so than each read again.
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u)
#pragma unroll
        for (u32 e = 0; e < kPerVector; ++e) {
          const u32 is_hit = todo >> (u * kPerVector + e) & 1;
          const u64 candidate = make_candidate(order_key(choosable(u, e)), tile_.index(u, e));
          if (is_hit) candidates.store_reserved(place, candidate);
          place += is_hit;
        }
      offered_of_tile_ |= todo;
    } else {
      for (; todo != 0; todo &= todo - 1) {
        const u32 bit = __ffs(todo) - 1;
        const u32 index = tile_.index(bit / kPerVector, bit % kPerVector);
        const u32 key = is_maximum ? order_key(lane_max_) : key_again(index, bit);
        if (!candidates.store(place++, make_candidate(key, index))) break;
        offered_of_tile_ |= 1u << bit;
      }
    }
    // Apart, lanes would run all that follows one after the other.
    __syncwarp();
    return is_enough;
  }

 protected:
  __device__ __forceinline__ RowScan(const Problem& problem, u32 row, Vector* slots)
      : stream_(static_cast<const typename FORMAT::Bits*>(problem.logits) + problem.logits_offset(row), problem.V,
                slots),
        V_(problem.V),
        offered_(0),
        best_(-FUSED_TOPK_INFINITY) {}

  // The lanes of which an element may be among the best. `not less` instead of `greater or equal`: a NaN must pass.
  __device__ __forceinline__ u32 lanes_with_hits(float least) const {
    return __ballot_sync(kAllLanes, !(lane_max_ < least));
  }

  // Which of the lane's elements may be, if it is one of `lanes`: bit u * n + e for element e of vector u. The 32 lanes call
  // it together.
  __device__ __forceinline__ u32 hits(u32 lanes, float least) {
    if constexpr (Stream::kInBackground)
      if (__popc(lanes) <= kFewLanes) return hits_of_few(lanes, least);
    return hits(least);
  }
  // Few of a lane's, usually, so that a tile in shared memory is compared vector by vector, where its maximum says so: registers
  // cannot be indexed. Of four logits the maximum costs as much as comparing them.
  __device__ __forceinline__ u32 hits(float least) {
    if constexpr (!Stream::kInBackground || (Stream::kInPlace && kPerVector == 4)) return hits_of_all(least);
    u32 vectors = 0;
#pragma unroll
    for (u32 u = 0; u < VECTORS; ++u)
      if (!(choosable_maximum(u) < least)) vectors |= 1u << u;
    u32 result = 0;
    for (; vectors != 0; vectors &= vectors - 1) {
      const u32 u = __ffs(vectors) - 1;
      result |= not_below(stream_.vector_again(tile_, u), least) << (u * kPerVector);
    }
    return MASK == kNoMask ? result : result & allowed_or_lowest(least);
  }

  // Of a tile in shared memory: all 32 lanes look at one lane's elements, one each, then at the next lane's.
  __device__ __forceinline__ u32 hits_of_few(u32 lanes, float least) const {
    static_assert(RowTile::kPerLane == kWarpSize, "one for each lane");
    u32 result = 0;
#pragma unroll 1
    for (; lanes != 0; lanes &= lanes - 1) {
      const u32 lane = __ffs(lanes) - 1;
      const u32 of_lane = __ballot_sync(kAllLanes, !(FORMAT::decode(stream_.element_of_lane(lane, lane_id())) < least));
      if (lane_id() == lane) result = of_lane;
    }
    return MASK == kNoMask ? result : result & allowed_or_lowest(least);
  }

  // The same of all elements.
  __device__ __forceinline__ u32 not_below(float least) {
    u32 result = 0;
#pragma unroll(Stream::kInBackground ? 1 : VECTORS)
    for (u32 u = 0; u < VECTORS; ++u) result |= not_below(stream_.vector_again(tile_, u), least) << (u * kPerVector);
    tile_.forget_decoded();
    return MASK == kNoMask ? result : result & allowed_or_lowest(least);
  }
  // Of a vector. `not less` instead of `greater or equal`: a NaN must pass.
  static __device__ __forceinline__ u32 not_below(const Vector& vector, float least) {
    u32 result = 0;
#pragma unroll
    for (u32 e = 0; e < kPerVector; ++e)
      if (!(FORMAT::decode(vector.words, e) < least)) result |= 1u << e;
    return result;
  }
  // hits(), every element compared.
  __device__ __forceinline__ u32 hits_of_all(float least) {
    u32 result = 0;
#pragma unroll
    for (u32 u = 0; u < VECTORS; ++u) result |= not_below(tile_.vector(u), least) << (u * kPerVector);
    tile_.forget_decoded();
    return MASK == kNoMask ? result : result & allowed_or_lowest(least);
  }
  // AT_ONCE takes registers that a warp of 32 on a multiprocessor does not have.
  template <bool AT_ONCE>
  __device__ __forceinline__ u32 not_below_key(u32 key) {
    const float least = __uint_as_float(bits_of_key(key));
    return AT_ONCE ? hits_of_all(least) : not_below(least);
  }

  // Of the lane's elements `todo`, those that can be among the best k of all lanes', and few more; raises the threshold to
  // what they prove. Where logits ascend, every tile beats all before it, and where they are equal, none is worse than any:
  // this is what keeps either from filling the candidates. All 32 lanes call it.
  template <class GROUP, bool AT_ONCE = !Stream::kInBackground || (Stream::kInPlace && !GROUP::kIsWarp)>
  __device__ __forceinline__ u32 best_of(u32 todo, Candidates<GROUP>& candidates) {
    const float greatest_logit = warp_max(lane_max_);
    // A NaN would be counted as not below anything.
    if (greatest_logit != greatest_logit) return todo;
    const u32 k = candidates.k();
    const u32 greatest = order_key(greatest_logit);
    // Another warp may have looked at better ones.
    candidates.exchange_threshold();
    if (make_candidate(greatest, tile_.first) <= candidates.threshold()) return 0;
    // Known so far: the threshold, and what the lanes' maxima prove, all 32 of them, or k where these are sooner found than
    // bisected.
    const u32 lane_key = order_key(lane_max_);
    u32 least = key_of(candidates.threshold() + 1);
    if (k <= kWarpSize) least = max(least, warp_min(lane_key));
    if (k <= kWarpSize / 2) least = max(least, nth_greatest(lane_key, k));
    // Bisection from the first bit in which they differ.
    const u32 below_differing = greatest == least ? 0 : ~0u >> __clz(greatest ^ least);
    u32 bound = greatest & ~below_differing;
    u32 count = ~0u;
#pragma unroll 1
    for (u32 bit = below_differing - below_differing / 2; bit >= FORMAT::kLowestKeyBit && count > k + kFewMore;
         bit /= 2) {
      const u32 trial = bound | bit;
      if (trial > greatest) continue;
      if (trial > least) {
        const u32 passing = warp_sum(u32(__popc(todo & not_below_key<AT_ONCE>(trial))));
        if (passing < k) continue;
        count = passing;
      }
      bound = trial;
    }
    // Of a negative logit of 16 bits, the key's lowest bits are set.
    if (bound < kZeroKey) bound |= FORMAT::kLowestKeyBit - 1;
    todo &= not_below_key<AT_ONCE>(bound);
    candidates.raise(bound);
    if (warp_sum(u32(__popc(todo))) <= k + kFewMore) {
      candidates.exchange_threshold();
      return todo;
    }

    // Too many are equal to the k-th best: the first k of those, in the order of tokens, are enough.
    const u32 greater = bound == greatest ? 0 : todo & not_below_key<AT_ONCE>(bound + 1);
    const u32 equal = todo & ~greater;
    u32 kept = 0;
    u32 before = 0;
#pragma unroll 1
    for (u32 first = 0; first < RowTile::kPerLane && before < k; first += kPerVector) {
      u32 of_vector = equal & (((1u << kPerVector) - 1) << first);
      const u32 with_own = before + warp_inclusive_sum(__popc(of_vector));
      before = __shfl_sync(kAllLanes, with_own, kWarpSize - 1);
      // The last of them are too many.
      for (u32 excess = with_own > k ? with_own - k : 0; excess != 0 && of_vector != 0; --excess)
        of_vector &= ~(1u << (31 - __clz(of_vector)));
      kept |= of_vector;
    }
    const u32 last = kept == 0 ? 0 : 31 - __clz(kept);
    const u32 last_index = warp_max(kept == 0 ? 0 : tile_.index(last / kPerVector, last % kPerVector));
    candidates.raise_to(make_candidate(bound, last_index));
    candidates.exchange_threshold();
    return greater | kept;
  }

  __device__ __forceinline__ bool is_allowed(u32 u, u32 e) const {
    return MASK == kNoMask || (allowed_ >> (u * kPerVector + e)) & 1;
  }
  // With a mask: the lane's elements that it allows, and if even -inf may be among the best, those that it hides.
  __device__ __forceinline__ u32 allowed_or_lowest(float least) const {
    return -FUSED_TOPK_INFINITY < least ? allowed_ : ~0u;
  }

  template <class GROUP>
  __device__ __forceinline__ void best_keys(u32 (&keys)[kSets], KthBound<GROUP>& bound, bool is_first) {
#pragma unroll
    for (u32 i = 0; i < kSets; ++i) keys[i] = order_key(set_maximum(i));
    tile_.forget_decoded();
    if constexpr (FOR_MANY) bound.add_earlier(keys, is_first);
  }
  // The greatest of set i of the lane's elements of the tile: four of a vector.
  __device__ __forceinline__ float set_maximum(u32 i) const {
    constexpr u32 kOfVector = kSets / VECTORS;
    float greatest = choosable(i / kOfVector, i % kOfVector);
#pragma unroll
    for (u32 e = i % kOfVector + kOfVector; e < kPerVector; e += kOfVector)
      greatest = max_nan(greatest, choosable(i / kOfVector, e));
    return greatest;
  }

  // Elements read once more, from where the tile came.
  __device__ __forceinline__ float logit_again(u32 index) const {
    return FORMAT::decode(stream_.logit_again(index, tile_));
  }
  __device__ __forceinline__ u32 key_again(u32 index, u32 bit) const {
    if (MASK != kNoMask && !((allowed_ >> bit) & 1)) return kNegativeInfinityKey;
    return order_key(logit_again(index));
  }
  __device__ __forceinline__ float normalized_again(u32 index, u32 bit) const {
    if (MASK == kMaskBoth && !((allowed_ >> bit) & 1)) return -FUSED_TOPK_INFINITY;
    return logit_again(index);
  }
  // The logit as the choice of tokens sees it, and as (m, d) sees it.
  __device__ __forceinline__ float choosable(u32 u, u32 e) const {
    return is_allowed(u, e) ? tile_.logit(u, e) : -FUSED_TOPK_INFINITY;
  }
  __device__ __forceinline__ float normalized(u32 u, u32 e) const {
    return MASK == kMaskChoice ? tile_.logit(u, e) : choosable(u, e);
  }
  __device__ __forceinline__ float choosable_maximum(u32 u) const {
    if constexpr (MASK == kNoMask) return tile_.maximum(u);
    float greatest = choosable(u, 0);
#pragma unroll
    for (u32 e = 1; e < kPerVector; ++e) greatest = max_nan(greatest, choosable(u, e));
    return greatest;
  }

  // With hits in no more lanes than this, it is quicker to go from lane to lane.
  static constexpr u32 kFewLanes = 4;
  // With hits in fewer lanes than this, a tile's own best are not worth looking for.
  static constexpr u32 kManyLanes = 24;
  // So many candidates more than k are no reason to look for the best of them.
  static constexpr u32 kFewMore = 32;
  Stream stream_;
  u32 V_;
  float scale_;
  RowMask mask_;
  RowTile tile_;
  u32 allowed_;          // the lane's elements of the tile that the mask allows
  u32 offered_of_tile_;  // those that have been offered
  u32 offered_;          // lanes' hits since the warp last updated the bound
  float lane_max_;       // of the tile
  float best_;           // the greatest logit that the lane has read
  Normalizer part_;      // m: of the part so far; d: of this lane's share of it
};

// The tiles that a group reads, in the order in which it does: the warps take turns, a part each. A turn has its tile's number,
// or, of the last tiles, that many before the first.
//
// For those come first (KernelChoice.lead of fused_topk/kernel_choice.py): where logits ascend, not every tile then beats all
// before it, for the best are among the first tiles whichever way they are sorted.
struct TileOrder {
  u32 first, parts;  // the group's
  u32 begin, end;    // turns
  u32 last_in;       // tiles of a part - 1
  u32 to_next;       // from the last tile of a part to the warp's next

  // Where a warp begins: known before all else is.
  template <class GROUP>
  static __device__ __forceinline__ u32 first_tile(const Problem& problem, u32 first_part, u32 last_part) {
    const u32 part = GROUP::warp() - problem.lead;
    return (part + (GROUP::warp() < problem.lead ? last_part : first_part)) << problem.tiles_per_part_log2;
  }

  // tiles: of the row
  template <class GROUP>
  static __device__ __forceinline__ TileOrder of(const Problem& problem, u32 first_part, u32 last_part, u32 tiles) {
    const u32 log2 = problem.tiles_per_part_log2, lead = problem.lead, first = first_part << log2;
    return {first,
            last_part - first_part,
            first - lead,
            min(last_part << log2, tiles) - lead,
            (1u << log2) - 1,
            ((GROUP::kWarps - 1) << log2) + 1};
  }

  __device__ __forceinline__ u32 tile(u32 turn) const { return is_before(turn, first) ? turn + parts : turn; }
  __device__ __forceinline__ bool has(u32 turn) const { return is_before(turn, end); }
  __device__ __forceinline__ bool ends_part(u32 turn) const { return (turn & last_in) == last_in || turn + 1 == end; }
  __device__ __forceinline__ u32 after(u32 turn) const { return turn + ((turn & last_in) == last_in ? to_next : 1); }

 private:
  // Modulo 2^32.
  static __device__ __forceinline__ bool is_before(u32 turn, u32 other) { return int(turn) < int(other); }
};

// Reads parts [first_part, last_part) of a row with all threads of a group and leaves the best k of them (and a few
// more, unsorted) in `candidates`; a barrier has followed the last add. `finish_part(part, normalizer)` is called once
// for each part, by the whole warp that read it.
//
// The warps run free of each other but for the first bound and for cuts.
template <class GROUP, class SCAN, class FINISH_PART>
__device__ __forceinline__ void scan_parts(const Problem& problem, u32 row, SCAN& scan, u32 first_part, u32 last_part,
                                           u32 k, Candidates<GROUP>& candidates, KthBound<GROUP>& bound,
                                           FINISH_PART finish_part) {
  const TileOrder order = TileOrder::of<GROUP>(problem, first_part, last_part, scan.tiles());
  const u32 log2 = problem.tiles_per_part_log2;
  u32 turn = order.begin + (GROUP::warp() << log2);
  const auto request = [&](u32 ahead) { scan.request(order.tile(ahead), order.has(ahead)); };
  const auto read = [&](u32 next) { scan.read(order.tile(turn), order.tile(next), order.has(next)); };
  // A tile that stays in shared memory is folded after its candidates have been offered: few warps have any to offer, and the
  // others' exponentials then keep no one waiting.
  constexpr bool kOffersFirst = SCAN::Stream::kInPlace && !GROUP::kIsWarp;
  const u32 second = order.after(turn);
  scan.start(order.tile(turn), order.has(turn), order.tile(second), order.has(second));
  scan.prepare(problem, row);
  candidates.restart(k);
  bool is_open = order.has(turn);
  scan.begin_part();
  if (is_open) {
    read(second);
    bound.publish(scan.proven(bound, true));
    if constexpr (!kOffersFirst) scan.fold();
  } else {
    bound.abstain();
  }
  GROUP::sync();
  candidates.raise(bound.found());
  while (true) {
    while (is_open) {
      if (!scan.offer(candidates, bound, GROUP::kIsWarp || order.has(order.after(turn)))) break;
      // What follows is worked out anew: kept through the offer, it would cost registers.
      keep_opaque(turn);
      if constexpr (kOffersFirst) scan.fold();
      const u32 next = order.after(turn);
      const u32 after_next = order.after(next);
      if constexpr (SCAN::Stream::kInBackground) request(SCAN::Stream::kAhead == 1 ? next : after_next);
      const bool ends_part = order.ends_part(turn);
      if (ends_part) finish_part(scan.tile() >> log2, scan.end_part());
      turn = next;
      is_open = order.has(turn);
      if (!is_open) break;
      read(after_next);
      scan.update(bound);
      if (ends_part) scan.begin_part();
      if constexpr (!kOffersFirst) scan.fold();
    }
    // Whoever still has something to offer has found the candidates full.
    if (!GROUP::any(is_open)) break;
    candidates.cut(candidates.enough());
  }
}

}  // namespace fused_topk
