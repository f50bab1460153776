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

// Loads the two B of two products from their transpose in shared memory: (b[0], b[1]) and (b[2], b[3]). Lane l gives the address
// of eight columns of row l % 16, those of the first product where l < 16. Addresses are multiples of 16 bytes.
__device__ __forceinline__ void load_transposed(u32 (&b)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(u32(__cvta_generic_to_shared(row)))
               : "memory");
}

}  // namespace fused_topk
