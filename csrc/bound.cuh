// SPDX-License-Identifier: Apache-2.0
// A lower bound of the k-th best of what a group has read, proven by few numbers.
//
// Say n warps have read something. If each publishes its ceil(k / n)-th best, then k elements are >= the least of those;
// and if k < n, and each publishes its best, then k elements are >= the k-th greatest of those. A warp's own n-th best is
// bounded in the same way by its lanes' bests. A warp may publish anew at any time, and others may find old and new
// numbers mixed: each of them stays true.
// Comes after group.cuh.
#pragma once

#include "group.cuh"

namespace fused_topk {

// A number that is at most the n-th greatest of the lanes' keys, and equals it if the greater ones all differ. kNoKey for
// n > 32. All 32 lanes call it.
__device__ __forceinline__ u32 nth_greatest(u32 key, u32 n) {
  u32 greatest = warp_max(key);
#pragma unroll 1
  for (u32 i = 1; i < n; ++i) {
    if (key == greatest) key = kNoKey;
    greatest = warp_max(key);
  }
  return greatest;
}

// The same for N keys of each lane and larger n, by bisection from the first bit in which they differ. Stops 8 bits later:
// what rounding the bound down costs is a few candidates more.
template <u32 N>
__device__ __forceinline__ u32 nth_greatest(const u32 (&keys)[N], u32 n) {
  if (n > N * kWarpSize) return kNoKey;
  u32 greatest = keys[0];
  u32 least = keys[0];
#pragma unroll
  for (u32 i = 1; i < N; ++i) {
    greatest = max(greatest, keys[i]);
    least = min(least, keys[i]);
  }
  const u32 differing = warp_max(greatest) ^ warp_min(least);
  if (differing == 0) return keys[0];
  const u32 first = 31 - __clz(differing);
  u32 bound = warp_min(least) >> first >> 1 << first << 1;
#pragma unroll 1
  for (u32 i = 0; i < 8 && i <= first; ++i) {
    const u32 trial = bound | 1u << (first - i);
    u32 count = 0;
#pragma unroll
    for (u32 c = 0; c < N; ++c) count += keys[c] >= trial;
    if (warp_sum(count) >= n) bound = trial;
  }
  return bound;
}

template <class GROUP>
class KthBound {
 public:
  struct Shared {
    u32 published[GROUP::kWarps];  // keys
  };

  // readers: warps of the group that read something; the others abstain.
  __device__ __forceinline__ KthBound(Shared& shared, u32 k, u32 readers)
      : shared_(shared), k_(k), readers_(readers), of_warp_(GROUP::kIsWarp ? k : (k + readers - 1) / readers) {
    if constexpr (!GROUP::kIsWarp)
      if (lane_id() == 0) shared_.published[GROUP::warp()] = kNoKey;
  }

  // Whether the bests of 32 lanes say too little.
  __device__ __forceinline__ bool needs_many() const { return of_warp_ > kWarpSize / 2; }
  // After how many candidates of its own a warp should update the bound: they are its sign that the bound is loose.
  __device__ __forceinline__ u32 worth() const { return needs_many() ? ~0u : max(2 * of_warp_, 4u); }

  // Tells the group the best keys that each lane of this warp has read, of different elements. found() gives the bound
  // that all warps' numbers prove, kNoKey for none. The 32 lanes of a warp call them together. A barrier comes between
  // the first of each.
  __device__ __forceinline__ void publish(u32 key) {
    publish_own(of_warp_ > kWarpSize ? kNoKey : nth_greatest(key, of_warp_));
  }
  template <u32 N>
  __device__ __forceinline__ void publish(const u32 (&keys)[N]) {
    publish_own(nth_greatest(keys, of_warp_));
  }
  // For a warp that has nothing to read, and so no say.
  __device__ __forceinline__ void abstain() { publish_own(k_ < readers_ ? kNoKey : kNanKey); }

  __device__ __forceinline__ u32 found() const {
    if constexpr (GROUP::kIsWarp) return own_;
    const u32 key = load_unordered(&shared_.published[lane_id() % GROUP::kWarps]);
    if (k_ >= readers_) return warp_min(key);
    return nth_greatest(lane_id() < GROUP::kWarps ? key : kNoKey, k_);
  }

 private:
  __device__ __forceinline__ void publish_own(u32 key) {
    own_ = key;
    if constexpr (!GROUP::kIsWarp)
      if (lane_id() == 0) store_unordered(&shared_.published[GROUP::warp()], key);
  }

  Shared& shared_;
  u32 k_;
  u32 readers_;
  u32 of_warp_;  // which best a warp publishes
  u32 own_;
};

}  // namespace fused_topk
