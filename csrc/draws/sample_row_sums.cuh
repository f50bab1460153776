// SPDX-License-Identifier: Apache-2.0
// Sums over a whole row by all of its blocks, which wait for each other. Every thread of every block gets each result.
// All sums are of integers, so they are exact and do not depend on the number of blocks.
#pragma once

#include "sample_request.cuh"

namespace fused_topk::sampling {

constexpr u32 kPieces = 256;  // of a row; a warp sums one at a time
constexpr u32 kLog2Bins = 4;
constexpr u32 kBins = 1u << kLog2Bins;
constexpr u32 kMostBlocks = kPieces / kWarps;  // of a row
static_assert(kPieces == kThreads, "each thread fetches a piece");

// What the blocks of a row leave for each other, in two sets: a block may write one while others still read the other.
struct Scratch {
  u64 pieces[2][kPieces];
  u64 bins[2][kMostBlocks][kBins];
};
static_assert(sizeof(Scratch) == 12288, "fused_topk/layout/launch.py allocates 12288 bytes a row");

struct SumsShared {
  u64 pieces[kPieces];
  u64 sums[kBins];
};
using BinsOfThreads = u64[kBins][kThreads];

// What is kept: the tokens with a greater key, and of those with this key the ones up to index `cut`. Keys are as
// RowSums::key gives them.
struct Border {
  u32 key;
  u32 cut;

  __device__ __forceinline__ bool keeps(u32 of, u32 index) const { return of > key || (of == key && index <= cut); }
};

// A key, the aim that the sum reaches there, the sum of the keys above it, and of those that are equal.
struct FoundKey {
  u32 key;
  u64 aim, above, equal;
};

template <class FORMAT>
class RowSums {
 public:
  const RowLogits<FORMAT> logits;

  __device__ __forceinline__ RowSums(const SampleRows& p, u32 row, SumsShared& shared, BinsOfThreads& bins)
      : logits(p, row), p_(p), row_(row), shared_(shared), bins_(bins) {}

  __device__ __forceinline__ u32 rank() const { return blockIdx.y; }
  __device__ __forceinline__ u32 blocks() const { return p_.blocks_per_row; }

  // The bits of a key in which two logits of the format can differ. For any thread.
  static __device__ __forceinline__ u32 key(float x) { return order_key(x) / FORMAT::kLowestKeyBit; }
  static __device__ __forceinline__ float logit_of(u32 key) {
    // The other bits of a key are those of a zero mantissa: ones if the logit is negative.
    const u32 whole = key * FORMAT::kLowestKeyBit;
    return __uint_as_float(bits_of_key(whole < kZeroKey ? whole + (FORMAT::kLowestKeyBit - 1) : whole));
  }

  // Sums measure(index) over each piece.
  template <class MEASURE>
  __device__ __forceinline__ void fill_pieces(const MEASURE& measure) {
    // Waits until all threads have read what is overwritten next.
    __syncthreads();
    u64* const to = blocks() > 1 ? scratch().pieces[turn_ % 2] : shared_.pieces;
#pragma unroll 1
    for (u32 piece = rank() * kWarps + threadIdx.x / kWarpSize; piece < kPieces; piece += blocks() * kWarps) {
      u64 sum = 0;
#pragma unroll 4
      for (u64 i = begin_of(piece) + lane_id(); i < end_of(piece); i += kWarpSize) sum += measure(u32(i));
      sum = warp_sum(sum);
      if (lane_id() == 0) to[piece] = sum;
    }
    wait_for_all();
    if (blocks() == 1) return;
    shared_.pieces[threadIdx.x] = load_from_other_block(to + threadIdx.x);
    ++turn_;
    __syncthreads();
  }
  __device__ __forceinline__ u64 sum_of_pieces() const {
    u64 sum = 0;
#pragma unroll 1
    for (u32 piece = lane_id(); piece < kPieces; piece += kWarpSize) sum += shared_.pieces[piece];
    return warp_sum(sum);
  }

  // The first index at which the running sum of `measure` exceeds `aim`. The pieces hold sums of `measure`, and `aim` is below
  // the total. All 32 lanes of a warp call it.
  template <class MEASURE>
  __device__ __forceinline__ u32 find(u64 aim, const MEASURE& measure) const {
    constexpr u32 kAtATime = 4;
    Place place = find_in(shared_.pieces, kPieces, aim);
    const u64 end = end_of(place.index);
#pragma unroll 1
    for (u64 first = begin_of(place.index); first < end; first += kAtATime * kWarpSize) {
      // All are in flight before the first is summed.
      u64 mine[kAtATime];
#pragma unroll
      for (u32 u = 0; u < kAtATime; ++u) {
        const u64 i = first + u * kWarpSize + lane_id();
        mine[u] = i < end ? measure(u32(i)) : 0;
      }
#pragma unroll
      for (u32 u = 0; u < kAtATime; ++u) {
        const u64 sums = place.before + warp_inclusive_sum(mine[u]);
        const u32 beyond = __ballot_sync(kAllLanes, sums > aim);
        if (beyond) return u32(first) + u * kWarpSize + __ffs(beyond) - 1;
        place.before = __shfl_sync(kAllLanes, sums, kWarpSize - 1);
      }
    }
    return u32(end) - 1;
  }

