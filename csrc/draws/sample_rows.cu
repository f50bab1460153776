// SPDX-License-Identifier: Apache-2.0
// Draws tokens from rows whose best are listed, with filters: a block a row or several, and nothing that the host must
// wait for.
//
// The list comes from softmax_topk.cu: the row's best tokens, and its (m, d). Top-k, top-p and min-p keep the best of a
// row, so a border says what is kept. Mostly the list has it, and a token is drawn from the list. If more is kept than is
// listed, the row is read twice more, as a rule:
//
// 1. The row's blocks count its tokens by their logits, in thousands of bins. The bins bound what the tokens above each
//    weigh, and so say between which logits the border of top-p is: mostly some hundred tokens.
// 2. They sum the weights of the tokens above these exactly, piece by piece, and list the tokens between. The last block
//    sorts those, finds the border, and draws: a piece, and from the piece a token.
//
// Where more tokens are between than a block can sort, they are counted again by finer bins, until they are few enough or all
// equal. One or two reads at least halve the range of their keys, so 32 times suffice. Min-p says by itself what is kept: only
// the second read.
//
// Blocks of one row wait for each other. So a launch with several blocks a row is cooperative.
#pragma once

#include "sample_list.cuh"
#include "sample_row_sums.cuh"

namespace fused_topk::sampling {

// What is kept of the tokens that the pieces do not have, and the border: no candidate below it is kept.
struct Border {
  u64 least;
  u32 kept;
};

// The least candidate with that key.
__device__ __forceinline__ u64 least_candidate(u32 key) { return u64(key) << 32; }

struct RowsShared {
  union {
    ListShared list;
    SumsShared sums;
  };
  u32 answer;
};

// A block's view of its row. Unless said otherwise all threads of all blocks of the row call a function.
template <class FORMAT>
struct RowSampler {
  using Keys = FormatKeys<FORMAT>;
  using Wanted = typename RowSums<FORMAT>::Wanted;
  using Narrowed = typename RowSums<FORMAT>::Narrowed;

  const SampleRows& p;
  RowsShared& shared;
  const u32 row;
  const RowTemperature temperature;
  RowSums<FORMAT> sums;
  float m, log_d;

  __device__ __forceinline__ RowSampler(const SampleRows& p, RowsShared& shared)
      : p(p),
        shared(shared),
        row(blockIdx.x),
        temperature(p, blockIdx.x),
        sums(p, blockIdx.x, shared.sums),
        m(__ldg(p.list_state + blockIdx.x)),
        log_d(logf(__ldg(p.list_state + p.rows + blockIdx.x))) {}

  __device__ __forceinline__ Weights weights() const { return {m, temperature.scale, p.one}; }
  // Any thread.
  __device__ __forceinline__ float own_log_prob(float x) const {
    return is_finite(m) ? (x - m) - log_d : not_a_number();
  }

  // One thread.
  __device__ __forceinline__ void write(u32 sample, u32 token, u64 total) const {
    const float x = sums.logits(token);
    const i64 place = i64(row) * p.num_samples + sample;
    p.tokens[place] = token;
    p.log_probs[place] = p.truncated ? (x - m) * temperature.inverse - log_of_sum(p, total) : own_log_prob(x);
  }

  // What the caller wants to see of the list. One block calls it.
  __device__ __forceinline__ void write_list() const {
    if (!p.best_values) return;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < p.logprobs; i += kThreads) {
      const i64 from = i64(row) * p.length + i, to = i64(row) * p.logprobs + i;
      const auto* const listed = static_cast<const typename FORMAT::Bits*>(p.list_logits);
      p.best_values[to] = own_log_prob(FORMAT::decode(__ldg(listed + from)));
      p.best_indices[to] = __ldg(p.list_indices + from);
    }
    if (threadIdx.x == 0) p.best_logsumexp[row] = m + (is_finite(m) ? log_d : 0.0f);
  }

