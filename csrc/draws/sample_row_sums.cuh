// SPDX-License-Identifier: Apache-2.0
// What all blocks of a row find out about it together, one read of the row at a time. Every thread of every block gets each
// result. Counts and sums are of integers, hence exact: they do not depend on how many blocks there are.
#pragma once

#include "sample_part.cuh"

namespace fused_topk::sampling {

constexpr u32 kPieces = 256;  // of a row; a warp reads one at a time
constexpr u32 kBins = 4096;
constexpr u32 kBinsOfThread = kBins / kThreads;
// Where a bin is: the threads that scan their bins do not wait for each other.
__device__ __forceinline__ u32 place_of_bin(u32 bin) { return bin + bin / kBinsOfThread; }
constexpr u32 kBinPlaces = kBins + kThreads;
// Candidates that a block can sort.
constexpr u32 kMostListed = 2048;
static_assert(kPieces == kThreads, "each thread fetches a piece");

// What the blocks of a row leave for each other.
struct Scratch {
  u64 weights[kPieces];
  u64 counts[kPieces];
  u64 listed[kMostListed];
};
// Of each block of a row, behind the row's, in two sets: a block may write one while others still read the other.
struct BlockScratch {
  u64 sum[2];
  u32 bins[2][kBins];
};
static_assert(sizeof(Scratch) == 20480 && sizeof(BlockScratch) == 32784, "fused_topk/layout/launch.py allocates them");

struct SumsShared {
  union {
    u32 bins[kBinPlaces];
    u64 listed[kMostListed];
  };
  u64 weights[kPieces];
  u64 counts[kPieces];
  u64 of_warp[kWarps];
  u32 number_listed;
  u32 is_last;
};

// What a token counts for: its weight, or 1.
struct Measure {
  Weights weight;
  bool is_one;

  __device__ __forceinline__ u64 operator()(float x) const { return is_one ? 1 : weight(x); }
  // By how much a sum may be off. The weights of two near logits may be in the wrong order by the error of 2^x, and the sum
  // that softmax_topk.cu has is of floats.
  __device__ __forceinline__ u64 unsure(u64 sum) const { return is_one ? 0 : (sum >> 18) + 1; }
};

// Keys from `low` to `high`; none if low is above high. Keys are as the format has them (FormatKeys).
struct KeyRange {
  u32 low, high;
};

// The bits of keys (order.h) in which two logits of the format can differ.
template <class FORMAT>
struct FormatKeys {
  static constexpr u32 kBit = FORMAT::kLowestKeyBit;
  // Of -inf, and of what follows it.
  static constexpr u32 kNegativeInfinity = kNegativeInfinityKey / kBit, kLeastFinite = kNegativeInfinity + 1;

  static __device__ __forceinline__ u32 of(float x) { return order_key(x) / kBit; }
  static __device__ __forceinline__ float logit_of(u32 key) { return __uint_as_float(bits_of_key(whole(key))); }
  // The least logit above the range. Not the one before: the key below that of 0 would be -0, which has the same key as 0.
  static __device__ __forceinline__ float end_of(KeyRange range) { return logit_of(range.high + 1); }
  // The whole key of a logit of the format. Its other bits are those of a zero mantissa: ones if the logit is negative.
  static __device__ __forceinline__ u32 whole(u32 key) {
    return key * kBit < kZeroKey ? key * kBit + (kBit - 1) : key * kBit;
  }
  // The keys of the greatest logit of the format that is at most x, and of the least that is at least x.
  static __device__ __forceinline__ u32 at_most(float x) {
    const u32 key = order_key(x);
    return key < kZeroKey ? (key + 1) / kBit - 1 : key / kBit;
  }
  static __device__ __forceinline__ u32 at_least(float x) {
    const u32 key = order_key(x);
    return key < kZeroKey ? key / kBit : key / kBit + (key % kBit ? 1 : 0);
  }
};

// Bins of equal width in the logit, from the row's greatest, m, downwards. The last one also has all that is below.
// top() and bottom(): the greatest and the least key that a bin may have. A bin's number is off by 2^-10 at most, as
// rounding allows, and the edges lie a hundredth of its width outside.
template <class FORMAT>
struct LogitBins {
  using Keys = FormatKeys<FORMAT>;
  static constexpr bool kHasAll = true;  // tokens from key `low` on

