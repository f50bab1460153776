// SPDX-License-Identifier: Apache-2.0
// What a finished row gives: from its m and d, the values of the k chosen.
// Comes after problem.cuh.
#pragma once

#include "problem.cuh"

namespace fused_topk {

// m and d of the row, and the values that they make of its logits.
struct RowResult {
  float m, d;
  float inverse_temperature;
  float log_d;  // found once, not for each value: it takes longer than what is done with it

  RowResult() = default;
  __device__ __forceinline__ RowResult(float m, float d, float inverse_temperature)
      : m(m), d(d), inverse_temperature(inverse_temperature), log_d(logf(d)) {}

  __device__ __forceinline__ bool is_finite() const { return fabsf(m) < FUSED_TOPK_INFINITY; }
  // A row with NaN or +inf, or of only -inf, has no probabilities, as in torch.
  __device__ __forceinline__ float log_probability(float x) const {
    return is_finite() ? (x - m) * inverse_temperature - log_d : __uint_as_float(0x7FC00000u);
  }
  __device__ __forceinline__ float probability(float x) const {
    return is_finite() ? expf((x - m) * inverse_temperature) / d : __uint_as_float(0x7FC00000u);
  }
  __device__ __forceinline__ float logsumexp() const { return m * inverse_temperature + (is_finite() ? log_d : 0.0f); }
};

// Writes the i-th of the k chosen of a row: token `index` with logit x, -inf if the mask hides it. raw_logit(index) gives
// the input's own bits, which a candidate's key has forgotten: the sign of zero, the payload of a NaN.
template <class FORMAT, class RAW_LOGIT>
__device__ __forceinline__ void write_chosen(const Problem& problem, u32 row, u32 k, u32 i, u32 index, float x,
                                             const RowResult& relative_to, RAW_LOGIT raw_logit) {
  const i64 out = i64(row) * k + i;
  problem.indices[out] = index;
  if (problem.value_kind == kLogits) {
    static_cast<typename FORMAT::Bits*>(problem.values)[out] =
        x == -FUSED_TOPK_INFINITY ? FORMAT::kNegativeInfinity : raw_logit(index);
  } else {
    static_cast<float*>(problem.values)[out] =
        problem.value_kind == kProbabilities ? relative_to.probability(x) : relative_to.log_probability(x);
  }
}

}  // namespace fused_topk
