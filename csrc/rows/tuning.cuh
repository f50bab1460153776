// SPDX-License-Identifier: Apache-2.0
// What is tuned for each GPU and kernel: one table, in the manner of CUB's tuning policies. TUNING.md has the reasons.
// fused_topk/layout/tuning.py reads the same table from this file: the numbers after `=`, and the rows.
#pragma once

#include "platform.cuh"

namespace fused_topk {

// How a warp's tiles become candidates. KernelChoice.method() of fused_topk/layout/topk_choice.py chooses.
enum Method : u32 {
  kTileByTile = 0,
  kForMany = 1,    // tile by tile, for a large k
  kInWindows = 2,  // a window of tiles at a time; a row without a mask, in parts of one tile
};

// What a kernel is compiled for.
struct Tuning {
  u32 resident_warps;  // must fit on a multiprocessor: 32 leave a thread 64 registers, 24 80, 16 128; 0: no limit
  // A warp requests that many tiles before it takes the first (TileStream). In kFilteredDraws a thread requests the counts of that
  // many blocks at once.
  u32 ahead;
  bool in_place;  // a tile stays in shared memory while a warp works on it (TileStream)
  u32 window;     // tiles of a window: as many as fit beside the candidates
};

namespace tuning {

enum Kernel { kTopk = 0, kRouters = 1, kShort = 2, kBlockRows = 3, kGridRows = 4, kDraws = 5, kFilteredDraws = 6 };
// Sets: bit i stands for value i of a column.
enum Is { kNo = 1, kYes = 2, kAny = 7 };
enum Bits { k16 = 1, k32 = 2 };
enum Methods { kByTile = 1, kByWindow = 4, kFewOnly = 5 };
enum Capability { kLast = 999 };

struct Row {
  u32 first, last;  // compute capability, times ten
  u32 kernel;
  u32 least_warps, most_warps;        // of the group that owns a row; 0: not a kernel of groups
  u32 masked, aligned, bits, method;  // sets
  Tuning tuning;
};

// The first row that fits is used. Kernels with a mask, and unaligned float32 rows, need more registers, so fewer warps. More
// than 16 warps of softmax_topk_kernel are resident only where that is faster. Beyond compute capability 9.0 these are the
// numbers for which no compiler spills.
// clang-format off
constexpr Row kTable[] = {
    // GPUs      kernel      group   masked aligned bits  method       warps ahead in place window
    // 4 kB in place for each warp, so that 32 warps fit.
    {90,  90,    kTopk,      1,  1,  kNo,  kYes,  k16,  kAny,       {32,  2,  true,  8}},
    {90,  90,    kTopk,      1,  1,  kNo,  kYes,  k32,  kAny,       {32,  1,  true,  8}},
    {90,  90,    kTopk,      1,  8,  kNo,  kYes,  kAny, kAny,       {24,  2,  false, 8}},
    {90,  90,    kTopk,      1,  8,  kNo,  kAny,  k16,  kAny,       {24,  2,  false, 8}},
    {90,  90,    kTopk,      1,  8,  kAny, kAny,  kAny, kAny,       {16,  2,  false, 8}},
    {90,  90,    kTopk,      16, 16, kNo,  kYes,  kAny, kByTile,    {16,  2,  true,  4}},
    {90,  90,    kTopk,      16, 16, kNo,  kYes,  kAny, kAny,       {16,  1,  false, 4}},
    // Unaligned: each vector is put together from two in shared memory. In registers a tile would need twice the room.
    {90,  90,    kTopk,      16, 16, kNo,  kAny,  kAny, kFewOnly,   {16,  2,  false, 4}},
    {90,  90,    kTopk,      16, 16, kAny, kAny,  k16,  kAny,       {16,  1,  false, 4}},
    {90,  90,    kTopk,      16, 16, kAny, kAny,  k32,  kAny,       {16,  0,  false, 4}},
    {80,  kLast, kTopk,      1,  1,  kNo,  kYes,  k16,  kAny,       {24,  2,  true,  8}},
    {80,  kLast, kTopk,      1,  1,  kNo,  kYes,  k32,  kAny,       {24,  1,  true,  8}},
    {120, kLast, kTopk,      8,  8,  kAny, kAny,  k16,  kByWindow,  {8,   2,  false, 8}},
    {100, kLast, kTopk,      1,  8,  kAny, kNo,   k32,  kAny,       {8,   2,  false, 8}},
    {0,   kLast, kTopk,      1,  8,  kYes, kNo,   kAny, kAny,       {8,   2,  false, 8}},
    {0,   kLast, kTopk,      1,  8,  kAny, kAny,  kAny, kAny,       {16,  2,  false, 8}},
    {80,  kLast, kTopk,      16, 16, kAny, kAny,  kAny, kAny,       {16,  0,  false, 4}},
    // Compute capability 7.5 has 64 kB of shared memory.
    {0,   79,    kTopk,      16, 16, kAny, kAny,  kAny, kAny,       {16,  0,  false, 2}},
    // No limit is quickest on compute capability 9.0. On others, and with a mask, some compiler would then spill.
    {90,  90,    kRouters,   0,  0,  kNo,  kAny,  kAny, kAny,       {0,   0,  false, 0}},
    {0,   kLast, kRouters,   0,  0,  kNo,  kAny,  kAny, kAny,       {32,  0,  false, 0}},
    {0,   kLast, kRouters,   0,  0,  kYes, kAny,  kAny, kAny,       {16,  0,  false, 0}},
    {90,  90,    kShort,     0,  0,  kNo,  kAny,  kAny, kAny,       {0,   0,  false, 0}},
    {0,   kLast, kShort,     0,  0,  kAny, kAny,  kAny, kAny,       {32,  0,  false, 0}},
    {90,  90,    kBlockRows, 0,  0,  kAny, kAny,  kAny, kAny,       {0,   0,  false, 0}},
    {0,   kLast, kBlockRows, 0,  0,  kAny, kAny,  kAny, kAny,       {32,  0,  false, 0}},
    // full_row_choice.py lets as many run at a time.
    {80,  kLast, kGridRows,  0,  0,  kAny, kAny,  kAny, kAny,       {32,  0,  false, 0}},
    {0,   79,    kGridRows,  0,  0,  kAny, kAny,  kAny, kAny,       {16,  0,  false, 0}},
    // With 32 NVRTC spills for most GPUs, and with 24 for compute capabilities 10.3 (of CUDA 12) and 12.0.
    {103, kLast, kDraws,     0,  0,  kAny, kAny,  kAny, kAny,       {16,  0,  false, 0}},
    {0,   kLast, kDraws,     0,  0,  kAny, kAny,  kAny, kAny,       {24,  0,  false, 0}},
    // With 4 ahead NVRTC spills for compute capabilities 7.5 and 10.0 on.
    {80,  99,    kFilteredDraws, 0, 0, kAny, kAny, kAny, kAny,      {32,  4,  false, 0}},
    {0,   kLast, kFilteredDraws, 0, 0, kAny, kAny, kAny, kAny,      {32,  2,  false, 0}},
};
// clang-format on

constexpr bool has(u32 set, u32 value) { return set >> value & 1; }

}  // namespace tuning

// bits: of a logit
constexpr Tuning tuned(tuning::Kernel kernel, u32 warps, u32 method, u32 bits, bool masked, bool aligned) {
  constexpr u32 kCapability = __CUDA_ARCH__ / 10;
  for (const tuning::Row& row : tuning::kTable) {
    if (kCapability >= row.first && kCapability <= row.last && row.kernel == kernel && warps >= row.least_warps &&
        warps <= row.most_warps && tuning::has(row.masked, masked) && tuning::has(row.aligned, aligned) &&
        tuning::has(row.bits, bits == 32) && tuning::has(row.method, method))
      return row.tuning;
  }
  return {};
}
// The blocks of `threads` threads that must fit on a multiprocessor, for a kernel other than kTopk; 0: no limit.
constexpr u32 tuned_blocks(tuning::Kernel kernel, u32 threads, bool masked = false) {
  return tuned(kernel, 0, kTileByTile, 32, masked, true).resident_warps * kWarpSize / threads;
}

}  // namespace fused_topk
