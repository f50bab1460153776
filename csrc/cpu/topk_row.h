// SPDX-License-Identifier: Apache-2.0
// A row of a request for top-k: its results. Shared by the files that compute top-k.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "problem.h"
#include "row_state.h"

namespace fused_topk::cpu {

// Turns the logits of a row's k best into probabilities or log-probabilities, in values [k]. `of_chosen`: relative to
// the k best alone.
inline void finish_values(ValueKind kind, bool of_chosen, const FinishedRow& row, u32 k, float* values) {
  if (!row.is_finite()) {
    std::fill(values, values + k, kNaN);
    return;
  }
  // After a merge the greatest of the k best may be less than row.m: a state's m may come from a token that is not
  // allowed.
  const double m = of_chosen && std::isfinite(values[0]) ? values[0] : row.m, inverse = row.inverse_temperature;
  const auto shifted = [=](float logit) { return (logit - m) * inverse; };
  double log_total = row.log_d;
  if (of_chosen) {
    double total = 0.0;
    for (u32 i = 0; i < k; ++i) total += std::exp(shifted(values[i]));
    log_total = std::log(total);
  }
  if (kind == ValueKind::kProbabilities) {
    for (u32 i = 0; i < k; ++i) values[i] = float(std::exp(shifted(values[i]) - log_total));
  } else {
    for (u32 i = 0; i < k; ++i) values[i] = float(shifted(values[i]) - log_total);
  }
}

// Writes the values of the k best candidates.
inline void write_values(const Problem& p, const FinishedRow& row, const u64* best, u32 k, float* values) {
  // The logits come first: a loop of conversions alone waits for no arithmetic and is several times as fast.
  for (u32 i = 0; i < k; ++i) values[i] = logit_of_key(key_of(best[i]));
  finish_values(p.value_kind, p.normalize_over == NormalizeOver::kTopK, row, k, values);
}

// A logit bit for bit; -inf for null, which stands for a token that is not allowed.
inline void write_logit(DType dtype, const char* logit, char* value) {
  std::memcpy(value, logit ? static_cast<const void*>(logit) : &kNegativeInfinity[dtype], kItemSize[dtype]);
}

inline void write_indices(const u64* best, u32 k, i64* indices) {
  for (u32 i = 0; i < k; ++i) indices[i] = index_of(best[i]);
}

}  // namespace fused_topk::cpu
