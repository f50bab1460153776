// SPDX-License-Identifier: Apache-2.0
// Reading a row of logits: a tile of 32 lanes x VECTORS x 16 bytes into registers, whatever the row's start address.
//
// Which element lands in which lane depends on the element's index alone, never on the address, so a row has the same
// sum, bit for bit, wherever it lies. Elements past the end, and tokens that are not allowed, read as -inf.
// Assumes: the row's elements are adjacent and aligned to their own size.
#pragma once

#include "platform.cuh"

namespace fused_topk {

// The three element formats: how many fit in 16 bytes, how to decode one, and the bits of -inf.
struct Float32 {
  using Bits = u32;
  static constexpr u32 kPerVector = 4;
  static constexpr Bits kNegativeInfinity = 0xFF800000u;
  static __device__ __forceinline__ float decode(Bits bits) { return __uint_as_float(bits); }
  static __device__ __forceinline__ float decode(const u32 (&words)[4], u32 e) { return decode(words[e]); }
};

struct BFloat16 {
  using Bits = u16;
  static constexpr u32 kPerVector = 8;
  static constexpr Bits kNegativeInfinity = 0xFF80u;
  static __device__ __forceinline__ float decode(Bits bits) { return __uint_as_float(u32(bits) << 16); }
  static __device__ __forceinline__ float decode(const u32 (&words)[4], u32 e) {
    return __uint_as_float(e % 2 == 0 ? words[e / 2] << 16 : words[e / 2] & 0xFFFF0000u);
  }
};

struct Float16 {
  using Bits = u16;
  static constexpr u32 kPerVector = 8;
  static constexpr Bits kNegativeInfinity = 0xFC00u;
  static __device__ __forceinline__ float decode(Bits bits) { return half_to_float(bits); }
  static __device__ __forceinline__ float decode(const u32 (&words)[4], u32 e) {
    return decode(Bits(e % 2 == 0 ? words[e / 2] : words[e / 2] >> 16));
  }
};

struct Vector {
  u32 words[4];
};

__device__ __forceinline__ Vector load_16_bytes(const void* address) {
  const uint4 v = __ldg(static_cast<const uint4*>(address));
  return {{v.x, v.y, v.z, v.w}};
}

// Bytes [shift, shift + 16) of two neighbouring 16-byte vectors. `shift` is below 16 and the same for the whole warp.
__device__ __forceinline__ Vector straddle(const Vector& low, const Vector& high, u32 shift) {
  u32 w[8] = {low.words[0],  low.words[1],  low.words[2],  low.words[3],
              high.words[0], high.words[1], high.words[2], high.words[3]};
#pragma unroll
  for (u32 i = 0; i < 7; ++i) w[i] = (shift & 4) ? w[i + 1] : w[i];
#pragma unroll
  for (u32 i = 0; i < 5; ++i) w[i] = (shift & 8) ? w[i + 2] : w[i];
  Vector out;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) out.words[i] = __funnelshift_r(w[i], w[i + 1], (shift & 3) * 8);
  return out;
}

// How a mask says which tokens are allowed.
enum MaskKind : u32 { kMaskBytes = 0, kMaskBits = 1 };

struct RowMask {
  const void* data;  // bytes [V] at distance `stride`, or words [ceil(V / 32)] at distance `stride`
  i64 stride;
  u32 kind;

  // Bit e says whether token `first + e` is allowed, for e < COUNT (4 or 8); tokens past V are not.
  template <u32 COUNT>
  __device__ __forceinline__ u32 allowed(u32 first, u32 V) const {
    if (first >= V) return 0;
    u32 bits = 0;
    if (kind == kMaskBits) {
      // COUNT divides 32 and `first`, so the bits lie in one word.
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

// VECTORS vectors of each lane of a warp: element e of vector u of a lane is token first + (u * 32 + lane) * n + e.
template <class FORMAT, u32 VECTORS>
struct Tile {
  static constexpr u32 kPerVector = FORMAT::kPerVector;
  static constexpr u32 kPerLane = VECTORS * kPerVector;
  static constexpr u32 kElements = kPerLane * kWarpSize;
  static_assert(kPerLane <= 32, "one bit of a word for each of a lane's elements");

  Vector vectors[VECTORS];
  u32 first;

  __device__ __forceinline__ u32 index(u32 u, u32 e) const {
    return first + (u * kWarpSize + lane_id()) * kPerVector + e;
  }
  __device__ __forceinline__ float logit(u32 u, u32 e) const { return FORMAT::decode(vectors[u].words, e); }

  // Every load of the tile is issued before the first is used: that is what keeps the memory busy.
  template <bool ALIGNED>
  __device__ __forceinline__ void load(const typename FORMAT::Bits* row, u32 V, u32 first_token) {
    first = first_token;
    const u32 shift = ALIGNED ? 0 : u32(reinterpret_cast<u64>(row) % 16);
    const char* start = reinterpret_cast<const char*>(row) - shift;
    // The straddling read also touches the 16 bytes before and after the tile's own.
    const bool is_inner = ALIGNED ? V - first >= kElements : first > 0 && V - first >= kElements + kPerVector;
    if (is_inner) {
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u) vectors[u] = load_vector<ALIGNED>(start, index(u, 0), shift);
    } else {
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u) {
        const u32 token = index(u, 0);
        const bool is_whole = ALIGNED ? token + kPerVector <= V : token > 0 && token + 2 * kPerVector <= V;
        vectors[u] = is_whole ? load_vector<ALIGNED>(start, token, shift) : load_edge(row, V, token);
      }
    }
  }

  // Makes the compiler decode the logits again instead of keeping them all decoded: that would double the registers.
  __device__ __forceinline__ void forget_decoded() {
#pragma unroll
    for (u32 u = 0; u < VECTORS; ++u)
#pragma unroll
      for (u32 w = 0; w < 4; ++w) keep_opaque(vectors[u].words[w]);
  }

 private:
  template <bool ALIGNED>
  static __device__ __forceinline__ Vector load_vector(const char* start, u32 token, u32 shift) {
    const char* address = start + u64(token) * sizeof(typename FORMAT::Bits);
    const Vector low = load_16_bytes(address);
    if constexpr (ALIGNED) return low;
    return straddle(low, load_16_bytes(address + 16), shift);
  }

  static __device__ __forceinline__ Vector load_edge(const typename FORMAT::Bits* row, u32 V, u32 token) {
    constexpr u32 kPerWord = kPerVector / 4;
    Vector out;
#pragma unroll
    for (u32 w = 0; w < 4; ++w) {
      out.words[w] = 0;
#pragma unroll
      for (u32 h = 0; h < kPerWord; ++h) {
        const u32 t = token + w * kPerWord + h;
        const u32 bits = t < V ? __ldg(row + t) : FORMAT::kNegativeInfinity;
        out.words[w] |= bits << (16 * h);
      }
    }
    return out;
  }
};

}  // namespace fused_topk
