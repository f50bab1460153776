// SPDX-License-Identifier: Apache-2.0
// The bins in which a search for a border counts a row's tokens. A bin bounds its tokens' logits, and so what they measure.
#pragma once

#include "sample_list.cuh"
#include "sample_part.cuh"

namespace fused_topk::sampling {

constexpr u32 kBins = 2048;
constexpr u32 kBinsOfThread = kBins / kThreads;
// The place of a bin in shared memory. One place after each thread's bins is empty, so that threads that scan their own
// bins read from different banks.
__device__ __forceinline__ u32 place_of_bin(u32 bin) { return bin + bin / kBinsOfThread; }
constexpr u32 kBinPlaces = kBins + kThreads + 1;

// What a token counts for: its weight, or 1.
struct Measure {
  Weights weight;
  bool is_one;

  __device__ __forceinline__ u64 operator()(float x) const { return is_one ? 1 : weight(x); }
  // The greatest error of a sum of weights. The error of 2^x may put the weights of two near logits in the wrong order,
  // and softmax_topk.cu sums in float32.
  __device__ __forceinline__ u64 unsure(u64 sum) const { return is_one ? 0 : (sum >> 18) + 1; }
};

// The keys from `low` to `high`, both included; no keys if low > high. They are keys of the format (FormatKeys).
struct KeyRange {
  u32 low, high;

  // The least key of the upper half. It is above `low` if the range has two keys or more.
  __device__ __forceinline__ u32 middle() const { return low + (high - low + 1) / 2; }
};

// The keys of a format: keys (order.h) without the low bits, which are equal in all logits of one sign.
template <class FORMAT>
struct FormatKeys {
  static constexpr u32 kBit = FORMAT::kLowestKeyBit;
  // The key of -inf, and the least key of a finite logit.
  static constexpr u32 kNegativeInfinity = kNegativeInfinityKey / kBit, kLeastFinite = kNegativeInfinity + 1;

  static __device__ __forceinline__ u32 of(float x) { return order_key(x) / kBit; }
  static __device__ __forceinline__ float logit_of(u32 key) { return __uint_as_float(bits_of_key(whole(key))); }
  // The least logit above the range. Callers compare with this logit, and not with the logit of range.high. Where
  // range.high is the key just below the key of 0, its logit would be -0, which equals 0.
  static __device__ __forceinline__ float end_of(KeyRange range) { return logit_of(range.high + 1); }
  // The 32-bit key (order.h) of a key of the format. The low bits of the logit's mantissa are zeros. They are zeros in
  // the key, too, or ones if the logit is negative.
  static __device__ __forceinline__ u32 whole(u32 key) {
    return key * kBit < kZeroKey ? key * kBit + (kBit - 1) : key * kBit;
  }
  // at_most(): the key of the format's greatest logit that is at most x. at_least(): the key of its least logit that is
  // at least x.
  static __device__ __forceinline__ u32 at_most(float x) {
    const u32 key = order_key(x);
    return key < kZeroKey ? (key + 1) / kBit - 1 : key / kBit;
  }
  static __device__ __forceinline__ u32 at_least(float x) {
    const u32 key = order_key(x);
    return key < kZeroKey ? key / kBit : key / kBit + (key % kBit ? 1 : 0);
  }
};

// The bins of a range of keys. Bin 0 has the greatest keys. No logit of a bin is above highest() or below lowest(), and
// no key of a bin is above top() or below bottom().
template <class FORMAT>
struct Bins {
  using Keys = FormatKeys<FORMAT>;

  KeyRange range;
  float m, least;   // the greatest and the least logit of the range
  float per_logit;  // bins per unit of the logit; 0: bins with equal numbers of keys
  float width;      // of a bin, as a difference of logits
  u32 shift;        // a bin of keys has 2^shift keys

  // Bins of equal width in the logit, from the row's greatest logit m downwards. The last bin also has all logits of
  // the range below it. Rounding moves a logit by at most 2^-10 of a bin's width. So highest() and lowest() lie a
  // hundredth of the width outside of the bin.
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
  // The bin of a logit. It is kBins, which no one reads, for a logit outside of the range. HAS_KEYS: equals has_keys().
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
  // The greatest key of a bin of keys or, with is_last, its least key.
  __device__ __forceinline__ u32 key(u32 bin, u32 is_last) const {
    return range.high - u32(min((u64(bin + is_last) << shift) - is_last, u64(range.high - range.low)));
  }
};

}  // namespace fused_topk::sampling
