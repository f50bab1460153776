// SPDX-License-Identifier: Apache-2.0
// The best k of what a group has seen: a buffer of candidates in shared memory, and a threshold that all of them pass.
//
// Algorithm 4 of the paper keeps a sorted list of k in each thread and inserts element by element. Here one unsorted
// buffer serves the whole group. Almost every element fails one comparison with the threshold:
//   - The threshold is a proven lower bound of the k-th best (bound.cuh). A candidate below it can be dropped.
//   - Any warp appends what passes, at any time (add).
//   - If the buffer is full, the group cuts it to little more than the best k (cut). This raises the threshold.
// The answer is exact whatever the bound. A loose bound costs time, never a candidate.
#pragma once

#include "bound.cuh"
#include "sort.cuh"

namespace fused_topk {

// The part of Candidates in shared memory.
template <class GROUP>
struct CandidatesShared {
  u64 threshold;  // the greatest threshold that any warp has shared
  u32 count;      // slots reserved so far; may exceed the capacity
  typename GROUP::Words words;
  BucketsShared<GROUP> buckets;
};

template <class GROUP>
class Candidates {
 public:
  using Shared = CandidatesShared<GROUP>;
  // Slots of each thread. They limit k: a cut must leave room.
  static constexpr u32 kOwn = GROUP::kIsWarp ? 4 : GROUP::kWarps <= 8 ? 2 : 8;
  static constexpr u32 kCapacity = kOwn * GROUP::kThreads;
  // Has room for the sorted best k behind the candidates that they are sorted from, which are a few more than k.
  static constexpr u32 kSlots = kCapacity + (GROUP::kForMany ? kCapacity / 8 : 0);

  // slots: [kSlots], shared memory, aligned to 16 bytes. k <= kCapacity / 2.
  __device__ __forceinline__ Candidates(u64* slots, Shared& shared) : slots_(slots), shared_(shared) {}

  // Empties the buffer and sets k. All threads call it, after a barrier that follows the last use. Another barrier must
  // follow before the first add.
  __device__ __forceinline__ void restart(u32 k) {
    k_ = k;
    set_threshold(kNoCandidate);
    if (GROUP::thread() == 0) {
      shared_.count = 0;
      shared_.threshold = kNoCandidate;
    }
  }

  // Only candidates greater than the threshold can be among the best k. It may differ between warps.
  __device__ __forceinline__ u64 threshold() const { return threshold_; }
  // No smaller logit can be among the best k. NaN if there is no threshold, or if the threshold is a NaN: no logit is
  // less than NaN.
  __device__ __forceinline__ float least() const { return least_; }
  // Whether the threshold is one token's candidate, rather than a bound of the logits.
  __device__ __forceinline__ bool is_at_token() const { return u32(threshold_) != ~0u; }
  // For the tokens from `first` on: whether any of them, even a NaN, can be among the best k; and the least logit that
  // can. Behind the threshold's own token an equal logit loses, because its index is greater.
  __device__ __forceinline__ bool has_room_from(u32 first) const { return make_candidate(kNanKey, first) > threshold_; }
  __device__ __forceinline__ float least_from(u32 first) const {
    if (first <= index_of(threshold_)) return least_;
    return __uint_as_float(bits_of_key(min(key_of(threshold_), kPositiveInfinityKey - 1) + 1));
  }
  __device__ __forceinline__ u32 k() const { return k_; }
  // [kCapacity]. The first stored() are in use, in no order.
  __device__ __forceinline__ const u64* slots() const { return slots_; }
  // The number of candidates. Needs a barrier after the last add.
  __device__ __forceinline__ u32 stored() const { return min(shared_.count, kCapacity); }
  // The number that a cut may leave. Each candidate beyond k saves the cut some steps.
  __device__ __forceinline__ u32 enough() const { return k_ + (kCapacity - k_) / 4; }

