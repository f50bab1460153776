// SPDX-License-Identifier: Apache-2.0
// Sorts candidates in shared memory. A candidate's place is the number of candidates that rank before it.
//
// Up to a few hundred candidates are all compared with each other. More are first put into small buckets; a candidate
// is then compared only with the candidates of its bucket. All candidates differ, so no two get the same place. If many
// candidates fall into one bucket, as they may where logits lie on both sides of zero, all are sorted by merging.
// Merging takes the same time whatever the candidates are.
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
};

// Spreads candidates evenly over the 64-bit numbers, so that buckets of one width divide them, and divide equal keys by
// index. It leaves out the bits that say nothing: key bits that the format of the logits does not use, and index bits
// above those of V.
struct Spread {
  u32 key_bits, index_bits;  // numbers of bits that are left out

  __device__ __forceinline__ u64 of(u64 candidate) const {
    return u64(key_of(candidate) >> key_bits) << 32 | u32(u32(candidate) << index_bits);
  }
  // The least key of candidates from `spread` on.
  __device__ __forceinline__ u32 key(u64 spread) const { return u32(spread >> 32) << key_bits; }
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
  __device__ __forceinline__ Buckets(const u64 (&own)[N], u32 count, u32 k, u32 m, Spread spread, Shared& shared)
      : shared_(shared), spread_(spread) {
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
  // Whether some bucket of those is so full that comparing its candidates is slow.
  __device__ __forceinline__ bool is_crowded() const { return is_crowded_; }
  // A key that the best m candidates reach, kNoKey if unknown.
  __device__ __forceinline__ u32 mth_key() const {
    const u32 bucket = shared_.bucket_of_m;
    if (bucket <= kAbove) return spread_.key(high_);
    const u64 widths = bucket - kAbove;
    // The widths are compared before they are shifted: where candidates span nearly all keys, the shifted ones may
    // exceed 64 bits.
    if (bucket == Shared::kBuckets - 1 || widths > high_ >> shift_) return kNoKey;
    return spread_.key(high_ - (widths << shift_));
  }

  // The place of the thread's own[c] among all candidates, bucket after bucket.
  __device__ __forceinline__ u32 place(u32 c) const { return shared_.begins[bucket(c)] + (place_[c] & 0xFFFF); }
  // The place of the first candidate of any candidate's bucket, and that of the next bucket's.
  __device__ __forceinline__ u32 begin(u64 candidate) const { return shared_.begins[bucket_of(candidate)]; }
  __device__ __forceinline__ u32 end(u64 candidate) const { return shared_.begins[bucket_of(candidate) + 1]; }

 private:
  static constexpr u32 kLog2Buckets = 9;
  static_assert(Shared::kBuckets == 1 << kLog2Buckets, "for blocks of 16 warps, with two samples of each");
  // Buckets [0, kAbove] lie above the better sample. Each is 8 times as wide as those below. Buckets up to kBetween end
  // at the worse sample.
  static constexpr u32 kAbove = Shared::kBuckets / 8 - 1;
  static constexpr u32 kBetween = Shared::kBuckets * 3 / 4;
  static constexpr u32 kCrowd = 192;

  // The bucket of the thread's own[c].
  __device__ __forceinline__ u32 bucket(u32 c) const { return place_[c] >> 16; }

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
    sample = sample == kNoCandidate ? kNoCandidate : spread_.of(sample);
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
    const u64 spread = spread_.of(candidate);
    const bool is_above = spread > high_;
    const u64 distance = is_above ? spread - high_ : high_ - spread;
    const u64 buckets = distance >> (is_above ? shift_ + 3 : shift_);
    const u32 most = is_above ? kAbove : Shared::kBuckets - kAbove - 2;
    const u32 away = buckets < most ? u32(buckets) : most;
    return is_above ? kAbove - away : kAbove + 1 + away;
  }

  // Turns the count of each bucket into its begin. Returns the count of the thread's own bucket, if it is needed. All
  // threads call it.
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
    return begin < k ? count : 0;
  }

  Shared& shared_;
  Spread spread_;
  u64 high_;
  u32 shift_;  // turns a distance into a number of buckets
  bool is_crowded_;
  u32 place_[N];  // bucket << 16 | place in it
};

