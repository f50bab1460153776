// SPDX-License-Identifier: Apache-2.0
// Sorting candidates in shared memory: a candidate's place is the number of candidates that rank before it.
//
// Up to a few hundred are all compared with each other. More go into buckets by their keys first, and a candidate is compared
// with those of its own bucket only. All candidates differ, so no two get the same place.
// Comes after group.cuh.
#pragma once

#include "group.cuh"

namespace fused_topk {

// Writes the best k of `slots` [count] to `sorted` [k], elsewhere in shared memory. In a block, four lanes share a
// candidate's comparisons, and warps without a candidate do not keep the others waiting. All threads call it, after a
// barrier that follows the last write to the slots; ends with a barrier.
template <class GROUP>
__device__ __forceinline__ void sort_by_counting(const u64* slots, u32 count, u32 k, u64* sorted) {
  constexpr u32 kSharing = GROUP::kIsWarp ? 1 : 4;
  const ulonglong2* const pairs = reinterpret_cast<const ulonglong2*>(slots);
#pragma unroll 1
  for (u32 first = GROUP::warp() * (kWarpSize / kSharing); first < count; first += GROUP::kThreads / kSharing) {
    const u32 i = first + lane_id() / kSharing;
    const u64 own = i < count ? slots[i] : kNoCandidate;
    u32 place = 0;
#pragma unroll 2
    for (u32 pair = lane_id() % kSharing; pair < count / 2; pair += kSharing) {
      const ulonglong2 both = pairs[pair];
      count_less(place, own, both.x);
      count_less(place, own, both.y);
    }
    if (count % 2 != 0 && lane_id() % kSharing == 0) count_less(place, own, slots[count - 1]);
#pragma unroll
    for (u32 step = kSharing / 2; step > 0; step /= 2) place += __shfl_xor_sync(kAllLanes, place, step);
    if (i < count && place < k) sorted[place] = own;
  }
  GROUP::sync();
}

// For Buckets, which serve blocks of more than 8 warps.
template <class GROUP>
struct BucketsShared {
  static constexpr u32 kLog2Buckets = GROUP::kWarps <= 8 ? 0 : 9;
  static constexpr u32 kBuckets = 1 << kLog2Buckets;
  alignas(16) u32 begins[kBuckets + 1];
  u32 found[2];
};

// A block's candidates in buckets, best first, by how far their keys are below the greatest; where all keys are equal, by the
// tokens' indices. Nearly equal keys among others that are far apart share a bucket: that costs time.
template <class GROUP, u32 N>
class Buckets {
 public:
  using Shared = BucketsShared<GROUP>;

  // own: each thread's, kNoCandidate for none. k and m: see needed() and mth_key(). All threads call it, after a barrier that
  // follows the last use of `shared` and `words`; ends with a barrier.
  __device__ __forceinline__ Buckets(const u64 (&own)[N], u32 k, u32 m, Shared& shared, typename GROUP::Words& words)
      : shared_(shared), m_(m) {
    constexpr u32 kBuckets = Shared::kBuckets;
    for (u32 i = GROUP::thread(); i < kBuckets; i += GROUP::kThreads) shared.begins[i] = 0;
    u32 least_inverted = 0;
    greatest_ = 0;
#pragma unroll
    for (u32 c = 0; c < N; ++c) {
      if (own[c] == kNoCandidate) continue;
      greatest_ = max(greatest_, key_of(own[c]));
      least_inverted = max(least_inverted, ~key_of(own[c]));
    }
    GROUP::maxima(greatest_, least_inverted, words);
    span_ = greatest_ + least_inverted + 1;
    is_by_index_ = span_ == 0;
    if (is_by_index_) {
#pragma unroll
      for (u32 c = 0; c < N; ++c) span_ = own[c] == kNoCandidate ? span_ : max(span_, index_of(own[c]));
      GROUP::sync();
      span_ = GROUP::maximum(span_, words, 0);
    }
    const u32 bits = 32 - __clz(span_);
    shift_ = bits > Shared::kLog2Buckets ? bits - Shared::kLog2Buckets : 0;
#pragma unroll
    for (u32 c = 0; c < N; ++c) {
      place_[c] = 0;
      if (own[c] != kNoCandidate) place_[c] = add_to_shared(&shared.begins[of(own[c])], 1);
    }
    GROUP::sync();
    if (GROUP::warp() == 0) {
      // From how many are in each to where it begins.
      constexpr u32 kOfLane = kBuckets / kWarpSize;
      u32* const of_lane = shared.begins + lane_id() * kOfLane;
      u32 begins[kOfLane + 1] = {0};
#pragma unroll
      for (u32 c = 0; c < kOfLane; ++c) begins[c + 1] = begins[c] + of_lane[c];
      const u32 before = warp_inclusive_sum(begins[kOfLane]) - begins[kOfLane];
      u32 after_k = kBuckets;
      u32 after_m = kBuckets;
#pragma unroll
      for (u32 c = kOfLane; c-- > 0;) {
        begins[c] += before;
        of_lane[c] = begins[c];
        if (begins[c] >= k) after_k = lane_id() * kOfLane + c;
        if (begins[c] >= m) after_m = lane_id() * kOfLane + c;
      }
      after_k = warp_min(after_k);
      after_m = warp_min(after_m);
      if (lane_id() == kWarpSize - 1) {
        shared.begins[kBuckets] = before + begins[kOfLane];
        shared.found[0] = after_k;
        shared.found[1] = after_m;
      }
    }
    GROUP::sync();
  }

