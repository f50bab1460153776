// SPDX-License-Identifier: Apache-2.0
// One instruction set's table of router_kernels.h, built like vector_kernels.cpp.
//
// Rows lie in the lanes of vectors, so one operation compares elements of several rows. A candidate is a key of 32 bits
// above 8 bits of index: an integer below 2^40. A float64 holds it exactly, and every instruction set has the maximum
// and the minimum of float64. A sorting network over groups of elements finds the k best.
#include "router_kernels.h"

#include "side_by_side.h"

namespace fused_topk::cpu {
namespace {

// Rows that are solved together.
constexpr u32 kGroup = 8;
static_assert(kGroup % kRows == 0);

// ---- Keys, with rows in the lanes ----

typedef u32 Keys __attribute__((vector_size(4 * kGroup)));
typedef int SignedKeys __attribute__((vector_size(4 * kGroup)));

// order_key of order.h, lane by lane. It uses signed integers, because every instruction set compares vectors of them.
inline Keys order_keys(Keys bits) {
  const SignedKeys magnitude = (SignedKeys)(bits & 0x7FFFFFFFu);
  const Keys sign = (Keys)((SignedKeys)bits >> 31);
  const Keys key = bits ^ (sign | 0x80000000u);
  const Keys of_numbers = magnitude == 0 ? Keys{} + kZeroKey : key;
  return of_numbers | (Keys)(magnitude > 0x7F800000);
}

// Elements [i, i + 8) of 8 rows, element j of row r in lane r of columns[j]. Elements beyond a row's end are undefined.
inline void load_columns(const float* const (&x)[kGroup], u32 i, u32 n, Keys (&columns)[8]) {
#if defined(__AVX2__)
  __m256 a[8], b[8];
  const u32 count = n - i < 8 ? n - i : 8;
  const __m256i lanes = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  for (u32 r = 0; r < 8; ++r) a[r] = _mm256_maskload_ps(x[r] + i, lanes);
  for (u32 r = 0; r < 8; r += 2) {
    b[r] = _mm256_unpacklo_ps(a[r], a[r + 1]);
    b[r + 1] = _mm256_unpackhi_ps(a[r], a[r + 1]);
  }
  for (u32 half = 0; half < 8; half += 4) {
    a[half] = _mm256_shuffle_ps(b[half], b[half + 2], 0x44);
    a[half + 1] = _mm256_shuffle_ps(b[half], b[half + 2], 0xEE);
    a[half + 2] = _mm256_shuffle_ps(b[half + 1], b[half + 3], 0x44);
    a[half + 3] = _mm256_shuffle_ps(b[half + 1], b[half + 3], 0xEE);
  }
  for (u32 j = 0; j < 4; ++j) {
    columns[j] = (Keys)_mm256_permute2f128_ps(a[j], a[j + 4], 0x20);
    columns[j + 4] = (Keys)_mm256_permute2f128_ps(a[j], a[j + 4], 0x31);
  }
#else
  for (u32 j = 0; j < 8 && i + j < n; ++j) {
    for (u32 r = 0; r < 8; ++r) columns[j][r] = bits_of(x[r][i + j]);
  }
#endif
}

// ---- The sorting network ----

constexpr u32 kCandidates = kLanes / 2;
typedef double Candidates __attribute__((vector_size(8 * kCandidates)));
typedef u64 CandidateBits __attribute__((vector_size(8 * kCandidates)));
typedef u32 CandidateKeys __attribute__((vector_size(4 * kCandidates)));
static_assert(kGroup % kCandidates == 0);

// The bits of 2^52. Adding the bits of an integer below 2^52 gives the sum of both as a float64.
constexpr u64 kInteger = 0x4330000000000000ull;

inline Candidates candidates_of(CandidateKeys keys, u32 index) {
  const CandidateBits bits = __builtin_convertvector(keys, CandidateBits);
  return (Candidates)((bits << 8) + (kInteger + (kMostExperts - 1 - index)));
}

inline void sort_two(Candidates& a, Candidates& b) {
#if defined(__AVX512F__)
  const auto less = (Candidates)_mm512_min_pd((__m512d)a, (__m512d)b);
  a = (Candidates)_mm512_max_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
  const auto less = (Candidates)_mm256_min_pd((__m256d)a, (__m256d)b);
  a = (Candidates)_mm256_max_pd((__m256d)a, (__m256d)b);
#else
  const Candidates less = a > b ? b : a;
  a = a > b ? a : b;
#endif
  b = less;
}

// x[0 .. WIDTH], greatest first: Batcher's odd-even merge sort.
template <u32 WIDTH>
inline void sort(Candidates* x) {
  if constexpr (WIDTH > 1) {
    constexpr u32 kHalf = WIDTH / 2;
    sort<kHalf>(x);
    sort<kHalf>(x + kHalf);
#pragma GCC unroll 8
    for (u32 i = 0; i < kHalf; ++i) sort_two(x[i], x[i + kHalf]);
#pragma GCC unroll 8
    for (u32 distance = kHalf / 2; distance > 0; distance /= 2) {
#pragma GCC unroll 8
      for (u32 i = distance; i + distance < WIDTH; ++i) {
        if ((i - distance) / distance % 2 == 0) sort_two(x[i], x[i + distance]);
      }
    }
  }
}

// Leaves the WIDTH best of the sorted `best` and `x` in `best`, sorted. The greater one of each place and its mirror
// image is taken. These rise and then fall (a bitonic sequence), so comparing half with half sorts them.
template <u32 WIDTH>
inline void merge(Candidates* best, Candidates* x) {
#pragma GCC unroll 8
  for (u32 i = 0; i < WIDTH; ++i) sort_two(best[i], x[WIDTH - 1 - i]);
#pragma GCC unroll 8
  for (u32 distance = WIDTH / 2; distance > 0; distance /= 2) {
#pragma GCC unroll 8
    for (u32 i = 0; i < WIDTH; ++i) {
      if (i / distance % 2 == 0) sort_two(best[i], best[i + distance]);
    }
  }
}

// keys: [n rounded up to a multiple of WIDTH], of which `lane` is the first of kCandidates.
template <u32 WIDTH>
inline void best_of(const Keys* keys, u32 n, u32 lane, Candidates (&best)[WIDTH]) {
  const auto load_group = [=](u32 first, Candidates(&group)[WIDTH]) {
    for (u32 i = 0; i < WIDTH; ++i) {
      CandidateKeys of_rows;
      __builtin_memcpy(&of_rows, reinterpret_cast<const u32*>(keys + first + i) + lane, sizeof of_rows);
      group[i] = candidates_of(of_rows, first + i);
    }
    sort<WIDTH>(group);
  };
  load_group(0, best);
  for (u32 first = WIDTH; first < n; first += WIDTH) {
    Candidates group[WIDTH];
    load_group(first, group);
    merge<WIDTH>(best, group);
  }
}

// ---- Results ----

// The chosen of a group of rows. Missing rows have zeros, or what the last row has.
struct Chosen {
  u32 keys[kMostChosen][kGroup] = {};
  u32 indices[kMostChosen][kGroup] = {};
};

template <u32 WIDTH>
inline void choose(const Keys* keys, u32 n, u32 count, Chosen& chosen) {
  for (u32 lane = 0; lane < count; lane += kCandidates) {
    Candidates best[WIDTH];
    best_of<WIDTH>(keys, n, lane, best);
    for (u32 i = 0; i < WIDTH; ++i) {
      const CandidateBits bits = (CandidateBits)best[i] - kInteger;
      const auto of_rows = __builtin_convertvector(bits >> 8, CandidateKeys);
      const auto indices = (kMostExperts - 1) - __builtin_convertvector(bits & 0xFFu, CandidateKeys);
      __builtin_memcpy(chosen.keys[i] + lane, &of_rows, sizeof of_rows);
      __builtin_memcpy(chosen.indices[i] + lane, &indices, sizeof indices);
    }
  }
}

// The values of row r, whose normalizer is finite. z: (x - m) / T of the chosen; terms: e^z.
inline void write_values(const RouterRows& rows, u32 r, const float (&terms)[kMostChosen][kGroup],
                         const double (&z)[kMostChosen][kGroup], double d, double log_d, float* values) {
  if (rows.value_kind == ValueKind::kLogProbabilities) {
    for (u32 i = 0; i < rows.k; ++i) values[i] = float(z[i][r] - log_d);
    return;
  }
  for (u32 i = 0; i < rows.k; ++i) {
    // Below the range of the float32 exponential there are results still.
    const double term = terms[i][r] > 0.0f ? double(terms[i][r]) : __builtin_exp(z[i][r]);
    values[i] = float(term / d);
  }
}

inline void route_group(const RouterRows& rows, const float* const (&x)[kGroup], u32 count, float* values, i64* indices,
                        float* logsumexp) {
  const u32 n = rows.n, k = rows.k;
  alignas(64) Keys keys[kMostExperts];
  for (u32 i = 0; i < n; i += 8) {
    Keys columns[8];
    load_columns(x, i, n, columns);
    for (u32 j = 0; j < 8; ++j) keys[i + j] = i + j < n ? order_keys(columns[j]) : Keys{} + kNoKey;
  }
  Chosen chosen;
  if (k == 1) {
    choose<1>(keys, n, count, chosen);
  } else if (k == 2) {
    choose<2>(keys, n, count, chosen);
  } else if (k <= 4) {
    choose<4>(keys, n, count, chosen);
  } else {
    choose<8>(keys, n, count, chosen);
  }
  for (u32 r = 0; r < count; ++r) {
    for (u32 i = 0; i < k; ++i) indices[r * k + i] = chosen.indices[i][r];
  }

  float m[kGroup] = {};
  double d[kGroup] = {}, log_d[kGroup];
  bool is_finite[kGroup];
  for (u32 first = 0; first < count; first += kRows) {
    ShortRows quad{{x[first], x[first + 1], x[first + 2], x[first + 3]}, {}, n};
    const Normalizers normalizers = normalize<false>(quad, rows.exponential);
    const Doubles4 logarithms = logarithm(normalizers.d);
    for (u32 i = 0; i < kRows; ++i) {
      const u32 r = first + i;
      m[r] = normalizers.m[i];
      d[r] = normalizers.d[i];
      log_d[r] = logarithms[i];
      is_finite[r] = normalizers.is_finite(i);
      if (r < count) logsumexp[r] = logsumexp_of(normalizers, i, x[r], n, rows.inverse_temperature, log_d[r]);
    }
  }
  if (rows.value_kind == ValueKind::kLogits) return;

  alignas(64) float terms[kMostChosen][kGroup];
  alignas(64) double z[kMostChosen][kGroup];
  for (u32 i = 0; i < k; ++i) {
    for (u32 r = 0; r < kGroup; ++r) {
      const float logit = float_of(bits_of_key(chosen.keys[i][r]));
      z[i][r] = (double(logit) - m[r]) * rows.inverse_temperature;
      terms[i][r] = logit - m[r];
    }
  }
  for (u32 i = 0; i < k * kGroup; i += kLanes) {
    Floats of_rows[1] = {load(terms[0] + i)};
    exp_in_place(of_rows, rows.exponential);
    store_vector(terms[0] + i, of_rows[0]);
  }
  if (rows.normalize_over == NormalizeOver::kTopK) {
    for (u32 r = 0; r < count; ++r) {
      d[r] = 0.0;
      for (u32 i = 0; i < k; ++i) d[r] += terms[i][r];
    }
    for (u32 first = 0; first < count; first += kRows) {
      const Doubles4 logarithms = logarithm(Doubles4{d[first], d[first + 1], d[first + 2], d[first + 3]});
      for (u32 i = 0; i < kRows; ++i) log_d[first + i] = logarithms[i];
    }
  }
  for (u32 r = 0; r < count; ++r) {
    if (is_finite[r]) {
      write_values(rows, r, terms, z, d[r], log_d[r], values + r * k);
    } else {
      // A row without a finite normalizer has no probabilities. As in torch.softmax, they are NaN.
      for (u32 i = 0; i < k; ++i) values[r * k + i] = kNaN;
    }
  }
}

void route(const RouterRows& rows) {
  for (u32 first = 0; first < rows.rows; first += kGroup) {
    const u32 count = rows.rows - first < kGroup ? rows.rows - first : kGroup;
    // The last row stands in for those that are missing.
    const float* x[kGroup];
    for (u32 r = 0; r < kGroup; ++r) x[r] = rows.x + (first + (r < count ? r : count - 1)) * rows.n;
    const u64 place = u64(first) * rows.k;
    route_group(rows, x, count, rows.values + place, rows.indices + place, rows.logsumexp + first);
  }
}

}  // namespace

extern const RouterKernels FUSED_TOPK_TABLE(RouterKernels) = {route};

}  // namespace fused_topk::cpu
