// SPDX-License-Identifier: Apache-2.0
// Sorting candidates in shared memory: a candidate's place is the number of candidates that rank before it.
//
// Up to a few hundred are all compared with each other. More are put into buckets of a few first, and a candidate is compared
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
  static constexpr u32 kBuckets = GROUP::kThreads;
  u64 samples[2 * GROUP::kWarps];
  u32 begins[kBuckets + 1];  // where each bucket's first candidate has its place, and the end
  // Read 16 bytes at a time: not with the end above, which a thread writes meanwhile.
  alignas(16) u32 of_warp[GROUP::kWarps];
  u32 needed, bucket_of_m;
  u16 bucket_at[GROUP::kWarps <= 8 ? 1 : 4 * GROUP::kThreads];
};

// A block's candidates in buckets, best first: most of the buckets divide evenly what lies between two samples, the second best of
// 32 and the second worst, so that a few candidates far from all others do not make them wide.
template <class GROUP, u32 N>
class Buckets {
 public:
  using Shared = BucketsShared<GROUP>;

  // own: the thread's share of `count` candidates, kNoCandidate for none; own[c] is none if there are no more than c * kThreads.
  // k and m: see needed() and mth_key(). All threads call it, after a barrier that follows the last use of `shared`; ends with a
  // barrier.
  __device__ __forceinline__ Buckets(const u64 (&own)[N], u32 count, u32 k, u32 m, Shared& shared) : shared_(shared) {
    shared.begins[GROUP::thread()] = 0;
    publish_samples(own);
    GROUP::sync();
    divide();
#pragma unroll
    for (u32 c = 0; c < N; ++c) place_[c] = c * GROUP::kThreads < count ? bucket_of(own[c]) << 16 : 0;
#pragma unroll
    for (u32 c = 0; c < N; ++c)
      if (own[c] != kNoCandidate) place_[c] |= add_to_shared(&shared.begins[bucket(c)], 1);
    GROUP::sync();
    is_crowded_ = GROUP::any(add_up(k, m) > kCrowd);
  }

  // How many are in the first buckets that hold the best k, or all.
  __device__ __forceinline__ u32 needed() const { return shared_.needed; }
  // Whether some bucket has so many that comparing them takes long.
  __device__ __forceinline__ bool is_crowded() const { return is_crowded_; }
  // A key that the best m of them are >=, kNoKey if it is not known.
  __device__ __forceinline__ u32 mth_key() const {
    const u32 bucket = shared_.bucket_of_m;
    if (bucket <= kAbove) return key_of(high_);
    const u64 below = u64(bucket - kAbove) << shift_;
    return bucket < Shared::kBuckets - 1 && below < high_ ? key_of(high_ - below) : kNoKey;
  }

  // Of the thread's own[c]: its bucket, and its place among all, bucket after bucket.
  __device__ __forceinline__ u32 bucket(u32 c) const { return place_[c] >> 16; }
  __device__ __forceinline__ u32 place(u32 c) const { return shared_.begins[bucket(c)] + (place_[c] & 0xFFFF); }

 private:
  static constexpr u32 kLog2Buckets = 9;
  static_assert(Shared::kBuckets == 1 << kLog2Buckets, "for blocks of 16 warps, with two samples of each");
  // Buckets [0, kAbove] are above the better sample, each 8 times as wide as those below; kBetween end at the other.
  static constexpr u32 kAbove = Shared::kBuckets / 8 - 1;
  static constexpr u32 kBetween = Shared::kBuckets * 3 / 4;
  static constexpr u32 kCrowd = 64;

  // Two of each warp's candidates: of its first lane that has one, and of its last, kNoCandidate if that is the same.
  __device__ __forceinline__ void publish_samples(const u64 (&own)[N]) {
    u64 sample = kNoCandidate;
#pragma unroll
    for (u32 c = 0; c < N; ++c) sample = own[c] == kNoCandidate ? sample : own[c];
    const u32 lanes = __ballot_sync(kAllLanes, sample != kNoCandidate);
    const u32 first = lanes == 0 ? 0 : __ffs(lanes) - 1;
    const u32 last = lanes == 0 ? 0 : 31 - __clz(lanes);
    u64* const samples = shared_.samples + 2 * GROUP::warp();
    if (lane_id() == first) samples[0] = sample;
    if (lane_id() == last) samples[1] = first == last ? kNoCandidate : sample;
  }

