// SPDX-License-Identifier: Apache-2.0
// One instruction set's table of expert_kernels.h, built like vector_kernels.cpp, and without fused multiply-adds (scores.h).
//
// A row has an array of scores and an array of keys. Keys are those of order.h as signed integers, which every instruction
// set compares. The best key is taken k times. So that this is quick, the greatest key of every 16 keys is kept.
#include "expert_kernels.h"

#include "vectors.h"

namespace fused_topk::cpu {
namespace {

using routers::kLeastSum;
using routers::kMostChosen;
using routers::kMostExperts;

// The operations of scores.h on several experts of a row.
struct VectorMath {
  using Float = Floats;
  static Floats of(float x) { return broadcast(x); }
  static Floats add(Floats a, Floats b) { return a + b; }
  static Floats sub(Floats a, Floats b) { return a - b; }
  static Floats mul(Floats a, Floats b) { return a * b; }
  static Floats reciprocal(Floats x) { return 1.0f / x; }
  static Floats sqrt(Floats x) {
#if defined(__AVX512F__)
    return (Floats)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
    return (Floats)_mm256_sqrt_ps((__m256)x);
#else
    for (u32 i = 0; i < kLanes; ++i) x[i] = __builtin_sqrtf(x[i]);
    return x;
#endif
  }
  static Floats power_of_two(Floats shifted) { return (Floats)((UInts)shifted << 23); }
  static Floats negative_magnitude(Floats x) { return (Floats)((UInts)x | 0x80000000u); }
  static Floats if_negative(Floats x, Floats a, Floats b) { return x < 0.0f ? a : b; }
  static Floats zero_if_less(Floats result, Floats y, float limit) { return y < limit ? Floats{} : result; }
};

// Keys are compared in blocks of 16, on every instruction set.
constexpr u32 kBlockKeys = 16;
typedef int Keys __attribute__((vector_size(4 * kBlockKeys)));
typedef int Keys8 __attribute__((vector_size(32)));
typedef int Keys4 __attribute__((vector_size(16)));
static_assert(kBlockKeys % kLanes == 0 && kMostExperts % kBlockKeys == 0);

// Less than the key of every logit. Stands for keys that have been taken, and fills up the last block.
constexpr int kNone = int(kNoKey ^ 0x80000000u);
constexpr int kInfiniteBits = 0x7F800000;

constexpr u32 padded(u32 n) { return (n + kBlockKeys - 1) / kBlockKeys * kBlockKeys; }

inline int greatest(const Keys& x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)x);
#else
  const auto low = half_of<Keys8>(x, 0), high = half_of<Keys8>(x, 1);
  const Keys8 half = low > high ? low : high;
  const auto a = half_of<Keys4>(half, 0), b = half_of<Keys4>(half, 1);
  const Keys4 four = a > b ? a : b;
  const int even = four[0] > four[2] ? four[0] : four[2], odd = four[1] > four[3] ? four[1] : four[3];
  return even > odd ? even : odd;
#endif
}

// The first lane that holds `key`. At least one lane holds it.
inline u32 first_of(const Keys& x, int key) {
#if defined(__AVX512F__)
  return u32(__builtin_ctz(_mm512_cmpeq_epi32_mask((__m512i)x, _mm512_set1_epi32(key))));
#elif defined(__AVX2__)
  const __m256i keys = _mm256_set1_epi32(key);
  const auto lanes_of = [&](u32 half) {
    const auto eight = (__m256i)half_of<Keys8>(x, half);
    return u32(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(eight, keys))));
  };
  return u32(__builtin_ctz(lanes_of(0) | lanes_of(1) << 8));
#else
  u32 lane = 0;
  while (x[lane] != key) ++lane;
  return lane;
#endif
}

inline Keys load_keys(const int* keys) {
  Keys result;
  __builtin_memcpy(&result, keys, sizeof result);
  return result;
}

inline Keys with_lane(const Keys& x, u32 lane, int key) {
  constexpr Keys kLane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return kLane == int(lane) ? key - Keys{} : x;
}

