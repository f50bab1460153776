// SPDX-License-Identifier: Apache-2.0
// The scores of experts, the same bits on every machine: softmax, sigmoid, and the square root of softplus.
//
// An expert is chosen by its score, so a score must not depend on who computes it. Every operation is rounded by itself, to
// nearest, in the order below; nothing is fused. fused_topk/operators/routing.py computes the same in torch
// operations. No result is subnormal, so that modes which flush those change nothing. Relative errors, in units of 2^-24:
//     exponential   1.6, beyond what the rounding of y does
//     sigmoid       at most 3.6
//     log1p         3.4, and of its square root half of that
// Comes after order.h. Compiles under NVRTC and g++.
#pragma once

#include "../algebra/order.h"

namespace fused_topk::routers {

enum Scoring : u32 { kSoftmax = 0, kSigmoid = 1, kSqrtSoftplus = 2 };

constexpr u32 kMostExperts = 1024;  // of a row
constexpr u32 kMostChosen = 32;
// What keeps a sum of weights from being zero, as in DeepSeek-V3.
constexpr float kLeastSum = 1e-20f;

// MATH: a type Float, of one number or of several, and its operations. sub, mul, add, reciprocal (of 1 to 3) and sqrt round to
// nearest.

// e^y for y <= 0. 0 below e^-87. With y = n ln 2 + r, |r| <= ln(2) / 2, it is 2^n e^r. n has 7 bits and the first part of ln 2
// has 9, so their product is exact.
template <class MATH, class F = typename MATH::Float>
FUSED_TOPK_FN F exponential(F y) {
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits, here with a float's exponent bias added to it.
  constexpr float kRound = 0x1.8p23f + 127.0f;
  const F shifted = MATH::add(MATH::mul(y, MATH::of(0x1.715476p+0f)), MATH::of(kRound));
  const F n = MATH::sub(shifted, MATH::of(kRound));
  F r = MATH::sub(y, MATH::mul(n, MATH::of(0x1.62p-1f)));
  r = MATH::sub(r, MATH::mul(n, MATH::of(0x1.c85fep-10f)));
  // (e^r - 1 - r) / r^2, minimax
  F p = MATH::of(0x1.6a21acp-10f);
  p = MATH::add(MATH::mul(p, r), MATH::of(0x1.123b6ap-7f));
  p = MATH::add(MATH::mul(p, r), MATH::of(0x1.5558fap-5f));
  p = MATH::add(MATH::mul(p, r), MATH::of(0x1.55549p-3f));
  p = MATH::add(MATH::mul(p, r), MATH::of(0x1.fffffcp-2f));
  p = MATH::add(MATH::mul(MATH::mul(p, r), r), r);
  p = MATH::add(p, MATH::of(1.0f));
  return MATH::zero_if_less(MATH::mul(p, MATH::power_of_two(shifted)), y, -87.0f);
}

template <class MATH, class F = typename MATH::Float>
FUSED_TOPK_FN F sigmoid(F x) {
  const F e = exponential<MATH>(MATH::negative_magnitude(x));
  const F of_positive = MATH::reciprocal(MATH::add(MATH::of(1.0f), e));
  return MATH::if_negative(x, MATH::mul(e, of_positive), of_positive);
}

// softplus(x) = max(x, 0) + log(1 + e) with e = e^-|x|, and log(1 + e) = 2 artanh(t / 2) with t = 2 e / (2 + e).
template <class MATH, class F = typename MATH::Float>
FUSED_TOPK_FN F sqrt_softplus(F x) {
  const F e = exponential<MATH>(MATH::negative_magnitude(x));
  const F inverse = MATH::reciprocal(MATH::add(MATH::of(2.0f), e));
  const F t = MATH::mul(e, MATH::add(inverse, inverse));
  const F u = MATH::mul(t, t);
  // (2 artanh(t / 2) / t - 1) / u, minimax
  F p = MATH::of(0x1.1ef87ap-11f);
  p = MATH::add(MATH::mul(p, u), MATH::of(0x1.1eb61p-9f));
  p = MATH::add(MATH::mul(p, u), MATH::of(0x1.99d27cp-7f));
  p = MATH::add(MATH::mul(p, u), MATH::of(0x1.5555p-4f));
  p = MATH::add(MATH::mul(MATH::mul(p, u), t), t);
  return MATH::sqrt(MATH::add(MATH::if_negative(x, MATH::of(0.0f), x), p));
}

}  // namespace fused_topk::routers