  // Raises the threshold so that only keys >= bound pass. Returns false if the threshold was already as high.
  __device__ __forceinline__ bool raise(u32 bound) { return bound > kNoKey && raise_to(u64(bound) << 32); }
  // Raises the threshold so that only candidates >= least pass.
  __device__ __forceinline__ bool raise_to(u64 least) {
    const bool is_closer = least - 1 > threshold_;
    if (is_closer) set_threshold(least - 1);
    return is_closer;
  }
  // Shares this warp's threshold with the other warps, and takes theirs if it is higher: each threshold holds for all
  // warps. All 32 lanes of a warp call it, at any time.
  __device__ __forceinline__ void exchange_with_other_warps() {
    if constexpr (GROUP::kIsWarp) return;
    u64 others = kNoCandidate;
    if (lane_id() == 0) others = raise_in_shared(&shared_.threshold, threshold_);
    others = __shfl_sync(kAllLanes, others, 0);
    if (others > threshold_) set_threshold(others);
  }

  // Appends the lanes' candidates, up to N of each lane. Sets to kNoCandidate what it has stored; the rest is to be
  // added after a cut. Returns false if any lane has a rest. All 32 lanes of a warp call it, at any time.
  template <u32 N>
  __device__ __forceinline__ bool add(u64 (&own)[N]) {
    bool is_full = false;
    // A few at a time, to save registers.
    constexpr u32 kAtATime = N < 4 ? N : 4;
#pragma unroll
    for (u32 first = 0; first < N; first += kAtATime) {
      u32 with[kAtATime];
      u32 count = 0;
#pragma unroll
      for (u32 c = 0; c < kAtATime; ++c) {
        with[c] = first + c < N ? __ballot_sync(kAllLanes, own[first + c] > threshold_) : 0;
        count += __popc(with[c]);
      }
      if (count == 0) continue;
      u32 slot = 0;
      if (lane_id() == 0) slot = add_to_shared(&shared_.count, count);
      slot = __shfl_sync(kAllLanes, slot, 0);
      is_full |= slot + count > kCapacity;
#pragma unroll
      for (u32 c = 0; c < kAtATime && first + c < N; ++c) {
        const u32 i = slot + lanes_before(with[c]);
        if (own[first + c] > threshold_ && i < kCapacity) {
          slots_[i] = own[first + c];
          own[first + c] = kNoCandidate;
        }
        slot += __popc(with[c]);
      }
    }
    return !is_full;
  }

  // Reserves `count` slots for each lane. `place` is the lane's first slot, for store(). Returns false if the buffer is
  // too small: some places are then past its end. All 32 lanes of a warp call it, at any time.
  __device__ __forceinline__ bool reserve(u32 count, u32& place) {
    const u32 lanes = __ballot_sync(kAllLanes, count != 0);
    if (lanes == 0) return true;
    u32 before = lanes_before(lanes);
    u32 total = __popc(lanes);
    if (__any_sync(kAllLanes, count > 1)) {
      const u32 with_own = warp_inclusive_sum(count);
      before = with_own - count;
      total = __shfl_sync(kAllLanes, with_own, kWarpSize - 1);
    }
    u32 first = 0;
    if (lane_id() == 0) first = add_to_shared(&shared_.count, total);
    first = __shfl_sync(kAllLanes, first, 0);
    place = first + before;
    return first + total <= kCapacity;
  }
  // Returns false if the place is past the end. The candidate must then be reserved again after a cut.
  __device__ __forceinline__ bool store(u32 place, u64 candidate) {
    if (place < kCapacity) slots_[place] = candidate;
    return place < kCapacity;
  }

  // store() for a place that is known to be within the buffer.
  __device__ __forceinline__ void store_reserved(u32 place, u64 candidate) { slots_[place] = candidate; }

