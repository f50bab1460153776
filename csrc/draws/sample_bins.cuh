// SPDX-License-Identifier: Apache-2.0
// In which bins a search for a border counts a row's tokens, and what those of a bin measure at least and at most.
#pragma once

#include "sample_list.cuh"
#include "sample_part.cuh"

namespace fused_topk::sampling {

constexpr u32 kBins = 2048;
constexpr u32 kBinsOfThread = kBins / kThreads;
// Where a bin is: the threads that scan their bins do not wait for each other.
__device__ __forceinline__ u32 place_of_bin(u32 bin) { return bin + bin / kBinsOfThread; }
constexpr u32 kBinPlaces = kBins + kThreads + 1;

// What a token counts for: its weight, or 1.
struct Measure {
  Weights weight;
  bool is_one;

  __device__ __forceinline__ u64 operator()(float x) const { return is_one ? 1 : weight(x); }
  // By how much a sum may be off. The weights of two near logits may be in the wrong order by the error of 2^x, and the sum
  // that softmax_topk.cu has is of floats.
  __device__ __forceinline__ u64 unsure(u64 sum) const { return is_one ? 0 : (sum >> 18) + 1; }
};

// Keys from `low` to `high`; none if low is above high. Keys are as the format has them (FormatKeys).
struct KeyRange {
  u32 low, high;

  // Of the upper half the least. It is above `low`, if the range has two keys.
  __device__ __forceinline__ u32 middle() const { return low + (high - low + 1) / 2; }
};

// The bits of keys (order.h) in which two logits of the format can differ.
template <class FORMAT>
struct FormatKeys {
  static constexpr u32 kBit = FORMAT::kLowestKeyBit;
  // Of -inf, and of what follows it.
  static constexpr u32 kNegativeInfinity = kNegativeInfinityKey / kBit, kLeastFinite = kNegativeInfinity + 1;

  static __device__ __forceinline__ u32 of(float x) { return order_key(x) / kBit; }
  static __device__ __forceinline__ float logit_of(u32 key) { return __uint_as_float(bits_of_key(whole(key))); }
  // The least logit above the range. Not the one before: the key below that of 0 would be -0, which has the same key as 0.
  static __device__ __forceinline__ float end_of(KeyRange range) { return logit_of(range.high + 1); }
  // The whole key of a logit of the format. Its other bits are those of a zero mantissa: ones if the logit is negative.
  static __device__ __forceinline__ u32 whole(u32 key) {
    return key * kBit < kZeroKey ? key * kBit + (kBit - 1) : key * kBit;
  }
  // The keys of the greatest logit of the format that is at most x, and of the least that is at least x.
  static __device__ __forceinline__ u32 at_most(float x) {
    const u32 key = order_key(x);
    return key < kZeroKey ? (key + 1) / kBit - 1 : key / kBit;
  }
  static __device__ __forceinline__ u32 at_least(float x) {
    const u32 key = order_key(x);
    return key < kZeroKey ? key / kBit : key / kBit + (key % kBit ? 1 : 0);
  }
};

// Bins of a range, from its end downwards. highest() and lowest(): no logit of a bin is above or below. top() and bottom(): the same of
// their keys.
template <class FORMAT>
struct Bins {
  using Keys = FormatKeys<FORMAT>;

  KeyRange range;
  float m, least;   // the logits at the range's ends
  float per_logit;  // bins; 0: they have as many keys each
  float width;      // in logits
  u32 shift;        // of keys

  // Of equal width in the logit, from the row's greatest, m, downwards. The last one also has all that is below. A bin's number is off
  // by 2^-10 at most, as rounding allows, and the edges lie a hundredth of its width outside.
  static __device__ __forceinline__ Bins of_logits(u32 low, float m, float per_logit) {
    per_logit = min(per_logit, 0x1p100f);
    return {{low, Keys::of(m)}, m, Keys::logit_of(low), per_logit, 1.0f / per_logit, 0};
  }
  static __device__ __forceinline__ Bins of_keys(KeyRange range) {
    const u32 bits = 32 - __clz(range.high - range.low), of_bins = 32 - __clz(kBins - 1);
    return {range, Keys::logit_of(range.high),         Keys::logit_of(range.low), 0.0f,
            0.0f,  bits > of_bins ? bits - of_bins : 0};
  }

  __device__ __forceinline__ bool has_keys() const { return per_logit == 0.0f; }
  // kBins, a place that no one reads, for a logit beyond the range. HAS_KEYS: has_keys().
  template <bool HAS_KEYS>
  __device__ __forceinline__ u32 of(float x) const {
    if (!HAS_KEYS) return x >= least ? u32(fminf((m - x) * per_logit, float(kBins - 1))) : kBins;
    const u32 below = range.high - Keys::of(x);
    return below <= range.high - range.low ? below >> shift : kBins;
  }
  __device__ __forceinline__ float highest(u32 bin) const {
    return has_keys() ? Keys::logit_of(key(bin, 0)) : fmaxf(least, fminf(m, m - (float(bin) - 0.01f) * width));
  }
  __device__ __forceinline__ float lowest(u32 bin) const {
    if (has_keys()) return Keys::logit_of(key(bin, 1));
    return bin == kBins - 1 ? least : fmaxf(least, m - (float(bin) + 1.01f) * width);
  }
  __device__ __forceinline__ u32 top(u32 bin) const { return max(range.low, Keys::at_most(highest(bin))); }
  __device__ __forceinline__ u32 bottom(u32 bin) const { return min(range.high, Keys::at_least(lowest(bin))); }

 private:
  // The first key of a bin of keys, or its last one.
  __device__ __forceinline__ u32 key(u32 bin, u32 is_last) const {
    return range.high - u32(min((u64(bin + is_last) << shift) - is_last, u64(range.high - range.low)));
  }
};

}  // namespace fused_topk::sampling
