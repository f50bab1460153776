// SPDX-License-Identifier: Apache-2.0
// The prepared requests that short_calls.cpp keeps, by the arguments of the calls that they serve.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "arrays.h"

namespace fused_topk::cpu {

namespace nb = nanobind;

// The arguments of a call, but for the contents of its arrays. Python objects are told apart by their identity; what is
// kept under a key keeps them alive.
struct Key {
  static constexpr u32 kMostWords = 16 + 3 * 2 * kMostDims;
  u32 size = 0;
  std::array<i64, kMostWords> words;

  void add(i64 word) { words[size++] = word; }
  void add(nb::handle object) { add(i64(reinterpret_cast<std::intptr_t>(object.ptr()))); }
  void add(const Array& array) {
    add(array.dims | i64(array.type.code) << 8 | i64(array.type.bits) << 16 | i64(array.type.lanes) << 24);
    for (int dim = 0; dim < array.dims; ++dim) {
      add(i64(array.shape[dim]));
      add(stride_of(array, dim));
    }
  }

  // FNV-1a, a word at a time.
  u64 hash() const {
    u64 hash = 0xCBF29CE484222325ull;
    for (u32 i = 0; i < size; ++i) hash = (hash ^ u64(words[i])) * 0x100000001B3ull;
    return hash ^ hash >> 32;
  }

  bool operator==(const Key& other) const {
    return size == other.size && std::equal(words.begin(), words.begin() + size, other.words.begin());
  }
};

// A new array that a call returns: like an array, or of a size and dtype as the framework's `empty` takes them.
struct Result {
  nb::object like;
  nb::object size;
  nb::object dtype;
};

template <class REQUEST>
struct Kept {
  Key key;
  nb::object owner;  // of the request
  const REQUEST* request;
  nb::object device;
  std::vector<Result> results;
  std::vector<nb::object> named;  // the objects that the key names
};

// Layouts that are kept at a time.
constexpr u32 kMostKept = 4096;

// A direct-mapped cache. A new key replaces the one in its place.
template <class REQUEST>
class Table {
 public:
  using Entry = std::shared_ptr<const Kept<REQUEST>>;

  Table() : entries_(kMostKept) {}

  // Null if it is not there. The entry outlives its place: a kernel may run while other threads change the table.
  Entry find(const Key& key) const {
    const std::lock_guard lock(mutex_);
    const Entry& entry = entries_[key.hash() % kMostKept];
    return entry && entry->key == key ? entry : nullptr;
  }

  void keep(Entry entry) {
    // What was there is released after the lock: its release may run Python code.
    const std::lock_guard lock(mutex_);
    std::swap(entries_[entry->key.hash() % kMostKept], entry);
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
};

}  // namespace fused_topk::cpu