  // A key that at least n stored candidates reach, kNoKey if unknown. Each lane's best key proves it; for larger n,
  // eight keys of each lane. All 32 lanes of a warp call it, after a barrier that follows the last add.
  __device__ __forceinline__ u32 nth_stored(u32 n) const {
    const u32 count = stored();
    if (n > kWarpSize / 2) {
      u32 keys[8];
#pragma unroll
      for (u32 c = 0; c < 8; ++c) {
        const u32 i = c * kWarpSize + lane_id();
        keys[c] = i < count ? key_of(slots_[i]) : kNoKey;
      }
      return nth_greatest(keys, n);
    }
    u32 best = kNoKey;
    for (u32 i = lane_id(); i < count; i += kWarpSize) best = max(best, key_of(slots_[i]));
    return nth_greatest(best, n);
  }

  // Drops all but the best candidates: at least k, and at most `enough`. Raises the threshold so that no worse
  // candidate passes. All threads call it, after a barrier that follows the last add. Ends with a barrier.
  __device__ __forceinline__ void cut(u32 enough) {
    take_highest_threshold();
    u64 own[kOwn];
    take(own);
    const u64 least = lower_bound(own, enough);
    if (least > kNoCandidate) raise_to(least);
    put_back(own);
  }

  // Leaves at most `length` candidates, the best ones. First drops what the threshold forbids by now, which is cheap.
  // Returns the number left. Called like cut().
  __device__ __forceinline__ u32 shorten(u32 length) {
    if (stored() > length) {
      exchange_with_other_warps();
      u64 own[kOwn];
      take(own);
      put_back(own);
      if (stored() > length) cut(length);
    }
    return stored();
  }

  // Writes every candidate that may be among the best k to `list` [length >= k], padded with kNoCandidate. Returns a
  // key that m of them reach, m <= k, or kNoKey if unknown. All threads call it, after a barrier that follows the last
  // add. restart() must follow.
  __device__ __forceinline__ u32 hand_over(u64* list, u32 length, u32 m, Spread spread) {
    while (true) {
      u64 own[kOwn];
      take(own);
      const Buckets<GROUP, kOwn> buckets(own, stored(), k_, m, spread, shared_.buckets);
      const u32 needed = buckets.needed();
      if (needed <= length) {
#pragma unroll
        for (u32 c = 0; c < kOwn; ++c) {
          if (own[c] == kNoCandidate) continue;
          const u32 i = buckets.place(c);
          if (i < needed) list[i] = own[c];
        }
        for (u32 i = needed + GROUP::thread(); i < length; i += GROUP::kThreads) list[i] = kNoCandidate;
        return buckets.mth_key();
      }
      cut(length);
    }
  }

  // The best k, best first, in shared memory. spread: of the candidates, for a group that sorts by buckets. All threads
  // call it, after a barrier that follows the last add. Ends with a barrier. Nothing may be added until restart().
  __device__ __forceinline__ const u64* sort(Spread spread) {
    u64* const sorted = slots_ + kSlots - kCapacity / 2;
    // The usual case comes first: its code is fetched as it runs, and a jump over other code costs time.
    if (stored() <= kCountingMax) {
      sort_by_counting<GROUP>(slots_, stored(), k_, sorted);
    } else if constexpr (GROUP::kWarps <= 8) {
      cut(kCountingMax);
      sort_by_counting<GROUP>(slots_, stored(), k_, sorted);
    } else {
      constexpr u32 kRoom = kSlots - kCapacity / 2 - 1;  // and one more
      while (!sort_by_buckets<GROUP, kOwn>(slots_, stored(), k_, sorted, kRoom, spread, shared_.buckets)) {
        if constexpr (GROUP::kForMany) {
          static_assert(kCapacity == 2 * MergeSort<GROUP>::kHalf, "sorts all, of which the best half may be wanted");
          MergeSort<GROUP>::sort(slots_, stored());
          return slots_;
        }
        cut(kRoom);
      }
    }
    return sorted;
  }

 private:
  // Up to this many candidates, sorting by counting is the quickest. The sorted candidates take the last slots.
  static constexpr u32 kCountingMax = GROUP::kWarps <= 8 ? kCapacity / 2 : 256;