  KeyRange range;
  float m, per_logit, width;

  __device__ __forceinline__ LogitBins(KeyRange range, float m, float per_logit)
      : range(range), m(m), per_logit(min(per_logit, 0x1p100f)), width(1.0f / this->per_logit) {}

  __device__ __forceinline__ u32 operator()(float x) const { return u32(fminf((m - x) * per_logit, float(kBins - 1))); }
  __device__ __forceinline__ u32 top(u32 bin) const {
    return bin == 0 ? range.high : within(Keys::at_most(m - (float(bin) - 0.01f) * width));
  }
  __device__ __forceinline__ u32 bottom(u32 bin) const {
    return bin == kBins - 1 ? range.low : within(Keys::at_least(m - (float(bin) + 1.01f) * width));
  }

 private:
  __device__ __forceinline__ u32 within(u32 key) const { return max(range.low, min(range.high, key)); }
};

// Bins of as many keys each.
template <class FORMAT>
struct KeyBins {
  using Keys = FormatKeys<FORMAT>;
  static constexpr bool kHasAll = false;

  KeyRange range;
  u32 shift;

  __device__ __forceinline__ explicit KeyBins(KeyRange range) : range(range) {
    const u32 bits = 32 - __clz(range.high - range.low), of_bins = 32 - __clz(kBins - 1);
    shift = bits > of_bins ? bits - of_bins : 0;
  }
  __device__ __forceinline__ u32 operator()(float x) const { return (range.high - Keys::of(x)) >> shift; }
  __device__ __forceinline__ u32 top(u32 bin) const { return range.high - u32(min(u64(bin) << shift, span())); }
  __device__ __forceinline__ u32 bottom(u32 bin) const {
    return range.high - u32(min(((u64(bin) + 1) << shift) - 1, span()));
  }

 private:
  __device__ __forceinline__ u64 span() const { return range.high - range.low; }
};

template <class FORMAT>
class RowSums {
 public:
  using Keys = FormatKeys<FORMAT>;

  const RowLogits<FORMAT> logits;

  __device__ __forceinline__ RowSums(const SampleRows& p, u32 row, SumsShared& shared)
      : logits(logits_of<FORMAT>(p, row)), p_(p), row_(row), shared_(shared) {}

  __device__ __forceinline__ u32 rank() const { return blockIdx.y; }
  __device__ __forceinline__ u32 blocks() const { return p_.blocks_per_row; }

  // A sum over the block's threads: of those before this one, and of all. All threads of a block call it.
  struct Sum {
    u64 before, all;
  };
  __device__ __forceinline__ Sum sum_of_block(u64 own) const {
    const u32 warp = threadIdx.x / kWarpSize;
    const u64 sums = warp_inclusive_sum(own);
    __syncthreads();
    if (lane_id() == kWarpSize - 1) shared_.of_warp[warp] = sums;
    __syncthreads();
    Sum result = {sums - own, 0};
#pragma unroll
    for (u32 i = 0; i < kWarps; ++i) {
      const u64 of_warp = shared_.of_warp[i];
      result.before += i < warp ? of_warp : 0;
      result.all += of_warp;
    }
    return result;
  }

