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
// Elements of a hidden state that are multiplied at once. Those of a few rows and of a group of tokens fit into the
// first-level cache together.
constexpr u32 kDepth = 512;
// Tokens whose weights are kept in the first-level cache while the rows take their turns.
constexpr u32 kGroup = 16;
// With few rows the weights are fetched into the cache ahead of their use: more bytes than the hardware fetches ahead on its
// own are on their way. With more rows the arithmetic takes as long.
constexpr u32 kRowsThatWait = 4;
constexpr i64 kFarAhead = 8192, kAhead = 2048;
static_assert(kLinearBlock % kGroup == 0 && kGroup % kTokens == 0);

// How weights become vectors of floats: kVectors of them from kStep elements.
struct Float32 {
  static constexpr u32 kVectors = 1;
  static constexpr u32 kStep = kLanes;
  static constexpr u32 kBytes = 4;

  static void load_weights(const char* source, Floats (&w)[kVectors]) {
    w[0] = load(reinterpret_cast<const float*>(source));
  }

  static void load_some_weights(const char* source, u32 n, Floats (&w)[kVectors]) {
    w[0] = load_some(reinterpret_cast<const float*>(source), n, 0.0f);
  }

  static void arrange(const float* hidden, float* arranged) { store_vector(arranged, load(hidden)); }

  static Floats rounded(Floats x) { return x; }
};

// A bfloat16 is the upper half of a float. Of a vector of pairs, the elements with even numbers make one vector of floats,
// those with odd numbers the other: one operation each. The hidden states are arranged in the same way.
struct BFloat16 {
  static constexpr u32 kVectors = 2;
  static constexpr u32 kStep = 2 * kLanes;
  static constexpr u32 kBytes = 2;

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

// Lane t is the sum of the lanes of x[t].
inline Floats4 sums_of_lanes(const Floats (&x)[kTokens]) {
#if defined(__AVX512F__)
  const Floats ab = (Floats)_mm512_shuffle_f32x4((__m512)x[0], (__m512)x[1], 0x44) +
                    (Floats)_mm512_shuffle_f32x4((__m512)x[0], (__m512)x[1], 0xEE);
  const Floats cd = (Floats)_mm512_shuffle_f32x4((__m512)x[2], (__m512)x[3], 0x44) +
                    (Floats)_mm512_shuffle_f32x4((__m512)x[2], (__m512)x[3], 0xEE);
  // Four lanes of each.
  Floats sums = (Floats)_mm512_shuffle_f32x4((__m512)ab, (__m512)cd, 0x88) +
                (Floats)_mm512_shuffle_f32x4((__m512)ab, (__m512)cd, 0xDD);
  sums += (Floats)_mm512_permute_ps((__m512)sums, 0xB1);
  sums += (Floats)_mm512_permute_ps((__m512)sums, 0x4E);
  const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  return (Floats4)_mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, (__m512)sums));
#elif defined(__AVX2__)
  const __m256 ab = _mm256_hadd_ps((__m256)x[0], (__m256)x[1]);
  const __m256 cd = _mm256_hadd_ps((__m256)x[2], (__m256)x[3]);
  const Floats8 sums = (Floats8)_mm256_hadd_ps(ab, cd);
  return half_of<Floats4>(sums, 0) + half_of<Floats4>(sums, 1);
#else
  Floats4 sums;
  for (u32 t = 0; t < kTokens; ++t) sums[t] = (x[t][0] + x[t][2]) + (x[t][1] + x[t][3]);
  return sums;
#endif
}

