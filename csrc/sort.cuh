// SPDX-License-Identifier: Apache-2.0
// Sorting candidates in shared memory: a candidate's place is the number of candidates that rank before it.
//
// Up to a few hundred are all compared with each other. Beyond, some of them cut the others into buckets of a few, and a
// candidate is compared with those of its own bucket only. All candidates differ, so no two get the same place.
// Comes after group.cuh.
#pragma once

#include "group.cuh"

namespace fused_topk {

// For sort_by_buckets(), which serves blocks of more than 8 warps.
template <class GROUP>
struct SortShared {
  static constexpr u32 kBuckets = GROUP::kWarps <= 8 ? 1 : GROUP::kThreads / 4;
  alignas(16) u64 some[kBuckets];
  u64 splitters[kBuckets];
  u32 first_of_bucket[kBuckets + 1];
  u32 needed;
};

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

// The same for up to 8 candidates a thread; shuffles `slots`. False, and nothing is changed, if more than `room` of them
// would have to be looked at: the k best, and the rest of the bucket that the last of those is in.
template <class GROUP>
__device__ __forceinline__ bool sort_by_buckets(u64* slots, u32 count, u32 k, u64* sorted, u32 room,
                                                SortShared<GROUP>& shared) {
  constexpr u32 kBuckets = SortShared<GROUP>::kBuckets;
  constexpr u32 kOwn = 8;
  const u32 thread = GROUP::thread();
  if (thread < kBuckets) {
    shared.some[thread] = slots[thread * count / kBuckets];
    shared.first_of_bucket[thread] = 0;
  }
  GROUP::sync();
  // Four lanes for each.
  const u64 splitter = shared.some[thread / 4];
  u32 rank = 0;
#pragma unroll 4
  for (u32 pair = lane_id() % 4; pair < kBuckets / 2; pair += 4) {
    const ulonglong2 both = reinterpret_cast<const ulonglong2*>(shared.some)[pair];
    count_less(rank, splitter, both.x);
    count_less(rank, splitter, both.y);
  }
#pragma unroll
  for (u32 step = 2; step > 0; step /= 2) rank += __shfl_xor_sync(kAllLanes, rank, step);
  // As a binary tree, level after level from [1] on: on the way down, lanes read neighbours. The last has no place in it.
  const u32 node = ((rank + 1) | kBuckets) >> __ffs(rank + 1);
  if (lane_id() % 4 == 0 && rank + 1 < kBuckets) shared.splitters[node] = splitter;
  GROUP::sync();

  // A bucket's number is that of the splitters in the tree that rank before it.
  u64 own[kOwn];
  u32 bucket[kOwn];  // and in the upper half the place in it
#pragma unroll
  for (u32 c = 0; c < kOwn; ++c) {
    const u32 i = c * GROUP::kThreads + thread;
    own[c] = i < count ? slots[i] : kNoCandidate;
    bucket[c] = 1;
  }
#pragma unroll
  for (u32 leaves = 1; leaves < kBuckets; leaves *= 2)
#pragma unroll
    for (u32 c = 0; c < kOwn; ++c)
      if (c * GROUP::kThreads < count) bucket[c] = 2 * bucket[c] + (shared.splitters[bucket[c]] > own[c]);
#pragma unroll
  for (u32 c = 0; c < kOwn; ++c) {
    if (c * GROUP::kThreads >= count) break;
    bucket[c] -= kBuckets;
    if (own[c] != kNoCandidate) bucket[c] |= add_to_shared(&shared.first_of_bucket[bucket[c]], 1) << 16;
  }
  GROUP::sync();
  if (GROUP::warp() == 0) {
    // From how many are in each to where it begins; the first k need what is before the first that begins behind them.
    constexpr u32 kOfLane = kBuckets / kWarpSize;
    u32* const of_lane = shared.first_of_bucket + lane_id() * kOfLane;
    u32 begins[kOfLane + 1] = {0};
#pragma unroll
    for (u32 c = 0; c < kOfLane; ++c) begins[c + 1] = begins[c] + of_lane[c];
    const u32 before = warp_inclusive_sum(begins[kOfLane]) - begins[kOfLane];
    u32 needed = count;
#pragma unroll
    for (u32 c = 0; c < kOfLane; ++c) {
      of_lane[c] = before + begins[c];
      if (of_lane[c] >= k) needed = min(needed, of_lane[c]);
    }
    needed = warp_min(needed);
    if (lane_id() == 0) shared.first_of_bucket[kBuckets] = shared.needed = needed;
  }
  GROUP::sync();
  const u32 needed = shared.needed;
  if (needed > room) return false;
#pragma unroll
  for (u32 c = 0; c < kOwn; ++c) {
    if (own[c] == kNoCandidate) continue;
    const u32 i = shared.first_of_bucket[bucket[c] & 0xFFFF] + (bucket[c] >> 16);
    if (i < needed) slots[i] = own[c];
  }
  if (thread == 0) slots[needed] = kNoCandidate;  // the other half of the last pair
  GROUP::sync();
#pragma unroll 1
  for (u32 i = thread; i < needed; i += GROUP::kThreads) {
    // The last bucket that begins at i or before: neighbours in a bucket read the same.
    u32 b = 0;
#pragma unroll
    for (u32 step = kBuckets / 2; step > 0; step /= 2)
      if (shared.first_of_bucket[b + step] <= i) b += step;
    const u64 candidate = slots[i];
    // In pairs: what is of the bucket before ranks before, and what is of the next does not.
    const u32 pair = shared.first_of_bucket[b] / 2;
    const u32 end = (shared.first_of_bucket[b + 1] + 1) / 2;
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
