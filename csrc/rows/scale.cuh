// SPDX-License-Identifier: Apache-2.0
// How the logits of a row are scaled. Every exponential of a softmax is computed here: exponentials for sums with the hardware's
// 2^x, and exponentials for results with the exact e^x. The scores of experts (scores.h) have operations of their own.
#pragma once

#include "platform.cuh"

namespace fused_topk {

// The greatest 1 / T. Times log2(e) it is still finite.
constexpr float kLargestInverse = 2e38f;
// The least normal float. A row of draws has no smaller 1 / T, so that -inf has no weight at any temperature.
constexpr float kLeastInverse = 1.17549435e-38f;

// The greatest |m log2(e) / T|. Beyond it the rounding error of this offset would exceed 1/4.
constexpr float kLargestOffset = 4194304.0f;

// What a call gives: a temperature for each row, or one for all rows. It is a part of every kernel's argument. FLOAT: the type of
// a temperature. fused_topk/layout/kernel_arguments.py reads the fields from here.
template <class FLOAT>
struct ScaleOfRows {
  const FLOAT* row_temperature;  // nullable; [rows]
  FLOAT temperature;             // where row_temperature is null

  // offset(): where the temperature of a row lies. It is only called where rows have temperatures.
  template <class OFFSET>
  __device__ __forceinline__ FLOAT given(OFFSET offset) const {
    return row_temperature ? __ldg(row_temperature + offset()) : temperature;
  }
};

using RowScale = ScaleOfRows<float>;
using DrawScale = ScaleOfRows<double>;

// For sums. What Python calls a Scale is ScaleOfRows here.
struct Scale {
  float factor = kLog2E;  // log2(e) / T

  __device__ __forceinline__ bool is_one() const { return factor == kLog2E; }
  // e^((x - base) / T)
  __device__ __forceinline__ float weight(float x, float base) const { return exp2_approx((x - base) * factor); }
};

// The same weights relative to one base, with one multiply-add each: (x - base) * factor = x * factor - offset. The
// rounding error of the offset is the same for all x and known exactly. regained() puts it back into a sum of such
// weights.
struct OffsetScale {
  float factor, offset, lost;

  __device__ __forceinline__ OffsetScale(Scale scale, float base)
      : factor(scale.factor), offset(base * factor), lost(fmaf(base, factor, -offset)) {}

  // False if the offset is infinite, NaN, or too large to correct.
  __device__ __forceinline__ bool is_correctable() const { return fabsf(offset) < kLargestOffset; }
  __device__ __forceinline__ float weight(float x) const { return exp2_approx(fmaf(x, factor, -offset)); }
  __device__ __forceinline__ float regained() const { return exp2_approx(-lost); }
};

// For results.
struct Temperature {
  float inverse;  // 1 / T

  // A T that is not positive makes all results NaN except the indices. A T so small that 1 / T overflows acts like the
  // smallest T whose inverse is finite, so that (m - m) / T stays 0.
  static __device__ __forceinline__ Temperature of(float t) {
    const float inverse = __frcp_rn(t);
    return {t > 0.0f ? (inverse < kLargestInverse ? inverse : kLargestInverse) : not_a_number()};
  }

  __device__ __forceinline__ Scale scale() const { return {inverse * kLog2E}; }
  // x / T
  __device__ __forceinline__ float scaled(float x) const { return x * inverse; }
  // (x - m) / T
  __device__ __forceinline__ float log_weight(float x, float m) const { return (x - m) * inverse; }
  // e^((x - m) / T)
  __device__ __forceinline__ float weight(float x, float m) const { return expf(log_weight(x, m)); }
};

__device__ __forceinline__ Normalizer merge(Normalizer a, Normalizer b, Scale scale) {
  return merge(a, b, scale.factor, exp2_approx);
}

// Threads into a warp: merges the lanes' states (normalizer.h), with the same bits in every lane. All 32 lanes call it.
__device__ __forceinline__ Normalizer warp_merge(Normalizer a, Scale scale) {
  const float m = warp_max(a.m);
  // The product is rounded before it is added. A fused multiply-add would let two lanes add the same pair differently.
  return {m, warp_sum(__fmul_rn(a.d, scale.weight(a.m, reference_point(m))))};
}

}  // namespace fused_topk
