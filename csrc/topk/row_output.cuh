// SPDX-License-Identifier: Apache-2.0
// What a group writes once its chosen are sorted: a row's results, the list that a beam hands over, a sequence's results.
#pragma once

#include "group.cuh"
#include "result.cuh"

namespace fused_topk {

// A row's place in its sequence, and its score.
struct Beam {
  u32 sequence, rank;
  float score;

  Beam() = default;
  __device__ __forceinline__ Beam(const Problem& problem, u32 row)
      : sequence(row / problem.beams), rank(row - sequence * problem.beams) {
    const i64(&strides)[2] = problem.beam_scores_strides;
    score = __ldg(problem.beam_scores + sequence * strides[0] + rank * strides[1]);
  }
};

__device__ __forceinline__ float logit_of(u64 candidate) { return __uint_as_float(bits_of_key(key_of(candidate))); }

// The normalizer of the k chosen alone. The order of the sum depends on k alone. Every warp computes it for itself.
__device__ __forceinline__ RowResult among_chosen(const RowResult& row, const u64* chosen, u32 k) {
  const float m = row.is_finite() ? logit_of(chosen[0]) : row.m;
  float d = 0.0f;
  for (u32 i = lane_id(); i < k; i += kWarpSize) d += row.temperature.weight(logit_of(chosen[i]), m);
  return {m, warp_sum(d), row.temperature};
}

// Writes a row's sorted `chosen` [k]. All threads of the group call it.
template <class GROUP, class READER>
__device__ __forceinline__ void write_row(const Problem& problem, u32 row, u32 k, const u64* chosen,
                                          const READER& reader, const RowResult& result) {
  const RowResult relative_to = problem.normalize_topk ? among_chosen(result, chosen, k) : result;
  const auto raw_logit = [&](u32 index) { return reader.raw_logit(index); };
  for (u32 i = GROUP::thread(); i < k; i += GROUP::kThreads)
    write_chosen<typename READER::Format>(problem, row, k, i, index_of(chosen[i]), logit_of(chosen[i]), relative_to,
                                          raw_logit);
}

// Leaves a row's sorted `chosen` [k] in its sequence's lists. They are sorted by logit, so by score too. Among equal scores
// the smaller beam comes first, then the row's own order.
template <class GROUP>
__device__ __forceinline__ void leave_beam_list(const Problem& problem, u32 row, const Beam& beam, u32 k,
                                                const u64* chosen, const RowResult& result) {
  for (u32 i = GROUP::thread(); i < k; i += GROUP::kThreads) {
    const float value = beam.score + result.log_probability(logit_of(chosen[i]));
    problem.beam_lists[i64(row) * k + i] = make_candidate(order_key(value), beam.rank * k + i);
    problem.beam_indices[i64(row) * k + i] = i64(beam.rank) * problem.V + index_of(chosen[i]);
  }
}

// Fetches the `indices` of a sequence's lists, `count` entries in all, if they fit into `kept`. All 32 lanes of a warp call it.
template <u32 N>
__device__ __forceinline__ void keep_indices(const i64* indices, u32 count, i64 (&kept)[N]) {
  if (count > N) return;
#pragma unroll 1
  for (u32 first = lane_id(); first < count; first += 2 * kWarpSize) {
    const u32 second = first + kWarpSize;
    // Past the end the last entry is loaded again, so that the loads need no branch.
    const i64 own[2] = {load_from_other_block(indices + first),
                        load_from_other_block(indices + min(second, count - 1))};
    kept[first] = own[0];
    if (second < count) kept[second] = own[1];
  }
}

// Writes a sequence's sorted `chosen` [k_of_sequence]. index(i) returns the index of entry i of its lists.
template <class GROUP, class INDEX>
__device__ __forceinline__ void write_sequence(const Problem& problem, u32 sequence, const u64* chosen, INDEX index) {
  for (u32 i = GROUP::thread(); i < problem.k_of_sequence; i += GROUP::kThreads) {
    const i64 out = i64(sequence) * problem.k_of_sequence + i;
    static_cast<float*>(problem.values)[out] = logit_of(chosen[i]);
    problem.indices[out] = index(index_of(chosen[i]));
  }
}

}  // namespace fused_topk
