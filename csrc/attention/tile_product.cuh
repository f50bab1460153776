// SPDX-License-Identifier: Apache-2.0
// Products of small matrices on tensor cores: C [16, 8] += A [16, 16] B [16, 8], a warp for each. Needs compute capability 8.0.
//
// Lane l holds, with g = l / 4 and c = l % 4, pairs of 16-bit numbers in words, and sums in float32:
//
//     A: row g, columns 2c and 2c + 1 (a[0]), 2c + 8 and 2c + 9 (a[2]); the same of row g + 8 (a[1], a[3])
//     B: column g, rows 2c and 2c + 1 (b[0]), 2c + 8 and 2c + 9 (b[1])
//     C: row g, columns 2c and 2c + 1 (c[0], c[1]); the same of row g + 8 (c[2], c[3])
#pragma once

#include "../rows/format.cuh"

namespace fused_topk {

__device__ __forceinline__ void add_product(BFloat16, float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void add_product(Float16, float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ u32 pair_of(BFloat16, float low, float high) { return bfloat16_pair(low, high); }
__device__ __forceinline__ u32 pair_of(Float16, float low, float high) { return half_pair(low, high); }

// The lower halves of two words, or their upper halves, as a pair.
__device__ __forceinline__ u32 halves(u32 low, u32 high, bool are_upper) {
  u32 pair;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(pair) : "r"(low), "r"(high), "r"(are_upper ? 0x7632u : 0x5410u));
  return pair;
}

}  // namespace fused_topk
