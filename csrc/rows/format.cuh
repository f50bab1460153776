// SPDX-License-Identifier: Apache-2.0
// The three formats of a logit, and vectors of them.
#pragma once

#include "tuning.cuh"

namespace fused_topk {

// 16 bytes of logits.
struct alignas(16) Vector {
  u32 words[4];
};

// Two floats as a pair of 16-bit floats, rounded to nearest even.
__device__ __forceinline__ u32 half_pair(float low, float high) {
  u32 word;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
  u16 bits[2];
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits[0]) : "f"(low));
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits[1]) : "f"(high));
  word = bits[0] | u32(bits[1]) << 16;
#endif
  return word;
}

#if __CUDA_ARCH__ < 800
__device__ __forceinline__ u32 bfloat16_bits(float x) {
  const u32 bits = __float_as_uint(x);
  return x != x ? 0x7FFFu : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}
#endif

__device__ __forceinline__ u32 bfloat16_pair(float low, float high) {
#if __CUDA_ARCH__ >= 800
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  return bfloat16_bits(low) | bfloat16_bits(high) << 16;
#endif
}

// Each format has:
//   Bits                 an element as an unsigned integer
//   kPerVector           elements in 16 bytes
//   kNegativeInfinity    the bits of -inf
//   kLowestKeyBit        the lowest bit in which the keys (order.h) of two elements of one sign can differ
//   kHasMaxPairs         whether the hardware compares two pairs of elements in one instruction
//   decode               an element as a float: from its bits, or element e of the words of a vector
//   encode               16 bytes from floats y, [kPerVector]
//   max_pairs            the greater elements of two pairs, element by element; for 16-bit formats
//   pair_keys            the order keys of a pair, 16 bits each; for 16-bit formats
struct Float32 {
  using Bits = u32;
  static constexpr u32 kPerVector = 4;
  static constexpr Bits kNegativeInfinity = 0xFF800000u;
  static constexpr u32 kLowestKeyBit = 1u;
  static constexpr bool kHasMaxPairs = false;
  static __device__ __forceinline__ float decode(Bits bits) { return __uint_as_float(bits); }
  static __device__ __forceinline__ float decode(const u32 (&words)[4], u32 e) { return decode(words[e]); }
  static __device__ __forceinline__ Vector encode(const float* y) {
    return {{__float_as_uint(y[0]), __float_as_uint(y[1]), __float_as_uint(y[2]), __float_as_uint(y[3])}};
  }
};

struct BFloat16 {
  using Bits = u16;
  static constexpr u32 kPerVector = 8;
  static constexpr Bits kNegativeInfinity = 0xFF80u;
  static constexpr u32 kLowestKeyBit = 1u << 16;
  static constexpr bool kHasMaxPairs = kHasPackedMax;
  static __device__ __forceinline__ float decode(Bits bits) { return __uint_as_float(u32(bits) << 16); }
  static __device__ __forceinline__ float decode(const u32 (&words)[4], u32 e) {
    return __uint_as_float(e % 2 == 0 ? words[e / 2] << 16 : words[e / 2] & 0xFFFF0000u);
  }
  static __device__ __forceinline__ Vector encode(const float* y) {
    return {
        {bfloat16_pair(y[0], y[1]), bfloat16_pair(y[2], y[3]), bfloat16_pair(y[4], y[5]), bfloat16_pair(y[6], y[7])}};
  }
  static __device__ __forceinline__ u32 max_pairs(u32 a, u32 b) { return max_nan_bfloat16x2(a, b); }
  static __device__ __forceinline__ u32 pair_keys(u32 word) { return order_keys(canonical_bfloat16x2(word)); }
};

struct Float16 {
  using Bits = u16;
  static constexpr u32 kPerVector = 8;
  static constexpr Bits kNegativeInfinity = 0xFC00u;
  static constexpr u32 kLowestKeyBit = 1u << 13;
  static constexpr bool kHasMaxPairs = kHasPackedMax;
  static __device__ __forceinline__ float decode(Bits bits) { return half_to_float(bits); }
  static __device__ __forceinline__ float decode(const u32 (&words)[4], u32 e) {
    return decode(Bits(e % 2 == 0 ? words[e / 2] : words[e / 2] >> 16));
  }
  static __device__ __forceinline__ Vector encode(const float* y) {
    return {{half_pair(y[0], y[1]), half_pair(y[2], y[3]), half_pair(y[4], y[5]), half_pair(y[6], y[7])}};
  }
  static __device__ __forceinline__ u32 max_pairs(u32 a, u32 b) { return max_nan_half2(a, b); }
  static __device__ __forceinline__ u32 pair_keys(u32 word) { return order_keys(canonical_half2(word)); }
};

template <class FORMAT>
constexpr bool is_bfloat16(FORMAT) {
  return false;
}
constexpr bool is_bfloat16(BFloat16) { return true; }

// Where element e of a vector lies in its word, e * 4 / kPerVector: the lowest bit, and all bits.
template <class FORMAT>
constexpr u32 shift_of(u32 e) {
  return e % (FORMAT::kPerVector / 4) * (8 * u32(sizeof(typename FORMAT::Bits)));
}
template <class FORMAT>
constexpr u32 bits_of(u32 e) {
  return u32(typename FORMAT::Bits(~0u)) << shift_of<FORMAT>(e);
}
template <class FORMAT>
__device__ __forceinline__ typename FORMAT::Bits element(const Vector& vector, u32 e) {
  return typename FORMAT::Bits(vector.words[e * 4 / FORMAT::kPerVector] >> shift_of<FORMAT>(e));
}
// A vector of the elements load(e).
template <class FORMAT, class LOAD>
__device__ __forceinline__ Vector vector_of(LOAD load) {
  Vector result = {{0, 0, 0, 0}};
#pragma unroll
  for (u32 e = 0; e < FORMAT::kPerVector; ++e) {
    const u32 bits = load(e);
    result.words[e * 4 / FORMAT::kPerVector] |= bits << shift_of<FORMAT>(e);
  }
  return result;
}
template <class FORMAT>
__device__ __forceinline__ Vector all_negative_infinity() {
  return vector_of<FORMAT>([](u32) { return FORMAT::kNegativeInfinity; });
}
// The vector, -inf where the bit of an element is 0.
template <class FORMAT>
__device__ __forceinline__ void hide(Vector& vector, u32 allowed) {
#pragma unroll
  for (u32 e = 0; e < FORMAT::kPerVector; ++e) {
    u32& word = vector.words[e * 4 / FORMAT::kPerVector];
    if (!(allowed >> e & 1u))
      word = (word & ~bits_of<FORMAT>(e)) | u32(FORMAT::kNegativeInfinity) << shift_of<FORMAT>(e);
  }
}

}  // namespace fused_topk
