// SPDX-License-Identifier: Apache-2.0
// Counts and sums that all blocks of a row compute together, one read of the row at a time. Every thread of every block gets
// each result; that of sum_pieces() goes to one block. Counts and sums are integers, hence exact: they do not depend on the
// number of blocks.
#pragma once

#include "sample_bins.cuh"

namespace fused_topk::sampling {

constexpr u32 kPieces = 512;  // of a row; a warp reads one at a time
// The most candidates that are listed for the search for the border.
constexpr u32 kMostListed = 1536;
static_assert(kPieces == kThreads, "each thread fetches a piece");

// A thread requests the counts of this many blocks at a time.
constexpr u32 kBlocksAhead = tuned(tuning::kFilteredDraws, 0, kTileByTile, 32, false, true).ahead;

// What sum_pieces() leaves of each piece for the row's last block.
struct Scratch {
  u64 weights[kPieces];
  u64 counts[kPieces];
};
// What each block of a row leaves for the others. In memory these follow the row's Scratch. Sums and bins have two
// sets: a block may write one set while others still read the other.
struct alignas(16) BlockScratch {
  u64 sums[2][2];
  u32 bins[2][kBins];
  u64 listed[kMostListed];
  u64 number_listed;
  u64 racer;  // with noise, the block's best
};
static_assert(sizeof(Scratch) == 8192 && sizeof(BlockScratch) == 28720, "fused_topk/layout/launch.py allocates them");

// A sum of weights and their number, to which threads add. The sum is in three 32-bit numbers, because atomic 64-bit
// additions to shared memory would be loops. A weight has up to 45 bits.
struct Bucket {
  static constexpr u32 kBits = 21, kMask = (1u << kBits) - 1, kOne = 1 << 16;
  static_assert(kMostListed <= 1u << (32 - kBits));

  u32 low, middle, high_and_count;

  __device__ __forceinline__ void add(u64 weight) {
    atomicAdd(&low, u32(weight) & kMask);
    atomicAdd(&middle, u32(weight >> kBits) & kMask);
    atomicAdd(&high_and_count, u32(weight >> 2 * kBits) + kOne);
  }
  __device__ __forceinline__ u64 weight() const {
    return low + (u64(middle) << kBits) + (u64(high_and_count % kOne) << 2 * kBits);
  }
  __device__ __forceinline__ u32 count() const { return high_and_count / kOne; }
};

struct SumsShared {
  union {
    u32 bins[kBinPlaces];
    struct {
      u64 listed[kMostListed];
      Bucket buckets[kThreads];
    };
  };
  u64 weights[kPieces];
  u64 counts[kPieces];
  u64 of_warp[kWarps];
  u64 racers[kWarps];  // with noise, each warp's best. Not in registers, which are few
  u32 number_listed;
  u32 is_last;
};

// What a search looks for: the greatest key such that the tokens with this key or greater keys together measure at
// least `aim`.
struct Wanted {
  u64 aim;        // 0: not known before the total is known
  u64 total;      // what all tokens of the first bins measure; 0: not known
  bool is_float;  // the total was summed in float32
  bool is_one;    // each token measures 1
};

// A sum over the block's threads: over the threads before this one, and over all threads.
struct Sum {
  u64 before, all;
};

// All threads of a block call these. of_warp: [kWarps], in shared memory. Not inlined: they are called in many places,
// and to fetch code that runs once takes longer than to run it.
__device__ __noinline__ Sum sum_of_block(u64 own, u64* of_warp) {
  const u32 warp = threadIdx.x / kWarpSize;
  const u64 sums = warp_inclusive_sum(own);
  __syncthreads();
  if (lane_id() == kWarpSize - 1) of_warp[warp] = sums;
  __syncthreads();
  const u64 mine = lane_id() < kWarps ? of_warp[lane_id()] : 0, of_warps = warp_inclusive_sum(mine);
  return {sums - own + __shfl_sync(kAllLanes, of_warps - mine, warp), __shfl_sync(kAllLanes, of_warps, kWarps - 1)};
}
__device__ __noinline__ u32 sum_of_block(u32 own, u64* of_warp) {
  const u32 sum = warp_sum(own);
  __syncthreads();
  if (lane_id() == 0) of_warp[threadIdx.x / kWarpSize] = sum;
  __syncthreads();
  return warp_sum(lane_id() < kWarps ? u32(of_warp[lane_id()]) : 0u);
}

template <class FORMAT, bool NOISE>
class RowSums {
 public:
  using Keys = FormatKeys<FORMAT>;
  // A lane takes one vector at a time: more do not fit the registers of 32 warps on a multiprocessor. The two reads
  // that a row mostly has need fewer registers: count() without sums, and sum_pieces(). These take two vectors of
  // float32.
  using Reader = PartReader<FORMAT, 1>;
  using WideReader = PartReader<FORMAT, 8 / FORMAT::kPerVector>;

