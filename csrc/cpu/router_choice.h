// SPDX-License-Identifier: Apache-2.0
// The k best of a group of rows as short as an expert router's: what router_kernels.cpp chooses, before any arithmetic.
// Only for the files that are compiled once per instruction set, like vectors.h.
//
// Rows lie in the lanes of vectors, so one operation compares elements of several rows. A candidate is a key of 32 bits
// above 8 bits of index: an integer below 2^40. A float64 holds it exactly, and every instruction set has the maximum
// and the minimum of float64. A sorting network over groups of elements finds the k best.
#pragma once

#include "router_kernels.h"
#include "vectors.h"

namespace fused_topk::cpu {
namespace {

// Rows that are solved together.
constexpr u32 kGroup = 8;

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

// Elements [i, i + 8) of 8 rows: element i + j of row r in lane r of columns[j]. Elements beyond a row's end are undefined.
inline void load_columns(const float* const (&x)[kGroup], u32 i, u32 n, Keys (&columns)[8]) {
#if defined(__AVX2__)
  __m256 a[8], b[8];
  const __m256i lanes = first_lanes(n - i < 8 ? n - i : 8);
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

// GCC converts the halves of a vector of AVX-512 one by one unless it is told.
inline CandidateBits widen(CandidateKeys keys) {
#if defined(__AVX512F__)
  return (CandidateBits)_mm512_maskz_cvtepu32_epi64(0xFF, (__m256i)keys);
#else
  return __builtin_convertvector(keys, CandidateBits);
#endif
}

inline CandidateKeys narrow(CandidateBits bits) {
#if defined(__AVX512F__)
  return (CandidateKeys)_mm512_maskz_cvtepi64_epi32(0xFF, (__m512i)bits);
#else
  return __builtin_convertvector(bits, CandidateKeys);
#endif
}

inline Candidates candidates_of(CandidateKeys keys, u32 index) {
  const CandidateBits bits = widen(keys);
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
    for (u32 pair = 0; pair < WIDTH / 2; ++pair) {
      const u32 i = 2 * pair - pair % distance;
      sort_two(best[i], best[i + distance]);
    }
  }
}

// keys: [n rounded up to a multiple of WIDTH]. The rows are kCandidates lanes from `lane` on.
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

// ---- The chosen tokens ----

// Of each row of a group, the greatest first. A lane without a row repeats the last row.
struct Chosen {
  u32 keys[kMostChosen][kGroup];
  u32 indices[kMostChosen][kGroup];
};

template <u32 WIDTH>
inline void choose(const Keys* keys, u32 n, Chosen& chosen) {
  for (u32 lane = 0; lane < kGroup; lane += kCandidates) {
    Candidates best[WIDTH];
    best_of<WIDTH>(keys, n, lane, best);
    for (u32 i = 0; i < WIDTH; ++i) {
      const CandidateBits bits = (CandidateBits)best[i] - kInteger;
      const CandidateKeys of_rows = narrow(bits >> 8);
      const CandidateKeys indices = (kMostExperts - 1) - narrow(bits & 0xFFu);
      __builtin_memcpy(chosen.keys[i] + lane, &of_rows, sizeof of_rows);
      __builtin_memcpy(chosen.indices[i] + lane, &indices, sizeof indices);
    }
  }
}

// The k best of each row. keys: as for best_of, padded to a multiple of 8.
inline void choose(const Keys* keys, u32 n, u32 k, Chosen& chosen) {
  if (k == 1) {
    choose<1>(keys, n, chosen);
  } else if (k == 2) {
    choose<2>(keys, n, chosen);
  } else if (k <= 4) {
    choose<4>(keys, n, chosen);
  } else {
    choose<8>(keys, n, chosen);
  }
}

}  // namespace
}  // namespace fused_topk::cpu
