// SPDX-License-Identifier: Apache-2.0
// One instruction set's table of vector_kernels.h: built with -DFUSED_TOPK_SET=<Baseline, Avx2 or Avx512> and the
// compiler's options for that set. Written with the vector types of vectors.h, and with intrinsics for what these
// cannot express: comparisons to a bit mask, conversion from float16. Everything but the table has internal linkage.
#include "vector_kernels.h"

#include "expert_kernels.h"
#include "full_row_kernels.h"
#include "linear_kernels.h"
#include "router_kernels.h"
#include "vectors.h"

namespace fused_topk::cpu {
namespace {

// ---- Reading ----

// Elements may lie at any byte address.
template <class T>
inline T element(const void* source, i64 i) {
  T x;
  __builtin_memcpy(&x, static_cast<const char*>(source) + i * i64(sizeof(T)), sizeof x);
  return x;
}

inline float float_of_bfloat16(u16 bits) { return float_of(u32(bits) << 16); }

// float16 has 5 bits of exponent, biased by 15. All but the last step works on integers, so the result does not depend
// on how the thread treats denormals.
inline float float_of_half(u16 half) {
#if defined(__aarch64__)
  __fp16 x;
  __builtin_memcpy(&x, &half, sizeof x);
  return x;
#else
  constexpr u32 kRebias = u32(127 - 15) << 23;
  const u32 magnitude = half & 0x7FFFu;
  u32 bits = (magnitude << 13) + kRebias;
  // Infinity and NaN have all bits of the exponent set in both formats.
  bits += magnitude >= 0x7C00u ? kRebias : 0u;
  // Below 2^-14 a float16 has no implied leading one.
  const u32 subnormal = bits_of(float(int(magnitude)) * 0x1p-24f);
  bits = magnitude < 0x0400u ? subnormal : bits;
  return float_of(bits | u32(half & 0x8000u) << 16);
#endif
}

void load_float32(const void* source, i64 stride, u32 n, float* x) {
  if (stride == 1) {
    __builtin_memcpy(x, source, n * sizeof(float));
    return;
  }
  for (u32 i = 0; i < n; ++i) x[i] = element<float>(source, i * stride);
}

void load_bfloat16(const void* source, i64 stride, u32 n, float* x) {
  if (stride == 1) {
    for (u32 i = 0; i < n; ++i) x[i] = float_of_bfloat16(element<u16>(source, i));
    return;
  }
  for (u32 i = 0; i < n; ++i) x[i] = float_of_bfloat16(element<u16>(source, i * stride));
}

void load_float16(const void* source, i64 stride, u32 n, float* x) {
  u32 i = 0;
  if (stride == 1) {
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8) {
      const char* eight = static_cast<const char*>(source) + 2 * i;
      _mm256_storeu_ps(x + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(eight))));
    }
#endif
    for (; i < n; ++i) x[i] = float_of_half(element<u16>(source, i));
    return;
  }
  for (; i < n; ++i) x[i] = float_of_half(element<u16>(source, i * stride));
}

// ---- Masking ----

void mask_bools(const u8* mask, i64 stride, u32 n, float* x) {
  if (stride == 1) {
    for (u32 i = 0; i < n; ++i) x[i] = mask[i] ? x[i] : -kInfinity;
    return;
  }
  for (u32 i = 0; i < n; ++i) x[i] = mask[i * stride] ? x[i] : -kInfinity;
}

void mask_bits(const void* words, i64 stride, u32 n, float* x) {
  Ints bit_of_lane;
  for (u32 i = 0; i < kLanes; ++i) bit_of_lane[i] = 1 << i;
  for (u32 i = 0; i < n; i += 32) {
    u32 word = element<u32>(words, i / 32 * stride);
    if (n - i < 32) {
      for (u32 bit = 0; bit < n - i; ++bit) x[i + bit] = word >> bit & 1u ? x[i + bit] : -kInfinity;
      return;
    }
    for (u32 bit = 0; bit < 32; bit += kLanes, word >>= kLanes) {
      const auto is_allowed = (broadcast(int(word)) & bit_of_lane) != 0;
      store_vector(x + i + bit, is_allowed ? load(x + i + bit) : broadcast(-kInfinity));
    }
  }
}

// ---- The normalizer ----