  // The filters of the row.
  __device__ __forceinline__ Filters filters() const {
    const i64 top_k = p.row_top_k ? __ldg(p.row_top_k + row) : p.top_k;
    const double min_p = p.row_min_p ? __ldg(p.row_min_p + row) : p.min_p;
    return {top_k > 0 && top_k < p.V ? u32(top_k) : 0, p.row_top_p ? __ldg(p.row_top_p + row) : p.top_p,
            min_p > 0.0 ? round_up(min(min_p, 2.0) * double(p.one)) : 0};
  }

  // The least finite key whose tokens min-p keeps. Weights fall with the keys.
  __device__ __forceinline__ u32 key_of_min_p(u64 least_weight) const {
    u32 low = Keys::kLeastFinite, high = Keys::of(m);
#pragma unroll 1
    while (low < high) {
      const u32 middle = low + (high - low) / 2;
      const bool is_below = weights()(Keys::logit_of(middle)) < least_weight;
      low = is_below ? middle + 1 : low;
      high = is_below ? high : middle;
    }
    return low;
  }

  // Bins of all tokens from key `low` on, of which those that matter weigh at least 1 / ratio of the best.
  __device__ __forceinline__ LogitBins<FORMAT> bins_from(u32 low, float ratio) const {
    // A weight below the unit is none.
    const float exponents = min(log2f(ratio), log2f(p.one)) + 1.0f;
    return {{low, Keys::of(m)}, m, temperature.scale * (float(kBins) / exponents)};
  }

  // Counts the tokens from key `low` on, and says where the border of top-p is. Without the total sums it, too.
  __device__ __forceinline__ Narrowed count_for_top_p(double top_p, u32 low, Wanted& wanted) {
    // What the border leaves behind is known to 2^-8, or better, if lighter tokens share a bin.
    const float total = wanted.total ? float(wanted.total) : p.one;
    const auto bins = bins_from(low, 0x1p8f * float(p.V) * p.one / (float(1.0 - top_p) * total));
    // Where nearly all is kept, the rest must be known better than a sum of floats.
    if (top_p > 1.0 - 0x1p-8) wanted.total = 0;
    const float summed_from = wanted.total ? FUSED_TOPK_INFINITY : Keys::logit_of(low);
    const u64 sum = sums.count(bins, summed_from, wanted.measure);
    if (!wanted.total) wanted = wanted_of(top_p, sum, false);
    return sums.narrowed(bins, 0, wanted);
  }
  __device__ __forceinline__ Wanted wanted_of(double top_p, u64 total, bool is_float) const {
    return {max(round_up(top_p * double(total)), u64(1)), total, is_float, {weights(), false}};
  }

  // The key of the k-th best token; the least finite one if fewer are finite.
  __device__ __forceinline__ u32 kth_key(u32 k) {
    const Wanted wanted = {k, 0, false, {weights(), true}};
    const auto bins = bins_from(Keys::kLeastFinite, FUSED_TOPK_INFINITY);
    sums.count(bins, FUSED_TOPK_INFINITY, wanted.measure);
    return narrowed_to(sums.narrowed(bins, 0, wanted), wanted, 0).range.low;
  }

  // Narrows a range until at most `limit` tokens, or equal ones alone, have its keys.
  __device__ __forceinline__ Narrowed narrowed_to(Narrowed found, const Wanted& wanted, u32 limit) {
#pragma unroll 1
    while (found.most > limit && found.range.low < found.range.high) {
      const KeyRange range = found.range;
      const KeyBins<FORMAT> bins(range);
      const u64 above = sums.count(bins, Keys::end_of(range), wanted.measure);
      found = sums.narrowed(bins, above, wanted);
      const u32 middle = range.low + (range.high - range.low) / 2 + 1;
      if (found.range.low < middle && middle <= found.range.high &&
          found.range.high - found.range.low > (range.high - range.low) / 2) {
        // The bounds are too far from each other: the exact sum says in which half it is.
        const bool is_upper = sums.count(bins, Keys::logit_of(middle), wanted.measure) >= wanted.aim;
        (is_upper ? found.range.low : found.range.high) = is_upper ? middle : middle - 1;
      }
    }
    return found;
  }

