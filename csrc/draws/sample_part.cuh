// SPDX-License-Identifier: Apache-2.0
// A part of a row, as the kernels that draw read it: with one warp, 16 bytes a lane at a time, at any start address.
#pragma once

#include "sample_request.cuh"

namespace fused_topk::sampling {

// A part of a row: its tokens.
struct Part {
  u32 begin, end;
};

// Reads a part of a row with a warp, kElements tokens at a time. Element e of a lane's vector u is token
// first + (u * 32 + lane) * kPerVector + e.
template <class FORMAT>
struct PartReader {
  static constexpr u32 kPerVector = FORMAT::kPerVector;
  static constexpr u32 kVectors = 4;
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
    for (u32 u = 0; u < kVectors; ++u) hide(vectors[u], row.mask.template allowed<kPerVector>(token(first, u), row.V));
  }

  // Calls take(logit, token) for each token of a part, of whole reads.
  template <class TAKE>
  __device__ __forceinline__ void for_each(Part part, const TAKE& take) const {
#pragma unroll 1
    for (u32 first = part.begin; first < part.end; first += kElements) {
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
    Vector result = {{0, 0, 0, 0}};
#pragma unroll
    for (u32 e = 0; e < kPerVector; ++e) {
      const u32 bits = token + e < row.V ? __ldg(address + e) : FORMAT::kNegativeInfinity;
      result.words[e * 4 / kPerVector] |= bits << (kPerVector == 8 ? e % 2 * 16 : 0);
    }
    return result;
  }

  static __device__ __forceinline__ void hide(Vector& vector, u32 allowed) {
#pragma unroll
    for (u32 e = 0; e < kPerVector; ++e) {
      const u32 shift = kPerVector == 8 ? e % 2 * 16 : 0;
      const u32 of_element = kPerVector == 8 ? 0xFFFFu << shift : ~0u;
      u32& word = vector.words[e * 4 / kPerVector];
      if (!(allowed >> e & 1u)) word = (word & ~of_element) | u32(FORMAT::kNegativeInfinity) << shift;
    }
  }
};

// The first token of a part at which the running sum of measure(logit, token), which is 0 for a logit of -inf, exceeds `aim`;
// the last token if it never does. The 32 lanes of a warp call it.
template <class FORMAT, class MEASURE>
__device__ __forceinline__ u32 find_in_part(const PartReader<FORMAT>& reader, Part part, u64 aim,
                                            const MEASURE& measure) {
  constexpr u32 kVectors = PartReader<FORMAT>::kVectors, kElements = PartReader<FORMAT>::kElements;
  u64 before = 0;
#pragma unroll 1
  for (u32 first = part.begin; first < part.end; first += kElements) {
    Vector vectors[kVectors];
    reader.load(first, vectors);
    // The vector in which the sum passes the aim, and what is before it.
    u32 found = kVectors;
    u64 sums = 0;
#pragma unroll
    for (u32 u = 0; u < kVectors; ++u) {
      if (found != kVectors) continue;
      u64 mine = 0;
#pragma unroll
      for (u32 e = 0; e < FORMAT::kPerVector; ++e)
        mine += measure(FORMAT::decode(vectors[u].words, e), PartReader<FORMAT>::token(first, u) + e);
      sums = before + warp_inclusive_sum(mine);
      before = __shfl_sync(kAllLanes, sums, kWarpSize - 1);
      sums -= mine;
      if (before <= aim) continue;
      found = u;
    }
    if (found == kVectors) continue;
    const u32 lane = __popc(__ballot_sync(kAllLanes, sums <= aim)) - 1;
    u32 token = first + (found * kWarpSize + lane) * FORMAT::kPerVector;
    sums = __shfl_sync(kAllLanes, sums, lane);
    // Every lane walks the vector: it is read again, and takes no registers until then.
#pragma unroll 1
    for (const u32 last = token + FORMAT::kPerVector - 1; token < last; ++token) {
      sums += measure(reader.row(token), token);
      if (sums > aim) break;
    }
    return token;
  }
  return part.end - 1;
}

}  // namespace fused_topk::sampling
