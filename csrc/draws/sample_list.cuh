// SPDX-License-Identifier: Apache-2.0
// Draws from a list of a row's best tokens. Top-k, top-p and min-p keep the best tokens of a row. So mostly the list has every
// token that they keep.
#pragma once

#include "race.cuh"

namespace fused_topk::sampling {

// The threads and warps of a block of sample_rows_kernel.
constexpr u32 kThreads = 512;
constexpr u32 kWarps = kThreads / kWarpSize;

constexpr u32 kLongestList = 1024;

// The filters of a row.
struct Filters {
  u32 k;             // 0: top-k keeps all
  double top_p;      // 1 keeps all
  u64 least_weight;  // the least weight that min-p keeps; 0 keeps all

  __device__ __forceinline__ bool has_top_p() const { return top_p < 1.0; }
  __device__ __forceinline__ bool has_min_p() const { return least_weight > 0; }
  __device__ __forceinline__ bool keep_all() const { return !k && !has_top_p() && !has_min_p(); }
};

__device__ __forceinline__ u64 round_up(double x) {
  const u64 below = u64(x);
  return below + (double(below) < x ? 1 : 0);
}

struct ListShared {
  u64 weight[kLongestList];
  u64 before[kLongestList];
  u32 index[kLongestList];
  u32 key[kLongestList];
};

// A block's list, in shared memory.
struct List {
  ListShared& shared;
  u32 length;
  u32 V;

  // All threads call it; a barrier must follow.
  template <class FORMAT>
  __device__ __forceinline__ void load(const SampleRows& p, u32 row, const Weights& weight) const {
    const auto* const logits = static_cast<const typename FORMAT::Bits*>(p.list_logits) + i64(row) * length;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < length; i += kThreads) {
      const float x = FORMAT::decode(__ldg(logits + i));
      shared.index[i] = u32(__ldg(p.list_indices + i64(row) * length + i));
      shared.key[i] = order_key(x);
      shared.weight[i] = weight(x);
    }
  }

  // The number of tokens of the list that the filters keep; 0 if they may also keep tokens beyond the list. sum: the
  // sum of all weights of the row, which top-p without top-k needs. All 32 lanes of a warp call it.
  __device__ __forceinline__ u32 kept(const Filters& filters, u64 sum) const {
    u32 kept = length;
    // has_border: no token beyond the list is kept. If the list's last token is -inf, so are all tokens beyond the
    // list, and they weigh nothing.
    bool has_border = kept == V || shared.key[length - 1] == kNegativeInfinityKey;
    if (filters.k) {
      if (filters.k > length) return 0;
      const u32 kth = shared.key[filters.k - 1];
      kept = count(kept, [&](u32 i) { return shared.key[i] >= kth; });
      has_border |= kept < length;
      // Tokens beyond the list may tie with the k-th token. Then the sum of all tokens that top-k keeps is not known,
      // and top-p keeps a share of that sum.
      if (!has_border && filters.has_top_p()) return 0;
    }
    if (filters.has_top_p()) {
      const u64 of_list = sum_of(kept);
      const u64 aim = round_up(filters.top_p * double(filters.k ? of_list : sum));
      u32 within = of_list < aim ? kept : 0;
      u64 before = 0;
#pragma unroll 1
      for (u32 first = within; first < kept; first += kWarpSize) {
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
    if (filters.has_min_p()) {
      const u32 likely = max(count(kept, [&](u32 i) { return shared.weight[i] >= filters.least_weight; }), 1u);
      has_border |= likely < kept;
      kept = likely;
    }
    return has_border ? kept : 0;
  }

  // How many of the first `kept` tokens are not -inf. All 32 lanes of a warp call it.
  __device__ __forceinline__ u32 finite(u32 kept) const {
    return count(kept, [&](u32 i) { return shared.key[i] != kNegativeInfinityKey; });
  }

  // Draws the samples from the first `kept` tokens. Calls write(sample, token, total) in one thread for each sample.
  // race: at the row's greatest logit. With noise the tokens race. All threads of the block call it.
  template <bool NOISE, class WRITE>
  __device__ __forceinline__ void draw(const SampleRows& p, u32 row, u32 kept, const Race& race,
                                       const WRITE& write) const {
    const u64 total = sum_of(kept);
    const u32 finite = this->finite(kept);
    if (threadIdx.x == 0) write_kept(p, row, finite, total, race.temperature.scaled(race.base));
    // The running sum goes in the order of the tokens' indices, as it does where the row is read (draw_from_pieces).
    // `before` is the sum of the weights of the tokens with smaller indices. With noise it is the racer instead; tokens of logit
    // -inf do not race.
#pragma unroll 1
    for (u32 i = threadIdx.x; i < kept; i += kThreads) {
      const u32 index = shared.index[i];
      if (races<NOISE>(p)) {
        const u32 key = shared.key[i];
        const float x = __uint_as_float(bits_of_key(key));
        shared.before[i] = key == kNegativeInfinityKey ? 0 : race.racer(x, index);
        continue;
      }
      u64 before = 0;
#pragma unroll 4
      for (u32 j = 0; j < kept; ++j) before += shared.index[j] < index ? shared.weight[j] : 0;
      shared.before[i] = before;
    }
    __syncthreads();
#pragma unroll 1
    for (u32 sample = threadIdx.x / kWarpSize; sample < p.num_samples; sample += kWarps) {
      if (races<NOISE>(p)) {
        u64 racer = 0;
#pragma unroll 1
        for (u32 i = lane_id(); i < kept; i += kWarpSize) racer = max(racer, shared.before[i]);
        racer = warp_max(racer);
        if (lane_id() == 0) write(sample, index_of(racer), total);
        continue;
      }
      const u64 aim = aim_of(p, row, sample, total);
#pragma unroll 1
      for (u32 i = lane_id(); i < kept; i += kWarpSize) {
        const u64 before = shared.before[i];
        if (before <= aim && aim - before < shared.weight[i]) write(sample, shared.index[i], total);
      }
    }
  }

 private:
  // All 32 lanes of a warp call these.
  __device__ __forceinline__ u64 sum_of(u32 count) const {
    u64 sum = 0;
#pragma unroll 1
    for (u32 i = lane_id(); i < count; i += kWarpSize) sum += shared.weight[i];
    return warp_sum(sum);
  }
  template <class CLAIM>
  __device__ __forceinline__ u32 count(u32 end, const CLAIM& claim) const {
    u32 result = 0;
#pragma unroll 1
    for (u32 first = 0; first < end; first += kWarpSize)
      result += __popc(__ballot_sync(kAllLanes, first + lane_id() < end && claim(first + lane_id())));
    return result;
  }
};

}  // namespace fused_topk::sampling