float maximum(const float* x, u32 n) {
  const Floats none = broadcast(-kInfinity);
  Floats best[4] = {none, none, none, none};
  u32 i = 0;
  // A NaN is the first operand, so that the other one is kept.
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (u32 j = 0; j < 4; ++j) best[j] = greater(load(x + i + j * kLanes), best[j]);
  }
  for (; i + kLanes <= n; i += kLanes) best[0] = greater(load(x + i), best[0]);
  if (i < n) best[1] = greater(load_some(x + i, n - i, -kInfinity), best[1]);
  return greatest_lane(greater(greater(best[0], best[1]), greater(best[2], best[3])));
}

bool has_nan(const float* x, u32 n) {
  u32 nans = 0;
  for (u32 i = 0; i < n; ++i) nans += (bits_of(x[i]) & 0x7FFFFFFFu) > 0x7F800000u;
  return nans != 0;
}

double sum_exp(const float* x, u32 n, const Exponential& e, const void* next, u32 bytes) {
  return sum_of_exp(x, n, e, next, bytes, [](Floats, u32, u32) {});
}

double sum_exp_moment(const float* x, u32 n, const Exponential& e, const void* next, u32 bytes, double* s) {
  Doubles moment = {};
  const double d = sum_of_exp(x, n, e, next, bytes, [&](Floats terms, u32 i, u32 count) {
    const Floats products = (load_lanes(x + i, count) - e.reference) * terms;
    moment += __builtin_convertvector(terms == 0.0f ? Floats{} : products, Doubles);
  });
  // 1 / T is inverse_c times ln 2.
  *s = sum_of_lanes(moment) * (double(e.inverse_c) * 0.6931471805599453);
  return d;
}

// ---- Selection ----

// Signed integers in the order of the floats. x has no NaN.
inline int ordered(int bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }

// A value that k to k + slack elements of x reach, or else the k-th greatest of x. Found by bisection: counting some
// hundred integers takes a few instructions, and there are at most 32 rounds, whatever x is.
inline int kth_greatest(const int* x, u32 n, u32 k, u32 slack) {
  int low = 0x7FFFFFFF;
  int high = -0x7FFFFFFF - 1;
  for (u32 i = 0; i < n; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
  }
  if (k == 1) return high;
  // At least k elements are >= low, and fewer than k are > high.
  while (low < high) {
    const int middle = int((i64(low) + high + 1) >> 1);
    u32 count = 0;
    for (u32 i = 0; i < n; ++i) count += x[i] >= middle;
    if (count < k) {
      high = middle - 1;
      continue;
    }
    low = middle;
    if (count <= k + slack) break;
  }
  // The least element >= low. An element below low wraps around and becomes greater than all others.
  u32 least = ~0u;
  for (u32 i = 0; i < n; ++i) {
    const u32 above_low = u32(x[i]) - u32(low);
    least = above_low < least ? above_low : least;
  }
  return int(u32(low) + least);
}

// The maxima of disjoint groups of x. At least k elements of x are >= the k-th greatest maximum.
float lower_bound_of_kth(const float* x, u32 n, u32 k) {
  const u32 vectors = n / kLanes;
  // With 4 k groups, about 1.15 k elements in random order are >= the bound.
  u32 groups = (4 * k + kLanes - 1) / kLanes;
  groups = groups < 4 ? 4 : groups;
  groups = groups > vectors / 2 ? vectors / 2 : groups;
  const u32 maxima = groups * kLanes;
  if (k > maxima / 2) return -kInfinity;

  int best[kBlock / 2];
  for (u32 group = 0; group < groups; ++group) {
    Floats m = broadcast(-kInfinity);
    for (u32 v = group; v < vectors; v += groups) m = greater(load(x + v * kLanes), m);
    __builtin_memcpy(best + group * kLanes, &m, sizeof m);
  }
  for (u32 i = 0; i < maxima; ++i) best[i] = ordered(best[i]);
  return float_of(u32(ordered(kth_greatest(best, maxima, k, k / 8 + 2))));
}

// Keys as signed integers, because vectors of those are easier to compare.
inline int signed_key(u64 candidate) { return int(key_of(candidate) ^ 0x80000000u); }

