// SPDX-License-Identifier: Apache-2.0
// The GPU's own operations: votes, reductions, fences, loads, the hardware's 2^x. The rest of csrc/ uses only these
// wrappers, a few intrinsics, threadIdx, blockIdx and __shared__. No CUDA header is needed (NVRTC).
#pragma once

#include "../algebra/normalizer.h"

namespace fused_topk {

using i64 = long long;

constexpr u32 kWarpSize = 32;
constexpr u32 kAllLanes = 0xFFFFFFFFu;

__device__ __forceinline__ u32 lane_id() { return threadIdx.x % kWarpSize; }

// The number of lanes of a ballot that come before this lane.
__device__ __forceinline__ u32 lanes_before(u32 ballot) { return __popc(ballot & ((1u << lane_id()) - 1)); }

// 2^x on the special-function unit: relative error at most 2^-22, 2^-inf = 0, NaN stays NaN.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x with a relative error of at most 2^-23.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7FC00000u); }

// max_or_nan (normalizer.h). One instruction, where the hardware has it.
__device__ __forceinline__ float max_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return max_or_nan(a, b);
#endif
}

// max_nan of two pairs of 16-bit floats at once. The instruction needs compute capability 8.0. On older hardware
// callers unpack the pairs (kHasPackedMax).
#if __CUDA_ARCH__ >= 800
constexpr bool kHasPackedMax = true;
__device__ __forceinline__ u32 max_nan_bfloat16x2(u32 a, u32 b) {
  u32 y;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ __forceinline__ u32 max_nan_half2(u32 a, u32 b) {
  u32 y;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
// Makes a pair canonical: -0 becomes +0, and any NaN becomes the positive NaN of all ones. Computes 1 x + 0.
__device__ __forceinline__ u32 canonical_bfloat16x2(u32 x) {
  u32 y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(0x3F803F80u), "r"(0u));
  return y;
}
__device__ __forceinline__ u32 canonical_half2(u32 x) {
  u32 y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(0x3C003C00u), "r"(0u));
  return y;
}
#else
constexpr bool kHasPackedMax = false;
__device__ __forceinline__ u32 max_nan_bfloat16x2(u32 a, u32) { return a; }
__device__ __forceinline__ u32 max_nan_half2(u32 a, u32) { return a; }
// infinity: the bits of +inf. A greater magnitude is a NaN.
__device__ __forceinline__ u32 canonical_pair(u32 x, u32 infinity) {
  u32 y = 0;
  for (u32 shift = 0; shift < 32; shift += 16) {
    const u32 bits = x >> shift & 0xFFFFu;
    const u32 magnitude = bits & 0x7FFFu;
    y |= (magnitude > infinity ? 0x7FFFu : magnitude == 0 ? 0u : bits) << shift;
  }
  return y;
}
__device__ __forceinline__ u32 canonical_bfloat16x2(u32 x) { return canonical_pair(x, 0x7F80u); }
__device__ __forceinline__ u32 canonical_half2(u32 x) { return canonical_pair(x, 0x7C00u); }
#endif

// Adds 1 to `count` if a < b. Uses the borrow of a - b, which needs no predicate.
__device__ __forceinline__ void count_less(u32& count, u64 a, u64 b) {
  u32 negative = ~count;
  asm("{ .reg .u32 low, high; sub.cc.u32 low, %1, %3; subc.cc.u32 high, %2, %4; subc.u32 %0, %0, 0; }"
      : "+r"(negative)
      : "r"(u32(a)), "r"(u32(a >> 32)), "r"(u32(b)), "r"(u32(b >> 32)));
  count = ~negative;
}

// order_key (order.h) of a float in four instructions. Adding +0 turns -0 into +0, and any NaN into the positive NaN
// whose bits are all ones.
__device__ __forceinline__ u32 order_key(float x) {
  float y;
  asm("add.rn.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  const u32 bits = __float_as_uint(y);
  return bits ^ (u32(int(bits) >> 31) | 0x80000000u);
}

// The order keys of a canonical pair of 16-bit floats, 16 bits each.
__device__ __forceinline__ u32 order_keys(u32 pair) {
  // Each half's sign, copied to all of its bits.
  u32 signs;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(signs) : "r"(pair), "r"(0u), "r"(0xBB99u));
  return pair ^ (signs | 0x80008000u);
}
// The inverse of order_keys, for one key.
__device__ __forceinline__ u16 bits_of_short_key(u32 key) { return u16(key & 0x8000u ? key & 0x7FFFu : ~key); }

__device__ __forceinline__ float half_to_float(u16 bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}

// Tells the compiler that the word may have changed.
__device__ __forceinline__ void keep_opaque(u32& word) { asm volatile("" : "+r"(word)); }
// Tells the compiler that memory may have changed.
__device__ __forceinline__ void keep_memory_opaque() { asm volatile("" ::: "memory"); }

// The greatest value of the warp, in every lane. All 32 lanes call it.
__device__ __forceinline__ u32 warp_max(u32 value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAllLanes, value);
#else
  for (u32 step = kWarpSize / 2; step > 0; step /= 2) value = max(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
#endif
}

__device__ __forceinline__ u64 warp_max(u64 value) {
  const u32 high = warp_max(u32(value >> 32));
  return u64(high) << 32 | warp_max(u32(value >> 32) == high ? u32(value) : 0);
}

// The smallest value of the warp, in every lane. All 32 lanes call it.
__device__ __forceinline__ u32 warp_min(u32 value) { return ~warp_max(~value); }

