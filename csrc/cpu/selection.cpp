// SPDX-License-Identifier: Apache-2.0
#include "selection.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace fused_topk::cpu {
namespace {

// The least logit that ranks before a logit of this key, whatever their indices are. +inf if only a NaN ranks before it.
float least_above(u32 key) { return key >= kPositiveInfinityKey ? kInfinity : logit_of_key(key + 1); }

// Sorts by key, greatest first, and keeps the order of equal keys: a radix sort from the least significant digit on.
// Returns where the result is, `list` or `scratch`.
template <u32 DIGITS, u32 BITS>
u64* sort_by_key(u64* list, u32 size, u64* scratch) {
  constexpr u32 kMask = (1u << BITS) - 1;
  u32 counts[DIGITS][1u << BITS] = {};
  for (u32 i = 0; i < size; ++i) {
    const u32 key = ~key_of(list[i]);
    for (u32 digit = 0; digit < DIGITS; ++digit) ++counts[digit][key >> (digit * BITS) & kMask];
  }
  for (u32 digit = 0; digit < DIGITS; ++digit) {
    u32* start = counts[digit];
    const u32 shift = digit * BITS;
    // All candidates have the same digit. The low bits of floats that were bfloat16 are an example.
    if (start[~key_of(list[0]) >> shift & kMask] == size) continue;
    u32 sum = 0;
    for (u32 value = 0; value <= kMask; ++value) {
      const u32 count = start[value];
      start[value] = sum;
      sum += count;
    }
    for (u32 i = 0; i < size; ++i) scratch[start[~key_of(list[i]) >> shift & kMask]++] = list[i];
    std::swap(list, scratch);
  }
  return list;
}

// From this many candidates on, fewer passes with longer tables pay.
constexpr u32 kManyToSort = 4096;
// Up to this many candidates, sorting them all is quicker than finding the k best first.
constexpr u32 kFew = 64;

}  // namespace

Selection::Selection(const VectorKernels& kernels, u32 k, u64 row_length) : kernels_(kernels), k_(k) {
  // The list is trimmed late enough that it pays, and early enough that the threshold stays sharp. Guesses.
  const u64 trim_at = 3 * u64(k) + 64;
  const u64 capacity = 4 * u64(k) + 256;
  // A list with room for the whole row is trimmed once, at the end.
  const u64 whole_row = row_length + kMostAtOnce;
  capacity_ = u32(std::min(capacity, whole_row));
  trim_at_ = u32(std::min(trim_at, whole_row));
  list_.resize(capacity_);
  restart();
}

void Selection::restart() {
  size_ = 0;
  threshold_ = -kInfinity;
}

void Selection::add_block(const float* x, u32 n, u32 first_index, float greatest, bool may_have_nan) {
  if (greatest < threshold_ && !may_have_nan) return;
  const u32 before = size_;
  const auto append = [&](u32 begin, u32 capacity) {
    return kernels_.append_candidates(x, begin, n, first_index, threshold_, list_.data(), &size_, capacity);
  };
  u32 begin = 0;
  if (threshold_ > -kInfinity) begin = append(0, std::min(capacity_, before + k_ + k_ / 2 + 2 * kMostAtOnce));
  if (begin < n) {
    // The first block, or one of an ascending row, where many pass: the block itself gives a threshold.
    const float bound = kernels_.lower_bound_of_kth(x, n, k_);
    if (bound > threshold_) {
      threshold_ = bound;
      size_ = before;
      begin = 0;
    }
    while ((begin = append(begin, capacity_)) < n) trim();
    // At least k elements of this block are >= the bound, and their indices are smaller.
    if (bound > -kInfinity) raise_threshold(least_above(key_of_logit(bound)));
  }
  if (size_ >= trim_at_) trim();
}

void Selection::add_candidates(const u64* candidates, u32 count) {
  if (size_ + u64(count) > list_.size()) list_.resize(size_ + u64(count));
  std::copy(candidates, candidates + count, list_.begin() + size_);
  size_ += count;
}

void Selection::raise_threshold(float least) {
  if (least > threshold_) threshold_ = least;
}

void Selection::trim() {
  if (size_ <= k_) return;
  keys_.resize(std::max<size_t>(keys_.size(), size_));
  raise_threshold(least_above(kernels_.keep_best(list_.data(), size_, k_, keys_.data())));
  size_ = k_;
}

const u64* Selection::trimmed(u32* count) {
  trim();
  *count = size_;
  return list_.data();
}

const u64* Selection::sorted() {
  for (; size_ < k_; ++size_) {
    if (size_ == list_.size()) list_.resize(k_);
    list_[size_] = make_candidate(kNegativeInfinityKey, size_);
  }
  if (size_ > kFew) trim();
  scratch_.resize(std::max<size_t>(scratch_.size(), size_));
  if (size_ <= kMostToSort) {
    kernels_.sort_few(list_.data(), size_, scratch_.data());
    return scratch_.data();
  }
  return size_ <= kManyToSort ? sort_by_key<4, 8>(list_.data(), size_, scratch_.data())
                              : sort_by_key<3, 11>(list_.data(), size_, scratch_.data());
}

}  // namespace fused_topk::cpu