  // Sorts what is listed, best first. One block calls it, as what follows.
  __device__ __forceinline__ void sort_listed() const {
    u64* const listed = sums.listed();
    const u32 count = sums.number_listed();
    const u32 length = count > 1 ? 2u << (31 - __clz(count - 1)) : 1;
#pragma unroll 1
    for (u32 i = count + threadIdx.x; i < length; i += kThreads) listed[i] = kNoCandidate;
    __syncthreads();
    // Bitonic: sorted runs of twice the length, step by step.
#pragma unroll 1
    for (u32 run = 2; run <= length; run *= 2) {
#pragma unroll 1
      for (u32 step = run / 2; step > 0; step /= 2) {
#pragma unroll 1
        for (u32 i = threadIdx.x; i < length / 2; i += kThreads) {
          const u32 place = 2 * i - i % step;
          const u64 a = listed[place], b = listed[place + step];
          if ((a < b) != ((place & run) != 0)) {
            listed[place] = b;
            listed[place + step] = a;
          }
        }
        __syncthreads();
      }
    }
  }

  // Of the tokens that are listed between the border's bounds: adds to the pieces what is kept.
  __device__ __forceinline__ Border border_of_listed(u64 above, u64 aim, u64 least, u32 greatest_key) const {
    sort_listed();
    u64* const listed = sums.listed();
    const u32 each = (sums.number_listed() + kThreads - 1) / kThreads, first = threadIdx.x * each;
    const u32 end = min(sums.number_listed(), first + each);
    const auto weight_of = [&](u64 candidate) { return weights()(__uint_as_float(bits_of_key(key_of(candidate)))); };
    u64 own = 0;
#pragma unroll 1
    for (u32 i = first; i < end; ++i) own += weight_of(listed[i]);
    above += sums.sum_of_block(own).before;
    u32 kept = 0;
#pragma unroll 1
    for (u32 i = first; i < end && above < aim && listed[i] >= least; ++i, ++kept) {
      const u64 weight = weight_of(listed[i]);
      atomicAdd(&sums.weights()[sums.piece_of(index_of(listed[i]))], weight);
      above += weight;
    }
    kept = u32(sums.sum_of_block(kept).all);
    return {kept ? listed[kept - 1] : least_candidate(greatest_key + 1), kept};
  }

  // The same of tokens that are all equal. Of them the first ones are kept.
  __device__ __forceinline__ Border border_of_equal(u64 above, u64 aim, u32 key) const {
    const u64 each = weights()(__uint_as_float(bits_of_key(key))), divisor = max(each, u64(1));
    const u64 needed = aim > above ? (aim - above + divisor - 1) / divisor : 1;
    const u64 mine = sums.within(threadIdx.x);
    const auto ties = sums.sum_of_block(mine);
    sums.weights()[threadIdx.x] += each * (min(ties.before + mine, needed) - min(ties.before, needed));
    if (needed >= ties.all) return {least_candidate(key), u32(ties.all)};
    if (ties.before < needed && needed <= ties.before + mine) {
      shared.answer = threadIdx.x;
      sums.listed()[0] = needed - ties.before - 1;
    }
    __syncthreads();
    const u32 last = find_in_part(PartReader<FORMAT>{sums.logits}, sums.part_of(shared.answer), sums.listed()[0],
                                  [&](float x, u32) { return u64(order_key(x) == key); });
    return {make_candidate(key, last), u32(needed)};
  }

  // Draws from the pieces, given the border and of each piece the sum of what is kept.
  __device__ __forceinline__ void draw_from_pieces(Border border) const {
    const u64 total = sums.sum_of_block(sums.weights()[threadIdx.x]).all;
    const u64 above = sums.sum_of_block(sums.above(threadIdx.x)).all;
    if (threadIdx.x == 0) write_kept(p, row, above + border.kept, total, m * temperature.inverse);
#pragma unroll 1
    for (u32 sample = threadIdx.x / kWarpSize; sample < p.num_samples; sample += kWarps) {
      const u64 aim = aim_of(p, row, sample, total);
      const Place place = find_in(sums.weights(), kPieces, aim);
      const u32 token = find_in_part(
          PartReader<FORMAT>{sums.logits}, sums.part_of(place.index), aim - place.before,
          [&](float x, u32 i) { return make_candidate(order_key(x), i) >= border.least ? weights()(x) : 0; });
      if (lane_id() == 0) write(sample, token, total);
    }
  }

