// SPDX-License-Identifier: Apache-2.0
// What the loop of softmax_topk.cu works with: what a warp does with a tile, which parts are the group's, and in which order it
// reads their tiles.
//
// A row is cut into parts. One warp reads a part, tile by tile. The cuts depend on V alone.
#pragma once

#include "part_folder.cuh"
#include "tile_selector.cuh"

namespace fused_topk {

// A warp's reader, folder and selector.
template <class FORMAT, u32 VECTORS, bool ALIGNED, u32 MASK, u32 AHEAD, bool IN_PLACE, bool FOR_MANY>
struct RowScan {
  using Reader = TileReader<FORMAT, VECTORS, ALIGNED, MASK, AHEAD, IN_PLACE>;
  using Stream = typename Reader::Stream;
  using RowTile = typename Reader::RowTile;

  struct Shared {};  // see WindowScan

  Reader reader;
  // NVRTC 12.9 spills otherwise.
  static constexpr bool kForgetsMask = __CUDA_ARCH__ >= 1000 && MASK == kMaskBoth && !FOR_MANY && is_bfloat16(FORMAT());
  PartFolder<Reader, kForgetsMask> folder;
  TileSelector<Reader, FOR_MANY> selector;

  // slots: [Stream::kWarpVectors], the warp's own
  __device__ __forceinline__ RowScan(const Problem& problem, u32 row, u32 length, Vector* slots, Shared&)
      : reader(problem, row, length, slots) {}

  // What can wait until the first tiles are in flight.
  __device__ __forceinline__ void prepare(const Problem& problem, u32 row) {
    folder.set_scale(problem.temperature_of(row).scale());
    reader.find_mask(problem, row);
  }
  __device__ __forceinline__ void read(u32 tile, u32 next, bool has_next) {
    reader.read(tile, next, has_next);
    selector.begin_tile(reader);
  }
  template <class GROUP>
  __device__ __forceinline__ u32 proven(KthBound<GROUP>& bound, bool is_first = false) {
    return selector.proven(reader, bound, is_first);
  }
};

// The parts up to a row's length.
template <u32 LOG2_TILE>
__device__ __forceinline__ u32 parts_of(const Problem& problem, u32 length) {
  const u32 log2_length = problem.tiles_per_part_log2 + LOG2_TILE;
  return (length + (1u << log2_length) - 1) >> log2_length;
}

// A split's share of a row: parts [first_part, last_part), how many of the k best it may have, and how many of its last
// tiles are read first. It ends at the row's length.
template <class GROUP, u32 LOG2_TILE, u32 MASK>
struct Share {
  u32 first_part, last_part, k, lead;
  u32 k_of_warp, warps_of_k;        // see Problem
  static constexpr u32 kSpare = 8;  // with more readers one is spare

  __device__ __forceinline__ Share(const Problem& problem, u32 split, u32 splits, u32 length)
      : first_part(0),
        last_part(problem.parts_per_row),
        k(problem.k),
        lead(problem.lead),
        k_of_warp(problem.k_of_warp),
        warps_of_k(problem.warps_of_k) {
    if (problem.may_have_lengths<MASK>()) {
      cut(problem, split, splits, length);
    } else if constexpr (GROUP::kSharesRow) {
      first_part = split * problem.parts_per_split + min(split, problem.splits_with_one_more);
      last_part = first_part + problem.parts_per_split + (split < problem.splits_with_one_more);
      // V < 2^31 and a part has at most 2^21 tokens, so nothing overflows.
      const u32 log2_length = problem.tiles_per_part_log2 + LOG2_TILE;
      k = min(k, min(last_part << log2_length, problem.V) - (first_part << log2_length));
      // Keeps k in one register. The compiler would otherwise keep the two numbers whose minimum k is.
      keep_opaque(k);
    }
  }

 private:
  // The splits share the parts up to the row's length. The length changes neither how a row is cut into parts nor the
  // order in which the parts' (m, d) are merged. A warp alone has no registers left for a lead.
  __device__ __forceinline__ void cut(const Problem& problem, u32 split, u32 splits, u32 length) {
    last_part = parts_of<LOG2_TILE>(problem, length);
    if constexpr (GROUP::kSharesRow) {
      const u32 each = last_part / splits, with_one_more = last_part - each * splits;
      first_part = split * each + min(split, with_one_more);
      last_part = first_part + each + (split < with_one_more);
    }
    const u32 parts = last_part - first_part;
    if (GROUP::kIsWarp || parts <= GROUP::kWarps) lead = 0;
    // A bound needs warps that have something to read. If there are enough of them, one is left out of the count: the
    // last tile may hold few logits.
    const u32 readers = GROUP::kForMany && parts > kSpare ? parts - 1 : parts;
    if (!GROUP::kIsWarp && parts > 0 && readers < warps_of_k) {
      k_of_warp = (k + readers - 1) / readers;
      warps_of_k = readers;
    }
  }
};

// The order in which a group reads its tiles: first the lead, which are the last tiles, then the others. The warps take
// one part each. A warp counts in turns. A turn from `first` on reads the tile of the same number. An earlier turn
// reads tile turn + parts: the lead.
//
// The lead (KernelChoice.lead of fused_topk/layout/topk_choice.py) serves rows of ascending logits: the best of a
// sorted row are then among the first tiles read, so that not every tile beats all tiles before it.
struct TileOrder {
  u32 first, parts;  // the group's first tile, and how many parts it has
  u32 begin, end;    // the group's turns
  u32 last_of_part;  // the tiles of a part, less one
  u32 to_next;       // from the last turn of a part to the first of the warp's next part

  // The first tile of a warp, which can be known before all else.
  template <class GROUP, class SHARE>
  static __device__ __forceinline__ u32 first_tile(const Problem& problem, const SHARE& share) {
    const u32 part = GROUP::warp() - share.lead;
    return (part + (GROUP::warp() < share.lead ? share.last_part : share.first_part)) << problem.tiles_per_part_log2;
  }

  // tiles: how many the row has
  template <class GROUP, class SHARE>
  static __device__ __forceinline__ TileOrder of(const Problem& problem, const SHARE& share, u32 tiles) {
    const u32 log2 = problem.tiles_per_part_log2, lead = share.lead, first = share.first_part << log2;
    return {first,
            share.last_part - share.first_part,
            first - lead,
            min(share.last_part << log2, tiles) - lead,
            (1u << log2) - 1,
            ((GROUP::kWarps - 1) << log2) + 1};
  }

  __device__ __forceinline__ u32 tile(u32 turn) const { return is_before(turn, first) ? turn + parts : turn; }
  __device__ __forceinline__ bool has(u32 turn) const { return is_before(turn, end); }
  __device__ __forceinline__ bool ends_part(u32 turn) const {
    return (turn & last_of_part) == last_of_part || turn + 1 == end;
  }
  __device__ __forceinline__ u32 after(u32 turn) const {
    return turn + ((turn & last_of_part) == last_of_part ? to_next : 1);
  }

 private:
  // Turns count modulo 2^32.
  static __device__ __forceinline__ bool is_before(u32 turn, u32 other) { return int(turn) < int(other); }
};

}  // namespace fused_topk
