// SPDX-License-Identifier: Apache-2.0
// Draws tokens from rows whose best are listed: a block a row, one launch, and nothing that the host must wait for.
//
// The list comes from softmax_topk.cu: the row's best tokens, and its normalizer. Top-k, top-p and min-p keep the best
// of a row, so a border says what is kept. Mostly the list has it, and a token is drawn from the list. If no filter is
// set the block sums the row share by share, and reads again the share that has the token. If more is kept than is
// listed, the block searches the border by bisection over the keys: up to 16 reads of the row a filter, mostly from the
// cache.
//
// Weights e^((x - m) / T) are integers, in units of 1 / `one`. So all sums are exact, in whatever order, and a row's
// draws do not depend on the launch. With 2^44 units (fewer beyond 2^18 tokens) and exp2_approx a draw is exact to 2^-20
// of the total.
#pragma once

#include "philox.h"
#include "row.cuh"

namespace fused_topk {

// The argument, passed by value. fused_topk/layout/sample_launch.py fills it by field names. Of each parameter, the
// pointer is null or has one number a row.
struct SampleRows {
  const void* logits;        // [rows, V]
  i64 row_stride;            // in elements
  const float* list_values;  // [rows, length] log-probabilities at temperature 1 of the best, best first
  const i64* list_indices;   // [rows, length]
  const void* mask;          // nullable; see RowMask
  i64 mask_row_stride;       // in bytes or words
  i64 mask_element_stride;
  double temperature;
  const double* row_temperature;
  i64 top_k;
  const i64* row_top_k;
  double top_p;
  const double* row_top_p;
  double min_p;
  const double* row_min_p;
  i64 seed;
  const i64* row_seed;
  i64 counter;
  const i64* row_counter;
  i64* tokens;       // [rows, num_samples]
  float* log_probs;  // [rows, num_samples]
  u32 V;
  u32 length;
  u32 mask_kind;  // MaskKind
  u32 num_samples;
  u32 truncated;  // 1: log_probs are relative to what is kept
  float one;      // the weight 1: a power of two
};
static_assert(sizeof(SampleRows) == 192, "fused_topk/layout/sample_launch.py packs 192 bytes");

}  // namespace fused_topk

namespace fused_topk::sampling {

constexpr u32 kThreads = 512;
constexpr u32 kWarps = kThreads / kWarpSize;
constexpr u32 kResidentBlocks = 2;  // on a multiprocessor
constexpr u32 kShares = 256;        // of a row; a warp reads one at a time
constexpr u32 kLongestList = 1024;
constexpr u32 kThresholds = 3;            // that a step of the bisection tries
constexpr float kLargestInverse = 2e38f;  // as in problem.cuh

// What is kept: the tokens with a greater key, and of those with this key the ones up to index `cut`.
struct Border {
  u32 key;
  u32 cut;

