// SPDX-License-Identifier: Apache-2.0
// The rows of logits of a request: which logits are read, and how they lie in memory. Every family of requests has them.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "vector_kernels.h"

namespace fused_topk::cpu {

// How rows are scaled. Strides count elements, one a leading dimension.
struct Scale {
  double temperature;            // where row_temperature is null
  const float* row_temperature;  // nullable; [sizes...]
  std::vector<i64> strides;
};

enum class MaskKind : u32 { kNone = 0, kBools = 1, kBits = 2 };

// Strides count elements; the strides of a mask of kBits count words. A stride of a leading dimension may be any number.
struct LogitRows {
  const VectorKernels* kernels;
  u32 threads;  // at most this many, the caller's included

  std::vector<i64> sizes;  // of the leading dimensions; their product is the number of rows
  u32 vocab_size;
  DType dtype;

  const char* logits;  // [sizes..., vocab_size]
  std::vector<i64> logits_strides;
  i64 logits_element_stride;

  Scale scale;

  const char* mask;  // null for kNone; [sizes..., vocab_size] bytes, or [sizes..., ceil(vocab_size / 32)] words
  MaskKind mask_kind;
  std::vector<i64> mask_strides;
  i64 mask_element_stride;

  const char* lengths;    // nullable; [sizes...]: tokens from a row's length on are -inf, and are not read
  bool lengths_are_long;  // int64, else int32
  std::vector<i64> lengths_strides;
};

// The table of an instruction set of this machine; "": the best one. Throws std::invalid_argument for another name.
const VectorKernels& kernels_named(std::string_view name);

template <class T>
inline T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Removes the last stride, the vocabulary's, and returns it.
inline i64 pop(std::vector<i64>& strides) {
  const i64 last = strides.back();
  strides.pop_back();
  return last;
}

// The rows of a request as cpu.py describes them. What changes from call to call is missing: see point_to().
// clang-format off: one argument group a line
inline LogitRows logit_rows(u32 dtype, std::vector<i64> shape, std::vector<i64> logits_strides,
                            double temperature, std::vector<i64> temperature_strides,
                            u32 mask_kind, std::vector<i64> mask_strides,
                            bool lengths_are_long, std::vector<i64> lengths_strides,
                            std::string_view instruction_set) {
  // clang-format on
  LogitRows rows{};
  rows.kernels = &kernels_named(instruction_set);
  rows.vocab_size = u32(pop(shape));
  rows.sizes = std::move(shape);
  rows.dtype = DType(dtype);
  rows.logits_element_stride = pop(logits_strides);
  rows.logits_strides = std::move(logits_strides);
  rows.scale = {temperature, nullptr, std::move(temperature_strides)};
  rows.mask_kind = MaskKind(mask_kind);
  if (!mask_strides.empty()) rows.mask_element_stride = pop(mask_strides);
  rows.mask_strides = std::move(mask_strides);
  rows.lengths_are_long = lengths_are_long;
  rows.lengths_strides = std::move(lengths_strides);
  return rows;
}

// The addresses of logits, row_temperature, mask and lengths; 0 for a tensor that the call does not have.
using RowAddresses = std::array<std::uintptr_t, 4>;

inline void point_to(LogitRows& rows, const RowAddresses& addresses, u32 threads) {
  rows.threads = threads;
  const auto [logits, row_temperature, mask, lengths] = addresses;
  rows.logits = pointer<const char>(logits);
  rows.scale.row_temperature = pointer<const float>(row_temperature);
  rows.mask = pointer<const char>(mask);
  rows.lengths = pointer<const char>(lengths);
}

// How many rows there are, given the sizes of the leading dimensions.
inline u64 rows_of(const std::vector<i64>& sizes) {
  u64 rows = 1;
  for (const i64 size : sizes) rows *= u64(size);
  return rows;
}

inline i64 offset_of(u64 row, const std::vector<i64>& sizes, const std::vector<i64>& strides) {
  i64 offset = 0;
  for (size_t dim = sizes.size(); dim-- > 0 && row != 0;) {
    const u64 size = u64(sizes[dim]);
    // With one dimension, or others of size 1, there is no division. That is the usual case.
    const u64 outer = row < size ? 0 : row / size;
    offset += i64(row - outer * size) * strides[dim];
    row = outer;
  }
  return offset;
}

inline const char* logits_of(const LogitRows& rows, u64 row) {
  return rows.logits + offset_of(row, rows.sizes, rows.logits_strides) * kItemSize[rows.dtype];
}

// The length of a row: its tokens from there on count as -inf.
inline u32 length_of(const LogitRows& rows, u64 row) {
  if (!rows.lengths) return rows.vocab_size;
  const i64 at = offset_of(row, rows.sizes, rows.lengths_strides);
  i64 length;
  if (rows.lengths_are_long) {
    std::memcpy(&length, rows.lengths + at * 8, 8);
  } else {
    int of_row;
    std::memcpy(&of_row, rows.lengths + at * 4, 4);
    length = of_row;
  }
  return u32(std::clamp<i64>(length, 0, rows.vocab_size));
}

// Null where there is no mask.
inline const char* mask_of(const LogitRows& rows, u64 row) {
  const u32 item_size = rows.mask_kind == MaskKind::kBits ? 4 : 1;
  return rows.mask ? rows.mask + offset_of(row, rows.sizes, rows.mask_strides) * item_size : nullptr;
}

// Writes -inf to x [n] where the row's mask forbids one of the tokens begin .. begin + n. begin is a multiple of 32.
inline void apply_mask(const LogitRows& rows, const char* mask, u32 begin, u32 n, float* x) {
  const i64 stride = rows.mask_element_stride;
  if (rows.mask_kind == MaskKind::kBools) {
    rows.kernels->mask_bools(reinterpret_cast<const u8*>(mask) + begin * stride, stride, n, x);
  } else {
    rows.kernels->mask_bits(mask + begin / 32 * stride * 4, stride, n, x);
  }
}

// Whether the logits are adjacent, aligned float32. Such logits are read where they lie, without a copy.
inline bool is_read_in_place(const LogitRows& rows, const char* logits) {
  return rows.dtype == kFloat32 && rows.logits_element_stride == 1 &&
         reinterpret_cast<std::uintptr_t>(logits) % alignof(float) == 0;
}

// Whether all elements of [sizes..., width] lie one after the other.
inline bool are_adjacent(const std::vector<i64>& sizes, i64 width, const std::vector<i64>& strides,
                         i64 element_stride) {
  i64 stride = width;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    if (sizes[dim] != 1 && strides[dim] != stride) return false;
    stride *= sizes[dim];
  }
  return element_stride == 1;
}

