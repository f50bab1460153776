// SPDX-License-Identifier: Apache-2.0
// A lower bound of the k-th best of what a group has read, proven by few numbers.
//
// If each warp publishes its j-th best, then k elements are >= the ceil(k / j)-th greatest of those. That many of the warps are
// fewer than have read something, for the least of all their numbers is far below the others: it may even be of the few logits
// that a row ends with. A warp's own j-th best is bounded in the same way by its lanes' bests. A warp may publish anew at any
// time, and others may find old and new numbers mixed: each of them stays true.
// Comes after group.cuh.
#pragma once

#include "group.cuh"

namespace fused_topk {

// A number that is at most the n-th greatest of the lanes' keys, and equals it if the greater ones all differ. kNoKey for
// n > 32. All 32 lanes call it.
__device__ __forceinline__ u32 nth_greatest(u32 key, u32 n) {
  if (n > kWarpSize) return kNoKey;
  u32 greatest = warp_max(key);
#pragma unroll 1
  for (u32 i = 1; i < n; ++i) {
    if (key == greatest) key = kNoKey;
    greatest = warp_max(key);
  }
  return greatest;
}

// A number that is at most the n-th greatest of N keys of each lane, by bisection. What a few more of them than n are not less
// than is near enough.
template <u32 N>
__device__ __forceinline__ u32 nth_greatest(const u32 (&keys)[N], u32 n) {
  if (n > N * kWarpSize) return kNoKey;
  u32 greatest = keys[0];
  u32 bound = keys[0];
#pragma unroll
  for (u32 i = 1; i < N; ++i) {
    greatest = max(greatest, keys[i]);
    bound = min(bound, keys[i]);
  }
  greatest = warp_max(greatest);
  bound = warp_min(bound);
  u32 passing = N * kWarpSize;
  // With many equal keys that may never be: twelve halvings of what the keys span are enough too.
#pragma unroll 1
  for (u32 turn = 0; turn < 12 && bound < greatest && passing > n + n / 8; ++turn) {
    const u32 trial = greatest - (greatest - bound) / 2;
    u32 own = 0;
#pragma unroll
    for (u32 c = 0; c < N; ++c) own += keys[c] >= trial;
    const u32 of_trial = warp_sum(own);
    if (of_trial >= n) {
      bound = trial;
      passing = of_trial;
    } else {
      greatest = trial - 1;
    }
  }
  return bound;
}

template <class GROUP>
class KthBound {
 public:
  struct Shared {
    alignas(16) u32 first[GROUP::kWarps];  // keys, published before a barrier
    u32 latest[GROUP::kWarps];             // and since
    // See add_earlier().
    static constexpr u32 kKept = GROUP::kForMany ? 8 : 1;
    u16 greatest[kKept][GROUP::kForMany ? GROUP::kThreads : 1];
  };

  // of_warp: j; warps: at least k / j, and at most as many as read something; the others abstain.
  __device__ __forceinline__ KthBound(Shared& shared, u32 of_warp, u32 warps)
      : shared_(shared), of_warp_(of_warp), warps_(warps) {}

  // Whether the bests of 32 lanes say too little.
  __device__ __forceinline__ bool needs_many() const {
    // KernelChoice.method() of fused_topk/kernel_choice.py has chosen the kernel.
    if constexpr (GROUP::kWarps > 8) return GROUP::kForMany;
    return of_warp_ > kWarpSize / 2;
  }
  // After how many lanes of its own with candidates a warp should update the bound: they are its sign that it is loose.
  __device__ __forceinline__ u32 worth() const { return needs_many() ? kWarpSize / 2 : max(2 * of_warp_, 4u); }

  // The number that a warp is to publish, of the best keys of each lane, of different elements. The 32 lanes call it.
  __device__ __forceinline__ u32 of_warp(u32 key) const { return nth_greatest(key, of_warp_); }
  template <u32 N>
  __device__ __forceinline__ u32 of_warp(const u32 (&keys)[N]) const {
    return nth_greatest(keys, of_warp_);
  }

  // FOR_MANY: makes of each of the lane's keys the greatest since the first call, rounded down.
  template <u32 N>
  __device__ __forceinline__ void add_earlier(u32 (&keys)[N], bool is_first) {
    static_assert(N == Shared::kKept, "a place for each");
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
      u16& earlier = shared_.greatest[i][GROUP::thread()];
      if (!is_first) keys[i] = max(keys[i], u32(earlier) << 16);
      earlier = u16(keys[i] >> 16);
    }
  }

  // Tells the group this warp's number. After a barrier, found() gives the bound that all warps' numbers prove, kNoKey for
  // none. The 32 lanes of a warp call each of them together.
  __device__ __forceinline__ void publish(u32 key) {
    own_ = key;
    if constexpr (!GROUP::kIsWarp)
      if (lane_id() == 0) shared_.first[GROUP::warp()] = shared_.latest[GROUP::warp()] = key;
  }
  // For a warp that has nothing to read, and so no say.
  __device__ __forceinline__ void abstain() { publish(kNoKey); }
  __device__ __forceinline__ u32 found() const {
    if constexpr (GROUP::kIsWarp) return own_;
    return proven_by(shared_.first[lane_id() % GROUP::kWarps], [&](u32 warp) { return shared_.first[warp]; });
  }

  // found() at any time after that barrier.
  __device__ __forceinline__ void update(u32 key) {
    own_ = key;
    if constexpr (!GROUP::kIsWarp)
      if (lane_id() == 0) store_unordered(&shared_.latest[GROUP::warp()], own_);
  }
  __device__ __forceinline__ u32 latest() const {
    if constexpr (GROUP::kIsWarp) return own_;
    // Worked out anew: kept since found(), it would cost a register.
    u32 warp = lane_id() % GROUP::kWarps;
    keep_opaque(warp);
    const u32 key = load_unordered(&shared_.latest[warp]);
    return proven_by(key, [&](u32 other) { return __shfl_sync(kAllLanes, key, other); });
  }

 private:
  // key: of warp `lane modulo warps`; key_of_warp(warp): any warp's.
  template <class KEY_OF_WARP>
  __device__ __forceinline__ u32 proven_by(u32 key, KEY_OF_WARP key_of_warp) const {
    // The least of those that fewer exceed than are needed.
    u32 greater = 0;
#pragma unroll
    for (u32 warp = 0; warp < GROUP::kWarps; ++warp) greater += key_of_warp(warp) > key;
    return warp_min(greater < warps_ ? key : kNanKey);
  }

  Shared& shared_;
  u32 of_warp_;  // which best a warp publishes
  u32 warps_;    // that have k of these together
  u32 own_;
};

}  // namespace fused_topk
