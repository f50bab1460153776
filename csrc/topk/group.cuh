// SPDX-License-Identifier: Apache-2.0
// A group: the threads that own a row, or a split's share of it, together. It is one warp, or all warps of a block. The
// same code serves both.
#pragma once

#include "../rows/platform.cuh"

namespace fused_topk {

// FOR_MANY: kernels for large k (KthBound::needs_many). Their code would slow all other kernels down, so it is apart.
template <u32 WARPS, bool FOR_MANY = false>
struct Group {
  static constexpr u32 kWarps = WARPS;
  static constexpr bool kForMany = FOR_MANY;
  static constexpr u32 kThreads = WARPS * kWarpSize;
  static constexpr bool kIsWarp = WARPS == 1;
  // Whether several groups may share a row. Only the largest do: in the few-row regime smaller groups are slower.
  static constexpr bool kSharesRow = WARPS > 8;

  // One 32-bit word for each warp, in two sets. A reduction may begin while some warps still read the other set.
  struct Words {
    u32 words[2][WARPS];
  };

  // The warp's rank in its group. Always 0 if the warp is the group, even if the block has several such groups.
  static __device__ __forceinline__ u32 warp() { return kIsWarp ? 0 : threadIdx.x / kWarpSize; }
  static __device__ __forceinline__ u32 thread() { return kIsWarp ? lane_id() : threadIdx.x; }

  // A barrier of the group's threads. It orders shared memory. All threads call it.
  static __device__ __forceinline__ void sync() {
    if constexpr (kIsWarp) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // True in every thread if `claim` is true in any. Also a barrier.
  static __device__ __forceinline__ bool any(bool claim) {
    if constexpr (kIsWarp) {
      const bool result = __any_sync(kAllLanes, claim);
      // __any_sync orders no memory access. __syncthreads_or, the block's version, does.
      __syncwarp();
      return result;
    } else {
      return __syncthreads_or(claim);
    }
  }

  // The sum and the maximum over the group's threads, in every thread. All threads call it. `turn` counts the calls
  // since a barrier that followed the last use of `shared`.
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
  // Lane w returns warp w's value. Lanes beyond the last warp return `none`.
  static __device__ __forceinline__ u32 exchange(u32 value, u32 none, Words& shared, u32 turn) {
    u32* words = shared.words[turn % 2];
    // Recomputed here: a value kept since the start of the kernel costs a register.
    u32 thread = threadIdx.x;
    keep_opaque(thread);
    if (lane_id() == 0) words[thread / kWarpSize] = value;
    sync();
    return lane_id() < kWarps ? words[lane_id()] : none;
  }
};

}  // namespace fused_topk