  const RowLogits<FORMAT> logits;

  __device__ __forceinline__ RowSums(const SampleRows& p, u32 row, SumsShared& shared)
      : logits(logits_of<FORMAT>(p, row)), p_(p), row_(row), shared_(shared) {}

  __device__ __forceinline__ u32 rank() const { return blockIdx.y; }
  __device__ __forceinline__ u32 blocks() const { return p_.blocks_per_row; }

  __device__ __forceinline__ Sum sum_of_block(u64 own) const { return sampling::sum_of_block(own, shared_.of_warp); }
  __device__ __forceinline__ u32 sum_of_block(u32 own) const { return sampling::sum_of_block(own, shared_.of_warp); }

  // The race (race.cuh). The 32 lanes of each warp call start(), then enter() for other racers and, after a barrier,
  // winner().
  __device__ __forceinline__ void start(u64 racer) const {
    if (lane_id() == 0) shared_.racers[threadIdx.x / kWarpSize] = racer;
  }
  __device__ __forceinline__ void enter(u64 racer) const {
    u64& best = shared_.racers[threadIdx.x / kWarpSize];
    if (lane_id() == 0) best = max(best, racer);
  }
  __device__ __forceinline__ u64 winner() const { return warp_max(shared_.racers[lane_id() % kWarps]); }

  // What tokens measure together. With bins of logits, sum: all tokens of the bins. With bins of keys, sum: the tokens
  // above the bins; of_half: the tokens from the middle of the range upwards.
  struct Sums {
    u64 sum, of_half;
  };

