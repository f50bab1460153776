// SPDX-License-Identifier: Apache-2.0
// The reader of a scan: one warp's tiles of a row, each with its mask and its lanes' maxima.
#pragma once

#include "../rows/problem.cuh"

namespace fused_topk {

template <class FORMAT, u32 VECTORS, bool ALIGNED, u32 MASK, u32 AHEAD, bool IN_PLACE>
class TileReader {
 public:
  using Format = FORMAT;
  using Stream = TileStream<FORMAT, VECTORS, ALIGNED, AHEAD, IN_PLACE>;
  using RowTile = typename Stream::RowTile;
  static constexpr u32 kVectors = VECTORS;
  static constexpr u32 kPerVector = RowTile::kPerVector;
  static constexpr u32 kMask = MASK;

  // slots: [Stream::kWarpVectors], the warp's own
  __device__ __forceinline__ TileReader(const Problem& problem, u32 row, u32 length, Vector* slots)
      : TileReader(static_cast<const typename FORMAT::Bits*>(problem.logits) + problem.logits_offset(row), length,
                   slots) {}
  // row: [V]
  __device__ __forceinline__ TileReader(const typename FORMAT::Bits* row, u32 V, Vector* slots)
      : stream_(row, V, slots), V_(V) {}

  // In place: requests the warp's first tile before all else. is_first: whether the warp has one.
  __device__ __forceinline__ void start_early(u32 first, bool is_first) {
    if constexpr (Stream::kInPlace) request(first, is_first);
  }
  // Requests the warp's first tiles: as many as can be in flight and are not yet.
  __device__ __forceinline__ void start(u32 first, bool is_first, u32 second, bool is_second) {
    if constexpr (Stream::kAhead > 0 && !Stream::kInPlace) request(first, is_first);
    if constexpr (Stream::kAhead == 2) request(second, is_second);
  }
  // Finds the row's mask. Called while the first tiles are in flight.
  __device__ __forceinline__ void find_mask(const Problem& problem, u32 row) {
    if constexpr (has_mask(MASK)) mask_ = problem.row_mask(row);
  }

  // Requests a tile, if it exists. Frees the slot of the tile read last.
  __device__ __forceinline__ void request(u32 tile, bool is_tile) {
    if (is_tile) {
      stream_.request(tile);
    } else {
      stream_.to_next_slot();
    }
  }

  // Takes the oldest requested tile and finds each lane's maximum. `next`: the warp's next tile after it, if it has one.
  __device__ __forceinline__ void read(u32 tile, u32 next, bool has_next) {
    stream_.take(tile_, tile, !has_next);
    if constexpr (Stream::kToRegisters) request(next, has_next);
    if constexpr (has_mask(MASK)) {
      allowed_ = 0;
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u)
        allowed_ |= mask_.template allowed<kPerVector>(tile_.index(u, 0), V_) << (u * kPerVector);
    }
    lane_max_ = -FUSED_TOPK_INFINITY;
#pragma unroll
    for (u32 u = 0; u < VECTORS; ++u) lane_max_ = max_nan(lane_max_, choosable_maximum(u));
  }
  // Loads a tile now. lane_max: the lane's maximum of it, known from an earlier read.
  __device__ __forceinline__ void reload(u32 tile, float lane_max) {
    stream_.load(tile_, tile);
    lane_max_ = lane_max;
  }

  __device__ __forceinline__ u32 V() const { return V_; }
  __device__ __forceinline__ u32 tiles() const { return (V_ - 1) / RowTile::kElements + 1; }
  __device__ __forceinline__ const Stream& stream() const { return stream_; }
  // The tile read last, and its number.
  __device__ __forceinline__ const RowTile& tile() const { return tile_; }
  __device__ __forceinline__ u32 tile_number() const { return tile_.first / RowTile::kElements; }
  __device__ __forceinline__ void forget_decoded() { tile_.forget_decoded(); }
  __device__ __forceinline__ void forget_allowed() { keep_opaque(allowed_); }
  // The lane's greatest logit of the tile, as the choice sees it.
  __device__ __forceinline__ float lane_max() const { return lane_max_; }
  // A bit for each of the lane's elements: the mask allows it.
  __device__ __forceinline__ u32 allowed() const { return allowed_; }
  __device__ __forceinline__ typename FORMAT::Bits raw_logit(u32 index) const { return stream_.raw_logit(index); }

  // Element e of vector u, as the choice of tokens sees it, and as (m, d) sees it.
  __device__ __forceinline__ float choosable(u32 u, u32 e) const {
    return is_allowed(u, e) ? tile_.logit(u, e) : -FUSED_TOPK_INFINITY;
  }
  __device__ __forceinline__ float normalized(u32 u, u32 e) const {
    return MASK == kMaskChoice ? tile_.logit(u, e) : choosable(u, e);
  }
  __device__ __forceinline__ float choosable_maximum(u32 u) const {
    if constexpr (!has_mask(MASK)) return tile_.maximum(u);
    float greatest = choosable(u, 0);
#pragma unroll
    for (u32 e = 1; e < kPerVector; ++e) greatest = max_nan(greatest, choosable(u, e));
    return greatest;
  }

  // An element of the tile, read again from memory: token `index`, bit u * n + e of the lane's elements. The first returns its
  // key as the choice sees it, the second its logit as (m, d) sees it.
  __device__ __forceinline__ u32 key_again(u32 index, u32 bit) const {
    if (has_mask(MASK) && !((allowed_ >> bit) & 1)) return kNegativeInfinityKey;
    return order_key(logit_again(index));
  }
  __device__ __forceinline__ float normalized_again(u32 index, u32 bit) const {
    if (MASK == kMaskBoth && !((allowed_ >> bit) & 1)) return -FUSED_TOPK_INFINITY;
    return logit_again(index);
  }

  // The bits of any lane's element of the tile, token `index`.
  __device__ __forceinline__ typename FORMAT::Bits bits_again(u32 index) const {
    return stream_.logit_again(index, tile_);
  }

 private:
  __device__ __forceinline__ bool is_allowed(u32 u, u32 e) const {
    return !has_mask(MASK) || (allowed_ >> (u * kPerVector + e)) & 1;
  }
  __device__ __forceinline__ float logit_again(u32 index) const {
    return FORMAT::decode(stream_.logit_again(index, tile_));
  }

  Stream stream_;
  u32 V_;
  RowMask mask_;
  RowTile tile_;
  u32 allowed_;
  float lane_max_;
};

}  // namespace fused_topk
