// SPDX-License-Identifier: Apache-2.0
// A row from which tokens are drawn: its parameters, the memory of a thread that draws, and the weights of the tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>
#include <vector>

#include "full_row_kernels.h"
#include "row_state.h"
#include "selection.h"

namespace fused_topk::cpu {

// No candidate ranks behind it.
constexpr u64 kKeepAll = 0;

inline float logit_of(u64 candidate) { return logit_of_key(key_of(candidate)); }

// Ranks behind every token with that key.
inline u64 last_of_key(u32 key) { return u64(key) << 32; }

// Makes the list at least `count` elements long.
template <class T>
T* room_for(std::vector<T>& list, size_t count) {
  if (list.size() < count) list.resize(count);
  return list.data();
}

// A row and its parameters.
struct SampleRow {
  u64 number;
  RowReader reader;
  Temperature temperature;
  bool is_greedy;
  u32 k;  // 0: top-k keeps all
  double top_p;
  double min_p;

  bool has_top_p() const { return top_p < 1.0; }
  bool has_min_p() const { return min_p > 0.0; }
  bool has_filter() const { return k || has_top_p() || has_min_p(); }
  // Whether the sum of all weights at this temperature is needed.
  bool needs_sum() const { return !is_greedy && !k && (has_top_p() || !has_min_p()); }
};

struct KeptToken {
  u32 index;
  bool is_finite;  // not -inf
  double weight;
};

// The memory with which a thread draws from a row.
struct SampleWorkspace {
  alignas(64) float buffer[kBlock];
  alignas(64) float terms[kBlock];
  std::vector<BlockNormalizer> own;       // of the blocks, at temperature 1
  std::vector<BlockNormalizer> tempered;  // at the row's temperature
  std::vector<double> sums;               // [blocks]: running sums of the kept weights
  std::unique_ptr<Selection> selection;
  u32 listed = 0;
  std::vector<KeptToken> kept;
  std::vector<double> bins;
  std::vector<u64> of_bin;
  // These never get shorter.
  std::vector<u64> candidates;
  std::vector<float> values;  // [listed tokens], like weights and indices
  std::vector<float> weights;
  std::vector<u32> indices;
  std::vector<int> bin_of;
  std::vector<u32> begins;  // [blocks + 1]: where the tokens of each block begin

  Selection& selection_of(const VectorKernels& kernels, u32 k, u32 vocab_size) {
    if (listed != k) {
      selection.reset(new Selection(kernels, k, vocab_size));
      listed = k;
    }
    selection->restart();
    return *selection;
  }
};

inline Exponential exponential_of(const SampleRow& row, float m) {
  Exponential exponential = row.temperature.exponential;
  exponential.reference = m;
  return exponential;
}

inline double weight_of(const SampleRow& row, float x, float m) {
  return std::exp((double(x) - m) * row.temperature.inverse);
}

// Where a caller gives noise, the token with the greatest quotient of weight and noise is drawn: that with the greatest log
// weight less log noise. Of equal ones the smallest token wins.
class Race {
 public:
  // noise: the row's.
  Race(const SampleRow& row, float m, const float* noise) : row_(row), m_(m), noise_(noise) {}

  // A token that is kept, or of logit -inf.
  void offer(float x, u32 token) {
    if (x == -kInfinity) return;
    double score = (double(x) - m_) * row_.temperature.inverse - std::log(double(noise_[token]));
    // NaN, of noise that is NaN or less than 0.
    if (score != score) score = -kInfinity;
    if (has_winner_ && (score < score_ || (score == score_ && token > winner_))) return;
    has_winner_ = true;
    score_ = score;
    winner_ = token;
    // Within float, so that noise times bound is a number.
    bound_ = float(std::min(std::exp(score) * kSurely, double(std::numeric_limits<float>::max())));
  }

  // The tokens from `first` on, of logits x [n], with their weights. A logarithm is computed of those tokens alone whose quotient
  // may be the greatest so far.
  void offer_block(const float* x, const float* weights, u32 n, u32 first) {
    const float* const noise = noise_ + first;
    for (u32 begin = 0; begin < n; begin += kStretch) {
      const u32 end = std::min(n, begin + kStretch);
      const float bound = bound_;
      u32 may_win = 0;
      for (u32 i = begin; i < end; ++i) may_win += !loses(weights[i], noise[i], bound);
      for (u32 i = begin; may_win && i < end; ++i)
        if (!loses(weights[i], noise[i], bound_)) offer(x[i], first + i);
    }
  }

  u32 winner() const { return winner_; }

 private:
  static constexpr u32 kStretch = 64;
  // More than weights are off by (vectors.h), and more than those weigh that are rounded to 0.
  static constexpr double kSurely = 1.0 - 0x1p-16;
  static constexpr float kLeastWeight = 1e-37f;

  // Of noise that is NaN no token loses.
  static bool loses(float weight, float noise, float bound) { return weight + kLeastWeight < noise * bound; }

  const SampleRow& row_;
  const float m_;
  const float* const noise_;
  bool has_winner_ = false;
  u32 winner_ = 0;
  double score_ = 0.0;
  float bound_ = 0.0f;  // less than the greatest quotient so far
};

inline double relative_to(float m, const BlockNormalizer& of_block, const SampleRow& row) {
  return of_block.d == 0.0 ? 0.0 : of_block.d * std::exp((double(of_block.m) - m) * row.temperature.inverse);
}

inline double sum_of_all(const SampleRow& row, float m, const SampleWorkspace& workspace) {
  double sum = 0.0;
  for (u32 i = 0; i < row.reader.blocks(); ++i) sum += relative_to(m, workspace.tempered[i], row);
  return sum;
}

}  // namespace fused_topk::cpu
