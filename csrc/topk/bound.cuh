// SPDX-License-Identifier: Apache-2.0
// A lower bound of the k-th best key of what a group has read, proven by few numbers.
//
// Each warp publishes its j-th best key. Then k elements are >= the ceil(k / j)-th greatest of the published keys. Only
// the top ceil(k / j) warps are needed. The minimum over all warps would be loose: one of them may have read just the
// tail of the row. A warp finds its own j-th best in the same way, from its lanes' best keys.
//
// A warp may publish again at any time. Others may read a mix of old and new keys. Each of them stays a valid bound.
#pragma once

#include "group.cuh"

namespace fused_topk {

// A lower bound of the n-th greatest of the lanes' keys. Exact if the n greatest keys differ. kNoKey for n > 32. All 32
// lanes call it.
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

// A lower bound of the n-th greatest of N keys of each lane, by bisection. Stops when at most n + n / 8 keys pass. All
// 32 lanes call it.
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
  // With many equal keys no bound lets so few pass. So the loop ends after twelve halvings.
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
    alignas(16) u32 first[GROUP::kWarps];  // each warp's key, published before the barrier
    u32 latest[GROUP::kWarps];             // each warp's key, published since
    // One entry of the set for each thread: see add_earlier().
    static constexpr u32 kKept = GROUP::kForMany ? 8 : 1;
    u16 greatest[kKept][GROUP::kForMany ? GROUP::kThreads : 1];
    // FOR_MANY: what each warp keeps here because it has no registers left.
    u32 rank_of_warp[GROUP::kForMany ? GROUP::kWarps : 1], warps[GROUP::kForMany ? GROUP::kWarps : 1];
  };

  // rank_of_warp: j, so each warp publishes its j-th best. warps: the number of warps needed, at least k / j, and at most
  // the number of warps that read something. The other warps abstain.
  __device__ __forceinline__ KthBound(Shared& shared, u32 rank_of_warp, u32 warps)
      : shared_(shared), rank_of_warp_(rank_of_warp), warps_(warps) {
    if constexpr (!GROUP::kForMany) return;
    if (lane_id() == 0) {
      shared.rank_of_warp[GROUP::warp()] = rank_of_warp;
      shared.warps[GROUP::warp()] = warps;
    }
    __syncwarp();
  }

  // Whether one key of each of 32 lanes proves too little.
  __device__ __forceinline__ bool needs_many() const {
    // KernelChoice.method() of fused_topk/layout/topk_choice.py has chosen the kernel by this.
    if constexpr (GROUP::kWarps > 8) return GROUP::kForMany;
    return rank_of_warp() > kWarpSize / 2;
  }
  // A warp that has had hits in this many lanes updates the bound: so many hits show that the bound is loose.
  __device__ __forceinline__ u32 worth() const { return needs_many() ? kWarpSize / 2 : max(2 * rank_of_warp(), 4u); }

  // The key that a warp publishes, given the best keys of each lane, all of different elements. All 32 lanes call it.
  __device__ __forceinline__ u32 key_to_publish(u32 key) const { return nth_greatest(key, rank_of_warp()); }
  template <u32 N>
  __device__ __forceinline__ u32 key_to_publish(const u32 (&keys)[N]) const {
    return nth_greatest(keys, rank_of_warp());
  }

  // FOR_MANY: raises each of the lane's keys to its maximum since the first call, rounded down to 16 bits.
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

  // Publishes this warp's key. A barrier must follow. Then found() returns the bound that all published keys prove, or
  // kNoKey. All 32 lanes of a warp call either.
  __device__ __forceinline__ void publish(u32 key) {
    own_ = key;
    if constexpr (!GROUP::kIsWarp)
      if (lane_id() == 0) shared_.first[GROUP::warp()] = shared_.latest[GROUP::warp()] = key;
  }
  // For a warp that has nothing to read.
  __device__ __forceinline__ void abstain() { publish(kNoKey); }
  __device__ __forceinline__ u32 found() const {
    if constexpr (GROUP::kIsWarp) return own_;
    return proven_by(shared_.first[lane_id() % GROUP::kWarps], [&](u32 warp) { return shared_.first[warp]; });
  }

  // update() and latest() are publish() and found() for any time after that barrier.
  __device__ __forceinline__ void update(u32 key) {
    own_ = key;
    if constexpr (!GROUP::kIsWarp)
      if (lane_id() == 0) store_unordered(&shared_.latest[GROUP::warp()], own_);
  }
  __device__ __forceinline__ u32 latest() const {
    if constexpr (GROUP::kIsWarp) return own_;
    // Recomputed here: a value kept since found() costs a register.
    u32 warp = lane_id() % GROUP::kWarps;
    keep_opaque(warp);
    const u32 key = load_unordered(&shared_.latest[warp]);
    return proven_by(key, [&](u32 other) { return __shfl_sync(kAllLanes, key, other); });
  }

 private:
  __device__ __forceinline__ u32 rank_of_warp() const {
    return GROUP::kForMany ? kept(shared_.rank_of_warp) : rank_of_warp_;
  }
  __device__ __forceinline__ u32 warps() const { return GROUP::kForMany ? kept(shared_.warps) : warps_; }
  template <u32 N>
  static __device__ __forceinline__ u32 kept(const u32 (&of_warp)[N]) {
    // Read anew: a value kept since an earlier call costs a register.
    u32 warp = GROUP::warp() % N;
    keep_opaque(warp);
    return of_warp[warp];
  }

  // key: the key of warp lane % kWarps. key_of_warp(w): the key of any warp w.
  template <class KEY_OF_WARP>
  __device__ __forceinline__ u32 proven_by(u32 key, KEY_OF_WARP key_of_warp) const {
    // The minimum of the keys that fewer than warps_ keys exceed.
    u32 greater = 0;
#pragma unroll
    for (u32 warp = 0; warp < GROUP::kWarps; ++warp) greater += key_of_warp(warp) > key;
    return warp_min(greater < warps() ? key : kNanKey);
  }

  Shared& shared_;
  u32 rank_of_warp_;  // j
  u32 warps_;         // the number of warps needed: ceil(k / j)
  u32 own_;
};

}  // namespace fused_topk