  // How many there are.
  __device__ __forceinline__ u32 count() const { return shared_.begins[Shared::kBuckets]; }
  // How many are in the first buckets that hold the best k, or all.
  __device__ __forceinline__ u32 needed() const { return shared_.begins[shared_.found[0]]; }
  // A key that the best m of them are >=, kNoKey if there are fewer.
  __device__ __forceinline__ u32 mth_key() const {
    if (count() < m_) return kNoKey;
    const u32 last = (shared_.found[1] << shift_) - 1;
    return is_by_index_ ? greatest_ : greatest_ - min(last, span_);
  }

  // The place of the thread's own[c] among all, bucket after bucket.
  __device__ __forceinline__ u32 place(u64 candidate, u32 c) const { return begin(candidate) + place_[c]; }
  // Where a candidate's bucket begins and ends.
  __device__ __forceinline__ u32 begin(u64 candidate) const { return shared_.begins[of(candidate)]; }
  __device__ __forceinline__ u32 end(u64 candidate) const { return shared_.begins[of(candidate) + 1]; }

 private:
  __device__ __forceinline__ u32 of(u64 candidate) const {
    return (is_by_index_ ? index_of(candidate) : greatest_ - key_of(candidate)) >> shift_;
  }

  Shared& shared_;
  u32 m_;
  u32 greatest_;  // key
  u32 span_;      // to the least, or the greatest index
  u32 shift_;
  u32 place_[N];  // in its bucket
  bool is_by_index_;
};

// The same as sort_by_counting(), for up to N candidates a thread; shuffles `slots`. False, and nothing is changed, if more than
// `room` of them would have to be looked at.
template <class GROUP, u32 N>
__device__ __forceinline__ bool sort_by_buckets(u64* slots, u32 count, u32 k, u64* sorted, u32 room,
                                                BucketsShared<GROUP>& shared, typename GROUP::Words& words) {
  u64 own[N];
#pragma unroll
  for (u32 c = 0; c < N; ++c) {
    const u32 i = c * GROUP::kThreads + GROUP::thread();
    own[c] = i < count ? slots[i] : kNoCandidate;
  }
  const Buckets<GROUP, N> buckets(own, k, k, shared, words);
  const u32 needed = buckets.needed();
  if (needed > room) return false;
#pragma unroll
  for (u32 c = 0; c < N; ++c) {
    if (own[c] == kNoCandidate) continue;
    const u32 i = buckets.place(own[c], c);
    if (i < needed) slots[i] = own[c];
  }
  if (GROUP::thread() == 0) slots[needed] = kNoCandidate;  // the other half of the last pair
  GROUP::sync();
#pragma unroll 1
  for (u32 i = GROUP::thread(); i < needed; i += GROUP::kThreads) {
    const u64 candidate = slots[i];
    // In pairs: what is of the bucket before ranks before, and what is of the next does not.
    const u32 pair = buckets.begin(candidate) / 2;
    const u32 end = (buckets.end(candidate) + 1) / 2;
    u32 place = 2 * pair;
#pragma unroll 4
    for (u32 p = pair; p < end; ++p) {
      const ulonglong2 both = reinterpret_cast<const ulonglong2*>(slots)[p];
      count_less(place, candidate, both.x);
      count_less(place, candidate, both.y);
    }
    if (place < k) sorted[place] = candidate;
  }
  GROUP::sync();
  return true;
}

}  // namespace fused_topk
