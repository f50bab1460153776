// SPDX-License-Identifier: Apache-2.0
// CUDA's keywords and built-in functions, for a C++ compiler: those that the kernels of csrc/ and the tests use.
// A built-in function that is missing here is a compile error, and a line to add.
#pragma once

#include <cmath>
#include <type_traits>
#include <utility>

#include "simt.h"

// As under NVRTC, from here on.
#define __CUDACC__ 1
#define __CUDACC_RTC__ 1

#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)

#define threadIdx (simt::thread_index())
#define blockIdx (simt::block_index())
#define blockDim (simt::block_size())
#define gridDim (simt::grid_size())

// What translate.py makes of a __shared__ declaration. T tells the variables of one line's instantiations apart.
template <class T, int LINE>
__forceinline__ T& simt_shared_variable(const char* name, size_t alignment) {
  static char tag;
  return *static_cast<T*>(
      simt::shared_variable(&tag, sizeof(T), alignment < alignof(T) ? alignof(T) : alignment, name));
}
template <class T>
__forceinline__ T* simt_dynamic_shared(size_t alignment) {
  return static_cast<T*>(simt::dynamic_shared(alignment < alignof(T) ? alignof(T) : alignment));
}

// Vectors.
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};

// Bits and arithmetic.
template <class TO, class FROM>
__forceinline__ TO simt_bits(FROM from) {
  static_assert(sizeof(TO) == sizeof(FROM));
  return __builtin_bit_cast(TO, from);
}
constexpr unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
constexpr int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
constexpr float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
constexpr float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
constexpr int __popc(unsigned x) { return __builtin_popcount(x); }
constexpr int __clz(int x) { return x ? __builtin_clz(x) : 32; }
constexpr int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
constexpr int __ffs(int x) { return __builtin_ffs(x); }
constexpr unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned(((unsigned long long)high << 32 | low) >> (shift & 31));
}

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return __builtin_fmin(a, b);
  return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return __builtin_fmax(a, b);
  return T(a) < T(b) ? T(b) : T(a);
}
__forceinline__ float __frcp_rn(float x) { return 1.0f / x; }
__forceinline__ float __fdiv_rn(float a, float b) { return a / b; }
__forceinline__ float __fadd_rn(float a, float b) { return a + b; }
__forceinline__ float __fmul_rn(float a, float b) { return a * b; }
__forceinline__ float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

// Collectives of a block.
__forceinline__ void __syncthreads() { simt::block_barrier("__syncthreads", false); }
__forceinline__ int __syncthreads_or(int claim) { return simt::block_barrier("__syncthreads_or", claim != 0) != 0; }

