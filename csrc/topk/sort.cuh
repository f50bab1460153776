// SPDX-License-Identifier: Apache-2.0
// Sorts candidates in shared memory. A candidate's place is the number of candidates that rank before it.
//
// Up to a few hundred candidates are all compared with each other. More are first put into small buckets; a candidate
// is then compared with those of its bucket only. All candidates differ, so no two get the same place.
#pragma once

#include "group.cuh"

namespace fused_topk {

// Writes the best k of `slots` [count] to `sorted` [k]. Both are in shared memory and do not overlap. In a block, four
// lanes share a candidate's comparisons. All threads call it, after a barrier that follows the last write to the slots.
// Ends with a barrier.
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

// The shared memory of Buckets. Only blocks of more than 8 warps use it.
template <class GROUP>
struct BucketsShared {
  static constexpr u32 kBuckets = GROUP::kThreads;
  u64 samples[2 * GROUP::kWarps];
  u32 begins[kBuckets + 1];  // the place of each bucket's first candidate, and the end
  // Threads read 16 bytes at a time. The alignment keeps such a read away from begins[kBuckets], written meanwhile.
  alignas(16) u32 of_warp[GROUP::kWarps];
  u32 needed, bucket_of_m;
  u16 bucket_at[GROUP::kWarps <= 8 ? 1 : 4 * GROUP::kThreads];
};

// A block's candidates in buckets, best bucket first. Two samples, the second best and the second worst of 32, span
// most of the buckets, all of one width. So a few candidates far from all others do not widen the buckets.
template <class GROUP, u32 N>
class Buckets {
 public:
  using Shared = BucketsShared<GROUP>;

  // own: the thread's share of `count` candidates, or kNoCandidate. own[c] is kNoCandidate if count <= c * kThreads. k
  // and m: see needed() and mth_key(). All threads call it, after a barrier that follows the last use of `shared`. Ends
  // with a barrier.
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

  // The number of candidates in the first buckets that together hold the best k. All candidates, if there are fewer
  // than k.
  __device__ __forceinline__ u32 needed() const { return shared_.needed; }
  // Whether some bucket is so full that comparing its candidates is slow.
  __device__ __forceinline__ bool is_crowded() const { return is_crowded_; }
  // A key that the best m candidates reach, kNoKey if unknown.
  __device__ __forceinline__ u32 mth_key() const {
    const u32 bucket = shared_.bucket_of_m;
    if (bucket <= kAbove) return key_of(high_);
    const u64 widths = bucket - kAbove;
    // Compared before they are shifted: where candidates span nearly all keys, they may leave 64 bits.
    if (bucket == Shared::kBuckets - 1 || widths > high_ >> shift_) return kNoKey;
    return key_of(high_ - (widths << shift_));
  }

  // The bucket of the thread's own[c], and its place among all candidates, bucket after bucket.
  __device__ __forceinline__ u32 bucket(u32 c) const { return place_[c] >> 16; }
  __device__ __forceinline__ u32 place(u32 c) const { return shared_.begins[bucket(c)] + (place_[c] & 0xFFFF); }

 private:
  static constexpr u32 kLog2Buckets = 9;
  static_assert(Shared::kBuckets == 1 << kLog2Buckets, "for blocks of 16 warps, with two samples of each");
  // Buckets [0, kAbove] lie above the better sample. Each is 8 times as wide as those below. Buckets up to kBetween end
  // at the worse sample.
  static constexpr u32 kAbove = Shared::kBuckets / 8 - 1;
  static constexpr u32 kBetween = Shared::kBuckets * 3 / 4;
  static constexpr u32 kCrowd = 64;

  // Publishes two candidates of each warp: one of the first lane that has any, and one of the last such lane. Publishes
  // kNoCandidate if both are the same lane.
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

  // Finds the buckets' limits from the samples. All warps find the same.
  __device__ __forceinline__ void divide() {
    const u64 sample = shared_.samples[lane_id() % (2 * GROUP::kWarps)];
    const u64 inverted = sample == kNoCandidate ? kNoCandidate : ~sample;
    high_ = warp_max(sample == warp_max(sample) ? kNoCandidate : sample);
    const u64 low = ~warp_max(inverted == warp_max(inverted) ? kNoCandidate : inverted);
    const u64 length = low < high_ ? high_ - low : 0;
    // The least shift for which length >> shift is less than kBetween.
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

  // Turns the count of each bucket into its begin. Returns the count of the thread's own bucket. All threads call it.
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
  u32 shift_;  // turns a distance into a number of buckets
  bool is_crowded_;
  u32 place_[N];  // bucket << 16 | place in it
};

// sort_by_counting() with buckets, for up to N candidates a thread. Reorders `slots`. Returns false and changes nothing
// if it would have to compare more than `room` candidates.
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
    // Without the candidates that are not needed, the buckets of the next turn are narrower.
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
    // Whole pairs are read. A candidate of the bucket before ranks before, and one of the bucket after does not: both
    // count right.
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