// Whether all logits lie one after the other.
inline bool are_adjacent(const LogitRows& rows) {
  return are_adjacent(rows.sizes, rows.vocab_size, rows.logits_strides, rows.logits_element_stride);
}

// Rows first .. first + count as floats [count, vocab_size], with -inf from each row's length on. Returns the logits
// themselves if they can be read where they lie, else the buffer, which has room for these rows.
inline const float* read_rows(const LogitRows& rows, u64 first, u32 count, float* buffer) {
  const u32 n = rows.vocab_size;
  const auto load = rows.kernels->load[rows.dtype];
  if (rows.lengths || !are_adjacent(rows)) {
    for (u32 i = 0; i < count; ++i, buffer += n) {
      const u32 length = length_of(rows, first + i);
      load(logits_of(rows, first + i), rows.logits_element_stride, length, buffer);
      std::fill(buffer + length, buffer + n, -kInfinity);
    }
    return buffer - u64(count) * n;
  }
  const char* const source = logits_of(rows, first);
  if (is_read_in_place(rows, source)) return reinterpret_cast<const float*>(source);
  load(source, 1, count * n, buffer);
  return buffer;
}

// Like read_rows, with -inf also where a token is not allowed.
inline const float* read_allowed(const LogitRows& rows, u64 first, u32 count, float* buffer) {
  const u32 n = rows.vocab_size;
  const float* const x = read_rows(rows, first, count, buffer);
  if (!rows.mask) return x;
  if (x != buffer) std::memcpy(buffer, x, u64(count) * n * sizeof(float));
  // If the mask's rows are adjacent and have whole words, all of them are applied as the mask of one long row.
  const bool has_bits = rows.mask_kind == MaskKind::kBits;
  if (n % (has_bits ? 32 : 1) == 0 &&
      are_adjacent(rows.sizes, has_bits ? n / 32 : n, rows.mask_strides, rows.mask_element_stride)) {
    apply_mask(rows, mask_of(rows, first), 0, count * n, buffer);
  } else {
    for (u32 row = 0; row < count; ++row) apply_mask(rows, mask_of(rows, first + row), 0, n, buffer + u64(row) * n);
  }
  return buffer;
}