  // The greatest key from `low` to `high`, the row's greatest, from which on the sum of measure(logit) is at least
  // aim(total): a radix search, kLog2Bins bits a read of the row.
  template <class MEASURE, class AIM>
  __device__ __forceinline__ FoundKey greatest_key(u32 low, u32 high, const MEASURE& measure, const AIM& aim_of_total) {
    u64 above = 0, aim = 0;
    bool is_first = true;
#pragma unroll 1
    while (true) {
      const u32 span_bits = 32 - __clz(high - low);
      const u32 shift = span_bits > kLog2Bins ? span_bits - kLog2Bins : 0;
      fill_bins(low, high, shift, measure);
      if (is_first) {
        aim = aim_of_total(warp_sum(lane_id() < kBins ? shared_.sums[lane_id()] : 0ull));
        is_first = false;
      }
      u32 bin = (high - low) >> shift;
#pragma unroll 1
      while (bin > 0 && above + shared_.sums[bin] < aim) above += shared_.sums[bin--];
      low += bin << shift;
      // low + 2^shift may be beyond 32 bits.
      high = low + min(high - low, (1u << shift) - 1);
      if (low == high || shift == 0) return {low, aim, above, shared_.sums[bin]};
    }
  }

  // All blocks have come here before the first goes on.
  __device__ __forceinline__ void wait_for_all() {
    __syncthreads();
    if (blocks() == 1) return;
    if (threadIdx.x == 0) {
      // The last to arrive counts the turn.
      if (take_ticket(tickets(), blocks()) == blocks() - 1) take_ticket(tickets() + 1, ~0u);
      while (tickets_taken(tickets() + 1) <= turn_) __nanosleep(20);
    }
    __syncthreads();
  }

  // Leaves the counters zero. All threads of all blocks call it at last.
  __device__ __forceinline__ void leave() {
    if (blocks() == 1) return;
    __syncthreads();
    if (threadIdx.x == 0 && take_ticket(tickets() + 2, blocks()) == blocks() - 1) tickets()[1] = 0;
  }

 private:
  __device__ __forceinline__ Scratch& scratch() const { return reinterpret_cast<Scratch*>(p_.scratch)[row_]; }
  __device__ __forceinline__ u32* tickets() const { return p_.tickets + 3 * i64(row_); }

  __device__ __forceinline__ u32 piece_length() const {
    return (p_.V + kPieces * kWarpSize - 1) / (kPieces * kWarpSize) * kWarpSize;
  }
  __device__ __forceinline__ u64 begin_of(u32 piece) const { return u64(piece) * piece_length(); }
  __device__ __forceinline__ u64 end_of(u32 piece) const {
    return min(u64(logits.V), begin_of(piece) + piece_length());
  }

  // Sums measure(logit) over the tokens with keys from `low` to `high`, those with equal (key - low) >> shift together.
  template <class MEASURE>
  __device__ __forceinline__ void fill_bins(u32 low, u32 high, u32 shift, const MEASURE& measure) {
    // Waits until all threads have read what is overwritten next.
    __syncthreads();
    // Each thread has bins of its own: no two threads wait for each other.
#pragma unroll
    for (u32 bin = 0; bin < kBins; ++bin) bins_[bin][threadIdx.x] = 0;
#pragma unroll 2
    for (u64 i = rank() * kThreads + threadIdx.x; i < logits.V; i += blocks() * kThreads) {
      const float x = logits(u32(i));
      const u32 of = key(x);
      if (of >= low && of <= high) bins_[(of - low) >> shift][threadIdx.x] += measure(x);
    }
    __syncthreads();
    u64* const to = blocks() > 1 ? scratch().bins[turn_ % 2][rank()] : shared_.sums;
#pragma unroll 1
    for (u32 bin = threadIdx.x / kWarpSize; bin < kBins; bin += kWarps) {
      u64 sum = 0;
#pragma unroll
      for (u32 i = 0; i < kThreads; i += kWarpSize) sum += bins_[bin][i + lane_id()];
      sum = warp_sum(sum);
      if (lane_id() == 0) to[bin] = sum;
    }
    wait_for_all();
    if (blocks() == 1) return;
    if (threadIdx.x < kBins) {
      u64 sum = 0;
#pragma unroll 4
      for (u32 block = 0; block < blocks(); ++block)
        sum += load_from_other_block(&scratch().bins[turn_ % 2][block][threadIdx.x]);
      shared_.sums[threadIdx.x] = sum;
    }
    ++turn_;
    __syncthreads();
  }

  const SampleRows& p_;
  const u32 row_;
  SumsShared& shared_;
  BinsOfThreads& bins_;
  u32 turn_ = 0;  // how often the blocks have waited for each other
};

}  // namespace fused_topk::sampling
