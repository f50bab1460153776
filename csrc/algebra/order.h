// SPDX-License-Identifier: Apache-2.0
// The one total order of the project: greater logit first, then smaller index.
//
// A logit becomes an unsigned key whose integer order is the order of the logits: NaN (either sign) above +inf,
// -0 equal to +0. A candidate packs that key above the complement of its index into 64 bits, so that `ranks before`
// is one integer comparison and no two tokens of a row compare equal. Kernels, CPU code and tests all use this file.
//
// Compiles under NVRTC, nvcc, g++ and clang; needs no header. README.md has the reading order.
#pragma once

#if defined(__CUDACC__)
#define FUSED_TOPK_FN __host__ __device__ __forceinline__
#else
// Internal linkage: the CPU kernel compiles this file once per instruction set, and the linker must not mix them.
#define FUSED_TOPK_FN static inline
#endif

namespace fused_topk {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 kNanKey = 0xFFFFFFFFu;
constexpr u32 kPositiveInfinityKey = 0xFF800000u;
constexpr u32 kZeroKey = 0x80000000u;
constexpr u32 kNegativeInfinityKey = 0x007FFFFFu;
// Below the key of every logit, -inf included: a key that no token has.
constexpr u32 kNoKey = 0u;

// `bits` are the bits of a float32; float16 and bfloat16 convert to float32 exactly and keep their order.
FUSED_TOPK_FN u32 order_key(u32 bits) {
  const u32 magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return kNanKey;
  // -0 must tie with +0, so that the smaller index wins whatever the sign.
  if (magnitude == 0u) return kZeroKey;
  return (bits & 0x80000000u) ? ~bits : (bits | 0x80000000u);
}

// The inverse of order_key, up to what it forgets: the sign of zero and the payload of NaN.
FUSED_TOPK_FN u32 bits_of_key(u32 key) {
  if (key == kNanKey) return 0x7FC00000u;
  return (key & 0x80000000u) ? (key & 0x7FFFFFFFu) : ~key;
}

// Greater candidate = ranks before. Indices are below 2^31, so no real candidate is 0, the empty slot.
constexpr u64 kNoCandidate = 0ull;

FUSED_TOPK_FN u64 make_candidate(u32 key, u32 index) { return (u64(key) << 32) | u32(~index); }
FUSED_TOPK_FN u32 key_of(u64 candidate) { return u32(candidate >> 32); }
FUSED_TOPK_FN u32 index_of(u64 candidate) { return ~u32(candidate); }

}  // namespace fused_topk
