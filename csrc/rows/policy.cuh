// SPDX-License-Identifier: Apache-2.0
// What is tuned for each GPU and kernel: one table, in the manner of CUB's tuning policies. TUNING.md has the reasons.
// tests/test_kernel_interface.py compares fused_topk/layout/topk_choice.py with this file.
#pragma once

#include "platform.cuh"

namespace fused_topk {

// How a warp's tiles become candidates. KernelChoice.method() of fused_topk/layout/topk_choice.py chooses.
enum Method : u32 {
  kTileByTile = 0,
  kForMany = 1,    // tile by tile, for a large k
  kInWindows = 2,  // a window of tiles at a time; a row without a mask, in parts of one tile
};

// What softmax_topk.cu is compiled for.
struct Policy {
  u32 resident_warps;  // must fit on a multiprocessor: 32 leave a thread 64 registers, 24 leave 80, 16 leave 128
  u32 tiles_ahead;     // are requested by a warp before it takes the first (TileStream)
  bool in_place;       // a tile stays in shared memory while a warp works on it (TileStream)
};

namespace policy {

// The least __CUDA_ARCH__ of a row. k90 is for 900 alone.
enum Gpu { kAnyGpu = 0, kFrom80 = 800, k90 = 900, kFrom100 = 1000, kFrom120 = 1200 };
enum Rows { kAnyRows, kUnmasked, kPlain, kUnaligned, kMaskedUnaligned };  // kPlain: aligned, without a mask
enum Bits { kAnyBits = 0, k16 = 16, k32 = 32 };
enum Methods { kAnyMethod, kByTile, kByWindow, kNotForMany };

struct Row {
  Gpu gpu;
  u32 least_warps, most_warps;  // of a group
  Rows rows;
  Bits bits;  // of a logit
  Methods methods;
  Policy policy;
};

// The first matching row is used. Kernels with a mask, and unaligned float32 rows, need more registers, so fewer warps.
// More than 16 warps are resident only where that is faster. Beyond compute capability 9.0 these are the numbers for which
// no compiler spills.
// clang-format off
constexpr Row kTable[] = {
    // GPU     group    rows              logits    methods       warps ahead in place
    // 4 kB in place for each warp, so that 32 warps fit.
    {k90,      1,  1,   kPlain,           k16,      kAnyMethod,   {32,  2,   true}},
    {k90,      1,  1,   kPlain,           k32,      kAnyMethod,   {32,  1,   true}},
    {k90,      1,  8,   kPlain,           kAnyBits, kAnyMethod,   {24,  2,   false}},
    {k90,      1,  8,   kUnmasked,        k16,      kAnyMethod,   {24,  2,   false}},
    {k90,      1,  8,   kAnyRows,         kAnyBits, kAnyMethod,   {16,  2,   false}},
    {k90,      16, 16,  kPlain,           kAnyBits, kByTile,      {16,  2,   true}},
    {k90,      16, 16,  kPlain,           kAnyBits, kAnyMethod,   {16,  1,   false}},
    // Unaligned: each vector is put together from two in shared memory. In registers a tile would need twice the room.
    {k90,      16, 16,  kUnmasked,        kAnyBits, kNotForMany,  {16,  2,   false}},
    {k90,      16, 16,  kAnyRows,         k16,      kAnyMethod,   {16,  1,   false}},
    {k90,      16, 16,  kAnyRows,         k32,      kAnyMethod,   {16,  0,   false}},
    {kFrom80,  1,  1,   kPlain,           k16,      kAnyMethod,   {24,  2,   true}},
    {kFrom80,  1,  1,   kPlain,           k32,      kAnyMethod,   {24,  1,   true}},
    {kFrom120, 8,  8,   kAnyRows,         k16,      kByWindow,    {8,   2,   false}},
    {kFrom100, 1,  8,   kUnaligned,       k32,      kAnyMethod,   {8,   2,   false}},
    {kAnyGpu,  1,  8,   kMaskedUnaligned, kAnyBits, kAnyMethod,   {8,   2,   false}},
    {kAnyGpu,  1,  8,   kAnyRows,         kAnyBits, kAnyMethod,   {16,  2,   false}},
    {kAnyGpu,  16, 16,  kAnyRows,         kAnyBits, kAnyMethod,   {16,  0,   false}},
};
// clang-format on

constexpr bool fits(Gpu gpu) { return gpu == k90 ? __CUDA_ARCH__ == 900 : __CUDA_ARCH__ >= int(gpu); }
constexpr bool fits(Methods methods, u32 method) {
  if (methods == kByTile) return method == kTileByTile;
  if (methods == kByWindow) return method == kInWindows;
  return methods == kAnyMethod || method != kForMany;
}
constexpr bool fits(Rows rows, bool masked, bool aligned) {
  if (rows == kUnaligned) return !aligned;
  if (rows == kMaskedUnaligned) return masked && !aligned;
  return rows == kAnyRows || (!masked && (aligned || rows == kUnmasked));
}

}  // namespace policy

// bits: of a logit
constexpr Policy policy_of(u32 warps, u32 method, u32 bits, bool masked, bool aligned) {
  for (const policy::Row& row : policy::kTable) {
    if (policy::fits(row.gpu) && warps >= row.least_warps && warps <= row.most_warps &&
        policy::fits(row.rows, masked, aligned) && (row.bits == policy::kAnyBits || row.bits == bits) &&
        policy::fits(row.methods, method))
      return row.policy;
  }
  return {};
}

// Tiles of a window: as many as fit beside the candidates of 16 warps; fewer in the 64 kB of compute capability 7.5.
constexpr u32 window_tiles(u32 warps) { return warps <= 8 ? 8 : kHasAsyncCopy ? 4 : 2; }

// The other kernels: how many blocks must fit on a multiprocessor, which limits the registers. 0 sets no limit. That is the
// quickest on compute capability 9.0. On others, and with a mask, some compiler would then spill.
constexpr bool kIs90 = __CUDA_ARCH__ == 900;
constexpr u32 resident_router_blocks(bool masked) { return masked ? 4 : kIs90 ? 0 : 8; }
constexpr u32 resident_short_blocks(bool masked) { return masked || !kIs90 ? 8 : 0; }
constexpr u32 kResidentBlockRows = kIs90 ? 0 : 1;
// fused_topk/layout/full_row_choice.py lets as many run at a time.
constexpr u32 kResidentGridRows = kHasAsyncCopy ? 2 : 1;

}  // namespace fused_topk
