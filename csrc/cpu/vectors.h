// SPDX-License-Identifier: Apache-2.0
// Vectors of the instruction set that a file is compiled for, and the exponential. Written with the vector types of GCC
// and Clang. Only for the files that are compiled once per instruction set: everything has internal linkage.
#pragma once

#include "vector_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// The name of this instruction set's table: FUSED_TOPK_TABLE(Kernels) is kAvx2Kernels in the build for AVX2.
#define FUSED_TOPK_JOIN(set, kind) k##set##kind
#define FUSED_TOPK_JOIN_EXPANDED(set, kind) FUSED_TOPK_JOIN(set, kind)
#define FUSED_TOPK_TABLE(kind) FUSED_TOPK_JOIN_EXPANDED(FUSED_TOPK_SET, kind)

namespace fused_topk::cpu {
namespace {

#if defined(__AVX512F__)
constexpr u32 kLanes = 16;
#elif defined(__AVX2__)
constexpr u32 kLanes = 8;
#else
constexpr u32 kLanes = 4;
#endif
static_assert(64 % kLanes == 0 && kBlock % 64 == 0);

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int Ints __attribute__((vector_size(4 * kLanes)));
typedef u32 UInts __attribute__((vector_size(4 * kLanes)));
typedef double Doubles __attribute__((vector_size(8 * kLanes)));
typedef float UnalignedFloats __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

inline Floats load(const float* x) { return *reinterpret_cast<const UnalignedFloats*>(x); }

#if defined(__AVX2__)
// All bits of the first n lanes.
inline __m256i first_lanes(u32 n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#endif

// x[0 .. n], the other lanes `fill`; n < kLanes.
inline Floats load_some(const float* x, u32 n, float fill) {
#if defined(__AVX512F__)
  return (Floats)_mm512_mask_loadu_ps(_mm512_set1_ps(fill), __mmask16((1u << n) - 1), x);
#elif defined(__AVX2__)
  const __m256i lanes = first_lanes(n);
  return (Floats)_mm256_blendv_ps(_mm256_set1_ps(fill), _mm256_maskload_ps(x, lanes), _mm256_castsi256_ps(lanes));
#else
  float lanes[kLanes];
  for (u32 i = 0; i < kLanes; ++i) lanes[i] = fill;
  __builtin_memcpy(lanes, x, n * sizeof(float));
  return load(lanes);
#endif
}

inline void store_vector(float* y, Floats lanes) { *reinterpret_cast<UnalignedFloats*>(y) = lanes; }

// The first n lanes; n <= kLanes.
inline void store_some(float* y, u32 n, Floats lanes) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(y, __mmask16((1u << n) - 1), (__m512)lanes);
#elif defined(__AVX2__)
  _mm256_maskstore_ps(y, first_lanes(n), (__m256)lanes);
#else
  __builtin_memcpy(y, &lanes, n * sizeof(float));
#endif
}

// load_some and store_some for n <= kLanes. n is mostly kLanes.
inline Floats load_lanes(const float* x, u32 n, float fill = -kInfinity) {
  return n == kLanes ? load(x) : load_some(x, n, fill);
}

inline void store_lanes(float* y, u32 n, Floats lanes) {
  if (n == kLanes) {
    store_vector(y, lanes);
  } else {
    store_some(y, n, lanes);
  }
}

// Subtracting +0 keeps the sign of -0. Adding +0 would not.
inline Floats broadcast(float x) { return x - Floats{}; }

inline Ints broadcast(int x) { return x - Ints{}; }

inline Ints load_ints(const int* x) {
  Ints lanes;
  __builtin_memcpy(&lanes, x, sizeof lanes);
  return lanes;
}

// b where one of the two is NaN.
inline Floats greater(Floats a, Floats b) { return a > b ? a : b; }

// The lower and the upper half of a vector's lanes.
template <class HALF, class VECTOR>
inline HALF half_of(const VECTOR& x, u32 which) {
  static_assert(2 * sizeof(HALF) == sizeof(VECTOR));
  HALF half;
  __builtin_memcpy(&half, reinterpret_cast<const char*>(&x) + which * sizeof half, sizeof half);
  return half;
}

typedef float Floats4 __attribute__((vector_size(16)));
typedef float Floats8 __attribute__((vector_size(32)));
typedef double Doubles4 __attribute__((vector_size(32)));
typedef double Doubles8 __attribute__((vector_size(64)));

// Four lanes that hold the greatest, or the sum, of all lanes. Each step halves the vector.
inline Floats4 four_greatest(Floats4 x) { return x; }
inline Doubles4 four_sums(Doubles4 x) { return x; }

#if defined(__AVX2__)
inline Floats4 four_greatest(Floats8 x) {
  const auto low = half_of<Floats4>(x, 0), high = half_of<Floats4>(x, 1);
  return low > high ? low : high;
}

inline Doubles4 four_sums(Doubles8 x) { return half_of<Doubles4>(x, 0) + half_of<Doubles4>(x, 1); }
#endif

#if defined(__AVX512F__)
inline Floats4 four_greatest(Floats x) {
  const auto low = half_of<Floats8>(x, 0), high = half_of<Floats8>(x, 1);
  return four_greatest(low > high ? low : high);
}

inline Doubles4 four_sums(Doubles x) { return four_sums(half_of<Doubles8>(x, 0) + half_of<Doubles8>(x, 1)); }
#endif

inline float greatest_lane(Floats x) {
  const Floats4 lanes = four_greatest(x);
  const float even = lanes[0] > lanes[2] ? lanes[0] : lanes[2];
  const float odd = lanes[1] > lanes[3] ? lanes[1] : lanes[3];
  return even > odd ? even : odd;
}

inline double sum_of_lanes(Doubles x) {
  const Doubles4 lanes = four_sums(x);
  return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

// Lane r is the greatest lane of x[r].
inline Floats4 greatest_lanes(const Floats (&x)[4]) {
#if defined(__SSE2__)
  __m128 a = four_greatest(x[0]), b = four_greatest(x[1]), c = four_greatest(x[2]), d = four_greatest(x[3]);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  const Floats4 even = a > c ? a : c, odd = b > d ? b : d;
  return even > odd ? even : odd;
#else
  return Floats4{greatest_lane(x[0]), greatest_lane(x[1]), greatest_lane(x[2]), greatest_lane(x[3])};
#endif
}

// Lane r is the sum of the lanes of x[r].
inline Doubles4 sums_of_lanes(const Doubles (&x)[4]) {
#if defined(__AVX2__)
  const __m256d first = _mm256_hadd_pd(four_sums(x[0]), four_sums(x[1]));
  const __m256d last = _mm256_hadd_pd(four_sums(x[2]), four_sums(x[3]));
  return Doubles4(_mm256_permute2f128_pd(first, last, 0x20)) + Doubles4(_mm256_permute2f128_pd(first, last, 0x31));
#else
  return Doubles4{sum_of_lanes(x[0]), sum_of_lanes(x[1]), sum_of_lanes(x[2]), sum_of_lanes(x[3])};
#endif
}

// Relative error at most 2.7 units of 2^-24, beyond what the rounding of x - reference does to e^x:
//   - (x - reference) - n c_high is exact, with or without fused multiply-add: c_high has 16 bits, n has 7, and the two
//     numbers are within a factor of 2 of each other (Sterbenz). c_high + c_low is c to 40 bits. So f = r / c is off by
//     three roundings, those of r, of 1 / c and of their product, each of |f| <= 1/2: 1.5 units, and 2^f by ln 2 times
//     that, 1.1.
//   - The polynomial, minimax of degree 6 on [-1/2, 1/2] with 1 as its constant term, and its roundings: 1.6 units, or
//     1.3 with fused multiply-add (the most over 200,000 arguments; 0.03 of it is the polynomial's own).
//   - The multiplication by 2^n is exact.
// Measured: 2.13 units over every float32 argument at T = 1, 1.76 with fused multiply-add; 2.35 at other T.
// tests/oracle.py allows the exponential 4 units in all that the tests compare.
//
// Several vectors at a time. For one vector alone, each operation would wait for the one before. e[v]: the
// exponential of x[v]. Its fields are those of Exponential, as numbers or lane by lane.
template <u32 COUNT, class EXPONENTIALS>
inline void exp_in_place(Floats (&x)[COUNT], const EXPONENTIALS& e) {
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits, here with a float's exponent bias added to it.
  constexpr float kRound = 0x1.8p23f + 127.0f;
  // p is n first, the polynomial later.
  Floats shifted[COUNT], f[COUNT], p[COUNT];
  for (u32 v = 0; v < COUNT; ++v) x[v] -= e[v].reference;
  for (u32 v = 0; v < COUNT; ++v) shifted[v] = x[v] * e[v].inverse_c + kRound;
  for (u32 v = 0; v < COUNT; ++v) p[v] = shifted[v] - kRound;
  for (u32 v = 0; v < COUNT; ++v) f[v] = x[v] - p[v] * e[v].c_high;
  for (u32 v = 0; v < COUNT; ++v) f[v] = f[v] - p[v] * e[v].c_low;
  for (u32 v = 0; v < COUNT; ++v) f[v] = f[v] * e[v].inverse_c;
  for (u32 v = 0; v < COUNT; ++v) p[v] = f[v] * 0x1.41d334p-13f + 0x1.5f456ap-10f;
  for (u32 v = 0; v < COUNT; ++v) p[v] = p[v] * f[v] + 0x1.3b2dbcp-7f;
  for (u32 v = 0; v < COUNT; ++v) p[v] = p[v] * f[v] + 0x1.c6aed4p-5f;
  for (u32 v = 0; v < COUNT; ++v) p[v] = p[v] * f[v] + 0x1.ebfbdap-3f;
  for (u32 v = 0; v < COUNT; ++v) p[v] = p[v] * f[v] + 0x1.62e430p-1f;
  for (u32 v = 0; v < COUNT; ++v) p[v] = p[v] * f[v] + 1.0f;
  // Only the low bits survive the shift. The comparison is written so that a NaN stays NaN.
  for (u32 v = 0; v < COUNT; ++v) x[v] = x[v] < e[v].lowest ? Floats{} : p[v] * (Floats)((UInts)shifted[v] << 23);
}

// One exponential for all vectors.
struct SameExponential {
  const Exponential& e;
  const Exponential& operator[](u32) const { return e; }
};

template <u32 COUNT>
inline void exp_in_place(Floats (&x)[COUNT], const Exponential& e) {
  exp_in_place(x, SameExponential{e});
}

// The sum of the exponentials of x [n]. prepare(vector, i) may replace each vector, which begins at x[i].
// keep(terms, i, lanes) gets each vector of exponentials: its first `lanes` lanes belong to x[i] and the following. Fetches
// n elements of `bytes` each into the cache, from `next` on.
//
// A float32 lane adds at most 4 exponentials and goes on in float64. With the two additions that join four vectors
// these are 5 roundings, however long the row is.
template <class PREPARE, class KEEP>
inline double sum_of_exp(const float* x, u32 n, const Exponential& e, const void* next, u32 bytes,
                         const PREPARE& prepare, const KEEP& keep) {
  constexpr u32 kGroup = 4 * kLanes;
  constexpr u32 kGroupsOfRun = 4;
  const char* fetch = static_cast<const char*>(next);
  const u32 groups = n / kGroup;
  Doubles total = {};
  u32 i = 0;
  for (u32 group = 0; group < groups;) {
    const u32 end = groups - group < kGroupsOfRun ? groups : group + kGroupsOfRun;
    Floats sum[4] = {};
    for (; group < end; ++group, i += kGroup) {
      for (u32 byte = 0; byte < kGroup * bytes; byte += 64) __builtin_prefetch(fetch + i * bytes + byte);
      Floats terms[4];
      for (u32 v = 0; v < 4; ++v) terms[v] = prepare(load(x + i + v * kLanes), i + v * kLanes);
      exp_in_place(terms, e);
      for (u32 v = 0; v < 4; ++v) sum[v] += terms[v];
      for (u32 v = 0; v < 4; ++v) keep(terms[v], i + v * kLanes, kLanes);
    }
    total += __builtin_convertvector((sum[0] + sum[1]) + (sum[2] + sum[3]), Doubles);
  }
  for (; i < n; i += kLanes) {
    const u32 rest = n - i < kLanes ? n - i : kLanes;
    Floats term[1] = {prepare(load_lanes(x + i, rest), i)};
    exp_in_place(term, e);
    keep(term[0], i, rest);
    total += __builtin_convertvector(term[0], Doubles);
  }
  return sum_of_lanes(total);
}
template <class KEEP>
inline double sum_of_exp(const float* x, u32 n, const Exponential& e, const void* next, u32 bytes, const KEEP& keep) {
  return sum_of_exp(x, n, e, next, bytes, [](Floats lanes, u32) { return lanes; }, keep);
}

}  // namespace
}  // namespace fused_topk::cpu