  // Reads the row. Counts the tokens with keys in the bins' range, bin by bin. Returns the sum of `measure` over
  // the logits from `summed_from` on.
  template <class BINS>
  __device__ __forceinline__ u64 count(const BINS& bins, float summed_from, const Measure& measure) {
    // Until all have read what is overwritten.
    __syncthreads();
#pragma unroll 4
    for (u32 i = threadIdx.x; i < kBinPlaces; i += kThreads) shared_.bins[i] = 0;
    __syncthreads();
    const float least = Keys::logit_of(bins.range.low), end = Keys::end_of(bins.range);
    u64 sum = 0;
    for_each_piece([&](float x, u32) {
      if (x >= least && x < end) atomicAdd(&shared_.bins[place_of_bin(bins(x))], 1u);
      if (x >= summed_from) sum += measure(x);
    });
    sum = sum_of_block(sum).all;
    if (blocks() == 1) return sum;

    const u32 turn = turn_ % 2;
    BlockScratch& own = scratch_of(rank());
#pragma unroll 1
    for (u32 bin = threadIdx.x; bin < kBins; bin += kThreads) own.bins[turn][bin] = shared_.bins[place_of_bin(bin)];
    if (threadIdx.x == 0) own.sum[turn] = sum;
    wait_for_all();
#pragma unroll 1
    for (u32 bin = 4 * threadIdx.x; bin < kBins; bin += 4 * kThreads) {
      u32 counts[4] = {0, 0, 0, 0};
#pragma unroll 8
      for (u32 block = 0; block < blocks(); ++block) {
        const uint4 of_block =
            load_from_other_block(reinterpret_cast<const uint4*>(scratch_of(block).bins[turn] + bin));
        counts[0] += of_block.x;
        counts[1] += of_block.y;
        counts[2] += of_block.z;
        counts[3] += of_block.w;
      }
#pragma unroll
      for (u32 i = 0; i < 4; ++i) shared_.bins[place_of_bin(bin + i)] = counts[i];
    }
    sum = threadIdx.x < blocks() ? load_from_other_block(&scratch_of(threadIdx.x).sum[turn]) : 0;
    ++turn_;
    return sum_of_block(sum).all;
  }

  // What a search is for: the greatest key from which on the tokens measure at least `aim` together.
  struct Wanted {
    u64 aim;
    u64 total;      // of all tokens that the first bins have; 0 if it is not known
    bool is_float;  // total: it was summed in float32
    Measure measure;
  };
  struct Narrowed {
    KeyRange
        range;  // where the key is; behind it there is no token, or it is the least key, if all together measure less
    u32 most;   // tokens with such keys, at most
  };

  // Where the key is, by the bins of the last count(). above: what the tokens above the bins measure. What those of a bin do is
  // bounded by its greatest and its least key.
  template <class BINS>
  __device__ __forceinline__ Narrowed narrowed(const BINS& bins, u64 above, const Wanted& wanted) const {
    const auto most_of = [&](u32 bin) {
      const u32 top = bins.top(bin);
      const u64 greatest = wanted.measure(Keys::logit_of(top));
      return greatest + (top == bins.bottom(bin) ? 0 : wanted.measure.unsure(greatest));
    };
    const auto least_of = [&](u32 bin) {
      const u32 bottom = bins.bottom(bin);
      const u64 least = wanted.measure(Keys::logit_of(bottom));
      return least - (bottom == bins.top(bin) ? 0 : min(least, wanted.measure.unsure(least)));
    };
    const u32 first = threadIdx.x * kBinsOfThread;
    u64 least = 0, most = 0;
#pragma unroll 1
    for (u32 bin = first; bin < first + kBinsOfThread; ++bin) {
      const u64 count = shared_.bins[place_of_bin(bin)];
      if (!count) continue;
      least += count * least_of(bin);
      most += count * most_of(bin);
    }
    const Sum all_least = sum_of_block(least), all_most = sum_of_block(most);
    // What is behind the key is known, too, if the bins have all that is left.
    const bool has_rest = BINS::kHasAll && wanted.total;
    const u64 rest = wanted.total > wanted.aim ? wanted.total - wanted.aim : 0;
    const u64 unsure = wanted.is_float ? wanted.measure.unsure(wanted.total) : 0;
    // Bins behind which the key surely is, and those at which it may not have been reached.
    u32 passed = 0, open = 0;
    least = above + all_least.before;
    most = above + all_most.before;
#pragma unroll 1
    for (u32 bin = first; bin < first + kBinsOfThread; ++bin) {
      const u64 count = shared_.bins[place_of_bin(bin)];
      if (count) {
        least += count * least_of(bin);
        most += count * most_of(bin);
      }
      const u64 least_behind = above + all_least.all - least, most_behind = above + all_most.all - most;
      passed += most < wanted.aim || (has_rest && least_behind > rest + unsure);
      open += least < wanted.aim && most_behind > (has_rest && rest > unsure ? rest - unsure : 0);
    }
    const u64 both = sum_of_block(u64(open) << 32 | passed).all;
    passed = u32(both);
    open = min(u32(both >> 32), kBins - 1);
    if (passed >= kBins) return {{bins.range.low, bins.range.low}, 0};
    open = max(open, passed);
    // Keys at the range's ends may be of the next bins, too.
    u64 within = 0;
#pragma unroll 1
    for (u32 bin = first; bin < first + kBinsOfThread; ++bin)
      if (bin + 1 >= passed && bin <= open + 1) within += shared_.bins[place_of_bin(bin)];
    return {{bins.bottom(open), bins.top(passed)}, u32(sum_of_block(within).all)};
  }

