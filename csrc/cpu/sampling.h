// SPDX-License-Identifier: Apache-2.0
// A request for draws. binding.cpp fills it in, and sampling.cpp computes it.
#pragma once

#include "problem.h"

namespace fused_topk::cpu {

// A parameter of draws: one number for all rows, or one for each row.
template <class T>
struct RowNumber {
  T number;
  const T* of_rows;  // nullable; [rows]

  T operator()(u64 row) const { return of_rows ? of_rows[row] : number; }
};

// `sizes` has one dimension. The temperature is that of `temperatures`.
struct SampleProblem : LogitRows {
  RowNumber<double> temperatures;  // 0: the best token
  RowNumber<i64> top_k;            // 0: all
  RowNumber<double> top_p;
  RowNumber<double> min_p;
  RowNumber<i64> seed;
  RowNumber<i64> counter;
  u32 first_row;       // the number of row 0 among all rows that are drawn with one seed
  const float* noise;  // nullable; [rows, vocab_size]: takes the place of seeds and counters. Then num_samples is 1

  u32 num_samples;
  u32 logprobs;    // how many of the best are listed
  bool truncated;  // whether log_probs are relative to what is kept

  i64* tokens;         // [rows, num_samples]
  float* log_probs;    // [rows, num_samples]
  float* best_values;  // nullable; [rows, logprobs], log-probabilities
  i64* best_indices;   // nullable; [rows, logprobs]
  float* logsumexp;    // nullable; [rows]

  i64* kept_counts;       // nullable; [rows], tokens that may be drawn
  float* kept_logsumexp;  // nullable; [rows], of their logits / T
};

// Throws std::bad_alloc.
void solve(const SampleProblem& problem);

}  // namespace fused_topk::cpu