// Writes the places of the k best keys, greatest first, equal ones by place. keys: [padded(n)]; the chosen become kNone.
inline void take_best(int* keys, u32 n, u32 k, u32* chosen) {
  constexpr u32 kMostBlocks = kMostExperts / kBlockKeys;
  const u32 blocks = padded(n) / kBlockKeys;
  alignas(64) int greatest_of[kMostBlocks];
  for (u32 b = 0; b < blocks; ++b) greatest_of[b] = greatest(load_keys(keys + b * kBlockKeys));
  for (u32 b = blocks; b < padded(blocks); ++b) greatest_of[b] = kNone;
  const auto take = [&](u32 block, int best, u32 i) {
    int* const of_block = keys + block * kBlockKeys;
    const Keys before = load_keys(of_block);
    const u32 lane = first_of(before, best);
    const Keys left = with_lane(before, lane, kNone);
    __builtin_memcpy(of_block, &left, sizeof left);
    chosen[i] = block * kBlockKeys + lane;
    return greatest(left);
  };
  if (blocks <= kBlockKeys) {
    Keys of_blocks = load_keys(greatest_of);
    for (u32 i = 0; i < k; ++i) {
      const int best = greatest(of_blocks);
      const u32 block = first_of(of_blocks, best);
      of_blocks = with_lane(of_blocks, block, take(block, best, i));
    }
    return;
  }
  for (u32 i = 0; i < k; ++i) {
    u32 block = 0;
    for (u32 b = 1; b < blocks; ++b) block = greatest_of[b] > greatest_of[block] ? b : block;
    greatest_of[block] = take(block, greatest_of[block], i);
  }
}

// The sum of x [width], which it overwrites. width is a power of two, at least 4. Adds four neighbours first, and then the
// two halves of what is left.
inline float sum(float* x, u32 width) {
  u32 quads = width / 4;
  for (u32 i = 0; i < quads; ++i) x[i] = (x[4 * i] + x[4 * i + 1]) + (x[4 * i + 2] + x[4 * i + 3]);
  while (quads > 1) {
    quads /= 2;
    for (u32 i = 0; i < quads; ++i) x[i] += x[i + quads];
  }
  return x[0];
}

inline Floats load_experts(const float* x, u32 i, u32 n) {
  return i + kLanes <= n ? load(x + i) : i < n ? load_some(x + i, n - i, -kInfinity) : broadcast(-kInfinity);
}

// scores: [padded(n)]
template <class SCORE>
inline void score_each(const float* x, u32 n, float* scores, const SCORE& score) {
  for (u32 i = 0; i < n; i += kLanes) store_vector(scores + i, score(load_experts(x, i, n)));
}

inline void softmax(const float* x, u32 n, float* scores) {
  Floats greatest = broadcast(-kInfinity);
  for (u32 i = 0; i < n; i += kLanes) greatest = greater(load_experts(x, i, n), greatest);
  const float m = greatest_lane(greatest);
  score_each(x, n, scores, [m](Floats v) { return routers::exponential<VectorMath>(v - m); });
  alignas(64) float terms[kMostExperts];
  u32 width = 4;
  while (width < n) width *= 2;
  __builtin_memcpy(terms, scores, n * sizeof(float));
  for (u32 i = n; i < width; ++i) terms[i] = 0.0f;
  const float inverse = 1.0f / sum(terms, width);
  for (u32 i = 0; i < n; i += kLanes) store_vector(scores + i, load(scores + i) * inverse);
}

// The keys of score + bias, by which experts are chosen. keys: [padded(n)]
inline void make_keys(const float* x, const float* scores, const float* bias, u32 n, int* keys) {
  for (u32 i = 0; i < n; i += kLanes) {
    Floats choice = load(scores + i);
    if (bias) choice += load_experts(bias, i, n);
    choice = load_experts(x, i, n) == -kInfinity ? broadcast(-kInfinity) : choice;
    const Ints bits = (Ints)choice;
    const Ints magnitude = bits & 0x7FFFFFFF;
    Ints key = bits ^ ((bits >> 31) & 0x7FFFFFFF);
    key = magnitude == 0 ? Ints{} : key;
    key = magnitude > kInfiniteBits ? 0x7FFFFFFF - Ints{} : key;
    __builtin_memcpy(keys + i, &key, sizeof key);
  }
  for (u32 i = n; i < padded(n); ++i) keys[i] = kNone;
}

inline int key_of(float choice) { return int(key_of_logit(choice) ^ 0x80000000u); }
inline float choice_of(int key) { return logit_of_key(u32(key) ^ 0x80000000u); }

