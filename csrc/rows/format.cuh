// SPDX-License-Identifier: Apache-2.0
// The three formats of a logit.
#pragma once

#include "tuning.cuh"

namespace fused_topk {

// Each format has:
//   Bits                 an element as an unsigned integer
//   kPerVector           elements in 16 bytes
//   kNegativeInfinity    the bits of -inf
//   kLowestKeyBit        the lowest bit in which the keys (order.h) of two elements of one sign can differ
//   kHasMaxPairs         whether the hardware compares two pairs of elements in one instruction
//   decode               an element as a float: from its bits, or element e of the words of a vector
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
  static __device__ __forceinline__ u32 max_pairs(u32 a, u32) { return a; }
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
  static __device__ __forceinline__ u32 max_pairs(u32 a, u32 b) { return max_nan_half2(a, b); }
  static __device__ __forceinline__ u32 pair_keys(u32 word) { return order_keys(canonical_half2(word)); }
};

template <class FORMAT>
constexpr bool is_bfloat16(FORMAT) {
  return false;
}
constexpr bool is_bfloat16(BFloat16) { return true; }

}  // namespace fused_topk
