// SPDX-License-Identifier: Apache-2.0
// The least time that a kernel can take: reads each byte once, with the loads of the other kernels, and computes nothing.
// Kernels that write whole rows are compared with a copy.
#include "platform.cuh"

namespace fused_topk {

__global__ void __launch_bounds__(256) read_rows_kernel(const uint4* data,  // [vectors]
                                                        i64 vectors,
                                                        u32* never_written)  // nullable
{
  constexpr u32 kInFlight = 8;
  const i64 first = i64(blockIdx.x) * blockDim.x * kInFlight + threadIdx.x;
  uint4 v[kInFlight];
#pragma unroll
  for (u32 i = 0; i < kInFlight; ++i) {
    const i64 at = first + i64(i) * blockDim.x;
    v[i] = at < vectors ? __ldg(data + at) : uint4{0, 0, 0, 0};
  }
  u32 mixed = 0;
#pragma unroll
  for (u32 i = 0; i < kInFlight; ++i) mixed ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
  // The compiler cannot know that the pointer is null, so it must load.
  if (never_written && mixed == 0x12345678u) *never_written = mixed;
}

}  // namespace fused_topk