// The key by which a group is chosen, given the keys [size] of its experts.
inline int key_of_group(const int* keys, u32 size, bool sums_two) {
  Keys best = kNone - Keys{}, second = best;
  for (u32 i = 0; i < size; i += kBlockKeys) {
    Keys some = kNone - Keys{};
    __builtin_memcpy(&some, keys + i, (size - i < kBlockKeys ? size - i : kBlockKeys) * sizeof(int));
    const Keys less = some < best ? some : best;
    second = second > less ? second : less;
    best = best > some ? best : some;
  }
  const int greatest_key = greatest(best);
  if (!sums_two || size == 1) return greatest_key;
  // The second best key of the group is the best key of another lane, or the second best of the same lane.
  const u32 lane = first_of(best, greatest_key);
  const int other = greatest(with_lane(best, lane, second[lane]));
  return key_of(choice_of(greatest_key) + choice_of(other));
}

// The k best experts of the best groups. keys: [padded(n)], overwritten.
inline void choose_in_groups(const ExpertRows& rows, int* keys, u32* chosen) {
  const u32 size = rows.n / rows.groups;
  alignas(64) int of_groups[kMostExperts];
  for (u32 g = 0; g < rows.groups; ++g) of_groups[g] = key_of_group(keys + g * size, size, rows.sums_two);
  for (u32 g = rows.groups; g < padded(rows.groups); ++g) of_groups[g] = kNone;
  u32 best[kMostExperts];
  take_best(of_groups, rows.groups, rows.topk_groups, best);
  // take_best has set the keys of the chosen groups to kNone. The experts of these groups move to the front in their
  // order, so that equal experts stay in order.
  u32 kept[kMostExperts];
  u32 count = 0;
  for (u32 g = 0; g < rows.groups; ++g) {
    if (of_groups[g] == kNone) {
      __builtin_memmove(keys + count * size, keys + g * size, size * sizeof(int));
      kept[count++] = g;
    }
  }
  const u32 left = count * size;
  for (u32 i = left; i < padded(left); ++i) keys[i] = kNone;
  take_best(keys, left, rows.k, chosen);
  for (u32 i = 0; i < rows.k; ++i) chosen[i] = kept[chosen[i] / size] * size + chosen[i] % size;
}

inline void route_row(const ExpertRows& rows, u32 row) {
  const u32 n = rows.n, k = rows.k;
  const float* const x = rows.x + u64(row) * n;
  alignas(64) float scores[kMostExperts];
  if (rows.scoring == routers::kSoftmax) {
    softmax(x, n, scores);
  } else if (rows.scoring == routers::kSigmoid) {
    score_each(x, n, scores, routers::sigmoid<VectorMath>);
  } else {
    score_each(x, n, scores, routers::sqrt_softplus<VectorMath>);
  }
  alignas(64) int keys[kMostExperts];
  make_keys(x, scores, rows.bias, n, keys);
  u32 chosen[kMostChosen];
  if (rows.groups == 1) {
    take_best(keys, n, k, chosen);
  } else {
    choose_in_groups(rows, keys, chosen);
  }
  alignas(64) float of_chosen[kMostChosen] = {};
  for (u32 i = 0; i < k; ++i) of_chosen[i] = scores[chosen[i]];
  float* const weights = rows.weights + u64(row) * k;
  if (rows.normalizes) {
    alignas(64) float terms[kMostChosen];
    __builtin_memcpy(terms, of_chosen, sizeof terms);
    const float total = sum(terms, kMostChosen) + kLeastSum;
    for (u32 i = 0; i < k; ++i) of_chosen[i] /= total;
  }
  for (u32 i = 0; i < k; ++i) weights[i] = of_chosen[i] * rows.scale;
  if (rows.are_short) {
    __builtin_memcpy(static_cast<u32*>(rows.experts) + u64(row) * k, chosen, k * sizeof(u32));
  } else {
    for (u32 i = 0; i < k; ++i) static_cast<i64*>(rows.experts)[u64(row) * k + i] = chosen[i];
  }
}

void route(const ExpertRows& rows) {
  for (u32 row = 0; row < rows.rows; ++row) route_row(rows, row);
}

}  // namespace

extern const ExpertKernels FUSED_TOPK_TABLE(ExpertKernels) = {route};

}  // namespace fused_topk::cpu