  // Reads the row, and counts the tokens of each bin. sums: bins of logits are summed, too. Bins of keys always are.
  __device__ __forceinline__ Sums count(const Bins<FORMAT>& bins, bool sums, const Measure& measure) {
    // All threads have read the shared memory that is now overwritten.
    __syncthreads();
#pragma unroll 4
    for (u32 i = threadIdx.x; i < kBinPlaces; i += kThreads) shared_.bins[i] = 0;
    __syncthreads();
    Sums all = bins.has_keys() ? counted<true, true>(bins, measure)
               : sums          ? counted<false, true>(bins, measure)
                               : counted<false, false>(bins, measure);
    sums |= bins.has_keys();
    __syncthreads();
    if (sums) all = sums_of_block(all);
    if (blocks() == 1) return all;

    const u32 turn = turn_ % 2;
    BlockScratch& own = scratch_of(rank());
#pragma unroll 1
    for (u32 bin = threadIdx.x; bin < kBins; bin += kThreads) own.bins[turn][bin] = shared_.bins[place_of_bin(bin)];
    if (sums && threadIdx.x == 0) {
      own.sums[turn][0] = all.sum;
      own.sums[turn][1] = all.of_half;
    }
    wait_for_all();
#pragma unroll 1
    for (u32 bin = 4 * threadIdx.x; bin < kBins; bin += 4 * kThreads) {
      u32 counts[4] = {0, 0, 0, 0};
#pragma unroll kBlocksAhead
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
    __syncthreads();
    ++turn_;
    if (!sums) return all;
    all = {0, 0};
    if (threadIdx.x < blocks()) {
      const u64* const of_block = scratch_of(threadIdx.x).sums[turn];
      all = {load_from_other_block(of_block), load_from_other_block(of_block + 1)};
    }
    return sums_of_block(all);
  }
  __device__ __forceinline__ Sums sums_of_block(Sums own) const {
    return {sum_of_block(own.sum).all, sum_of_block(own.of_half).all};
  }

  // Does this for this block's pieces. Each thread returns its own sums.
  template <bool HAS_KEYS, bool SUMS>
  __device__ __forceinline__ Sums counted(const Bins<FORMAT>& bins, const Measure& measure) const {
    const float summed_from = HAS_KEYS ? Keys::end_of(bins.range) : bins.least,
                middle = Keys::logit_of(bins.range.middle());
    Sums result = {0, 0};
    const auto take = [&](float x, u32) {
      atomicAdd(&shared_.bins[place_of_bin(bins.template of<HAS_KEYS>(x))], 1u);
      if (!SUMS) return;
      const u64 own = measure(x);
      result.sum += x >= summed_from ? own : 0;
      if (HAS_KEYS) result.of_half += x >= middle ? own : 0;
    };
    for_each_piece<PartReader<FORMAT, (SUMS ? Reader::kVectors : WideReader::kVectors)>>(take, [](u32) {});
    return result;
  }

  struct Narrowed {
    KeyRange
        range;  // where the wanted key is. If all tokens measure less than the aim: the least key, or a range that no token is below
    u32 most;  // at most this many tokens have keys of the range; kUnknown before the search
  };
  static constexpr u32 kUnknown = ~0u;

  // Finds where the wanted key is from the bins of the last count(). above: what the tokens above the bins measure. The
  // highest and the lowest logit of a bin bound what its tokens measure.
  __device__ __forceinline__ Narrowed narrowed(const Bins<FORMAT>& bins, u64 above, const Wanted& wanted,
                                               const Measure& measure) const {
    // Adds what the tokens of a bin measure, at least and at most.
    u64 least = 0, most = 0;
    const auto add = [&](u32 bin) {
      const u64 count = shared_.bins[place_of_bin(bin)];
      const float highest = bins.highest(bin), lowest = bins.lowest(bin);
      const u64 greatest = measure(highest), smallest = measure(lowest);
      const bool is_exact = highest == lowest;
      most += count * (greatest + (is_exact ? 0 : measure.unsure(greatest)));
      least += count * (smallest - (is_exact ? 0 : min(smallest, measure.unsure(smallest))));
    };
    const u32 first = threadIdx.x * kBinsOfThread, end = first + kBinsOfThread;
#pragma unroll 1
    for (u32 bin = first; bin < end; ++bin) add(bin);
    const Sum all_least = sum_of_block(least), all_most = sum_of_block(most);
    // least and most bound what the tokens of all bins from the first to a given one measure. The wanted key surely is
    // below the given bin if these tokens measure less than the aim. It also is if the tokens below the bin measure
    // more than `rest`, the total less the aim, because the tokens below the wanted key measure no more. This second
    // test needs bins that have all tokens of the total (has_rest). passes(): the key surely is below the bin.
    // is_open(): it may be.
    const bool has_rest = !bins.has_keys() && wanted.total;
    const u64 unsure = wanted.is_float ? measure.unsure(wanted.total) : 0;
    const u64 rest = has_rest && wanted.total > wanted.aim ? wanted.total - wanted.aim : 0;
    const u64 aim = wanted.aim - min(wanted.aim, above);
    const u64 passed_least = has_rest ? all_least.all - min(all_least.all, rest + unsure) : 0;
    const u64 open_most = all_most.all - min(all_most.all, rest - min(rest, unsure));
    const auto passes = [&] { return most < aim || least < passed_least; };
    const auto is_open = [&] { return least < aim && most < open_most; };
    // If passes() or is_open() holds for a bin, it holds for all bins before it. So a thread tests each of its bins
    // only where the test before its first bin and the test after its last one differ.
    least += all_least.before;
    most += all_most.before;
    u32 passed = passes() ? kBinsOfThread : 0, open = is_open() ? kBinsOfThread : 0;
    least = all_least.before;
    most = all_most.before;
    if ((passes() && !passed) || (is_open() && !open)) {
      passed = open = 0;
#pragma unroll 1
      for (u32 bin = first; bin < end; ++bin) {
        add(bin);
        passed += passes();
        open += is_open();
      }
    }
    static_assert(kBins < 1u << 16);
    const u32 both = sum_of_block(open << 16 | passed);
    passed = both & 0xFFFFu;
    open = min(both >> 16, kBins - 1);
    if (passed >= kBins) return {{bins.range.low, bins.range.low}, 0};
    open = max(open, passed);
    // The bins next to these may also have tokens with keys at the ends of the range.
    u32 within = 0;
    const u32 last = min(end, open + 2);
#pragma unroll 1
    for (u32 bin = max(first + 1, passed) - 1; bin < last; ++bin) within += shared_.bins[place_of_bin(bin)];
    return {{bins.bottom(open), bins.top(passed)}, sum_of_block(within)};
  }

  // Reads the row. For each piece, sums the weights of the tokens above the range, and counts these tokens and the
  // tokens in the range. lists: also lists the tokens in the range, of which there are at most kMostListed. Returns
  // true in the last block to arrive, which has all results in shared memory, and false in the other blocks, which are
  // done. With noise, the tokens above the range race.
  __device__ __forceinline__ bool sum_pieces(KeyRange range, bool lists, const Weights& weight,
                                             Temperature temperature) {
    __syncthreads();
    if (races<NOISE>(p_)) start(0);
    if (threadIdx.x == 0) shared_.number_listed = 0;
    __syncthreads();
    const float least = Keys::logit_of(range.low), end = Keys::end_of(range);
    const bool is_alone = blocks() == 1;
    u64 *const to_weights = is_alone ? shared_.weights : scratch().weights, *const to_counts = is_alone
                                                                                                   ? shared_.counts
                                                                                                   : scratch().counts;
    u64 sum = 0;
    u32 above = 0, within = 0;
    for_each_piece<WideReader>(
        [&](float x, u32 token) {
          const bool is_above = x >= end, is_within = x >= least && !is_above;
          sum += is_above ? weight(x) : 0;
          above += is_above;
          within += is_within;
          if (lists && is_within)
            shared_.listed[atomicAdd(&shared_.number_listed, 1u)] = make_candidate(order_key(x), token);
        },
        [&](u32 piece) {
          sum = warp_sum(sum);
          above = warp_sum(above);
          within = warp_sum(within);
          if (lane_id() == 0) {
            to_weights[piece] = sum;
            to_counts[piece] = u64(above) << 32 | within;
          }
          if (races<NOISE>(p_)) {
            if (above) {
              const Race race(p_, row_, weight.m, temperature);
              const Part part = part_of(piece);
              enter(warp_max(race.best_of(logits, part.begin + lane_id(), part.end, kWarpSize,
                                          [&](float x, u32) { return x >= end; })));
            }
          }
          sum = above = within = 0;
        });
    __syncthreads();
    if (is_alone) return true;

    BlockScratch& own = scratch_of(rank());
    if (races<NOISE>(p_)) {
      const u64 racer = winner();
      if (threadIdx.x == 0) own.racer = racer;
    }
    const u32 number = shared_.number_listed;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < number; i += kThreads) own.listed[i] = shared_.listed[i];
    if (threadIdx.x == 0) own.number_listed = number;
    if (!is_last()) return false;
    shared_.weights[threadIdx.x] = load_from_other_block(to_weights + threadIdx.x);
    shared_.counts[threadIdx.x] = load_from_other_block(to_counts + threadIdx.x);
    // Each warp fetches the list of one block, and its best racer.
    static_assert(kWarps <= kWarpSize);
    const u32 warp = threadIdx.x / kWarpSize;
    const u32 of_block = lane_id() < blocks() ? u32(load_from_other_block(&scratch_of(lane_id()).number_listed)) : 0;
    const u32 up_to = warp_inclusive_sum(of_block);
    const u32 end_of_list = __shfl_sync(kAllLanes, up_to, warp), all = __shfl_sync(kAllLanes, up_to, kWarpSize - 1);
    const u32 begin = end_of_list - __shfl_sync(kAllLanes, of_block, warp);
    if (races<NOISE>(p_) && warp < blocks()) enter(load_from_other_block(&scratch_of(warp).racer));
#pragma unroll 1
    for (u32 i = begin + lane_id(); i < end_of_list; i += kWarpSize)
      shared_.listed[i] = load_from_other_block(scratch_of(warp).listed + (i - begin));
    if (threadIdx.x == 0) shared_.number_listed = all;
    __syncthreads();
    return true;
  }

