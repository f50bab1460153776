// SPDX-License-Identifier: Apache-2.0
// Which tokens of a row count: its mask and its length.
#pragma once

#include "platform.cuh"

namespace fused_topk {

// What a mask hides a token from. kMaskBoth: from the choice and from (m, d). kMaskChoice ("all"): from the choice
// only. kLengths: there is no mask, and each row has a length. With a mask rows may have lengths, with kNoMask they have none.
enum MaskUse : u32 { kNoMask = 0, kMaskBoth = 1, kMaskChoice = 2, kLengths = 3 };
constexpr bool has_mask(u32 use) { return use == kMaskBoth || use == kMaskChoice; }

// Entry `at` of an array of int64 or, unless `are_long`, int32: a row's length, clamped to 0 .. V.
__device__ __forceinline__ u32 length_at(const void* lengths, bool are_long, i64 at, u32 V) {
  const i64 length =
      are_long ? __ldg(static_cast<const i64*>(lengths) + at) : __ldg(static_cast<const int*>(lengths) + at);
  return length < 0 ? 0 : length < i64(V) ? u32(length) : V;
}

// How a mask stores which tokens are allowed.
enum MaskKind : u32 { kMaskBytes = 0, kMaskBits = 1 };

struct RowMask {
  const void* data;  // bytes [V] at distance `stride`, or words [ceil(V / 32)] at distance `stride`
  i64 stride;
  u32 kind;

  // Bit e: token `first + e` is allowed, for e < COUNT (1, 4 or 8). Tokens past V are not.
  template <u32 COUNT>
  __device__ __forceinline__ u32 allowed(u32 first, u32 V) const {
    if (first >= V) return 0;
    u32 bits = 0;
    if (kind == kMaskBits) {
      // COUNT divides 32 and `first`, so all bits lie in one int32 of the mask.
      bits = __ldg(static_cast<const u32*>(data) + i64(first / 32) * stride) >> (first % 32);
    } else {
      const unsigned char* bytes = static_cast<const unsigned char*>(data);
#pragma unroll
      for (u32 e = 0; e < COUNT; ++e)
        if (first + e < V && __ldg(bytes + i64(first + e) * stride)) bits |= 1u << e;
    }
    return bits & ((V - first < COUNT ? 1u << (V - first) : 1u << COUNT) - 1);
  }
};

}  // namespace fused_topk
