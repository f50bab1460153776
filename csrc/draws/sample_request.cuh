// SPDX-License-Identifier: Apache-2.0
// The argument of the two kernels that draw tokens, and what both need of a row: its logits, its temperature, the weights of
// its tokens and its random numbers.
//
// The weight of a token is e^((x - m) / T) as an integer, in units of 1 / `one`. So sums of weights are exact in any
// order, and a row's draws do not depend on the launch. With 2^44 units (fewer beyond 2^18 tokens) and exp2_approx a
// draw is exact to 2^-20 of the total.
#pragma once

#include "../rows/numbers.cuh"
#include "../rows/row_logits.cuh"
#include "philox.h"

namespace fused_topk {

// The argument, passed by value. fused_topk/layout/launch.py fills it by field names. seed, counter, top_k, top_p and
// min_p each come with a pointer, row_seed and so on. It is null, or has one number for each row, which is used in
// place of the other. The fields of both kernels come first and last.
struct SampleRows {
  const void* logits;  // [rows, V]
  i64 row_stride;      // in elements
  u32 V;
  u32 blocks_per_row;
  u32 num_samples;
  u32 part_length_log2;  // sample_vocabulary_kernel: tokens of a part
  // sample_rows_kernel: [rows] of a Scratch and a BlockScratch for each block; else [rows, parts] of PartState. Null: one
  // block a row
  u64* scratch;
  u32* tickets;      // sample_rows_kernel: [rows, 3]; else [rows]. Zero before and after each launch
  i64* tokens;       // [rows, num_samples]
  float* log_probs;  // [rows, num_samples]
  DrawNumbers numbers;
  i64 seed;
  const i64* row_seed;
  i64 counter;
  const i64* row_counter;
  float one;            // the weight 1: a power of two
  u32 truncated;        // 1: log_probs are relative to the tokens that are kept
  u32 mask_kind;        // MaskKind
  u32 length;           // of the list
  u32 first_row;        // the number of row 0 among the rows that share a seed
  const void* mask;     // nullable; see RowMask
  i64 mask_row_stride;  // in bytes or words
  i64 mask_element_stride;
  // sample_rows_kernel alone:
  const void* list_logits;  // [rows, length]: the list's logits, best first
  const i64* list_indices;  // [rows, length]
  const float* list_state;  // [2, rows]: m, and d at temperature 1
  i64 top_k;
  const i64* row_top_k;
  double top_p;
  const double* row_top_p;
  double min_p;
  const double* row_min_p;
  float* best_values;     // nullable; [rows, logprobs]: log-probabilities of the list's first tokens
  i64* best_indices;      // nullable; [rows, logprobs]
  float* best_logsumexp;  // nullable; [rows]
  u32 logprobs;
  u32 rows;
  // Both kernels:
  i64* kept_counts;       // nullable; [rows]: tokens that may be drawn
  float* kept_logsumexp;  // nullable; [rows]: logsumexp of their logits / temperature
  const float* noise;     // nullable; [rows, V]: takes the place of random numbers, with num_samples = 1
};

}  // namespace fused_topk

namespace fused_topk::sampling {

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < FUSED_TOPK_INFINITY; }

// The logits of a row.
template <class FORMAT>
__device__ __forceinline__ RowLogits<FORMAT> logits_of(const SampleRows& p, u32 row) {
  const i64 mask = i64(row) * p.mask_row_stride * (p.mask_kind == kMaskBits ? 4 : 1);
  return {static_cast<const typename FORMAT::Bits*>(p.logits) + i64(row) * p.row_stride,
          {p.mask ? static_cast<const char*>(p.mask) + mask : nullptr, p.mask_element_stride, p.mask_kind},
          p.numbers.length_of(row, p.V)};
}

// A row's temperature. It is 1 for a greedy row, where the best token is taken.
struct RowTemperature : Temperature {
  bool is_greedy;
  bool is_zero;

  __device__ __forceinline__ RowTemperature(const SampleRows& p, u32 row) {
    const double t = p.numbers.given_temperature(row);
    is_greedy = !(t > 0.0);
    is_zero = t == 0.0;
    inverse = is_greedy ? 1.0f : max(min(float(1.0 / t), kLargestInverse), kLeastInverse);
  }
};

// The weights of tokens relative to a logit m.
struct Weights {
  float m;
  Scale scale;
  float one;

  __device__ __forceinline__ u64 operator()(float x) const { return u64(scale.weight(x, m) * one); }
};

// The drawn position in [0, total): the uniform number times the total.
__device__ __forceinline__ u64 aim_of(const SampleRows& p, u32 row, u32 sample, u64 total) {
  const i64 seed = p.row_seed ? __ldg(p.row_seed + row) : p.seed;
  const i64 counter = p.row_counter ? __ldg(p.row_counter + row) : p.counter;
  // Rows that share a seed are told apart by their numbers. A row with its own seed needs no number.
  const double u = uniform_number(u64(seed), u64(counter), sample, p.row_seed ? 0 : p.first_row + row);
  return min(u64(u * double(total)), total - 1);
}

// log of a sum of weights.
__device__ __forceinline__ float log_of_sum(const SampleRows& p, u64 sum) { return logf(float(sum) / p.one); }

// Writes how many tokens a row was drawn from, and the logsumexp of their logits / T. sum: the sum of their weights.
// greatest: the greatest logit / T. One thread calls it.
__device__ __forceinline__ void write_kept(const SampleRows& p, u32 row, u64 count, u64 sum, float greatest) {
  if (!p.kept_counts) return;
  p.kept_counts[row] = i64(count);
  p.kept_logsumexp[row] = greatest + log_of_sum(p, sum);
}

// Writes the best token as every sample, for a greedy row or a row without a distribution. m: the greatest logit if the
// temperature is 0, else NaN. All threads of a block call it.
__device__ __forceinline__ void write_best(const SampleRows& p, u32 row, u32 best, float log_prob, float m) {
  if (p.kept_counts && threadIdx.x == 0) {
    p.kept_counts[row] = is_finite(m);
    p.kept_logsumexp[row] = m;
  }
#pragma unroll 1
  for (u32 sample = threadIdx.x; sample < p.num_samples; sample += blockDim.x) {
    p.tokens[i64(row) * p.num_samples + sample] = best;
    p.log_probs[i64(row) * p.num_samples + sample] = log_prob;
  }
}

}  // namespace fused_topk::sampling
