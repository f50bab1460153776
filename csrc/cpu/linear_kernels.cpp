// SPDX-License-Identifier: Apache-2.0
// One instruction set's kernels of linear_kernels.h.
//
// A hidden state and a token's weights both lie along the depth. So a logit is summed in the lanes of one vector, and its
// lanes are added at the end; nothing is packed or transposed. A tile of a few rows times four tokens stays in registers.
// Each vector of weights is loaded once for all rows of the tile, and each vector of a hidden state once for four tokens.
//
// The depth is cut into stretches of kDepth. A stretch's lanes are added, and then the stretches in their order. So each
// product passes through at most
//     n = kDepth / kLanes + log2(kLanes) + ceil(depth / kDepth)
// roundings as a term of a sum, one more of its own without fused multiply-add, and one for the bias. With
// u = 2^-24 and s = sum |h_i w_i| a logit's error before it is rounded to the weight's dtype is at most
//     (n + 2) u s / (1 - (n + 2) u),
// for depth 2048 42 u s with AVX-512, 73 u s with AVX2 and 136 u s with the baseline. Rounding errors are of both signs, so
// most are nearer to their square root.
#include "linear_kernels.h"

#include <algorithm>
#include <cstddef>

#include "vectors.h"

namespace fused_topk::cpu {
namespace {

constexpr u32 kTokens = 4;
// What fits into the registers: an accumulator a row and token, the vectors of four tokens and one of a row.
#if defined(__AVX512F__)
constexpr u32 kRowsAtOnce = 6;
#else
constexpr u32 kRowsAtOnce = 2;
#endif
// Elements of a hidden state that are multiplied at once. Those of a few rows and of four tokens fit into the first-level
// cache together.
constexpr u32 kDepth = 512;
// While some weights are multiplied, weights of later tokens are fetched into the cache: about so many bytes ahead, at the
// same depth. The hardware on its own fetches fewer bytes ahead. Without this, 512 -> 50257 float32 took 1.9 times as long
// at 16 and 32 rows (Xeon model 207, 2026-11-25). Times of torch's product over ours, float32, 768 -> 50257, 1024 and
// 2048 -> 32000: 1.0 to 1.1 at 1 row, 1.9 to 2.1 at 2, 1.9 to 2.7 at 4. When we fetched 2 KB of the same tokens: 0.9 to
// 1.0, 1.6 to 2.0, 1.7 to 2.5 (EPYC of family 25, 2026-11-27).
constexpr i64 kAhead = 65536;

// How weights become vectors of floats: kVectors of them from kStep elements.
struct Float32 {
  static constexpr u32 kVectors = 1;
  static constexpr u32 kStep = kLanes;
  static constexpr u32 kBytes = 4;
  static constexpr bool kRounds = false;

  static void load_weights(const char* source, Floats (&w)[kVectors]) {
    w[0] = load(reinterpret_cast<const float*>(source));
  }

  static void load_some_weights(const char* source, u32 n, Floats (&w)[kVectors]) {
    w[0] = load_some(reinterpret_cast<const float*>(source), n, 0.0f);
  }

  static void arrange(const float* hidden, float* arranged) { store_vector(arranged, load(hidden)); }

  static Floats rounded(Floats x) { return x; }
};

// A bfloat16 is the upper half of a float. The elements of a vector with even numbers make one vector of floats, and
// the others a second one: one operation each. The hidden states are arranged in the same way. AVX512-BF16
// multiplies pairs and needs no such vectors, but took 1.4 times as long (Xeon model 207, 4 rows and more, 2026-11-25).
struct BFloat16 {
  static constexpr u32 kVectors = 2;
  static constexpr u32 kStep = 2 * kLanes;
  static constexpr u32 kBytes = 2;
  static constexpr bool kRounds = true;

  static void load_weights(const char* source, Floats (&w)[kVectors]) {
    UInts pairs;
    __builtin_memcpy(&pairs, source, sizeof pairs);
    w[0] = (Floats)(pairs << 16);
    w[1] = (Floats)(pairs & 0xFFFF0000u);
  }

  static void load_some_weights(const char* source, u32 n, Floats (&w)[kVectors]) {
    u16 elements[kStep] = {};
    __builtin_memcpy(elements, source, n * sizeof(u16));
    load_weights(reinterpret_cast<const char*>(elements), w);
  }