// One stretch of the depth, n <= kDepth, of ROWS rows and `count` <= kTokens tokens. hidden: [ROWS, hidden_stride] and
// weight[t] from the stretch's first element on. Writes the sums, or adds them to those of the stretches before.
template <class WEIGHT, u32 ROWS>
void multiply_tile(const float* hidden, u32 hidden_stride, const char* const (&weight)[kTokens], u32 n, u32 count,
                   i64 ahead, bool is_first, float* logits) {
  // Not `= {}`, which clears memory before the registers.
  Floats sums[ROWS][kTokens];
#pragma GCC unroll 8
  for (u32 r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (u32 t = 0; t < kTokens; ++t) sums[r][t] = Floats{};
  }
  const auto add_products = [&](u32 i, const auto& load_vectors) {
    Floats w[kTokens][WEIGHT::kVectors];
    for (u32 t = 0; t < kTokens; ++t) load_vectors(weight[t] + i * WEIGHT::kBytes, w[t]);
    if (ROWS <= kRowsThatWait) {
      for (u32 t = 0; t < kTokens; ++t) __builtin_prefetch(weight[t] + i * WEIGHT::kBytes + ahead);
    }
#pragma GCC unroll 2
    for (u32 v = 0; v < WEIGHT::kVectors; ++v) {
#pragma GCC unroll 8
      for (u32 r = 0; r < ROWS; ++r) {
        const Floats x = load(hidden + r * hidden_stride + i + v * kLanes);
#pragma GCC unroll 8
        for (u32 t = 0; t < kTokens; ++t) sums[r][t] += x * w[t][v];
      }
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
#pragma GCC unroll 8
  for (u32 r = 0; r < ROWS; ++r) {
    Floats4 sum = sums_of_lanes(sums[r]);
    float* const y = logits + r * kLinearBlock;
    // The places beyond `count` are other tokens' or nobody's.
    if (!is_first) {
      Floats4 before = {};
      __builtin_memcpy(&before, y, count * sizeof(float));
      sum += before;
    }
    __builtin_memcpy(y, &sum, count * sizeof(float));
  }
}

template <class WEIGHT>
using MultiplyTile = void (*)(const float*, u32, const char* const (&)[kTokens], u32, u32, i64, bool, float*);

// The function for each number of rows, from 1 on.
template <class WEIGHT>
constexpr MultiplyTile<WEIGHT> kMultiplyTile[] = {
    multiply_tile<WEIGHT, 1>, multiply_tile<WEIGHT, 2>,
#if defined(__AVX512F__)
    multiply_tile<WEIGHT, 3>, multiply_tile<WEIGHT, 4>, multiply_tile<WEIGHT, 5>, multiply_tile<WEIGHT, 6>,
#endif
};

template <class WEIGHT>
u32 padded_depth(u32 depth) {
  return (depth + WEIGHT::kStep - 1) / WEIGHT::kStep * WEIGHT::kStep;
}

template <class WEIGHT>
void arrange(const float* hidden, u32 depth, float* arranged) {
  u32 i = 0;
  for (; i + WEIGHT::kStep <= depth; i += WEIGHT::kStep) WEIGHT::arrange(hidden + i, arranged + i);
  if (i == depth) return;
  float rest[WEIGHT::kStep] = {};
  __builtin_memcpy(rest, hidden + i, (depth - i) * sizeof(float));
  WEIGHT::arrange(rest, arranged + i);
}

template <class WEIGHT>
void multiply(const Products& p) {
  static_assert(kDepth % WEIGHT::kStep == 0);
  const u32 hidden_stride = padded_depth<WEIGHT>(p.depth);
  const u32 tiles = (p.rows + kRowsAtOnce - 1) / kRowsAtOnce;
  // Where all rows take part at once, the weights of a few tokens are read straight through.
  const u32 group = tiles == 1 ? kTokens : kGroup;
  // The weights that come next, in bytes: those of the next tokens, or if they are long, the same tokens' later ones.
  const i64 of_tokens = i64(kTokens) * p.weight_stride * WEIGHT::kBytes;
  const i64 ahead = of_tokens <= kFarAhead ? of_tokens * (kFarAhead / (of_tokens < 1 ? 1 : of_tokens)) : kAhead;
  for (u32 first = 0; first < p.tokens; first += group) {
    const u32 end = p.tokens - first < group ? p.tokens : first + group;
    for (u32 begin = 0; begin < p.depth; begin += kDepth) {
      const u32 n = p.depth - begin < kDepth ? p.depth - begin : kDepth;
      for (u32 tile = 0; tile < tiles; ++tile) {
        const u32 row = p.rows * tile / tiles;
        const u32 rows = p.rows * (tile + 1) / tiles - row;
        for (u32 token = first; token < end; token += kTokens) {
          const u32 count = end - token < kTokens ? end - token : kTokens;
          const char* weight[kTokens];
          for (u32 t = 0; t < kTokens; ++t) {
            const i64 at = i64(token + (t < count ? t : count - 1)) * p.weight_stride + begin;
            weight[t] = p.weight + at * WEIGHT::kBytes;
          }
          kMultiplyTile<WEIGHT>[rows - 1](p.hidden + row* hidden_stride + begin, hidden_stride, weight, n, count, ahead,
                                          begin == 0, p.logits + row* kLinearBlock + token);
        }
      }
    }
  }
}

template <class WEIGHT>
void finish(float* x, const float* bias, u32 n) {
  for (u32 i = 0; i < n; i += kLanes) {
    const u32 lanes = n - i < kLanes ? n - i : kLanes;
    Floats logits = lanes == kLanes ? load(x + i) : load_some(x + i, lanes, 0.0f);
    if (bias) logits += lanes == kLanes ? load(bias + i) : load_some(bias + i, lanes, 0.0f);
    logits = WEIGHT::rounded(logits);
    if (lanes == kLanes) {
      store_vector(x + i, logits);
    } else {
      store_some(x + i, lanes, logits);
    }
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
