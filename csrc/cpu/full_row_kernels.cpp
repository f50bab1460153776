// SPDX-License-Identifier: Apache-2.0
// One instruction set's table of full_row_kernels.h, built like vector_kernels.cpp.
#include "full_row_kernels.h"

#include "side_by_side.h"

namespace fused_topk::cpu {
namespace {

constexpr u32 kGroup = 4 * kLanes;

typedef u16 Shorts __attribute__((vector_size(2 * kLanes)));

inline void write_logsumexp(const ShortRows& rows, const Normalizers& normalizers, const double (&inverse)[kRows]) {
  const Doubles4 log_d = logarithm(normalizers.d);
  for (u32 r = 0; r < kRows; ++r) {
    const double m = normalizers.m[r] * inverse[r];
    *rows.y[r] = normalizers.is_finite(r) ? float(m + log_d[r]) : holds_nan(rows.x[r], rows.n) ? kNaN : float(m);
  }
}

// A row without a finite normalizer has no probabilities. As in torch, they are NaN.
inline void write_nan(const ShortRows& rows, const Normalizers& normalizers) {
  for (u32 r = 0; r < kRows; ++r) {
    for (u32 i = 0; i < rows.n && !normalizers.is_finite(r); ++i) rows.y[r][i] = kNaN;
  }
}

// Rows that fit into a vector stay in registers. e[r], inverse[r]: of row r.
template <class EXPONENTIALS>
inline void solve_vectors(FullRowKind kind, const ShortRows& rows, const EXPONENTIALS& e,
                          const double (&inverse)[kRows]) {
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
    for (u32 r = 0; r < kRows; ++r) store_lanes(rows.y[r], rows.n, x[r] * float(inverse[r]) - float(log_d[r]));
  }
  write_nan(rows, normalizers);
}

template <class EXPONENTIALS>
inline void solve_side_by_side(FullRowKind kind, const ShortRows& rows, const EXPONENTIALS& e,
                               const double (&inverse)[kRows]) {
  const Normalizers normalizers = kind == FullRowKind::kSoftmax ? normalize<true>(rows, e) : normalize<false>(rows, e);
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
        y[r] = (load_lanes(rows.x[r] + i, count) - reference_point(normalizers.m[r])) * float(inverse[r]) -
               float(log_d[r]);
      for (u32 r = 0; r < kRows; ++r) store_lanes(rows.y[r] + i, count, y[r]);
    });
  }
  write_nan(rows, normalizers);
}

template <class EXPONENTIALS>
inline void solve_group(FullRowKind kind, const ShortRows& rows, const EXPONENTIALS& e,
                        const double (&inverse)[kRows]) {
  if (rows.n <= kLanes) {
    solve_vectors(kind, rows, e, inverse);
  } else {
    solve_side_by_side(kind, rows, e, inverse);
  }
}

void short_rows(FullRowKind kind, const float* x, u32 rows, u32 n, const Temperatures& t, float* y) {
  const u32 width = kind == FullRowKind::kLogSumExp ? 1 : n;
  for (u32 first = 0; first < rows; first += kRows) {
    ShortRows group;
    group.n = n;
    double inverse[kRows];
    for (u32 r = 0; r < kRows; ++r) {
      const u32 row = first + r < rows ? first + r : rows - 1;
      group.x[r] = x + row * n;
      group.y[r] = y + row * width;
      inverse[r] = t.inverses[t.place_of(row)];
    }
    if (t.differ) {
      solve_group(kind, group, RowExponentials(t, first, rows), inverse);
    } else {
      solve_group(kind, group, SameExponential{*t.exponentials}, inverse);
    }
  }
}

double exp_terms(const float* x, u32 n, const Exponential& e, float* terms, const void* next, u32 bytes) {
  return sum_of_exp(x, n, e, next, bytes,
                    [=](Floats lanes, u32 i, u32 count) { store_lanes(terms + i, count, lanes); });
}

// y = make(x), a vector at a time. A plain loop would be compiled twice, because y may be x.
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
    Floats t[1] = {load_lanes(x + i, rest)};
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
  // Whatever rounds to 65536 or more is infinite.
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
extern const FullRowKernels FUSED_TOPK_TABLE(FullRowKernels) = {
    short_rows,
    exp_terms,
    scale,
    exp_scaled,
    log_values,
    {store_float32, store_float16, store_bfloat16},
};
// clang-format on

}  // namespace fused_topk::cpu