  static void arrange(const float* hidden, float* arranged) {
    for (u32 i = 0; i < kStep; ++i) arranged[i % 2 * kLanes + i / 2] = hidden[i];
  }

  // To the nearest, ties to even.
  static Floats rounded(Floats x) {
    const UInts bits = (UInts)x;
    const UInts nearest = (bits + 0x7FFFu + (bits >> 16 & 1u)) & 0xFFFF0000u;
    // Rounding may carry a NaN's bits into the sign.
    return x == x ? (Floats)nearest : x;
  }
};

// add_lanes: sums[r][t] is the sum of the lanes of x[r][t]. The lanes of every vector are added in the same order.
#if defined(__AVX512F__)
// Reduces two vectors to one. Adds half of a's lanes to its other half, and does the same with b. `of_b` marks the lanes that hold b's
// sums. `moved` has the other half of each in the place of the half that stays.
inline Floats halved(Floats a, Floats b, __mmask16 of_b, Floats moved) {
  return (Floats)_mm512_mask_blend_ps(of_b, (__m512)a, (__m512)b) + moved;
}

// Reduces x[0], x[2], x[1] and x[3] to four lanes each. The sum of a vector's four lanes is the sum of all its lanes.
inline Floats quartered(const Floats (&x)[kTokens]) {
  Floats pair[2];
  for (u32 i = 0; i < 2; ++i) {
    const __m512 a = (__m512)x[2 * i], b = (__m512)x[2 * i + 1];
    pair[i] = halved(x[2 * i], x[2 * i + 1], 0xFF00, (Floats)_mm512_shuffle_f32x4(a, b, 0x4E));
  }
  const __m512i others = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
  return halved(pair[0], pair[1], 0xF0F0, (Floats)_mm512_permutex2var_ps((__m512)pair[0], others, (__m512)pair[1]));
}

template <u32 ROWS>
__attribute__((always_inline)) inline void add_lanes(const Floats (&x)[ROWS][kTokens], Floats4 (&sums)[ROWS]) {
#pragma GCC unroll 2
  for (u32 r = 0; r < ROWS; r += 4) {
    // Four rows at once. The last row stands in for missing rows.
    Floats quarters[4], pair[2];
#pragma GCC unroll 4
    for (u32 i = 0; i < 4; ++i) quarters[i] = r + i < ROWS ? quartered(x[r + i < ROWS ? r + i : 0]) : quarters[i - 1];
#pragma GCC unroll 2
    for (u32 i = 0; i < 2; ++i) {
      const Floats a = quarters[2 * i], b = quarters[2 * i + 1];
      pair[i] = halved(a, b, 0xCCCC, (Floats)_mm512_shuffle_ps((__m512)a, (__m512)b, 0x4E));
    }
    const Floats by_token = (Floats)_mm512_shuffle_ps((__m512)pair[0], (__m512)pair[1], 0x88) +
                            (Floats)_mm512_shuffle_ps((__m512)pair[0], (__m512)pair[1], 0xDD);
    const __m512i rows_first = _mm512_setr_epi32(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15);
    const __m512 by_row = _mm512_permutexvar_ps(rows_first, (__m512)by_token);
    sums[r] = (Floats4)_mm512_castps512_ps128(by_row);
    if (r + 1 < ROWS) sums[r + 1] = (Floats4)_mm512_extractf32x4_ps(by_row, 1);
    if (r + 2 < ROWS) sums[r + 2] = (Floats4)_mm512_extractf32x4_ps(by_row, 2);
    if (r + 3 < ROWS) sums[r + 3] = (Floats4)_mm512_extractf32x4_ps(by_row, 3);
  }
}
#else
template <u32 ROWS>
__attribute__((always_inline)) inline void add_lanes(const Floats (&x)[ROWS][kTokens], Floats4 (&sums)[ROWS]) {
  for (u32 r = 0; r < ROWS; ++r) {
#if defined(__AVX2__)
    const __m256 ab = _mm256_hadd_ps((__m256)x[r][0], (__m256)x[r][1]);
    const __m256 cd = _mm256_hadd_ps((__m256)x[r][2], (__m256)x[r][3]);
    const Floats8 halves = (Floats8)_mm256_hadd_ps(ab, cd);
    sums[r] = half_of<Floats4>(halves, 0) + half_of<Floats4>(halves, 1);
#else
    for (u32 t = 0; t < kTokens; ++t) sums[r][t] = (x[r][t][0] + x[r][t][2]) + (x[r][t][1] + x[r][t][3]);
#endif
  }
}
#endif

// One stretch of the depth, n <= kDepth, of ROWS rows and `count` <= kTokens tokens. hidden: [n / kLanes, ROWS, kLanes]. It
// and weight[t] begin with the stretch's first element. Writes the sums, or adds them to those of the stretches before.
// Meanwhile it fetches into the cache what lies `ahead` bytes after the weights of FETCHES tokens, from number `fetched` on.
template <class WEIGHT, u32 ROWS, u32 FETCHES>
void multiply_tile(const float* hidden, const char* const (&weight)[kTokens], u32 n, u32 count, i64 ahead, u32 fetched,
                   bool is_first, float* logits) {
  // Not `= {}`, which clears memory before the registers.
  Floats products[ROWS][kTokens];
#pragma GCC unroll 8
  for (u32 r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (u32 t = 0; t < kTokens; ++t) products[r][t] = Floats{};
  }
  const char* fetch[FETCHES];
  for (u32 t = 0; t < FETCHES; ++t) fetch[t] = weight[fetched + t] + ahead;
  const auto add_products = [&](u32 i, const auto& load_vectors) {
    Floats w[kTokens][WEIGHT::kVectors];
    for (u32 t = 0; t < kTokens; ++t) load_vectors(weight[t] + i * WEIGHT::kBytes, w[t]);
    for (u32 t = 0; t < FETCHES; ++t) __builtin_prefetch(fetch[t] + i * WEIGHT::kBytes);
#pragma GCC unroll 2
    for (u32 v = 0; v < WEIGHT::kVectors; ++v) {
#pragma GCC unroll 8
      for (u32 r = 0; r < ROWS; ++r) {
        const Floats x = load(hidden + r * kLanes);
#pragma GCC unroll 8
        for (u32 t = 0; t < kTokens; ++t) products[r][t] += x * w[t][v];
      }
      hidden += ROWS * kLanes;
    }
  };
  u32 i = 0;
  for (; i + WEIGHT::kStep <= n; i += WEIGHT::kStep) add_products(i, WEIGHT::load_weights);
  if (i < n) {
    const auto load_rest = [&](const char* source, Floats(&w)[WEIGHT::kVectors]) {
      WEIGHT::load_some_weights(source, n - i, w);
    };
    add_products(i, load_rest);
  }
  Floats4 sums[ROWS];
  add_lanes(products, sums);
#pragma GCC unroll 8
  for (u32 r = 0; r < ROWS; ++r) {
    float* const y = logits + r * kLogitsStride;
    if (count == kTokens) {
      if (!is_first) {
        Floats4 before;
        __builtin_memcpy(&before, y, sizeof before);
        sums[r] += before;
      }
      __builtin_memcpy(y, &sums[r], sizeof sums[r]);
    } else {
      // There are no tokens beyond `count`.
      for (u32 t = 0; t < count; ++t) y[t] = is_first ? sums[r][t] : y[t] + sums[r][t];
    }
  }
}

template <class WEIGHT>
using MultiplyTile = void (*)(const float*, const char* const (&)[kTokens], u32, u32, i64, u32, bool, float*);

// The functions for each number of rows, from 1 on.
template <class WEIGHT, u32 FETCHES>
constexpr MultiplyTile<WEIGHT> kMultiplyTile[] = {
    multiply_tile<WEIGHT, 1, FETCHES>, multiply_tile<WEIGHT, 2, FETCHES>,
#if defined(__AVX512F__)
    multiply_tile<WEIGHT, 3, FETCHES>, multiply_tile<WEIGHT, 4, FETCHES>,
    multiply_tile<WEIGHT, 5, FETCHES>, multiply_tile<WEIGHT, 6, FETCHES>,
#endif
};

// How rows are shared by tiles of about the same height.
struct Tiles {
  u32 rows;
  u32 count;