  __device__ __forceinline__ void set_threshold(u64 threshold) {
    threshold_ = threshold;
    // The first key that can still pass.
    least_ = __uint_as_float(bits_of_key(key_of(threshold + 1)));
  }

  // Takes the highest threshold of all warps: what one warp has proven holds for all. All threads call it. A barrier
  // must precede the next use of the words.
  __device__ __forceinline__ void take_highest_threshold() {
    if constexpr (GROUP::kIsWarp) return;
    const u32 greatest = GROUP::maximum(key_of(threshold_), shared_.words, 0);
    const u32 rest = GROUP::maximum(key_of(threshold_) == greatest ? u32(threshold_) : 0, shared_.words, 1);
    set_threshold(u64(greatest) << 32 | rest);
  }

  // take() empties the slots into the threads' registers. put_back() stores what passes the threshold.
  __device__ __forceinline__ void take(u64 (&own)[kOwn]) {
    const u32 count = stored();
#pragma unroll
    for (u32 c = 0; c < kOwn; ++c) {
      const u32 i = c * GROUP::kThreads + GROUP::thread();
      own[c] = i < count && slots_[i] > threshold_ ? slots_[i] : kNoCandidate;
    }
  }
  __device__ __forceinline__ void put_back(u64 (&own)[kOwn]) {
    // Every thread has read the count before it is reset.
    GROUP::sync();
    if (GROUP::thread() == 0) shared_.count = 0;
    GROUP::sync();
    add(own);
    GROUP::sync();
  }

  // A candidate c such that at least k and at most `enough` of the group's candidates are >= c. kNoCandidate if there
  // are fewer than k. Bisects from the highest bit in which they differ. All threads call it. Barriers separate its
  // calls.
  __device__ __forceinline__ u64 lower_bound(const u64 (&own)[kOwn], u32 enough) const {
    u32 greatest = 0;
    u32 least_inverted = 0;
#pragma unroll
    for (u32 c = 0; c < kOwn; ++c) {
      if (own[c] == kNoCandidate) continue;
      greatest = max(greatest, key_of(own[c]));
      least_inverted = max(least_inverted, ~key_of(own[c]));
    }
    greatest = GROUP::maximum(greatest, shared_.words, 0);
    const u32 differing = greatest ^ ~GROUP::maximum(least_inverted, shared_.words, 1);
    // All keys share the bits above this one. If all keys are equal, the indices decide.
    u64 bit = differing != 0 ? u64(1u << (31 - __clz(differing))) << 32 : 1u << (31 - __clz(greatest_index(own)));
    u64 bound = make_candidate(greatest, 0) & ~(2 * bit - 1);
    u64 trial = bound;
    // The first count tells whether there are k at all.
#pragma unroll 1
    for (u32 turn = 0;; ++turn) {
      u32 count = 0;
#pragma unroll
      for (u32 c = 0; c < kOwn; ++c) count += own[c] >= trial && own[c] != kNoCandidate;
      count = GROUP::sum(count, shared_.words, turn);
      if (count >= k_) {
        bound = trial;
        if (count <= enough) break;
      } else if (turn == 0) {
        return kNoCandidate;
      }
      if (bit == 0) break;
      trial = bound | bit;
      bit >>= 1;
    }
    return bound;
  }

  // The greatest index of the group's candidates, at least 1. All threads call it. Ends with a barrier.
  __device__ __forceinline__ u32 greatest_index(const u64 (&own)[kOwn]) const {
    u32 greatest = 1;
#pragma unroll
    for (u32 c = 0; c < kOwn; ++c)
      if (own[c] != kNoCandidate) greatest = max(greatest, index_of(own[c]));
    greatest = GROUP::maximum(greatest, shared_.words, 0);
    GROUP::sync();
    return greatest;
  }

  u64* slots_;
  Shared& shared_;
  u32 k_;
  u64 threshold_;
  float least_;
};

}  // namespace fused_topk
