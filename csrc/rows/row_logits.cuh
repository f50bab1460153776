// SPDX-License-Identifier: Apache-2.0
// A row's logits, one by one or some at a time, for kernels that read a part of a row again while it is in the L2 cache. No tile
// waits in registers or shared memory.
#pragma once

#include "mask.cuh"
#include "row.cuh"

namespace fused_topk {

// The logits of a row. Its functions are for any thread.
template <class FORMAT>
struct RowLogits {
  using Bits = typename FORMAT::Bits;

  const Bits* const data;  // [V]
  const RowMask mask;      // its data is null where there is none
  const u32 V;             // the row's length

  // The logit of token `index` < V; -inf if the mask hides the token.
  __device__ __forceinline__ float operator()(u32 index) const {
    if (mask.data) {
      const u32 bit = index % 4;
      if (!(mask.template allowed<4>(index - bit, V) >> bit & 1u)) return -FUSED_TOPK_INFINITY;
    }
    return FORMAT::decode(__ldg(data + index));
  }
};

// Reads a row with a warp, kElements tokens at a time, 16 bytes a lane, at any start address. Element e of a lane's
// vector u is token first + (u * 32 + lane) * kPerVector + e.
template <class FORMAT, u32 VECTORS = 4>
struct PartReader {
  static constexpr u32 kPerVector = FORMAT::kPerVector;
  static constexpr u32 kVectors = VECTORS;
  static constexpr u32 kElements = kVectors * kPerVector * kWarpSize;

  const RowLogits<FORMAT>& row;

  // The first token of a lane's vector u.
  static __device__ __forceinline__ u32 token(u32 first, u32 u) {
    return first + (u * kWarpSize + lane_id()) * kPerVector;
  }

  // Tokens past the end of the row, and those that the mask hides, are -inf.
  __device__ __forceinline__ void load(u32 first, Vector (&vectors)[kVectors]) const {
#pragma unroll
    for (u32 u = 0; u < kVectors; ++u) vectors[u] = vector(token(first, u));
    if (!row.mask.data) return;
#pragma unroll
    for (u32 u = 0; u < kVectors; ++u)
      hide<FORMAT>(vectors[u], row.mask.template allowed<kPerVector>(token(first, u), row.V));
  }

  // Calls take(logit, token) for each token from `begin` on, until a read would begin at `end` or behind it. step: the
  // distance between the starts of two reads.
  template <class TAKE>
  __device__ __forceinline__ void for_each(u32 begin, u32 end, const TAKE& take, u32 step = kElements) const {
#pragma unroll 1
    for (u32 first = begin; first < end; first += step) {
      Vector vectors[kVectors];
      load(first, vectors);
#pragma unroll
      for (u32 u = 0; u < kVectors; ++u)
#pragma unroll
        for (u32 e = 0; e < kPerVector; ++e) take(FORMAT::decode(vectors[u].words, e), token(first, u) + e);
    }
  }

 private:
  __device__ __forceinline__ Vector vector(u32 token) const {
    const auto* const address = row.data + token;
    const u32 shift = u32(reinterpret_cast<u64>(row.data) % 16);
    if (shift == 0 && token + kPerVector <= row.V) return load_16_bytes(address);
    // A straddling read touches up to 16 bytes before and after the vector.
    if (shift != 0 && token > 0 && token + 2 * kPerVector <= row.V) {
      const char* const aligned = reinterpret_cast<const char*>(address) - shift;
      return straddle(load_16_bytes(aligned), load_16_bytes(aligned + 16), shift);
    }
    return vector_of<FORMAT>([&](u32 e) { return token + e < row.V ? __ldg(address + e) : FORMAT::kNegativeInfinity; });
  }
};

}  // namespace fused_topk
