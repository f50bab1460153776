// SPDX-License-Identifier: Apache-2.0
// Everything that is the GPU's and not the algorithm's: warp votes and reductions, fences, loads, the hardware's 2^x.
// The rest of csrc/ uses only these wrappers, threadIdx, blockIdx and __shared__. No CUDA header is needed (NVRTC).
#pragma once

#include "normalizer.h"

namespace fused_topk {

using i64 = long long;

constexpr u32 kWarpSize = 32;
constexpr u32 kAllLanes = 0xFFFFFFFFu;

__device__ __forceinline__ u32 lane_id() { return threadIdx.x % kWarpSize; }

// 2^x on the special-function unit: relative error at most 2^-22, 2^-inf = 0, NaN stays NaN.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// max_or_nan (normalizer.h) in one instruction where there is one.
__device__ __forceinline__ float max_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return max_or_nan(a, b);
#endif
}

__device__ __forceinline__ float half_to_float(u16 bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}

// The compiler must assume that the word has changed.
__device__ __forceinline__ void keep_opaque(u32& word) { asm volatile("" : "+r"(word)); }

// Largest value over the warp, in every lane. All 32 lanes call it.
__device__ __forceinline__ u32 warp_max(u32 value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAllLanes, value);
#else
  for (u32 step = kWarpSize / 2; step > 0; step /= 2) value = max(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
#endif
}

// Smallest value over the warp, in every lane. All 32 lanes call it.
__device__ __forceinline__ u32 warp_min(u32 value) { return ~warp_max(~value); }

// Number of bits set in the warp's words, in every lane. All 32 lanes call it.
__device__ __forceinline__ u32 warp_count(u32 word) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(kAllLanes, __popc(word));
#else
  u32 count = __popc(word);
  for (u32 step = kWarpSize / 2; step > 0; step /= 2) count += __shfl_xor_sync(kAllLanes, count, step);
  return count;
#endif
}

// Sum over the warp, the same bits in every lane (the xor tree adds the same pairs everywhere). All 32 lanes call it.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (u32 step = kWarpSize / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

// Threads into a warp: the merge of normalizer.h over the lanes, the same bits in every lane. All 32 lanes call it.
__device__ __forceinline__ Normalizer warp_merge(Normalizer a, float scale) {
#pragma unroll
  for (u32 step = kWarpSize / 2; step > 0; step /= 2) {
    const Normalizer b = {__shfl_xor_sync(kAllLanes, a.m, step), __shfl_xor_sync(kAllLanes, a.d, step)};
    a = merge(a, b, scale, exp2_approx);
  }
  return a;
}

// What another block wrote: read past this multiprocessor's L1, which is not kept coherent.
template <class T>
__device__ __forceinline__ T load_from_other_block(const T* address) {
  return __ldcg(address);
}

}  // namespace fused_topk