  // Reads the row. Sums the weights of the tokens above the range, piece by piece, and counts them and those in the range.
  // lists: lists the latter, which are at most kMostListed. Returns in the last block to arrive, which has all of it in shared
  // memory; false in the others, which are done.
  __device__ __forceinline__ bool sum_pieces(KeyRange range, bool lists, const Weights& weight) {
    __syncthreads();
    if (threadIdx.x == 0) shared_.number_listed = 0;
    __syncthreads();
    const float least = Keys::logit_of(range.low), end = Keys::end_of(range);
    const bool is_alone = blocks() == 1;
    u64 *const to_weights = is_alone ? shared_.weights : scratch().weights, *const to_counts = is_alone
                                                                                                   ? shared_.counts
                                                                                                   : scratch().counts;
    u64 sum = 0, counts = 0;
    for_each_piece(
        [&](float x, u32 token) {
          if (x >= end) {
            sum += weight(x);
            counts += kOneAbove;
          } else if (x >= least) {
            counts += 1;
            if (lists) shared_.listed[atomicAdd(&shared_.number_listed, 1u)] = make_candidate(order_key(x), token);
          }
        },
        [&](u32 piece) {
          sum = warp_sum(sum);
          counts = warp_sum(counts);
          if (lane_id() == 0) {
            to_weights[piece] = sum;
            to_counts[piece] = counts;
          }
          sum = counts = 0;
        });
    __syncthreads();
    if (is_alone) return true;

    u32* const listed = tickets() + 3;
    const u32 own = shared_.number_listed;
    if (threadIdx.x == 0) shared_.of_warp[0] = own ? atomicAdd(listed, own) : 0;
    __syncthreads();
    u64* const to = scratch().listed + u32(shared_.of_warp[0]);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < own; i += kThreads) to[i] = shared_.listed[i];
    if (!is_last()) return false;
    shared_.weights[threadIdx.x] = load_from_other_block(to_weights + threadIdx.x);
    shared_.counts[threadIdx.x] = load_from_other_block(to_counts + threadIdx.x);
    const u32 all = load_from_other_block(listed);
#pragma unroll 4
    for (u32 i = threadIdx.x; i < all; i += kThreads) shared_.listed[i] = load_from_other_block(scratch().listed + i);
    __syncthreads();
    if (threadIdx.x == 0) {
      shared_.number_listed = all;
      *listed = 0;
    }
    __syncthreads();
    return true;
  }
  static constexpr u64 kOneAbove = 1ull << 32;

