// SPDX-License-Identifier: Apache-2.0
// The results of a finished row: the values of its k chosen, from its m and d.
#pragma once

#include "../rows/problem.cuh"

namespace fused_topk {

// m and d of a row, and the values that follow from them.
struct RowResult {
  float m, d;
  Temperature temperature;
  float log_d;  // computed once, since a logarithm costs more than the rest of a value

  RowResult() = default;
  __device__ __forceinline__ RowResult(float m, float d, Temperature temperature)
      : m(m), d(d), temperature(temperature), log_d(logf(d)) {}

  __device__ __forceinline__ bool is_finite() const { return fabsf(m) < FUSED_TOPK_INFINITY; }
  // As in torch, a row has no probabilities if it has a NaN or a +inf, or if all of it is -inf.
  __device__ __forceinline__ float log_probability(float x) const {
    return is_finite() ? temperature.log_weight(x, m) - log_d : not_a_number();
  }
  __device__ __forceinline__ float probability(float x) const {
    return is_finite() ? temperature.weight(x, m) / d : not_a_number();
  }
  __device__ __forceinline__ float logsumexp() const { return temperature.scaled(m) + (is_finite() ? log_d : 0.0f); }
};

// Writes m and d of a row for kState. The thread that wrote the row's logsumexp calls it, and m takes its place. So every
// launch writes a logsumexp without asking for the kind.
__device__ __forceinline__ void write_state(float* logsumexp, u32 rows, u32 row, const RowResult& result) {
  logsumexp[row] = result.m;
  logsumexp[rows + row] = result.d;
}

// Writes the i-th of a row's k chosen: token `index` with logit x, -inf if the mask hides it. raw_logit(index) returns
// the input's bits. A candidate's key has lost the sign of a zero and the payload of a NaN.
template <class FORMAT, class RAW_LOGIT>
__device__ __forceinline__ void write_chosen(const Problem& problem, u32 row, u32 k, u32 i, u32 index, float x,
                                             const RowResult& relative_to, RAW_LOGIT raw_logit) {
  const i64 out = i64(row) * k + i;
  problem.indices[out] = index;
  if (has_logits(problem.value_kind)) {
    static_cast<typename FORMAT::Bits*>(problem.values)[out] =
        x == -FUSED_TOPK_INFINITY ? FORMAT::kNegativeInfinity : raw_logit(index);
  } else {
    static_cast<float*>(problem.values)[out] =
        problem.value_kind == kProbabilities ? relative_to.probability(x) : relative_to.log_probability(x);
  }
}

}  // namespace fused_topk
