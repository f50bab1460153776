// SPDX-License-Identifier: Apache-2.0
// The threads that own a row together: one warp, or all warps of a block. The same code serves both scopes.
#pragma once

#include "platform.cuh"

namespace fused_topk {

// FOR_MANY: in kernels of large k (KthBound::needs_many), whose code would lie in the way of all others.
template <u32 WARPS, bool FOR_MANY = false>
struct Group {
  static constexpr u32 kWarps = WARPS;
  static constexpr bool kForMany = FOR_MANY;
  static constexpr u32 kThreads = WARPS * kWarpSize;
  static constexpr bool kIsWarp = WARPS == 1;
  // With groups of other blocks: only the largest. Where rows are few enough for that, smaller ones take longer.
  static constexpr bool kSharesRow = WARPS > 8;

  // One word for each warp, twice, so that a reduction can begin while some warps still read the last one's words.
  struct Words {
    u32 words[2][WARPS];
  };

  // A warp that is a group of its own has rank 0 however many such groups share its block.
  static __device__ __forceinline__ u32 warp() { return kIsWarp ? 0 : threadIdx.x / kWarpSize; }
  static __device__ __forceinline__ u32 thread() { return kIsWarp ? lane_id() : threadIdx.x; }

  // A barrier among the group's threads; shared memory written before it is seen after it. All of them call it.
  static __device__ __forceinline__ void sync() {
    if constexpr (kIsWarp) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // A barrier too. True in every thread if it is true in any.
  static __device__ __forceinline__ bool any(bool claim) {
    if constexpr (kIsWarp) {
      const bool result = __any_sync(kAllLanes, claim);
      // The vote orders no memory access; the barrier that a block's version brings along does.
      __syncwarp();
      return result;
    } else {
      return __syncthreads_or(claim);
    }
  }

  // Sum and maximum over the group's threads, in every thread. All of them call it; `turn` counts the calls since a
  // barrier that followed the last use of `shared`.
  static __device__ __forceinline__ u32 sum(u32 value, Words& shared, u32 turn) {
    value = warp_sum(value);
    if constexpr (kIsWarp) return value;
    return warp_sum(exchange(value, 0u, shared, turn));
  }
  static __device__ __forceinline__ u32 maximum(u32 value, Words& shared, u32 turn) {
    value = warp_max(value);
    if constexpr (kIsWarp) return value;
    return warp_max(exchange(value, 0u, shared, turn));
  }

 private:
  // Lane w gets what warp w gave, the lanes beyond `none`.
  static __device__ __forceinline__ u32 exchange(u32 value, u32 none, Words& shared, u32 turn) {
    u32* words = shared.words[turn % 2];
    // Worked out anew: kept since the kernel began, it would cost a register.
    u32 thread = threadIdx.x;
    keep_opaque(thread);
    if (lane_id() == 0) words[thread / kWarpSize] = value;
    sync();
    return lane_id() < kWarps ? words[lane_id()] : none;
  }
};

}  // namespace fused_topk
