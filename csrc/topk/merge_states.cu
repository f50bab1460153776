// SPDX-License-Identifier: Apache-2.0
// Merges the states (m, d, T) of the parts of a row, which several launches, or several GPUs, have left.
//
//     m, d     of the whole: the parts' merged (normalizer.h), by a warp, in one order
//     T        of the whole: the place of an entry is the number of entries that rank before it. The lists of T are sorted, so
//              a binary search in each of the other lists finds that number
//
// So no entry waits for another, and k and the number of parts may have any value. Equal logits of different parts are
// ordered by their tokens in the whole vocabulary, which have 64 bits. The lists are read where a collective has left
// them, with any strides of parts and rows. Lists that fit into shared memory are read once, and the searches wait less
// there. WARPS = 1: a warp has a row, and a block four.
#include "result.cuh"

namespace fused_topk {

// The argument of a launch. fused_topk/layout/launch.py fills it by field names.
struct States {
  const void* logits;       // [parts, rows, width]
  const i64* indices;       // [parts, rows, width]; -1: no candidate; ranks behind every candidate
  const float* m;           // [parts, rows]
  const float* d;           // [parts, rows]
  const int* part_lengths;  // nullable; [parts]: the number of tokens of each; indices count from the part's first
  void* values;             // [rows, k] float, or the logits' format for kLogits and kState
  i64* result_indices;      // [rows, k]
  float* logsumexp;         // [rows]; for kState [2, rows]: m, d
  RowScale scale;
  // In elements. Entries of a list are adjacent.
  i64 logits_part_stride, logits_row_stride;
  i64 indices_part_stride, indices_row_stride;
  i64 m_part_stride, m_row_stride;
  i64 d_part_stride, d_row_stride;
  i64 part_lengths_stride;
  u32 rows, parts, width, k;  // k <= parts * width < 2^32
  u32 value_kind;
  u32 normalize_topk;  // 1: values are relative to the k chosen

  __device__ __forceinline__ Temperature temperature_of(u32 row) const {
    return Temperature::of(scale.given([&] { return row; }));
  }
};

namespace merging {

// An entry of a list, as the order sees it.
struct alignas(16) Entry {
  u32 key;    // kNoKey if it is no candidate
  i64 token;  // in the whole vocabulary
};

// The entries of one row.
template <class FORMAT>
class Lists {
 public:
  using Bits = typename FORMAT::Bits;

  // kept: nullable; [parts * width]
  __device__ __forceinline__ Lists(const States& states, u32 row, Entry* kept)
      : states_(states), row_(row), kept_(kept) {}

  // Reads what is kept. Each of the row's threads calls it. A barrier must follow.
  __device__ __forceinline__ void keep(u32 thread, u32 threads) {
    for (u32 i = thread; i < states_.parts * states_.width; i += threads) {
      const u32 part = i / states_.width;
      kept_[i] = load(part, i - part * states_.width, start(part));
    }
  }
  __device__ __forceinline__ Bits bits(u32 part, u32 place) const {
    const Bits* const logits = static_cast<const Bits*>(states_.logits) + row_ * states_.logits_row_stride;
    return __ldg(logits + part * states_.logits_part_stride + place);
  }
  // start: the token at which the part begins.
  __device__ __forceinline__ Entry entry(u32 part, u32 place, i64 start) const {
    return kept_ ? kept_[part * states_.width + place] : load(part, place, start);
  }
  // 0 where it is not needed.
  __device__ __forceinline__ i64 start_of_entries(u32 part) const { return kept_ ? 0 : start(part); }
  // How many entries of all parts rank before the entry at `place` of `part`. Stops counting at k.
  __device__ __forceinline__ u32 rank(u32 part, u32 place, const Entry& own) const {
    u32 count = place;
    i64 begin = 0;
#pragma unroll 1
    for (u32 p = 0; p < states_.parts && count < states_.k; ++p) {
      if (p != part) count += rank_in(p, begin, own, p < part);
      if (!kept_) begin += length(p);
    }
    return count;
  }

 private:
  __device__ __forceinline__ Entry load(u32 part, u32 place, i64 start) const {
    const i64* const indices = states_.indices + row_ * states_.indices_row_stride;
    const i64 index = __ldg(indices + part * states_.indices_part_stride + place);
    const Bits logit = bits(part, place);
    // rank_in() may add one to it without overflow.
    constexpr i64 kBehindAll = 0x7FFFFFFFFFFFFFFE;
    return index < 0 ? Entry{kNoKey, kBehindAll} : Entry{order_key(FORMAT::decode(logit)), start + index};
  }
  __device__ __forceinline__ i64 length(u32 part) const {
    return states_.part_lengths ? __ldg(states_.part_lengths + part * states_.part_lengths_stride) : 0;
  }
  __device__ __forceinline__ i64 start(u32 part) const {
    i64 sum = 0;
    for (u32 p = 0; states_.part_lengths && p < part; ++p) sum += length(p);
    return sum;
  }
  // wins_ties: whether the list's part comes before the part of `own`. This decides between entries of the same token.
  // So no two entries get the same place, whatever the input.
  __device__ __forceinline__ u32 rank_in(u32 part, i64 begin, const Entry& own, bool wins_ties) const {
    u32 low = 0;
    u32 high = min(states_.width, states_.k);
    while (low < high) {
      const u32 middle = (low + high) / 2;
      const Entry other = entry(part, middle, begin);
      const bool is_before = other.key > own.key || (other.key == own.key && other.token < own.token + wins_ties);
      low = is_before ? middle + 1 : low;
      high = is_before ? high : middle;
    }
    return low;
  }