  // The results of sum_pieces(), in the last block.
  __device__ __forceinline__ u64* weights() const { return shared_.weights; }
  __device__ __forceinline__ u32 within(u32 piece) const { return u32(shared_.counts[piece]); }
  __device__ __forceinline__ u32 above(u32 piece) const { return u32(shared_.counts[piece] >> 32); }
  __device__ __forceinline__ u64* listed() const { return shared_.listed; }
  __device__ __forceinline__ Bucket* buckets() const { return shared_.buckets; }
  __device__ __forceinline__ u32 number_listed() const { return shared_.number_listed; }
  __device__ __forceinline__ u32 piece_of(u32 token) const { return token / piece_length(); }
  __device__ __forceinline__ Part part_of(u32 piece) const {
    const u64 begin = u64(piece) * piece_length();
    return {u32(min(u64(logits.V), begin)), u32(min(u64(logits.V), begin + piece_length()))};
  }

  // Leaves the counters zero. All threads of all blocks call it at the end, unless they have called sum_pieces().
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
  __device__ __forceinline__ u32* tickets() const { return p_.tickets + 3 * i64(row_); }

  // The tokens of a piece: a multiple of what a warp reads at once.
  __device__ __forceinline__ u32 piece_length() const {
    constexpr u32 kOfAll = kPieces * WideReader::kElements;
    return (p_.V + kOfAll - 1) / kOfAll * WideReader::kElements;
  }

  // Calls take(logit, token) for each token of this block's pieces, and done(piece) in the warp that has read the
  // piece. Each piece of the row belongs to one block.
  template <class READER, class TAKE, class DONE>
  __device__ __forceinline__ void for_each_piece(const TAKE& take, const DONE& done) const {
    const READER reader{logits};
#pragma unroll 1
    for (u32 piece = rank() * kWarps + threadIdx.x / kWarpSize; piece < kPieces; piece += blocks() * kWarps) {
      const Part part = part_of(piece);
      reader.for_each(part.begin, part.end, take);
      done(piece);
    }
  }

  // Waits until all blocks of the row have come here.
  __device__ __forceinline__ void wait_for_all() {
    __syncthreads();
    if (threadIdx.x == 0) {
      // The last block to arrive counts the turn, which lets the others go on.
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
