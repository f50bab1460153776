// SPDX-License-Identifier: Apache-2.0
// The online normalizer of softmax (Milakov & Gimelshein 2018, equations 6 and 7) as a commutative monoid.
//
//     identity = (-inf, 0)        of(x) = (x, 1)
//     a + b    = (m, a.d e^((a.m - m)/T) + b.d e^((b.m - m)/T)),   m = max(a.m, b.m)
//
// d is kept relative to m, so a common offset of the logits costs no accuracy. The exponentials are 2^((x - m) * scale) with
// scale = log2(e) / T: the temperature costs nothing. `EXP2` is the caller's 2^x, the hardware's instruction on a GPU, so that
// this file needs no maths library. The CPU merges blocks in float64 (`merge` of row_state.h).
#pragma once

#include "order.h"

namespace fused_topk {

constexpr float kLog2E = 1.4426950408889634f;

// NVRTC has no maths header and g++ no __int_as_float.
#if defined(__CUDACC_RTC__)
#define FUSED_TOPK_INFINITY (__int_as_float(0x7F800000))
#else
#define FUSED_TOPK_INFINITY (__builtin_huge_valf())
#endif

struct Normalizer {
  float m = -FUSED_TOPK_INFINITY;  // running maximum, NaN once a NaN was seen
  float d = 0.0f;                  // running sum of e^((x - m) / T)
};

// Unlike fmaxf, keeps a NaN from either side: a row with a NaN has a NaN normalizer.
FUSED_TOPK_FN float max_or_nan(float a, float b) { return a > b || a != a ? a : b; }

// The -inf rule, here and nowhere else: what to subtract from logits whose maximum is m. An all -inf part has m = -inf,
// and -inf - -inf would be NaN; relative to 0 its exponentials are the zeros that they should be.
FUSED_TOPK_FN float reference_point(float m) { return m == -FUSED_TOPK_INFINITY ? 0.0f : m; }

template <class EXP2>
FUSED_TOPK_FN Normalizer merge(Normalizer a, Normalizer b, float scale, EXP2 exp2) {
  const float m = max_or_nan(a.m, b.m);
  const float base = reference_point(m);
  return {m, a.d * exp2((a.m - base) * scale) + b.d * exp2((b.m - base) * scale)};
}

}  // namespace fused_topk
