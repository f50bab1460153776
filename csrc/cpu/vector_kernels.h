// SPDX-License-Identifier: Apache-2.0
// The loops over elements: all that depends on the instruction set, and nothing else.
//
// vector_kernels.cpp is compiled once per instruction set, each time into one VectorKernels table. It must not use the
// standard library: if two builds instantiate the same template, the linker keeps one of them, and code for a newer CPU
// might run on an older one. Reading order: order.h, this file, vector_kernels.cpp.
#pragma once

#include "../algebra/order.h"

namespace fused_topk::cpu {

using u8 = unsigned char;
using i64 = long long;

constexpr float kInfinity = __builtin_huge_valf(), kNaN = __builtin_nanf("");

FUSED_TOPK_FN u32 bits_of(float x) {
  u32 bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

FUSED_TOPK_FN float float_of(u32 bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

FUSED_TOPK_FN u32 key_of_logit(float x) { return order_key(bits_of(x)); }
FUSED_TOPK_FN float logit_of_key(u32 key) { return float_of(bits_of_key(key)); }

// A row is read in blocks of this many elements, so that a block is in the first-level cache while it is maximised,
// summed and searched. A multiple of 32, the tokens of a packed mask's word.
constexpr u32 kBlock = 4096;

enum DType : u32 { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };
constexpr u32 kDTypes = 3;
constexpr u32 kItemSize[kDTypes] = {4, 2, 2};
// The bits of -inf, in the low bytes: x86 and ARM store these first.
constexpr u32 kNegativeInfinity[kDTypes] = {0xFF800000u, 0xFC00u, 0xFF80u};

// e^((x - reference) / T), prepared for a block. With c = ln 2 * T and x - reference = n c + r, |r| <= c / 2,
// it is 2^n 2^(r / c).
struct Exponential {
  float reference;  // not less than any x of the block, unless x is NaN
  float inverse_c;  // log2(e) / T
  float c_high;     // the upper 16 bits of c. Its product with n, of at most 8 bits, is exact in float32
  float c_low;      // the rest of c
  float lowest;     // x - reference below this gives 0: 2^-125 is the smallest result
};

// The temperature of all rows, or one of each.
struct Temperatures {
  const Exponential* exponentials;  // [1], or [rows] if they differ; with the reference 0
  const double* inverses;           // [1], or [rows] if they differ: 1 / T
  bool differ;

  u32 place_of(u32 row) const { return differ ? row : 0; }
};

struct ExpertKernels;
struct FullRowKernels;
struct LinearKernels;
struct RouterKernels;

struct VectorKernels {
  const char* name;

  // Elements 0 .. n of a row of the table's dtype, `stride` elements apart, as float32. x: [n], n <= kBlock.
  void (*load[kDTypes])(const void* source, i64 stride, u32 n, float* x);

  // Writes -inf to x[i] where mask[i * stride] is false, or where bit i % 32 of words[i / 32 * stride] is 0.
  void (*mask_bools)(const u8* mask, i64 stride, u32 n, float* x);
  void (*mask_bits)(const void* words, i64 stride, u32 n, float* x);

  // The greatest element of x that is not a NaN; -inf if all are NaNs.
  float (*maximum)(const float* x, u32 n);

  // Whether x has a NaN.
  bool (*has_nan)(const float* x, u32 n);

  // The sum of the exponentials of x, NaN if x has a NaN. `next` [n * bytes] is read next. It is fetched into the cache
  // meanwhile: the sum waits for arithmetic, reading waits for memory.
  double (*sum_exp)(const float* x, u32 n, const Exponential& exponential, const void* next, u32 bytes);

  // The same, and in *s the sum of (x - reference) / T times the exponential, 0 where that is 0.
  double (*sum_exp_moment)(const float* x, u32 n, const Exponential& exponential, const void* next, u32 bytes,
                           double* s);

  // A value that at least k elements of x reach, and not many more. NaNs do not count. -inf for k > n / 4, where such a
  // value is hard to find.
  float (*lower_bound_of_kth)(const float* x, u32 n, u32 k);

  // Appends a candidate with index first_index + i for each x[i], begin <= i < n, that is NaN or >= `threshold`, in
  // their order. Stops before the list could exceed `capacity`. Returns where it stopped, n at the end. A call that
  // begins there loses nothing.
  u32 (*append_candidates)(const float* x, u32 begin, u32 n, u32 first_index, float threshold, u64* list, u32* size,
                           u32 capacity);

  // The sum of the exponentials of all x[i] >= end. Adds the number of these elements to *count. For each x[i] with
  // low <= x[i] < end it appends x[i] to `values` and first_index + i to `indices`, in their order. No x[i] is NaN, `low`
  // is finite, and both lists have room for kBlock more.
  double (*sum_exp_above)(const float* x, u32 n, u32 first_index, float low, float end, const Exponential& exponential,
                          u32* count, float* values, u32* indices, u32* size);

  // Leaves the k <= size best of list[0 .. size] at its beginning. The list is in the order of the indices before and
  // after. Returns the least key of the k. keys: [size], scratch.
  u32 (*keep_best)(u64* list, u32 size, u32 k, int* keys);

  // Writes list[0 .. size] to `sorted`, best first. size <= kMostToSort, and the list is in the order of the indices.
  void (*sort_few)(const u64* list, u32 size, u64* sorted);

  // How many elements of x have a greater key than `key`.
  u32 (*count_above)(const float* x, u32 n, u32 key);

  const FullRowKernels* full_rows;
  const RouterKernels* router;
  const ExpertKernels* experts;
  const LinearKernels* linear;  // [kDTypes]
};

// Comparing each candidate with each other one grows with the square of their number.
constexpr u32 kMostToSort = 128;

// append_candidates stops when fewer than this many slots are left.
constexpr u32 kMostAtOnce = 64;

extern const VectorKernels kBaselineKernels;
#if defined(__x86_64__)
extern const VectorKernels kAvx2Kernels;
extern const VectorKernels kAvx512Kernels;
#endif

}  // namespace fused_topk::cpu