  __device__ __forceinline__ bool keeps(u32 of, u32 index) const { return of > key || (of == key && index <= cut); }
};

struct Shared {
  u64 shares[kShares];
  u64 sums[kThresholds][kWarps];
  u64 weight[kLongestList];
  u64 before[kLongestList];
  u32 index[kLongestList];
  u32 key[kLongestList];
  u32 answer;
};

__device__ __forceinline__ u64 warp_sum(u64 value) {
#pragma unroll
  for (u32 step = kWarpSize / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

// The sum over this lane and the lanes before it. All 32 lanes call it.
__device__ __forceinline__ u64 warp_inclusive_sum(u64 value) {
#pragma unroll
  for (u32 step = 1; step < kWarpSize; step *= 2) {
    const u64 before = __shfl_up_sync(kAllLanes, value, step);
    if (lane_id() >= step) value += before;
  }
  return value;
}

__device__ __forceinline__ u64 round_up(double x) {
  const u64 below = u64(x);
  return below + (double(below) < x ? 1 : 0);
}

__device__ __forceinline__ float logit_of(u32 key) { return __uint_as_float(bits_of_key(key)); }

// A block's view of its row. Unless said otherwise all threads call a function, and get the result.
template <class FORMAT>
struct RowSampler {
  using Bits = typename FORMAT::Bits;

  const SampleRows& p;
  Shared& shared;
  const u32 row;
  const Bits* const logits;  // [V]
  const RowMask mask;
  float m;
  float inverse;
  float scale;

  __device__ __forceinline__ RowSampler(const SampleRows& p, Shared& shared)
      : p(p),
        shared(shared),
        row(blockIdx.x),
        logits(static_cast<const Bits*>(p.logits) + i64(blockIdx.x) * p.row_stride),
        mask{
            static_cast<const char*>(p.mask) + i64(blockIdx.x) * p.mask_row_stride * (p.mask_kind == kMaskBits ? 4 : 1),
            p.mask_element_stride, p.mask_kind} {}

  // Any thread.
  __device__ __forceinline__ float logit(u32 index) const {
    if (p.mask) {
      const u32 bit = index % 4;
      if (!(mask.template allowed<4>(index - bit, p.V) >> bit & 1u)) return -FUSED_TOPK_INFINITY;
    }
    return FORMAT::decode(__ldg(logits + index));
  }
  __device__ __forceinline__ u64 weight(float x) const { return u64(exp2_approx((x - m) * scale) * p.one); }

  __device__ __forceinline__ u32 share_length() const {
    return (p.V + kShares * kWarpSize - 1) / (kShares * kWarpSize) * kWarpSize;
  }

  // Sums measure(index) over each share.
  template <class MEASURE>
  __device__ __forceinline__ void fill_shares(const MEASURE& measure) {
    // Until all have read what is overwritten.
    __syncthreads();
    const u32 length = share_length();
#pragma unroll 1
    for (u32 share = threadIdx.x / kWarpSize; share < kShares; share += kWarps) {
      const u64 begin = u64(share) * length;
      const u64 end = min(u64(p.V), begin + length);
      u64 sum = 0;
#pragma unroll 4
      for (u64 i = begin + lane_id(); i < end; i += kWarpSize) sum += measure(u32(i));
      sum = warp_sum(sum);
      if (lane_id() == 0) shared.shares[share] = sum;
    }
    __syncthreads();
  }
  __device__ __forceinline__ u64 sum_of_shares() const {
    u64 sum = 0;
    for (u32 share = lane_id(); share < kShares; share += kWarpSize) sum += shared.shares[share];
    return warp_sum(sum);
  }

  // The first index at which the running sum of `measure`, of which the shares have the sums, exceeds `aim`, which is
  // below the total. All 32 lanes of a warp call it.
  template <class MEASURE>
  __device__ __forceinline__ u32 find(u64 aim, const MEASURE& measure) const {
    u64 before = 0;
    u32 share = 0;
#pragma unroll 1
    for (u32 first = 0; first < kShares; first += kWarpSize) {
      const u64 sums = before + warp_inclusive_sum(shared.shares[first + lane_id()]);
      const u32 beyond = __ballot_sync(kAllLanes, sums > aim);
      if (beyond) {
        const u32 lane = __ffs(beyond) - 1;
        share = first + lane;
        const u64 up_to = __shfl_sync(kAllLanes, sums, lane);
        before = up_to - shared.shares[share];
        break;
      }
      before = __shfl_sync(kAllLanes, sums, kWarpSize - 1);
    }
    const u64 begin = u64(share) * share_length();
    const u64 end = min(u64(p.V), begin + share_length());
#pragma unroll 1
    for (u64 first = begin; first < end; first += kWarpSize) {
      const u64 i = first + lane_id();
      const u64 sums = before + warp_inclusive_sum(i < end ? measure(u32(i)) : 0);
      const u32 beyond = __ballot_sync(kAllLanes, sums > aim);
      if (beyond) return u32(first) + __ffs(beyond) - 1;
      before = __shfl_sync(kAllLanes, sums, kWarpSize - 1);
    }
    return u32(end) - 1;
  }

  // For each threshold, the sum of measure(logit) over the tokens with keys that are not below it.
  template <class MEASURE>
  __device__ __forceinline__ void sum_from(const u32 (&thresholds)[kThresholds], u64 (&sums)[kThresholds],
                                           const MEASURE& measure) {
    u64 mine[kThresholds] = {};
    // Two tokens at a time would take more registers than two blocks on a multiprocessor leave.
#pragma unroll 1
    for (u64 i = threadIdx.x; i < p.V; i += kThreads) {
      const float x = logit(u32(i));
      const u32 key = order_key(x);
      if (key < thresholds[0]) continue;
      const u64 value = measure(x);
#pragma unroll
      for (u32 t = 0; t < kThresholds; ++t) mine[t] += key >= thresholds[t] ? value : 0;
    }
    __syncthreads();
#pragma unroll
    for (u32 t = 0; t < kThresholds; ++t) {
      const u64 of_warp = warp_sum(mine[t]);
      if (lane_id() == 0) shared.sums[t][threadIdx.x / kWarpSize] = of_warp;
    }
    __syncthreads();
#pragma unroll
    for (u32 t = 0; t < kThresholds; ++t)
      sums[t] = warp_sum(lane_id() < kWarps ? shared.sums[t][lane_id() % kWarps] : 0);
  }
  template <class MEASURE>
  __device__ __forceinline__ u64 sum_from(u32 threshold, const MEASURE& measure) {
    const u32 thresholds[kThresholds] = {threshold, threshold, threshold};
    u64 sums[kThresholds];
    sum_from(thresholds, sums, measure);
    return sums[0];
  }

  // The greatest key from `low` to `high` from which on the sum of `measure` is at least `aim`, as it is from `low` on.
  template <class MEASURE>
  __device__ __forceinline__ u32 greatest_key(u32 low, u32 high, u64 aim, const MEASURE& measure) {
#pragma unroll 1
    while (low < high) {
      u32 thresholds[kThresholds];
      u64 sums[kThresholds];
      const u32 span = high - low;
#pragma unroll
      for (u32 t = 0; t < kThresholds; ++t) thresholds[t] = low + max(1u, u32(u64(span) * (t + 1) / (kThresholds + 1)));
      sum_from(thresholds, sums, measure);
      u32 least = low, greatest = thresholds[0] - 1;
#pragma unroll
      for (u32 t = 0; t < kThresholds; ++t) {
        if (sums[t] >= aim) {
          least = thresholds[t];
          greatest = t + 1 < kThresholds ? thresholds[t + 1 < kThresholds ? t + 1 : t] - 1 : high;
        }
      }
      low = least;
      high = max(greatest, least);
    }
    return low;
  }

  // A number below the total.
  __device__ __forceinline__ u64 aim_of(u32 sample, u64 total) const {
    const i64 seed = p.row_seed ? __ldg(p.row_seed + row) : p.seed;
    const i64 counter = p.row_counter ? __ldg(p.row_counter + row) : p.counter;
    // Rows with a seed of their own are told apart by it.
    const double u = uniform_number(u64(seed), u64(counter), sample, p.row_seed ? 0 : row);
    return min(u64(u * double(total)), total - 1);
  }

  // One thread.
  __device__ __forceinline__ void write(u32 sample, u32 token, u64 total) const {
    const float x = logit(token);
    const i64 place = i64(row) * p.num_samples + sample;
    p.tokens[place] = token;
    p.log_probs[place] = p.truncated ? (x - m) * inverse - logf(float(total) / p.one) : own_log_prob(x);
  }
  // Of the best token the list has -log d.
  __device__ __forceinline__ float own_log_prob(float x) const {
    return (x - m) + __ldg(p.list_values + i64(row) * p.length);
  }

  template <class MEASURE>
  __device__ __forceinline__ void draw_from_shares(const MEASURE& measure) const {
    const u64 total = sum_of_shares();
#pragma unroll 1
    for (u32 sample = threadIdx.x / kWarpSize; sample < p.num_samples; sample += kWarps) {
      const u32 token = find(aim_of(sample, total), measure);
      if (lane_id() == 0) write(sample, token, total);
    }
  }

  __device__ __forceinline__ void draw_from_list(u32 kept) {
    u64 total = 0;
#pragma unroll 1
    for (u32 i = lane_id(); i < kept; i += kWarpSize) total += shared.weight[i];
    total = warp_sum(total);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < kept; i += kThreads) {
      const u32 index = shared.index[i];
      u64 before = 0;
#pragma unroll 4
      for (u32 j = 0; j < kept; ++j) before += shared.index[j] < index ? shared.weight[j] : 0;
      shared.before[i] = before;
    }
    __syncthreads();
#pragma unroll 1
    for (u32 sample = threadIdx.x / kWarpSize; sample < p.num_samples; sample += kWarps) {
      const u64 aim = aim_of(sample, total);
#pragma unroll 1
      for (u32 i = lane_id(); i < kept; i += kWarpSize) {
        const u64 before = shared.before[i];
        if (before <= aim && aim - before < shared.weight[i]) write(sample, shared.index[i], total);
      }
    }
  }

  // How many of the list are kept; 0 if what is kept is longer than the list. sum: of all weights, for top-p without k.
  // All 32 lanes of the first warp call it.
  __device__ __forceinline__ u32 kept_of_list(u32 k, double top_p, u64 least_weight, u64 sum) const {
    u32 kept = p.length;
    bool has_border = kept == p.V;
    if (k) {
      if (k > p.length) return 0;
      const u32 kth = shared.key[k - 1];
      kept = count(kept, [&](u32 i) { return shared.key[i] >= kth; });
      has_border |= kept < p.length;
      // Without the sum of all that tie with the k-th, top-p has nothing to be relative to.
      if (!has_border && top_p < 1.0) return 0;
    }
    if (top_p < 1.0) {
      u64 of_list = 0;
#pragma unroll 1
      for (u32 i = lane_id(); i < kept; i += kWarpSize) of_list += shared.weight[i];
      of_list = warp_sum(of_list);
      const u64 aim = round_up(top_p * double(k ? of_list : sum));
      u32 within = 0;
      u64 before = 0;
#pragma unroll 1
      for (u32 first = 0; first < kept; first += kWarpSize) {
        const u32 i = first + lane_id();
        const u64 mine = i < kept ? shared.weight[i] : 0;
        const u64 sums = before + warp_inclusive_sum(mine);
        within += __popc(__ballot_sync(kAllLanes, i < kept && sums - mine < aim));
        before = __shfl_sync(kAllLanes, sums, kWarpSize - 1);
      }
      within = max(within, 1u);
      has_border |= within < kept || of_list >= aim;
      kept = within;
    }
    if (least_weight > 0) {
      const u32 likely = max(count(kept, [&](u32 i) { return shared.weight[i] >= least_weight; }), 1u);
      has_border |= likely < kept;
      kept = likely;
    }
    return has_border ? kept : 0;
  }
  template <class CLAIM>
  __device__ __forceinline__ u32 count(u32 end, const CLAIM& claim) const {
    u32 result = 0;
#pragma unroll 1
    for (u32 first = 0; first < end; first += kWarpSize)
      result += __popc(__ballot_sync(kAllLanes, first + lane_id() < end && claim(first + lane_id())));
    return result;
  }

  // The border of a row of which more is kept than is listed.
  __device__ __forceinline__ Border search_border(u32 k, double top_p, u64 least_weight) {
    const auto weight_of = [&](float x) { return weight(x); };
    const u32 greatest = order_key(m);
    Border border = {kNegativeInfinityKey, p.V};
    if (k) {
      border.key = k <= p.length ? shared.key[k - 1]
                                 : greatest_key(kNegativeInfinityKey, greatest, k, [](float) { return u64(1); });
    }
    if (top_p < 1.0) {
      const u64 aim = max(round_up(top_p * double(sum_from(border.key, weight_of))), u64(1));
      const u32 key = greatest_key(border.key, greatest, aim, weight_of);
      const u64 above = sum_from(key + 1, weight_of);
      const u64 each = max(weight(logit_of(key)), u64(1));
      const u64 needed = aim > above ? (aim - above + each - 1) / each : 1;
      const auto is_tie = [&](u32 i) { return u64(order_key(logit(i)) == key); };
      border.key = key;
      fill_shares(is_tie);
      if (needed < sum_of_shares()) {
        if (threadIdx.x < kWarpSize) {
          const u32 cut = find(needed - 1, is_tie);
          if (lane_id() == 0) shared.answer = cut;
        }
        __syncthreads();
        border.cut = shared.answer;
      }
    }
    if (least_weight > 0) {
      u32 low = border.key, high = greatest;
#pragma unroll 1
      while (low < high) {
        const u32 middle = low + (high - low) / 2;
        const bool is_below = weight(logit_of(middle)) < least_weight;
        low = is_below ? middle + 1 : low;
        high = is_below ? high : middle;
      }
      if (low > border.key) border = {low, p.V};
    }
    return border;
  }

  __device__ __forceinline__ void run() {
    const u32 best = u32(__ldg(p.list_indices + i64(row) * p.length));
    m = logit(best);
    const double t = p.row_temperature ? __ldg(p.row_temperature + row) : p.temperature;
    const bool has_distribution = fabsf(m) < FUSED_TOPK_INFINITY;
    if (!has_distribution || !(t > 0.0)) {
      const float nan = __uint_as_float(0x7FC00000u);
      const float log_prob = !p.truncated ? own_log_prob(m) : has_distribution && t == 0.0 ? 0.0f : nan;
#pragma unroll 1
      for (u32 sample = threadIdx.x; sample < p.num_samples; sample += kThreads) {
        p.tokens[i64(row) * p.num_samples + sample] = best;
        p.log_probs[i64(row) * p.num_samples + sample] = log_prob;
      }
      return;
    }
    inverse = min(float(1.0 / t), kLargestInverse);
    scale = inverse * kLog2E;
    const i64 top_k = p.row_top_k ? __ldg(p.row_top_k + row) : p.top_k;
    const double top_p = p.row_top_p ? __ldg(p.row_top_p + row) : p.top_p;
    const double min_p = p.row_min_p ? __ldg(p.row_min_p + row) : p.min_p;
    const u32 k = top_k > 0 && top_k < i64(p.V) ? u32(top_k) : 0;
    const u64 least_weight = min_p > 0.0 ? round_up((min_p < 1.0 ? min_p : 1.0) * double(p.one)) : 0;
    const auto weight_at = [&](u32 i) { return weight(logit(i)); };

    u64 sum = 0;
    if (!k && (top_p < 1.0 || !least_weight)) {
      fill_shares(weight_at);
      sum = sum_of_shares();
    }
    if (!k && !(top_p < 1.0) && !least_weight) {
      draw_from_shares(weight_at);
      return;
    }
#pragma unroll 1
    for (u32 i = threadIdx.x; i < p.length; i += kThreads) {
      const u32 index = u32(__ldg(p.list_indices + i64(row) * p.length + i));
      const float x = logit(index);
      shared.index[i] = index;
      shared.key[i] = order_key(x);
      shared.weight[i] = weight(x);
    }
    __syncthreads();
    if (threadIdx.x < kWarpSize) {
      const u32 kept = kept_of_list(k, top_p, least_weight, sum);
      if (lane_id() == 0) shared.answer = kept;
    }
    __syncthreads();
    const u32 kept = shared.answer;
    if (kept) {
      draw_from_list(kept);
      return;
    }
    const Border border = search_border(k, top_p, least_weight);
    const auto kept_weight = [&](u32 i) {
      const float x = logit(i);
      return border.keeps(order_key(x), i) ? weight(x) : 0;
    };
    fill_shares(kept_weight);
    draw_from_shares(kept_weight);
  }
};

// A block of kThreads a row. Without a number of blocks NVRTC 12.9 would rather spill than use 64 registers.
template <class FORMAT>
__global__ void __launch_bounds__(kThreads, kResidentBlocks) sample_rows_kernel(const __grid_constant__ SampleRows p) {
  __shared__ Shared shared;
  RowSampler<FORMAT>(p, shared).run();
}

}  // namespace fused_topk::sampling