  // What find() returns to the lanes of the first warp, in every thread of the block.
  template <class FIND>
  __device__ __forceinline__ u32 in_first_warp(const FIND& find) const {
    if (threadIdx.x < kWarpSize) {
      const u32 found = find();
      if (lane_id() == 0) shared.answer = found;
    }
    __syncthreads();
    return shared.answer;
  }

  __device__ __forceinline__ void run() {
    const bool is_first = sums.rank() == 0;
    if (is_first) write_list();
    if (!is_finite(m) || temperature.is_greedy) {
      if (!is_first) return;
      const float of_best = !p.truncated                          ? own_log_prob(m)
                            : is_finite(m) && temperature.is_zero ? 0.0f
                                                                  : not_a_number();
      const float m_of_zero = is_finite(m) && temperature.is_zero ? m : not_a_number();
      write_best(p, row, u32(__ldg(p.list_indices + i64(row) * p.length)), of_best, m_of_zero);
      return;
    }
    const Filters filters = this->filters();
    // What is kept is above the range, and perhaps a part of the range.
    u32 least_key = Keys::kLeastFinite;
    Narrowed found = {{least_key, least_key - 1}, 0};
    Wanted wanted = {0, 0, false, {weights(), false}};
    if (!filters.keep_all()) {
      const bool is_of_all = filters.has_top_p() && !filters.k;
      if (is_of_all && temperature.scale == kLog2E) {
        // softmax_topk has the sum.
        wanted = wanted_of(filters.top_p, u64(__ldg(p.list_state + p.rows + row) * p.one), true);
      } else if (is_of_all) {
        found = count_for_top_p(filters.top_p, least_key, wanted);
      }
      const List list{shared.list, p.length, p.V};
      __syncthreads();
      list.template load<FORMAT>(p, row, weights());
      __syncthreads();
      const u32 kept = in_first_warp([&] { return list.kept(filters, wanted.total); });
      if (kept) {
        if (is_first)
          list.draw(p, row, kept, m * temperature.inverse,
                    [&](u32 sample, u32 token, u64 total) { write(sample, token, total); });
        sums.leave();
        return;
      }
      if (filters.k) {
        least_key = filters.k <= p.length ? shared.list.key[filters.k - 1] / FORMAT::kLowestKeyBit : kth_key(filters.k);
        found.range = {least_key, least_key - 1};
      }
      if (filters.has_top_p()) {
        if (filters.k || temperature.scale == kLog2E) found = count_for_top_p(filters.top_p, least_key, wanted);
        found = narrowed_to(found, wanted, kMostListed);
      }
      if (filters.has_min_p()) least_key = max(least_key, key_of_min_p(filters.least_weight));
    }
    KeyRange range = found.range;
    if (least_key > range.high) range = {least_key, least_key - 1};
    const bool lists = range.low < range.high;
    if (!sums.sum_pieces(range, lists, weights())) return;
    const u64 above = sums.sum_of_block(sums.weights()[threadIdx.x]).all;
    const u64 least = least_candidate(Keys::whole(least_key));
    const u32 greatest_key = Keys::whole(range.high);
    draw_from_pieces(range.low > range.high ? Border{least, 0}
                     : lists                ? border_of_listed(above, wanted.aim, least, greatest_key)
                                            : border_of_equal(above, wanted.aim, greatest_key));
  }
};

// Grid: (rows, blocks_per_row).
template <class FORMAT>
__global__ void __launch_bounds__(kThreads, 2) sample_rows_kernel(const __grid_constant__ SampleRows p) {
  __shared__ RowsShared shared;
  RowSampler<FORMAT>(p, shared).run();
}

}  // namespace fused_topk::sampling
