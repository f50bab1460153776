// SPDX-License-Identifier: Apache-2.0
// Short rows, several at a time. The operations of one short row depend on each other. Several rows at once hide that
// latency. Only for the files that are compiled once per instruction set, like vectors.h.
#pragma once

#include "../algebra/normalizer.h"
#include "vectors.h"

namespace fused_topk::cpu {
namespace {

// log(d), 1 <= d < infinity, with an error of 2e-11. d = 2^exponent * f with f within a factor sqrt(2) of 1, and
// log f = 2 atanh((f - 1) / (f + 1)).
template <class DOUBLES>
inline DOUBLES logarithm(DOUBLES d) {
  typedef unsigned long long Bits __attribute__((vector_size(sizeof d)));
  constexpr unsigned long long kSqrtHalf = 0x3FE6A09E667F3BCDull;
  const Bits exponent = ((Bits)d - kSqrtHalf) >> 52;
  const DOUBLES f = (DOUBLES)((Bits)d - (exponent << 52));
  const DOUBLES s = (f - 1.0) / (f + 1.0);
  const DOUBLES s2 = s * s;
  DOUBLES series = s2 * (1.0 / 11) + 1.0 / 9;
  series = series * s2 + 1.0 / 7;
  series = series * s2 + 1.0 / 5;
  series = series * s2 + 1.0 / 3;
  series = series * s2 + 1.0;
  // An integer below 2^52, in the low bits of 2^52.
  const DOUBLES whole = (DOUBLES)(exponent | 0x4330000000000000ull) - 0x1p52;
  return whole * 0.6931471805599453 + 2.0 * s * series;
}

// Calls do_vectors(i, count) for each vector [i, i + count) of a row. count is kLanes, and less for the last vector.
template <class VECTORS>
inline void for_each_vector(u32 n, const VECTORS& do_vectors) {
  u32 i = 0;
  for (; i + kLanes <= n; i += kLanes) do_vectors(i, kLanes);
  if (i < n) do_vectors(i, n - i);
}

// Rows that lie side by side in the registers. Where fewer than kRows are left, the last row takes the missing places,
// and its result is written several times.
constexpr u32 kRows = sizeof(Doubles4) / sizeof(double);

struct ShortRows {
  const float* x[kRows];
  float* y[kRows];  // of kLogSumExp: one number each
  u32 n;
};

// The temperatures of kRows rows, from `first` on: an exponential for each row, whose reference is 0.
struct RowExponentials {
  Exponential of_row[kRows];

  RowExponentials(const Temperatures& t, u32 first, u32 rows) {
    for (u32 r = 0; r < kRows; ++r) of_row[r] = t.exponentials[t.place_of(first + r < rows ? first + r : rows - 1)];
  }

  const Exponential& operator[](u32 row) const { return of_row[row]; }
};

// The sums of the exponentials of x relative to its reference. KEEP: the exponentials go into the row's y. A float32
// lane adds at most 4 of them and goes on in float64, as in sum_of_exp. e[r]: of row r.
template <bool KEEP, class EXPONENTIALS>
inline Doubles4 sum_side_by_side(const ShortRows& rows, const float (&reference)[kRows], const EXPONENTIALS& e) {
  constexpr u32 kRun = 4 * kLanes;
  Doubles total[kRows] = {};
  for (u32 begin = 0; begin < rows.n; begin += kRun) {
    Floats sum[kRows] = {};
    for_each_vector(rows.n - begin < kRun ? rows.n - begin : kRun, [&](u32 i, u32 count) {
      Floats terms[kRows];
      for (u32 r = 0; r < kRows; ++r) terms[r] = load_lanes(rows.x[r] + begin + i, count) - reference[r];
      exp_in_place(terms, e);
      for (u32 r = 0; r < kRows; ++r) sum[r] += terms[r];
      if (KEEP) {
        for (u32 r = 0; r < kRows; ++r) store_lanes(rows.y[r] + begin + i, count, terms[r]);
      }
    });
    for (u32 r = 0; r < kRows; ++r) total[r] += __builtin_convertvector(sum[r], Doubles);
  }
  return sums_of_lanes(total);
}

// What is known of kRows rows once their exponentials have been summed.
struct Normalizers {
  Floats4 m;  // the greatest logit that is not a NaN
  Doubles4 d;
  // d is NaN where a logit or the temperature is NaN, or a logit is +inf; 0 where all are -inf.
  bool is_finite(u32 r) const { return d[r] >= 1.0; }
};

// The normalizers of rows. KEEP: the exponentials, relative to m, go into each row's y.
template <bool KEEP, class EXPONENTIALS>
inline Normalizers normalize(const ShortRows& rows, const EXPONENTIALS& e) {
  Floats best[kRows];
  for (u32 r = 0; r < kRows; ++r) best[r] = broadcast(-kInfinity);
  // A NaN is the first operand, so that the other one is kept.
  for_each_vector(rows.n, [&](u32 i, u32 count) {
    for (u32 r = 0; r < kRows; ++r) best[r] = greater(load_lanes(rows.x[r] + i, count), best[r]);
  });
  const Floats4 m = greatest_lanes(best);
  const float reference[kRows] = {reference_point(m[0]), reference_point(m[1]), reference_point(m[2]),
                                  reference_point(m[3])};
  return {m, sum_side_by_side<KEEP>(rows, reference, e)};
}

inline bool holds_nan(const float* x, u32 n) {
  for (u32 i = 0; i < n; ++i) {
    if (x[i] != x[i]) return true;
  }
  return false;
}

}  // namespace
}  // namespace fused_topk::cpu
