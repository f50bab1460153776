// SPDX-License-Identifier: Apache-2.0
// The blocks of a cluster, which run at the same time and can write to each other's shared memory. Compute capability
// 9.0 and later; before, no kernel that calls these is compiled.
#pragma once

#include "platform.cuh"

namespace fused_topk {

#if __CUDA_ARCH__ >= 900

// The cluster's barrier, in two halves. All threads of all its blocks call both; what they wrote before the first half,
// to any block's shared memory, is seen after the second.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Writes where the block of that rank has what this block has at `slot`. That block must have begun to run: after a
// barrier of the cluster it has.
__device__ __forceinline__ void store_in_block(Normalizer* slot, u32 rank, Normalizer value) {
  u32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(u32(__cvta_generic_to_shared(slot))), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value.m) : "memory");
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address + 4), "f"(value.d) : "memory");
}

#else
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ void store_in_block(Normalizer*, u32, Normalizer) {}
#endif

}  // namespace fused_topk
