// SPDX-License-Identifier: Apache-2.0
// One read of a group's share of a row, tile by tile: the loop of Algorithm 4.
//
// A row is cut into parts. One warp reads a part, tile by tile. The cuts depend on V alone. For every tile the warp updates
// the part's (m, d) (PartFolder) and offers hits to its group's candidates (TileSelector).
// Comes after tile_reader.cuh, part_folder.cuh and tile_selector.cuh.
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
  __device__ __forceinline__ RowScan(const Problem& problem, u32 row, Vector* slots, Shared&)
      : reader(problem, row, slots) {}

  // What can wait until the first tiles are in flight.
  __device__ __forceinline__ void prepare(const Problem& problem, u32 row) {
    folder.set_scale(kLog2E * problem.inverse_temperature(row));
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

// The order in which a group reads its tiles: first the lead, which are the last tiles, then the others. The warps take one
// part each. A warp counts in turns. A turn from `first` on reads the tile of the same number. An earlier turn reads tile
// turn + parts: the lead.
//
// The lead (KernelChoice.lead of fused_topk/layout/topk_choice.py) serves rows of ascending logits: the best of a sorted row are
// then among the first tiles read, so that not every tile beats all tiles before it.
struct TileOrder {
  u32 first, parts;  // the group's first tile, and how many parts it has
  u32 begin, end;    // the group's turns
  u32 last_of_part;  // the tiles of a part, less one
  u32 to_next;       // from the last turn of a part to the first of the warp's next part

  // The first tile of a warp, which can be known before all else.
  template <class GROUP>
  static __device__ __forceinline__ u32 first_tile(const Problem& problem, u32 first_part, u32 last_part) {
    const u32 part = GROUP::warp() - problem.lead;
    return (part + (GROUP::warp() < problem.lead ? last_part : first_part)) << problem.tiles_per_part_log2;
  }

  // tiles: how many the row has
  template <class GROUP>
  static __device__ __forceinline__ TileOrder of(const Problem& problem, u32 first_part, u32 last_part, u32 tiles) {
    const u32 log2 = problem.tiles_per_part_log2, lead = problem.lead, first = first_part << log2;
    return {first,
            last_part - first_part,
            first - lead,
            min(last_part << log2, tiles) - lead,
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

// Reads parts [first_part, last_part) of a row with all threads of a group. Leaves their best k in `candidates`, with a few
// more, unsorted. A barrier has followed the last add. The whole warp that has read a part calls finish_part(part, normalizer).
//
// The warps run independently, but for the first bound and for cuts.
template <class GROUP, class SCAN, class FINISH_PART>
__device__ __forceinline__ void scan_parts(const Problem& problem, u32 row, SCAN& scan, u32 first_part, u32 last_part,
                                           u32 k, Candidates<GROUP>& candidates, KthBound<GROUP>& bound,
                                           FINISH_PART finish_part) {
  const TileOrder order = TileOrder::of<GROUP>(problem, first_part, last_part, scan.reader.tiles());
  const u32 log2 = problem.tiles_per_part_log2;
  u32 turn = order.begin + (GROUP::warp() << log2);
  const auto request = [&](u32 ahead) { scan.reader.request(order.tile(ahead), order.has(ahead)); };
  const auto read = [&](u32 next) { scan.read(order.tile(turn), order.tile(next), order.has(next)); };
  // A tile in shared memory is folded after its hits are offered. Few warps have hits, and their offers then do not wait for
  // the others' exponentials.
  constexpr bool kOffersFirst = SCAN::Stream::kInPlace && !GROUP::kIsWarp;
  const u32 second = order.after(turn);
  scan.reader.start(order.tile(turn), order.has(turn), order.tile(second), order.has(second));
  scan.prepare(problem, row);
  candidates.restart(k);
  bool is_open = order.has(turn);
  scan.folder.begin_part();
  if (is_open) {
    read(second);
    bound.publish(scan.proven(bound, true));
    if constexpr (!kOffersFirst) scan.folder.fold(scan.reader);
  } else {
    bound.abstain();
  }
  GROUP::sync();
  candidates.raise(bound.found());
  while (true) {
    while (is_open) {
      if (!scan.selector.offer(scan.reader, candidates, bound, GROUP::kIsWarp || order.has(order.after(turn)))) break;
      // What follows is recomputed: values kept during the offer cost registers.
      keep_opaque(turn);
      if constexpr (kOffersFirst) scan.folder.fold(scan.reader);
      const u32 next = order.after(turn);
      const u32 after_next = order.after(next);
      if constexpr (SCAN::Stream::kInBackground) request(SCAN::Stream::kAhead == 1 ? next : after_next);
      const bool ends_part = order.ends_part(turn);
      if (ends_part) finish_part(scan.reader.tile_number() >> log2, scan.folder.end_part());
      turn = next;
      is_open = order.has(turn);
      if (!is_open) break;
      read(after_next);
      scan.selector.update(scan.reader, bound);
      if (ends_part) scan.folder.begin_part();
      if constexpr (!kOffersFirst) scan.folder.fold(scan.reader);
    }
    // A warp that is still open has found the candidates full.
    if (!GROUP::any(is_open)) break;
    candidates.cut(candidates.enough());
  }
}

}  // namespace fused_topk