  explicit Tiles(u32 rows) : rows(rows), count((rows + kRowsAtOnce - 1) / kRowsAtOnce) {}
  u32 first(u32 tile) const { return rows * tile / count; }
};

template <class WEIGHT>
u32 padded_depth(u32 depth) {
  return (depth + WEIGHT::kStep - 1) / WEIGHT::kStep * WEIGHT::kStep;
}

template <class WEIGHT>
void arrange(const float* hidden, u32 depth, u32 row, u32 rows, float* arranged) {
  const Tiles tiles(rows);
  u32 tile = 0;
  while (tiles.first(tile + 1) <= row) ++tile;
  const u32 first = tiles.first(tile), height = tiles.first(tile + 1) - first;
  float* place = arranged + size_t(first) * padded_depth<WEIGHT>(depth) + (row - first) * kLanes;
  for (u32 i = 0; i < depth; i += WEIGHT::kStep) {
    float elements[WEIGHT::kStep] = {}, vectors[WEIGHT::kStep];
    __builtin_memcpy(elements, hidden + i, (depth - i < WEIGHT::kStep ? depth - i : WEIGHT::kStep) * sizeof(float));
    WEIGHT::arrange(elements, vectors);
    for (u32 v = 0; v < WEIGHT::kVectors; ++v) store_vector(place + v * height * kLanes, load(vectors + v * kLanes));
    place += WEIGHT::kVectors * height * kLanes;
  }
}

template <class WEIGHT>
void multiply(const Products& p) {
  static_assert(kDepth % WEIGHT::kStep == 0);
  const u32 depth = padded_depth<WEIGHT>(p.depth);
  const Tiles tiles(p.rows);
  // The tiles share the fetches for a step's four tokens. A single tile fetches for all four, each of two tiles for two
  // tokens, and each of three or more tiles for one.
  const u32 fetches = tiles.count == 1 ? 4 : tiles.count == 2 ? 2 : 1;
  const MultiplyTile<WEIGHT>* const multiply_tiles = tiles.count == 1   ? kMultiplyTile<WEIGHT, 4>
                                                     : tiles.count == 2 ? kMultiplyTile<WEIGHT, 2>
                                                                        : kMultiplyTile<WEIGHT, 1>;
  const i64 of_tokens = std::max(kTokens * p.weight_stride * WEIGHT::kBytes, i64(1));
  const i64 ahead = std::max(kAhead / of_tokens, i64(1)) * of_tokens;
  for (u32 token = 0; token < p.tokens; token += kTokens) {
    const u32 count = p.tokens - token < kTokens ? p.tokens - token : kTokens;
    for (u32 begin = 0; begin < p.depth; begin += kDepth) {
      const u32 n = p.depth - begin < kDepth ? p.depth - begin : kDepth;
      const char* weight[kTokens];
      for (u32 t = 0; t < kTokens; ++t) {
        const i64 at = i64(token + (t < count ? t : count - 1)) * p.weight_stride + begin;
        weight[t] = p.weight + at * WEIGHT::kBytes;
      }
      for (u32 tile = 0; tile < tiles.count; ++tile) {
        const u32 row = tiles.first(tile), rows = tiles.first(tile + 1) - row;
        const float* const hidden = p.hidden + size_t(row) * depth + size_t(rows) * begin;
        multiply_tiles[rows - 1](hidden, weight, n, count, ahead, tile * fetches % kTokens, begin == 0,
                                 p.logits + row * kLogitsStride + token);
      }
    }
  }
}

template <class WEIGHT>
void finish(float* x, const float* bias, u32 n) {
  if (!bias && !WEIGHT::kRounds) return;
  for (u32 i = 0; i < n; i += kLanes) {
    const u32 lanes = n - i < kLanes ? n - i : kLanes;
    Floats logits = load_lanes(x + i, lanes, 0.0f);
    if (bias) logits += load_lanes(bias + i, lanes, 0.0f);
    store_lanes(x + i, lanes, WEIGHT::rounded(logits));
  }
}

}  // namespace

#define FUSED_TOPK_LINEAR(WEIGHT) {padded_depth<WEIGHT>, arrange<WEIGHT>, multiply<WEIGHT>, finish<WEIGHT>}

extern const LinearKernels FUSED_TOPK_TABLE(LinearKernels)[kDTypes] = {
    FUSED_TOPK_LINEAR(Float32),
    {},
    FUSED_TOPK_LINEAR(BFloat16),
};

}  // namespace fused_topk::cpu
