// SPDX-License-Identifier: Apache-2.0
// A row of a request for top-k: its results. Shared by the files that compute top-k.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "problem.h"
#include "row_state.h"

namespace fused_topk::cpu {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// The normalizer of a whole row.
struct FinishedRow {
  double m;
  double log_d;
  double inverse_temperature;

  FinishedRow(const BlockNormalizer& sum, double inverse)
      : m(sum.m), log_d(std::log(sum.d)), inverse_temperature(inverse) {}

  // Relative to a maximum of +inf, d is NaN. The logsumexp is +inf, or NaN if the temperature is.
  float logsumexp() const { return float(std::isinf(m) ? m * inverse_temperature : m * inverse_temperature + log_d); }
};

// Probabilities or log-probabilities of the k best. values: [k]
inline void write_values(const Problem& p, const FinishedRow& row, const u64* best, u32 k, float* values) {
  // A row without a finite normalizer has no probabilities. As in torch.softmax, they are NaN.
  if (!std::isfinite(row.log_d) || !std::isfinite(row.m)) {
    std::fill(values, values + k, float(kNaN));
    return;
  }
  // The logits come first: a loop of conversions alone waits for no arithmetic and is several times as fast.
  for (u32 i = 0; i < k; ++i) {
    const u32 bits = bits_of_key(key_of(best[i]));
    std::memcpy(values + i, &bits, sizeof bits);
  }
  const double m = row.m, inverse = row.inverse_temperature;
  const auto shifted = [=](float logit) { return (logit - m) * inverse; };
  double log_total = row.log_d;
  if (p.normalize_over == NormalizeOver::kTopK) {
    double total = 0.0;
    for (u32 i = 0; i < k; ++i) total += std::exp(shifted(values[i]));
    log_total = std::log(total);
  }
  if (p.value_kind == ValueKind::kProbabilities) {
    for (u32 i = 0; i < k; ++i) values[i] = float(std::exp(shifted(values[i]) - log_total));
  } else {
    for (u32 i = 0; i < k; ++i) values[i] = float(shifted(values[i]) - log_total);
  }
}

}  // namespace fused_topk::cpu