  // Says what each bucket is for. All warps come to the same.
  __device__ __forceinline__ void divide() {
    const u64 sample = shared_.samples[lane_id() % (2 * GROUP::kWarps)];
    const u64 inverted = sample == kNoCandidate ? kNoCandidate : ~sample;
    high_ = warp_max(sample == warp_max(sample) ? kNoCandidate : sample);
    const u64 low = ~warp_max(inverted == warp_max(inverted) ? kNoCandidate : inverted);
    const u64 length = low < high_ ? high_ - low : 0;
    // The least for which length >> shift is less than kBetween.
    const u32 bits = 64 - __clzll(length);
    shift_ = bits > kLog2Buckets ? bits - kLog2Buckets : 0;
    if (length >> shift_ >= kBetween) ++shift_;
  }
  __device__ __forceinline__ u32 bucket_of(u64 candidate) const {
    const bool is_above = candidate > high_;
    const u64 distance = is_above ? candidate - high_ : high_ - candidate;
    const u64 buckets = distance >> (is_above ? shift_ + 3 : shift_);
    const u32 most = is_above ? kAbove : Shared::kBuckets - kAbove - 2;
    const u32 away = buckets < most ? u32(buckets) : most;
    return is_above ? kAbove - away : kAbove + 1 + away;
  }

  // From how many are in each bucket to where it begins; gives how many are in the thread's. All threads call it.
  __device__ __forceinline__ u32 add_up(u32 k, u32 m) {
    const u32 bucket = GROUP::thread();
    const u32 count = shared_.begins[bucket];
    u32 end = warp_inclusive_sum(count);
    if (lane_id() == kWarpSize - 1) shared_.of_warp[GROUP::warp()] = end;
    GROUP::sync();
#pragma unroll
    for (u32 warp = 0; warp < GROUP::kWarps; ++warp) end += warp < GROUP::warp() ? shared_.of_warp[warp] : 0;
    const u32 begin = end - count;
    shared_.begins[bucket] = begin;
    const bool is_last = bucket == Shared::kBuckets - 1;
    if (is_last) shared_.begins[bucket + 1] = end;
    if (begin < k && (k <= end || is_last)) shared_.needed = end;
    if (begin < m && (m <= end || is_last)) shared_.bucket_of_m = m <= end ? bucket : Shared::kBuckets - 1;
    return count;
  }

  Shared& shared_;
  u64 high_;
  u32 shift_;  // from a distance to a number of buckets
  bool is_crowded_;
  u32 place_[N];  // bucket, and the place in it
};

// The same as sort_by_counting(), for up to N candidates a thread; shuffles `slots`. False, and nothing is changed, if more than
// `room` of them would have to be looked at.
template <class GROUP, u32 N>
__device__ __forceinline__ bool sort_by_buckets(u64* slots, u32 count, u32 k, u64* sorted, u32 room,
                                                BucketsShared<GROUP>& shared) {
  u64 own[N];
#pragma unroll
  for (u32 c = 0; c < N; ++c) {
    const u32 i = c * GROUP::kThreads + GROUP::thread();
    own[c] = i < count ? slots[i] : kNoCandidate;
  }
  u32 needed;
#pragma unroll 1
  for (bool is_first = true;; is_first = false) {
    const Buckets<GROUP, N> buckets(own, count, k, k, shared);
    needed = buckets.needed();
    // Without those that are not needed, the buckets come out narrower.
    const bool is_final = !buckets.is_crowded() || !is_first;
    if (is_final && needed > room) return false;
#pragma unroll
    for (u32 c = 0; c < N; ++c) {
      if (own[c] == kNoCandidate) continue;
      const u32 i = buckets.place(c);
      if (i >= needed) {
        own[c] = kNoCandidate;
      } else if (is_final) {
        slots[i] = own[c];
        shared.bucket_at[i] = buckets.bucket(c);
      }
    }
    if (is_final && GROUP::thread() == 0) slots[needed] = kNoCandidate;  // the other half of the last pair
    GROUP::sync();
    if (is_final) break;
  }
#pragma unroll 1
  for (u32 i = GROUP::thread(); i < needed; i += GROUP::kThreads) {
    const u64 candidate = slots[i];
    // In pairs: what is of the bucket before ranks before, and what is of the next does not.
    const u32* const begins = shared.begins + shared.bucket_at[i];
    const u32 first = begins[0] / 2;
    const u32 end = (begins[1] + 1) / 2;
    u32 place = 2 * first;
#pragma unroll 4
    for (u32 p = first; p < end; ++p) {
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