// The sum over the warp, in every lane. All 32 lanes call it.
__device__ __forceinline__ u32 warp_sum(u32 value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(kAllLanes, value);
#else
  for (u32 step = kWarpSize / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
#endif
}

// The sum over the warp, with the same bits in every lane: the xor tree adds the same pairs everywhere. T: float or
// u64. All 32 lanes call it.
template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (u32 step = kWarpSize / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

// The sum over this lane and the lanes before it. T: u32 or u64. All 32 lanes call it.
template <class T>
__device__ __forceinline__ T warp_inclusive_sum(T value) {
#pragma unroll
  for (u32 step = 1; step < kWarpSize; step *= 2) {
    const T before = __shfl_up_sync(kAllLanes, value, step);
    if (lane_id() >= step) value += before;
  }
  return value;
}

// The greatest value of the warp, in every lane. NaN ranks above all. Values are results of max_nan, so a NaN is
// positive. All 32 lanes call it.
__device__ __forceinline__ float warp_max(float value) {
#if __CUDA_ARCH__ >= 800
  // Floats compare like integers once the negative ones are inverted.
  const int bits = __float_as_int(value);
  const int greatest = __reduce_max_sync(kAllLanes, bits ^ ((bits >> 31) & 0x7FFFFFFF));
  return __int_as_float(greatest ^ ((greatest >> 31) & 0x7FFFFFFF));
#else
  for (u32 step = kWarpSize / 2; step > 0; step /= 2) value = max_nan(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
#endif
}

// Adds to a counter in shared memory. Returns its value before.
__device__ __forceinline__ u32 add_to_shared(u32* counter, u32 count) {
  u32 before;
  // Not atomicAdd: the compiler would first sum over the warp's lanes, but only one lane calls this.
  asm volatile("atom.shared.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(u32(__cvta_generic_to_shared(counter))), "r"(count)
               : "memory");
  return before;
}

// A 32-bit word of shared memory that warps write and read without a barrier. A read returns any value that was ever
// stored.
__device__ __forceinline__ void store_unordered(u32* word, u32 value) {
  [[maybe_unused]] u32 before;
  asm volatile("atom.shared.exch.b32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(u32(__cvta_generic_to_shared(word))), "r"(value)
               : "memory");
}
__device__ __forceinline__ u32 load_unordered(u32* word) { return add_to_shared(word, 0); }

// A 64-bit number of shared memory that only grows, without a barrier. Raises it to `value` and returns its value
// before.
__device__ __forceinline__ u64 raise_in_shared(u64* number, u64 value) {
  u64 before;
  asm volatile("atom.shared.max.u64 %0, [%1], %2;"
               : "=l"(before)
               : "r"(u32(__cvta_generic_to_shared(number))), "l"(value)
               : "memory");
  return before;
}

// Takes a ticket of a counter that blocks share: adds 1 and returns the value before. The last of `count` blocks gets
// count - 1, and the counter wraps to 0. Orders memory: a block that gets a greater number sees what this block wrote
// before the barrier that precedes the call.
__device__ __forceinline__ u32 take_ticket(u32* counter, u32 count) {
  u32 ticket;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(ticket)
               : "l"(counter), "r"(count - 1)
               : "memory");
  return ticket;
}

// The counter's value. A block that sees another block counted also sees what that block wrote.
__device__ __forceinline__ u32 tickets_taken(const u32* counter) {
  u32 count;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

// The cache policy of loads. leaves_first: the lines that they read are the first to leave the L2 cache when it needs
// room. Otherwise the cache decides.
struct CachePolicy {
  u64 bits;

  __device__ __forceinline__ explicit CachePolicy(bool leaves_first) : bits(0) {
#if __CUDA_ARCH__ >= 800
    u64 first, normal;
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(first));
    asm("createpolicy.fractional.L2::evict_normal.b64 %0;" : "=l"(normal));
    bits = leaves_first ? first : normal;
#endif
  }
};

// Loads 16 bytes that no one writes during the launch.
__device__ __forceinline__ uint4 load_with_policy(const void* global, CachePolicy policy) {
#if __CUDA_ARCH__ >= 800
  uint4 v;
  asm volatile("ld.global.nc.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(global), "l"(policy.bits));
  return v;
#else
  return __ldg(static_cast<const uint4*>(global));
#endif
}

// Copies 16 bytes to shared memory in the background, without registers. Both addresses are multiples of 16. Needs
// compute capability 8.0 (kHasAsyncCopy). On older hardware callers load to registers.
#if __CUDA_ARCH__ >= 800
constexpr bool kHasAsyncCopy = true;
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(u32(__cvta_generic_to_shared(shared))), "l"(global)
               : "memory");
}
// Zeros, and no read, unless `is_read`.
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool is_read) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(u32(__cvta_generic_to_shared(shared))),
               "l"(global), "r"(is_read ? 16u : 0u)
               : "memory");
}
__device__ __forceinline__ void copy_async(void* shared, const void* global, CachePolicy policy) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(u32(__cvta_generic_to_shared(shared))),
      "l"(global), "l"(policy.bits)
      : "memory");
}
// Closes a batch: the copies that this thread has begun since the last call. A batch may be empty.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `PENDING` of this thread's batches, the newest, are in flight.
template <u32 PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
#else
constexpr bool kHasAsyncCopy = false;
__device__ __forceinline__ void copy_async(void*, const void*) {}
__device__ __forceinline__ void copy_async(void*, const void*, CachePolicy) {}
__device__ __forceinline__ void commit_copies() {}
template <u32 PENDING>
__device__ __forceinline__ void wait_copies() {}
#endif

// Loads what another block wrote. Bypasses this multiprocessor's L1 cache, which is not coherent.
template <class T>
__device__ __forceinline__ T load_from_other_block(const T* address) {
  return __ldcg(address);
}

}  // namespace fused_topk