  const States& states_;
  u32 row_;
  Entry* kept_;
};

// (m, d) of a row, the same in every lane. The order of the sum depends on the number of parts alone. All 32 lanes of a
// warp call it.
__device__ __forceinline__ Normalizer merge_normalizers(const States& states, u32 row, Scale scale) {
  Normalizer sum;
#pragma unroll 1
  for (u32 part = lane_id(); part < states.parts; part += kWarpSize) {
    const float m = __ldg(states.m + part * states.m_part_stride + row * states.m_row_stride);
    const float d = __ldg(states.d + part * states.d_part_stride + row * states.d_row_stride);
    // warp_merge() needs a positive NaN.
    const Normalizer state = {m == m ? m : not_a_number(), d};
    sum = merge(sum, state, scale);
  }
  return warp_merge(sum, scale);
}

// The normalizer of the k chosen alone, for normalize_topk: like among_chosen() of row_output.cuh. logits: [k], the
// chosen logits. All 32 lanes of a warp call it.
__device__ __forceinline__ RowResult among_logits(const RowResult& row, const float* logits, u32 k) {
  const float first = logits[0];
  const float m = row.is_finite() && fabsf(first) < FUSED_TOPK_INFINITY ? first : row.m;
  float d = 0.0f;
  for (u32 i = lane_id(); i < k; i += kWarpSize) d += row.temperature.weight(logits[i], m);
  return {m, warp_sum(d), row.temperature};
}

// All threads that have a row call it.
template <u32 WARPS>
__device__ __forceinline__ void sync_row() {
  if constexpr (WARPS == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// The entries of a row that fit into shared memory. layout/launch.py gives a warp no row with more.
template <u32 WARPS>
constexpr u32 kMostKept = WARPS == 1 ? kWarpSize : 1024;

// Grid: (rows), or (rows / 4) for WARPS = 1. The limit of 32 resident warps leaves a thread 64 registers. Without a
// limit the compiler takes 32 on compute capability 9.0, and spills one.
template <class FORMAT, u32 WARPS>
__global__ void __launch_bounds__(WARPS == 1 ? 128 : WARPS * kWarpSize, WARPS == 1 ? 8 : 4)
    merge_states_kernel(const __grid_constant__ States states) {
  constexpr u32 kThreads = WARPS * kWarpSize;
  const u32 thread = threadIdx.x % kThreads;
  const u32 row = WARPS == 1 ? blockIdx.x * 4 + threadIdx.x / kWarpSize : blockIdx.x;
  // Whole warps or blocks leave, so no barrier misses a thread.
  if (row >= states.rows) return;
  __shared__ Entry all_kept[WARPS == 1 ? 4 : 1][kMostKept<WARPS>];
  const bool are_kept = WARPS == 1 || states.parts * states.width <= kMostKept<WARPS>;
  Lists<FORMAT> lists(states, row, are_kept ? all_kept[WARPS == 1 ? threadIdx.x / kWarpSize : 0] : nullptr);
  if (are_kept) lists.keep(thread, kThreads);
  const u32 k = states.k;
  const Temperature temperature = states.temperature_of(row);
  const Normalizer sum = merge_normalizers(states, row, temperature.scale());
  const RowResult result(sum.m, sum.d, temperature);
  if (thread == 0) {
    states.logsumexp[row] = result.logsumexp();
    if (states.value_kind == kState) write_state(states.logsumexp, states.rows, row, result);
  }

  sync_row<WARPS>();
  const bool are_logits = has_logits(states.value_kind);
  const auto value_of = [&](float x, const RowResult& relative_to) {
    return states.value_kind == kProbabilities ? relative_to.probability(x) : relative_to.log_probability(x);
  };
  float* const values = static_cast<float*>(states.values) + i64(row) * k;
#pragma unroll 1
  for (u32 i = thread; i < states.parts * states.width; i += kThreads) {
    const u32 part = i / states.width;
    const u32 place = i - part * states.width;
    const Entry own = lists.entry(part, place, lists.start_of_entries(part));
    const u32 rank = lists.rank(part, place, own);
    if (rank >= k) continue;
    const i64 out = i64(row) * k + rank;
    const bool is_candidate = own.key != kNoKey;
    const typename FORMAT::Bits bits = is_candidate ? lists.bits(part, place) : FORMAT::kNegativeInfinity;
    states.result_indices[out] = is_candidate ? own.token : -1;
    if (are_logits) {
      static_cast<typename FORMAT::Bits*>(states.values)[out] = bits;
    } else {
      const float x = FORMAT::decode(bits);
      values[rank] = states.normalize_topk ? x : value_of(x, result);
    }
  }
  if (are_logits || !states.normalize_topk) return;
  // The chosen logits are now where the values will be written.
  sync_row<WARPS>();
  const RowResult relative_to = among_logits(result, values, k);
  sync_row<WARPS>();
  for (u32 i = thread; i < k; i += kThreads) values[i] = value_of(values[i], relative_to);
}

}  // namespace merging
}  // namespace fused_topk