// sort_by_counting() with buckets, for up to N candidates a thread. Reorders `slots`. Returns false and changes nothing
// if it would have to compare more than `room` candidates or, FOR_MANY, too many with each other.
template <class GROUP, u32 N>
__device__ __forceinline__ bool sort_by_buckets(u64* slots, u32 count, u32 k, u64* sorted, u32 room, Spread spread,
                                                BucketsShared<GROUP>& shared) {
  u64 own[N];
#pragma unroll
  for (u32 c = 0; c < N; ++c) {
    const u32 i = c * GROUP::kThreads + GROUP::thread();
    own[c] = i < count ? slots[i] : kNoCandidate;
  }
  const Buckets<GROUP, N> buckets(own, count, k, k, spread, shared);
  const u32 needed = buckets.needed();
  if ((GROUP::kForMany && buckets.is_crowded()) || needed > room) return false;
#pragma unroll
  for (u32 c = 0; c < N; ++c) {
    if (own[c] == kNoCandidate) continue;
    const u32 i = buckets.place(c);
    if (i < needed) slots[i] = own[c];
  }
  if (GROUP::thread() == 0) slots[needed] = kNoCandidate;  // the other half of the last pair
  GROUP::sync();
#pragma unroll 1
  for (u32 i = GROUP::thread(); i < needed; i += GROUP::kThreads) {
    const u64 candidate = slots[i];
    // Whole pairs are read. A candidate of the bucket before ranks before, and one of the bucket after does not: both
    // count right.
    const u32 first = buckets.begin(candidate) / 2;
    const u32 end = (buckets.end(candidate) + 1) / 2;
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

// Sorts by merging, best first, with kOwn candidates a thread at a time. Only blocks call it.
template <class GROUP>
class MergeSort {
 public:
  static constexpr u32 kOwn = 4;
  static constexpr u32 kHalf = kOwn * GROUP::kThreads;

  // Sorts `slots` [2 * kHalf], of which the first `count` are in use. All threads call it, after a barrier that follows
  // the last write to the slots. Then the best kHalf are at their places. Ends with a barrier.
  static __device__ __forceinline__ void sort(u64* slots, u32 count) {
#pragma unroll 1
    for (u32 first = 0; first < count; first += kHalf) {
      const u32 own = first + thread() / kWarpSize * kRun;
      sort_run(slots + own, own < count ? count - own : 0);
      GROUP::sync();
#pragma unroll 1
      for (u32 run = kRun; run < kHalf && run < count - first; run *= 2) merge(slots + first, run);
    }
    if (count > kHalf) merge(slots, kHalf);
  }

 private:
  static constexpr u32 kRun = kOwn * kWarpSize;  // candidates that a warp sorts in registers

  // Recomputed: a value kept since the start of the kernel costs a register.
  static __device__ __forceinline__ u32 thread() {
    u32 thread = GROUP::thread();
    keep_opaque(thread);
    return thread;
  }

  // Merges each two neighbouring sorted runs of `run` candidates: a thread finds kOwn of the merged ones. Of whole
  // halves it merges the better half. All threads call it. Ends with a barrier.
  static __device__ __forceinline__ void merge(u64* slots, u32 run) {
    const u32 place = kOwn * thread();
    const u32 begin = place & ~(2 * run - 1);  // of both runs
    const u32 before = place - begin;          // merged ones that precede the thread's
    const u64* const left = slots + begin;
    const u64* const right = left + run;
    // Finds by bisection how many of these come from the left run.
    u32 i = before > run ? before - run : 0;
    u32 end = min(before, run);
#pragma unroll 1
    while (i < end) {
      const u32 middle = (i + end) / 2;
      if (left[middle] >= right[before - 1 - middle]) {
        i = middle + 1;
      } else {
        end = middle;
      }
    }
    u32 j = before - i;
    u64 of_left = i < run ? left[i] : kNoCandidate;
    u64 of_right = j < run ? right[j] : kNoCandidate;
    u64 own[kOwn];
#pragma unroll
    for (u32 c = 0; c < kOwn; ++c) {
      const bool is_left = of_left >= of_right;
      own[c] = is_left ? of_left : of_right;
      if (is_left) {
        of_left = ++i < run ? left[i] : kNoCandidate;
      } else {
        of_right = ++j < run ? right[j] : kNoCandidate;
      }
    }
    GROUP::sync();
    store(slots + place, own);
    GROUP::sync();
  }

  // Sorts a run in shared memory, of which `count` candidates are in use, and fills it up with kNoCandidate: a bitonic
  // sort of the 32 lanes of a warp. Candidate c of a lane has place lane * kOwn + c.
  static __device__ __forceinline__ void sort_run(u64* run, u32 count) {
    u64 own[kOwn];
#pragma unroll
    for (u32 c = 0; c < kOwn; ++c) {
      const u32 i = c * kWarpSize + lane_id();
      own[c] = i < count ? run[i] : kNoCandidate;
    }
    __syncwarp();
    if (count > 0) {
      put_in_order(own[0], own[1], true);
      put_in_order(own[2], own[3], false);
      merge_own(own, lane_id() % 2 == 0);
#pragma unroll 1
      for (u32 lanes = 2; lanes <= kWarpSize; lanes *= 2) {
        const bool descends = (lane_id() & lanes) == 0;
#pragma unroll 1
        for (u32 step = lanes / 2; step > 0; step /= 2) {
          const bool takes_greater = ((lane_id() & step) == 0) == descends;
#pragma unroll
          for (u32 c = 0; c < kOwn; ++c) {
            const u64 other = __shfl_xor_sync(kAllLanes, own[c], step);
            own[c] = (other > own[c]) == takes_greater ? other : own[c];
          }
        }
        merge_own(own, descends);
      }
    }
    store(run + kOwn * lane_id(), own);
  }
  // Sorts a lane's candidates, which rise and fall once.
  static __device__ __forceinline__ void merge_own(u64 (&own)[kOwn], bool descends) {
    put_in_order(own[0], own[2], descends);
    put_in_order(own[1], own[3], descends);
    put_in_order(own[0], own[1], descends);
    put_in_order(own[2], own[3], descends);
  }
  static __device__ __forceinline__ void put_in_order(u64& first, u64& second, bool descends) {
    const bool swaps = (first < second) == descends;
    const u64 former = first;
    first = swaps ? second : first;
    second = swaps ? former : second;
  }
  // slots: aligned to 16 bytes
  static __device__ __forceinline__ void store(u64* slots, const u64 (&own)[kOwn]) {
    ulonglong2* const pairs = reinterpret_cast<ulonglong2*>(slots);
#pragma unroll
    for (u32 pair = 0; pair < kOwn / 2; ++pair) pairs[pair] = {own[2 * pair], own[2 * pair + 1]};
  }
};

}  // namespace fused_topk