  // What sum_pieces() leaves.
  __device__ __forceinline__ u64* weights() const { return shared_.weights; }
  __device__ __forceinline__ u32 within(u32 piece) const { return u32(shared_.counts[piece]); }
  __device__ __forceinline__ u32 above(u32 piece) const { return u32(shared_.counts[piece] >> 32); }
  __device__ __forceinline__ u64* listed() const { return shared_.listed; }
  __device__ __forceinline__ u32 number_listed() const { return shared_.number_listed; }
  __device__ __forceinline__ u32 piece_of(u32 token) const { return token / piece_length(); }
  __device__ __forceinline__ Part part_of(u32 piece) const {
    const u64 begin = u64(piece) * piece_length();
    return {u32(min(u64(logits.V), begin)), u32(min(u64(logits.V), begin + piece_length()))};
  }

  // Leaves the counters zero. All threads of all blocks call it at last, if they have not come to sum_pieces().
  __device__ __forceinline__ void leave() {
    if (turn_ > 0) is_last();
  }

 private:
  __device__ __forceinline__ Scratch& scratch() const {
    constexpr u32 kOfRow = sizeof(Scratch), kOfBlock = sizeof(BlockScratch);
    return *reinterpret_cast<Scratch*>(reinterpret_cast<char*>(p_.scratch) +
                                       i64(row_) * (kOfRow + blocks() * kOfBlock));
  }
  __device__ __forceinline__ BlockScratch& scratch_of(u32 block) const {
    return reinterpret_cast<BlockScratch*>(&scratch() + 1)[block];
  }
  __device__ __forceinline__ u32* tickets() const { return p_.tickets + 4 * i64(row_); }

  // Whole reads of a warp.
  __device__ __forceinline__ u32 piece_length() const {
    constexpr u32 kOfAll = kPieces * PartReader<FORMAT>::kElements;
    return (p_.V + kOfAll - 1) / kOfAll * PartReader<FORMAT>::kElements;
  }

  // Calls take(logit, token) for each token of this block's pieces, and done(piece) in each warp behind a piece. Every piece of
  // the row is some block's.
  template <class TAKE, class DONE>
  __device__ __forceinline__ void for_each_piece(const TAKE& take, const DONE& done) const {
    const PartReader<FORMAT> reader{logits};
#pragma unroll 1
    for (u32 piece = rank() * kWarps + threadIdx.x / kWarpSize; piece < kPieces; piece += blocks() * kWarps) {
      const Part part = part_of(piece);
      reader.for_each(part.begin, part.end, take);
      done(piece);
    }
  }
  template <class TAKE>
  __device__ __forceinline__ void for_each_piece(const TAKE& take) const {
    for_each_piece(take, [](u32) {});
  }

  // All blocks have come here before the first goes on.
  __device__ __forceinline__ void wait_for_all() {
    __syncthreads();
    if (threadIdx.x == 0) {
      // The last to arrive counts the turn.
      if (take_ticket(tickets(), blocks()) == blocks() - 1) take_ticket(tickets() + 1, ~0u);
      while (tickets_taken(tickets() + 1) <= turn_) __nanosleep(20);
    }
    __syncthreads();
  }

  // Whether this block is the last of the row to come here. It resets the counter of turns.
  __device__ __forceinline__ bool is_last() {
    __syncthreads();
    if (threadIdx.x == 0) {
      shared_.is_last = take_ticket(tickets() + 2, blocks()) == blocks() - 1;
      if (shared_.is_last) tickets()[1] = 0;
    }
    __syncthreads();
    return shared_.is_last;
  }

  const SampleRows& p_;
  const u32 row_;
  SumsShared& shared_;
  u32 turn_ = 0;  // how often the blocks have waited for each other
};

}  // namespace fused_topk::sampling