// Collectives of a warp. Like the hardware's, a shuffle, a vote or a reduction orders no memory access.
__forceinline__ void __syncwarp(unsigned mask = ~0u) { simt::sync_warp(mask); }
template <class T>
__forceinline__ T simt_shuffle(const char* name, unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  unsigned long long bits = 0;
  if constexpr (sizeof(T) == 4)
    bits = simt_bits<unsigned>(value);
  else
    bits = simt_bits<unsigned long long>(value);
  bits = simt::shuffle(name, mask, bits, source);
  if constexpr (sizeof(T) == 4)
    return simt_bits<T>(unsigned(bits));
  else
    return simt_bits<T>(bits);
}
// A lane whose source would lie outside of its segment of `width` lanes reads itself.
__forceinline__ unsigned simt_lane() { return threadIdx.x % 32; }
template <class T>
__forceinline__ T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return simt_shuffle("__shfl_sync", mask, value, (simt_lane() & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
__forceinline__ T __shfl_xor_sync(unsigned mask, T value, int step, int width = 32) {
  const unsigned lane = simt_lane(), source = lane ^ step;
  // Across the end of the segment, towards lower lanes is allowed.
  return simt_shuffle("__shfl_xor_sync", mask, value, source > (lane | (width - 1)) ? lane : source);
}
template <class T>
__forceinline__ T __shfl_up_sync(unsigned mask, T value, unsigned step, int width = 32) {
  const unsigned lane = simt_lane();
  return simt_shuffle("__shfl_up_sync", mask, value, (lane & (width - 1)) < step ? lane : lane - step);
}
template <class T>
__forceinline__ T __shfl_down_sync(unsigned mask, T value, unsigned step, int width = 32) {
  const unsigned lane = simt_lane();
  return simt_shuffle("__shfl_down_sync", mask, value,
                      (lane & (width - 1)) + step >= unsigned(width) ? lane : lane + step);
}
__forceinline__ unsigned __ballot_sync(unsigned mask, int claim) { return simt::ballot("__ballot_sync", mask, claim); }
__forceinline__ int __any_sync(unsigned mask, int claim) { return simt::ballot("__any_sync", mask, claim) != 0; }
__forceinline__ int __all_sync(unsigned mask, int claim) { return simt::ballot("__all_sync", mask, claim) == mask; }
#if __CUDA_ARCH__ >= 800
#define SIMT_REDUCE(name, reduction)                                                         \
  __forceinline__ unsigned __reduce_##name##_sync(unsigned mask, unsigned value) {           \
    return simt::reduce("__reduce_" #name "_sync", mask, value, simt::Reduction::reduction); \
  }
SIMT_REDUCE(add, kAdd)
SIMT_REDUCE(max, kMax)
#undef SIMT_REDUCE
__forceinline__ int __reduce_max_sync(unsigned mask, int value) {
  return simt::reduce("__reduce_max_sync", mask, value, simt::Reduction::kSignedMax);
}
#endif

// Memory.
__forceinline__ void __nanosleep(unsigned) { simt::rest(); }
__forceinline__ void __trap() { simt::trap("traps"); }

#define SIMT_LOAD(name, cache)                                  \
  template <class T>                                            \
  __forceinline__ T name(const T* address) {                    \
    T value;                                                    \
    simt::load(&value, address, sizeof(T), simt::Cache::cache); \
    return value;                                               \
  }
SIMT_LOAD(__ldg, kReadOnly)
SIMT_LOAD(__ldcg, kAny)
#undef SIMT_LOAD
#define SIMT_STORE(name)                           \
  template <class T>                               \
  __forceinline__ void name(T* address, T value) { \
    simt::store(address, &value, sizeof(T));       \
  }
SIMT_STORE(__stcg)
SIMT_STORE(__stcs)
#undef SIMT_STORE

__forceinline__ size_t __cvta_generic_to_shared(const void* pointer) { return simt::shared_address(pointer); }

// Nothing runs between the check and the update: the fibers share one thread of the host. The update itself must not be
// taken for a plain access.
#define SIMT_ATOMIC(name, update)                                          \
  template <class T>                                                       \
  __attribute__((no_sanitize("thread"))) T simt_##name(T* word, T value) { \
    const T old = *word;                                                   \
    *word = update;                                                        \
    return old;                                                            \
  }                                                                        \
  template <class T, class U>                                              \
  __forceinline__ T name(T* word, U value) {                               \
    simt::before_atomic(word, sizeof(T), simt::Atomic::kExchange);         \
    return simt_##name<T>(word, T(value));                                 \
  }
SIMT_ATOMIC(atomicAdd, old + value)
SIMT_ATOMIC(atomicExch, value)
SIMT_ATOMIC(atomicMax, old < value ? value : old)
SIMT_ATOMIC(atomicOr, old | value)
SIMT_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
#undef SIMT_ATOMIC

// How a launch calls a kernel: one pointer for each parameter, as cudaLaunchKernel has it.
template <class... T, size_t... I>
__attribute__((no_sanitize("thread"))) void simt_call(void (*kernel)(T...), void** arguments,
                                                      std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_cv_t<T>*>(arguments[I])...);
}
template <class... T>
void simt_call(void (*kernel)(T...), void** arguments) {
  simt_call(kernel, arguments, std::index_sequence_for<T...>());
}