// One row of a request, block by block.
class RowReader {
 public:
  RowReader(const LogitRows& rows, u64 row)
      : rows_(rows),
        step_(rows.logits_element_stride * kItemSize[rows.dtype]),
        logits_(logits_of(rows, row)),
        mask_(mask_of(rows, row)),
        length_(length_of(rows, row)),
        in_place_(!mask_ && is_read_in_place(rows, logits_)) {}

  // The number of blocks up to the row's length, at least one. All elements behind these blocks are -inf.
  u32 blocks() const { return length_ == 0 ? 1 : (length_ - 1) / kBlock + 1; }
  u32 elements_of(u32 block) const { return std::min(kBlock, rows_.vocab_size - block * kBlock); }

  // A block's elements as floats [elements_of(block)]. Returns the logits themselves if they can be read where they lie,
  // else the buffer. Elements from the row's length on are -inf. The block still has all of its elements, so that loops
  // sum in the same order whatever the length. Elements that the mask hides are -inf too, unless the caller sets `hides`
  // to false and calls hide() later.
  const float* load(u32 block, float* buffer, bool hides = true) const {
    const u32 begin = block * kBlock, n = elements_of(block);
    if (in_place_ && n <= length_ - begin) return reinterpret_cast<const float*>(at(begin));
    copy(begin, n, buffer);
    if (hides) hide(block, buffer);
    return buffer;
  }
  // Copies a block's first n elements to x, as floats. Hidden elements, and those from the length on, are -inf.
  void load_first(u32 block, u32 n, float* x) const {
    copy(block * kBlock, n, x);
    if (mask_) apply_mask(rows_, mask_, block * kBlock, n, x);
  }
  // A token's logit; -inf if the token is hidden.
  float logit(u32 token) const {
    if (token >= length_) return -kInfinity;
    // Packed masks are applied by words, so this begins with the first token of the token's word.
    float x[32];
    const u32 begin = token / 32 * 32, n = token - begin + 1;
    copy(begin, n, x);
    if (mask_) apply_mask(rows_, mask_, begin, n, x);
    return x[n - 1];
  }
  bool may_hide() const { return mask_ || length_ < rows_.vocab_size; }
  // Whether a token is not allowed, or lies beyond the row's length.
  bool hides(u32 token) const {
    if (token >= length_ || !mask_) return token >= length_;
    float x[32] = {};
    apply_mask(rows_, mask_, token / 32 * 32, token % 32 + 1, x);
    return x[token % 32] != 0.0f;
  }
  // Writes -inf where the mask hides an element of the block. x: [elements_of(block)]
  void hide(u32 block, float* x) const {
    if (mask_) apply_mask(rows_, mask_, block * kBlock, elements_of(block), x);
  }
  bool has_mask() const { return mask_; }

  // The address of a token's logit, and the address just behind a block.
  const char* at(u32 token) const { return logits_ + token * step_; }
  const char* behind(u32 block) const { return at(block * kBlock + elements_of(block)); }
  u32 item_size() const { return kItemSize[rows_.dtype]; }

 private:
  void copy(u32 begin, u32 n, float* x) const {
    const u32 present = std::min(n, length_ - begin);
    rows_.kernels->load[rows_.dtype](at(begin), rows_.logits_element_stride, present, x);
    std::fill(x + present, x + n, -kInfinity);
  }

  const LogitRows& rows_;
  i64 step_;
  const char* logits_;
  const char* mask_;  // nullable
  u32 length_;
  bool in_place_;
};

}  // namespace fused_topk::cpu
