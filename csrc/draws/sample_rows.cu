// SPDX-License-Identifier: Apache-2.0
// Draws tokens after filters, given each row's list of best tokens. One block or several have a row. The host waits for nothing.
//
// The list comes from softmax_topk.cu: the row's best tokens, and its (m, d). Top-k, top-p and min-p keep the best of a
// row, so a border says what is kept. Mostly the list has it, and a token is drawn from the list. If more is kept than is
// listed, the row's blocks find the border by bisection over the keys: each read of the row decides 4 bits. Then they sum the
// kept tokens piece by piece, and the piece that has the token is read again.
//
// Blocks of one row wait for each other. So a launch with several blocks a row is cooperative.
#pragma once

#include "sample_list.cuh"
#include "sample_row_sums.cuh"

namespace fused_topk::sampling {

struct RowsShared {
  union {
    ListShared list;
    // After the list: its keys are no longer needed.
    BinsOfThreads bins;
  };
  SumsShared sums;
  u32 answer;
};

// A block's view of its row. Unless said otherwise all threads of all blocks of the row call a function.
template <class FORMAT>
struct RowSampler {
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
        sums(p, blockIdx.x, shared.sums, shared.bins),
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

  template <class MEASURE>
  __device__ __forceinline__ void draw_from_pieces(const MEASURE& measure) const {
    if (sums.rank() != 0) return;
    const u64 total = sums.sum_of_pieces();
#pragma unroll 1
    for (u32 sample = threadIdx.x / kWarpSize; sample < p.num_samples; sample += kWarps) {
      const u32 token = sums.find(aim_of(p, row, sample, total), measure);
      if (lane_id() == 0) write(sample, token, total);
    }
  }

  // The border of a row that keeps more than its list has. kth: the key of the k-th best, if the list has it. sum: as for
  // List::kept.
  __device__ __forceinline__ Border search_border(const Filters& filters, u32 kth, u64 sum) {
    const Weights weight = weights();
    const u32 greatest = sums.key(m);
    Border border = {kNegativeInfinityKey / FORMAT::kLowestKeyBit, p.V};
    if (filters.k) {
      const auto count = [](float) { return u64(1); };
      const auto k = [&](u64) { return u64(filters.k); };
      border.key = filters.k <= p.length ? kth : sums.greatest_key(border.key, greatest, count, k).key;
    }
    if (filters.has_top_p()) {
      const auto aim_of_total = [&](u64 total) {
        return max(round_up(filters.top_p * double(filters.k ? total : sum)), u64(1));
      };
      const FoundKey found = sums.greatest_key(border.key, greatest, weight, aim_of_total);
      border.key = found.key;
      const u64 each = max(weight(sums.logit_of(found.key)), u64(1));
      const u64 needed = found.aim > found.above ? (found.aim - found.above + each - 1) / each : 1;
      if (needed * each < found.equal) {
        const auto is_tie = [&](u32 i) { return u64(sums.key(sums.logits(i)) == found.key); };
        sums.fill_pieces(is_tie);
        border.cut = in_first_warp([&] { return sums.find(needed - 1, is_tie); });
      }
    }
    if (filters.has_min_p()) {
      // Weights fall with the keys.
      u32 low = border.key, high = greatest;
#pragma unroll 1
      while (low < high) {
        const u32 middle = low + (high - low) / 2;
        const bool is_below = weight(sums.logit_of(middle)) < filters.least_weight;
        low = is_below ? middle + 1 : low;
        high = is_below ? high : middle;
      }
      if (low > border.key) border = {low, p.V};
    }
    return border;
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
      write_best(p, row, u32(__ldg(p.list_indices + i64(row) * p.length)), of_best);
      return;
    }
    const Filters filters = this->filters();
    const List list{shared.list, p.length, p.V};
    list.template load<FORMAT>(p, row, weights());
    const auto weight_at = [&](u32 i) { return weights()(sums.logits(i)); };
    u64 sum = 0;
    if (!filters.k && (filters.has_top_p() || filters.keep_all())) {
      if (filters.has_top_p() && temperature.scale == kLog2E) {
        // softmax_topk has it.
        sum = u64(__ldg(p.list_state + p.rows + row) * p.one);
      } else {
        sums.fill_pieces(weight_at);
        sum = sums.sum_of_pieces();
      }
    }
    if (filters.keep_all()) {
      draw_from_pieces(weight_at);
      sums.leave();
      return;
    }
    __syncthreads();
    const u32 kept = in_first_warp([&] { return list.kept(filters, sum); });
    if (kept) {
      if (is_first) list.draw(p, row, kept, [&](u32 sample, u32 token, u64 total) { write(sample, token, total); });
      sums.leave();
      return;
    }
    const u32 kth = filters.k && filters.k <= p.length ? shared.list.key[filters.k - 1] / FORMAT::kLowestKeyBit : 0;
    const Border border = search_border(filters, kth, sum);
    const auto kept_weight = [&](u32 i) {
      const float x = sums.logits(i);
      return border.keeps(sums.key(x), i) ? weights()(x) : 0;
    };
    sums.fill_pieces(kept_weight);
    draw_from_pieces(kept_weight);
    sums.leave();
  }
};

// Grid: (rows, blocks_per_row).
template <class FORMAT>
__global__ void __launch_bounds__(kThreads, 2) sample_rows_kernel(const __grid_constant__ SampleRows p) {
  __shared__ RowsShared shared;
  RowSampler<FORMAT>(p, shared).run();
}

}  // namespace fused_topk::sampling