u32 keep_best(u64* list, u32 size, u32 k, int* keys) {
  for (u32 i = 0; i < size; ++i) keys[i] = signed_key(list[i]);
  const int kth = kth_greatest(keys, size, k, 0);
  u32 above = 0;
  for (u32 i = 0; i < size; ++i) above += keys[i] > kth;
  // Of the candidates with the key `kth`, the first ones are kept.
  u32 kept = 0;
  u32 i = 0;
  for (u32 ties = k - above; ties != 0; ++i) {
    list[kept] = list[i];
    ties -= keys[i] == kth;
    kept += keys[i] >= kth;
  }
  for (; i < size; ++i) {
    list[kept] = list[i];
    kept += keys[i] > kth;
  }
  return u32(kth) ^ 0x80000000u;
}

// The place of a candidate is the number of candidates that rank before it.
void sort_few(const u64* list, u32 size, u64* sorted) {
  int keys[kMostToSort];
  const u32 padded = (size + kLanes - 1) / kLanes * kLanes;
  for (u32 i = 0; i < size; ++i) keys[i] = signed_key(list[i]);
  for (u32 i = size; i < padded; ++i) keys[i] = 0;
  int lane_numbers[kLanes];
  for (u32 lane = 0; lane < kLanes; ++lane) lane_numbers[lane] = int(lane);
  const Ints lanes = load_ints(lane_numbers);
  for (u32 first = 0; first < size; first += kLanes) {
    const Ints mine = load_ints(keys + first);
    const u32 end = size - first < kLanes ? size : first + kLanes;
    // A comparison that holds is -1.
    Ints place = {};
    for (u32 i = 0; i < first; ++i) place -= broadcast(keys[i]) >= mine;
    for (u32 i = first; i < end; ++i) {
      const Ints key = broadcast(keys[i]);
      place -= (key > mine) | ((key == mine) & (broadcast(int(i - first)) < lanes));
    }
    for (u32 i = end; i < size; ++i) place -= broadcast(keys[i]) > mine;
    for (u32 i = first; i < end; ++i) sorted[place[i - first]] = list[i];
  }
}

inline u32 lanes_not_below(Floats x, Floats threshold) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)x, (__m512)threshold, _CMP_NLT_UQ);
#elif defined(__AVX__)
  return u32(_mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)threshold, _CMP_NLT_UQ)));
#elif defined(__SSE__)
  return u32(_mm_movemask_ps(_mm_cmpnlt_ps((__m128)x, (__m128)threshold)));
#else
  const Ints below = x < threshold;
  u32 lanes = 0;
  for (u32 lane = 0; lane < kLanes; ++lane) lanes |= u32(below[lane] + 1) << lane;
  return lanes;
#endif
}

// All of x, in a loop that the compiler can vectorise.
void make_candidates(const float* x, u32 n, u32 first_index, u64* candidates) {
  for (u32 i = 0; i < n; ++i) candidates[i] = make_candidate(key_of_logit(x[i]), first_index + i);
}

// Bit i: x[i] >= threshold. x: [64]
inline u64 bits_not_below(const float* x, Floats threshold) {
  u64 bits = 0;
  for (u32 i = 0; i < 64; i += kLanes) bits |= u64(lanes_not_below(load(x + i), threshold)) << i;
  return bits;
}

u32 append_candidates(const float* x, u32 begin, u32 n, u32 first_index, float threshold, u64* list, u32* size,
                      u32 capacity) {
  if (threshold == -kInfinity) {
    const u32 stop = capacity - *size < n - begin ? begin + (capacity - *size) : n;
    make_candidates(x + begin, stop - begin, first_index + begin, list + *size);
    *size += stop - begin;
    return stop;
  }
  const Floats limit = broadcast(threshold);
  u32 end = *size;
  u32 i = begin;
  for (; i < n && capacity - end >= kMostAtOnce; i += 64) {
    u64 bits = 0;
    // Most vectors have no such element.
    for (; i + 64 <= n && bits == 0; i += 64) bits = bits_not_below(x + i, limit);
    if (bits != 0) {
      i -= 64;
    } else if (i < n) {
      float rest[64] = {};
      __builtin_memcpy(rest, x + i, (n - i) * sizeof(float));
      bits = bits_not_below(rest, limit) & ((1ull << (n - i)) - 1);
    }
    // All elements pass, as in rows that ascend or are all equal.
    if (bits == ~0ull) {
      make_candidates(x + i, 64, first_index + i, list + end);
      end += 64;
      continue;
    }
    for (; bits != 0; bits &= bits - 1) {
      const u32 at = i + u32(__builtin_ctzll(bits));
      list[end++] = make_candidate(key_of_logit(x[at]), first_index + at);
    }
  }
  *size = end;
  return i < n ? i : n;
}

