// SPDX-License-Identifier: Apache-2.0
// One instruction set's table of full_row_kernels.h, built like vector_kernels.cpp.
#include "full_row_kernels.h"

#include "../normalizer.h"
#include "vectors.h"

namespace fused_topk::cpu {
namespace {

constexpr u32 kGroup = 4 * kLanes;
constexpr float kNaN = __builtin_nanf("");

typedef u16 Shorts __attribute__((vector_size(2 * kLanes)));

typedef unsigned long long Bits4 __attribute__((vector_size(32)));

// log(d), 1 <= d < infinity, with an error of 2e-11. d = 2^exponent * f with f within a factor sqrt(2) of 1, and
// log f = 2 atanh((f - 1) / (f + 1)).
inline Doubles4 logarithm(Doubles4 d) {
  constexpr unsigned long long kSqrtHalf = 0x3FE6A09E667F3BCDull;
  const Bits4 exponent = ((Bits4)d - kSqrtHalf) >> 52;
  const Doubles4 f = (Doubles4)((Bits4)d - (exponent << 52));
  const Doubles4 s = (f - 1.0) / (f + 1.0);
  const Doubles4 s2 = s * s;
  Doubles4 series = s2 * (1.0 / 11) + 1.0 / 9;
  series = series * s2 + 1.0 / 7;
  series = series * s2 + 1.0 / 5;
  series = series * s2 + 1.0 / 3;
  series = series * s2 + 1.0;
  // An integer below 2^52, in the low bits of 2^52.
  const Doubles4 whole = (Doubles4)(exponent | 0x4330000000000000ull) - 0x1p52;
  return whole * 0.6931471805599453 + 2.0 * s * series;
}

// Calls do_vectors(i, count) for the vectors of a row, [i, i + count) of it each: count = kLanes but for the last.
template <class VECTORS>
inline void for_each_vector(u32 n, const VECTORS& do_vectors) {
  u32 i = 0;
  for (; i + kLanes <= n; i += kLanes) do_vectors(i, kLanes);
  if (i < n) do_vectors(i, n - i);
}

inline Floats load_lanes(const float* x, u32 count) {
  return count == kLanes ? load(x) : load_some(x, count, -kInfinity);
}

inline void store_lanes(float* y, u32 count, Floats lanes) {
  if (count == kLanes) {
    store_vector(y, lanes);
  } else {
    store_some(y, count, lanes);
  }
}

// Rows that lie side by side in the registers, so that the chain of operations of one fills the waits of the others.
// Where fewer are left, the last one stands in for those that are missing: its result is written several times.
constexpr u32 kRows = sizeof(Doubles4) / sizeof(double);

struct ShortRows {
  const float* x[kRows];
  float* y[kRows];  // of kLogSumExp: one number each
  u32 n;
};

// The exponentials of x relative to its reference, each row's into its y if `keep`, and their sums. A float32 lane adds up at most 4
// of them before it goes on in float64, as in sum_of_exp.
template <bool KEEP>
inline Doubles4 sum_side_by_side(const ShortRows& rows, const float (&reference)[kRows], const Exponential& e) {
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

inline bool holds_nan(const float* x, u32 n) {
  for (u32 i = 0; i < n; ++i) {
    if (x[i] != x[i]) return true;
  }
  return false;
}

// What is known of kRows rows once their exponentials have been summed.
struct Normalizers {
  Floats4 m;  // the greatest logit that is not a NaN
  Doubles4 d;
  // d is NaN where a logit or the temperature is NaN, or a logit is +inf; 0 where all are -inf.
  bool is_finite(u32 r) const { return d[r] >= 1.0; }
};

inline void write_logsumexp(const ShortRows& rows, const Normalizers& normalizers, double inverse) {
  const Doubles4 log_d = logarithm(normalizers.d);
  for (u32 r = 0; r < kRows; ++r) {
    const double m = normalizers.m[r] * inverse;
    const double infinite = holds_nan(rows.x[r], rows.n) ? double(kNaN) : m;
    *rows.y[r] = float(normalizers.is_finite(r) ? m + log_d[r] : infinite);
  }
}

// No finite normalizer, no probabilities: NaN, as torch has it.
inline void write_nan(const ShortRows& rows, const Normalizers& normalizers) {
  for (u32 r = 0; r < kRows; ++r) {
    for (u32 i = 0; i < rows.n && !normalizers.is_finite(r); ++i) rows.y[r][i] = kNaN;
  }
}

// Rows that fit into a vector stay in registers.
inline void solve_vectors(FullRowKind kind, const ShortRows& rows, const Exponential& e, double inverse) {
  Floats x[kRows], terms[kRows];
  Doubles sums[kRows];
  for (u32 r = 0; r < kRows; ++r) x[r] = load_lanes(rows.x[r], rows.n);
  // A NaN is the first operand, so that the other one is kept.
  for (u32 r = 0; r < kRows; ++r) terms[r] = greater(x[r], broadcast(-kInfinity));
  Normalizers normalizers{greatest_lanes(terms), {}};
  for (u32 r = 0; r < kRows; ++r) terms[r] = x[r] -= reference_point(normalizers.m[r]);
  exp_in_place(terms, e);
  for (u32 r = 0; r < kRows; ++r) sums[r] = __builtin_convertvector(terms[r], Doubles);
  normalizers.d = sums_of_lanes(sums);
  if (kind == FullRowKind::kLogSumExp) {
    write_logsumexp(rows, normalizers, inverse);
    return;
  }
  if (kind == FullRowKind::kSoftmax) {
    const Doubles4 factor = 1.0 / normalizers.d;
    for (u32 r = 0; r < kRows; ++r) store_lanes(rows.y[r], rows.n, terms[r] * float(factor[r]));
  } else {
    const Doubles4 log_d = logarithm(normalizers.d);
    for (u32 r = 0; r < kRows; ++r) store_lanes(rows.y[r], rows.n, x[r] * float(inverse) - float(log_d[r]));
  }
  write_nan(rows, normalizers);
}

inline void solve_side_by_side(FullRowKind kind, const ShortRows& rows, const Exponential& e, double inverse) {
  Floats best[kRows];
  for (u32 r = 0; r < kRows; ++r) best[r] = broadcast(-kInfinity);
  for_each_vector(rows.n, [&](u32 i, u32 count) {
    for (u32 r = 0; r < kRows; ++r) best[r] = greater(load_lanes(rows.x[r] + i, count), best[r]);
  });
  Normalizers normalizers{greatest_lanes(best), {}};
  float reference[kRows];
  for (u32 r = 0; r < kRows; ++r) reference[r] = reference_point(normalizers.m[r]);
  normalizers.d = kind == FullRowKind::kSoftmax ? sum_side_by_side<true>(rows, reference, e)
                                                : sum_side_by_side<false>(rows, reference, e);
  if (kind == FullRowKind::kLogSumExp) {
    write_logsumexp(rows, normalizers, inverse);
    return;
  }
  if (kind == FullRowKind::kSoftmax) {
    const Doubles4 factor = 1.0 / normalizers.d;
    for_each_vector(rows.n, [&](u32 i, u32 count) {
      Floats y[kRows];
      for (u32 r = 0; r < kRows; ++r) y[r] = load_lanes(rows.y[r] + i, count) * float(factor[r]);
      for (u32 r = 0; r < kRows; ++r) store_lanes(rows.y[r] + i, count, y[r]);
    });
  } else {
    const Doubles4 log_d = logarithm(normalizers.d);
    for_each_vector(rows.n, [&](u32 i, u32 count) {
      Floats y[kRows];
      for (u32 r = 0; r < kRows; ++r)
        y[r] = (load_lanes(rows.x[r] + i, count) - reference[r]) * float(inverse) - float(log_d[r]);
      for (u32 r = 0; r < kRows; ++r) store_lanes(rows.y[r] + i, count, y[r]);
    });
  }
  write_nan(rows, normalizers);
}

void short_rows(FullRowKind kind, const float* x, u32 rows, u32 n, const Exponential& e, double inverse, float* y) {
  const u32 width = kind == FullRowKind::kLogSumExp ? 1 : n;
  for (u32 first = 0; first < rows; first += kRows) {
    ShortRows group;
    group.n = n;
    for (u32 r = 0; r < kRows; ++r) {
      const u32 row = first + r < rows ? first + r : rows - 1;
      group.x[r] = x + row * n;
      group.y[r] = y + row * width;
    }
    if (n <= kLanes) {
      solve_vectors(kind, group, e, inverse);
    } else {
      solve_side_by_side(kind, group, e, inverse);
    }
  }
}

double exp_terms(const float* x, u32 n, const Exponential& e, float* terms, const void* next, u32 bytes) {
  return sum_of_exp(x, n, e, next, bytes,
                    [=](Floats lanes, u32 i, u32 count) { store_lanes(terms + i, count, lanes); });
}

// y = make(x), a vector at a time: unlike of a plain loop, the compiler need not know whether y is x.
template <class MAKE>
inline void map(const float* x, u32 n, float* y, const MAKE& make) {
  u32 i = 0;
  for (; i + kLanes <= n; i += kLanes) store_vector(y + i, make(load(x + i)));
  if (i < n) store_some(y + i, n - i, make(load_some(x + i, n - i, 0.0f)));
}

void scale(const float* terms, u32 n, float factor, float* y) {
  map(terms, n, y, [=](Floats x) { return x * factor; });
}

void exp_scaled(const float* x, u32 n, const Exponential& e, float factor, float* y) {
  u32 i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    Floats t[4];
    for (u32 v = 0; v < 4; ++v) t[v] = load(x + i + v * kLanes);
    exp_in_place(t, e);
    for (u32 v = 0; v < 4; ++v) store_vector(y + i + v * kLanes, t[v] * factor);
  }
  for (; i < n; i += kLanes) {
    const u32 rest = n - i < kLanes ? n - i : kLanes;
    Floats t[1] = {rest == kLanes ? load(x + i) : load_some(x + i, rest, -kInfinity)};
    exp_in_place(t, e);
    store_some(y + i, rest, t[0] * factor);
  }
}

void log_values(const float* x, u32 n, float m, float inverse_temperature, float log_d, float* y) {
  map(x, n, y, [=](Floats lanes) { return (lanes - m) * inverse_temperature - log_d; });
}

void store_float32(const float* y, u32 n, void* destination) { __builtin_memcpy(destination, y, n * sizeof(float)); }

void store_bfloat16(const float* y, u32 n, void* destination) {
  char* out = static_cast<char*>(destination);
  for (u32 i = 0; i < n; i += kLanes) {
    const bool is_whole = n - i >= kLanes;
    const UInts bits = (UInts)(is_whole ? load(y + i) : load_some(y + i, n - i, 0.0f));
    // Half a unit less than the last kept bit's parity makes ties go to even. A NaN would overflow.
    const UInts rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    const UInts result = (bits & 0x7FFFFFFFu) > 0x7F800000u ? UInts{} + 0x7FC0u : rounded;
    const auto narrow = __builtin_convertvector(result, Shorts);
    __builtin_memcpy(out + 2 * i, &narrow, 2 * (is_whole ? kLanes : n - i));
  }
}

inline u16 half_of_float(float x) {
#if defined(__aarch64__)
  const __fp16 rounded = __fp16(x);
  u16 bits;
  __builtin_memcpy(&bits, &rounded, sizeof bits);
  return bits;
#else
  const u32 bits = bits_of(x);
  const u32 magnitude = bits & 0x7FFFFFFFu;
  // float16 has 5 bits of exponent, biased by 15, and 13 bits of fraction less.
  constexpr u32 kRebias = u32(127 - 15) << 23;
  u32 half = (magnitude - kRebias + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
  // Below 2^-14 the last place is 2^-24, as it is in a float from 0.5 to 1.
  const u32 subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  half = magnitude < 0x38800000u ? subnormal : half;
  // What rounds to 65536 or more.
  half = magnitude >= 0x477FF000u ? 0x7C00u : half;
  half = magnitude > 0x7F800000u ? 0x7E00u : half;
  return u16(half | (bits >> 16 & 0x8000u));
#endif
}

void store_float16(const float* y, u32 n, void* destination) {
  char* out = static_cast<char*>(destination);
  u32 i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(y + i), _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  for (; i < n; ++i) {
    const u16 result = half_of_float(y[i]);
    __builtin_memcpy(out + 2 * i, &result, sizeof result);
  }
}

}  // namespace

// clang-format off: one a line
extern const FullRowKernels FUSED_TOPK_FULL_ROW_KERNELS = {
    short_rows,
    exp_terms,
    scale,
    exp_scaled,
    log_values,
    {store_float32, store_float16, store_bfloat16},
};
// clang-format on

}  // namespace fused_topk::cpu
