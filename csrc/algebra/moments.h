// SPDX-License-Identifier: Apache-2.0
// The normalizer (normalizer.h) with one more sum, from which the entropy comes: a commutative monoid, too.
//
//     identity = (-inf, 0, 0)        of(x) = (x, 1, 0)
//     d = sum of e^z    s = sum of z e^z, 0 for z = -inf    with z = (x - m) / T
//     a state relative to another m:  (d e^y, (s + y d) e^y)  with y = (its m - m) / T
//
// The entropy is log d - s / d. No term of s is above 0, so nothing cancels. `EXP` is an exponential of any base, and `scale` is
// 1 / T times the base's logarithm of e: s is in units of that base, too.
#pragma once

#include "normalizer.h"

namespace fused_topk {

template <class NUMBER>
struct Moments {
  float m = -FUSED_TOPK_INFINITY;
  NUMBER d = 0;
  NUMBER s = 0;
};

template <class NUMBER, class EXP>
FUSED_TOPK_FN void rebase(Moments<NUMBER>& x, float m, NUMBER scale, EXP exp) {
  const NUMBER y = (NUMBER(x.m) - NUMBER(reference_point(m))) * scale;
  const NUMBER weight = exp(y);
  x.m = m;
  // Of y = -inf nothing is left.
  x.s = weight == NUMBER(0) ? NUMBER(0) : (x.s + y * x.d) * weight;
  x.d *= weight;
}

template <class NUMBER, class EXP>
FUSED_TOPK_FN Moments<NUMBER> merge_moments(Moments<NUMBER> a, Moments<NUMBER> b, NUMBER scale, EXP exp) {
  const float m = max_or_nan(a.m, b.m);
  rebase(a, m, scale, exp);
  rebase(b, m, scale, exp);
  return {m, a.d + b.d, a.s + b.s};
}

}  // namespace fused_topk