#if defined(__AVX512F__)
// Writes the chosen lanes one after the other, and returns the end. It has no branch, which the CPU would often mispredict.
// `to` has room for a whole vector.
template <class T>
inline T* write_lanes(T* to, __m512i lanes, u32 chosen) {
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(__mmask16(chosen), lanes));
  return to + __builtin_popcount(chosen);
}
#endif

double sum_exp_above(const float* x, u32 n, u32 first_index, float low, float end, const Exponential& e, u32* count,
                     float* values, u32* indices, u32* size) {
  const Floats least = broadcast(low), limit = broadcast(end);
  u32 places[kBlock + kLanes];
  u32* behind = places;
#if defined(__AVX512F__)
  alignas(64) float above[kBlock + kLanes];
  float* behind_above = above;
  __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  u32 count_above = 0;
#endif
  for (u32 i = 0; i < n; i += kLanes) {
    const Floats lanes = n - i < kLanes ? load_some(x + i, n - i, -kInfinity) : load(x + i);
    const u32 not_below = lanes_not_below(lanes, limit), listed = lanes_not_below(lanes, least) & ~not_below;
#if defined(__AVX512F__)
    behind_above = write_lanes(behind_above, (__m512i)lanes, not_below);
    behind = write_lanes(behind, index, listed);
    index = _mm512_add_epi32(index, _mm512_set1_epi32(kLanes));
#else
    count_above += u32(__builtin_popcount(not_below));
    for (u32 bits = listed; bits != 0; bits &= bits - 1) *behind++ = i + u32(__builtin_ctz(bits));
#endif
  }
  const u32 listed = u32(behind - places);
  for (u32 i = 0; i < listed; ++i) values[*size + i] = x[places[i]];
  for (u32 i = 0; i < listed; ++i) indices[*size + i] = first_index + places[i];
  *size += listed;
#if defined(__AVX512F__)
  const u32 count_above = u32(behind_above - above);
  *count += count_above;
  return sum_exp(above, count_above, e, x, 0);
#else
  *count += count_above;
  const Floats nothing = broadcast(-kInfinity);
  return sum_of_exp(
      x, n, e, x, 0, [&](Floats lanes, u32) { return lanes >= limit ? lanes : nothing; }, [](Floats, u32, u32) {});
#endif
}

u32 count_above(const float* x, u32 n, u32 key) {
  if (key == kNanKey) return 0;
  // Compares bits instead of keys, which takes a third of the time. The bits of all logits with a greater key lie in one
  // range, first .. end, except NaNs with a sign. If the key is that of zero or of a positive logit, the range has the
  // greater positive logits. Otherwise it has zero, all positive logits, and the negative ones of smaller magnitude.
  constexpr u32 kSign = 0x80000000u, kInfinity = 0x7F800000u;
  const u32 positive = key - kZeroKey < kInfinity ? key - kZeroKey : kInfinity;
  const u32 first = key < kZeroKey ? 0 : positive + 1;
  // -0 and +0 have the same key, so -0 is in the range whenever +0 is.
  const u32 end = key >= kZeroKey ? kSign : ~key > kSign ? ~key : kSign + 1;
  u32 count = 0;
  for (u32 i = 0; i < n; ++i)
    count += u32(bits_of(x[i]) - first < end - first) | u32(bits_of(x[i]) > kSign + kInfinity);
  return count;
}

}  // namespace

#if defined(__AVX512F__)
#define FUSED_TOPK_NAME "avx512"
#elif defined(__AVX2__)
#define FUSED_TOPK_NAME "avx2"
#else
#define FUSED_TOPK_NAME "baseline"
#endif

// clang-format off: one a line
extern const VectorKernels FUSED_TOPK_TABLE(Kernels) = {
    FUSED_TOPK_NAME,
    {load_float32, load_float16, load_bfloat16},
    mask_bools,
    mask_bits,
    maximum,
    has_nan,
    sum_exp,
    sum_exp_moment,
    lower_bound_of_kth,
    append_candidates,
    sum_exp_above,
    keep_best,
    sort_few,
    count_above,
    &FUSED_TOPK_TABLE(FullRowKernels),
    &FUSED_TOPK_TABLE(RouterKernels),
    &FUSED_TOPK_TABLE(ExpertKernels),
    FUSED_TOPK_TABLE(LinearKernels),
};
// clang-format on

}  // namespace fused_topk::cpu
