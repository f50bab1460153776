// SPDX-License-Identifier: Apache-2.0
// The part of DLPack that short_calls.cpp uses: how a framework shows its arrays to C code without a call of Python.
// A framework's array type has a capsule `__dlpack_c_exchange_api__` with an ExchangeApi. The layout of these structs is
// DLPack's C interface, version 1.3 (https://dmlc.github.io/dlpack/latest/c_api.html).
#pragma once

#include <cstdint>

namespace fused_topk::cpu::dlpack {

constexpr char kCapsuleName[] = "dlpack_exchange_api";
constexpr std::uint32_t kMajorVersion = 1;
constexpr std::int32_t kCpu = 1;

enum TypeCode : std::uint8_t { kInt = 0, kFloat = 2, kBFloat = 4, kBool = 6 };

struct Type {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Array {
  void* data;
  std::int32_t device_type;
  std::int32_t device;
  std::int32_t dims;
  Type type;
  std::int64_t* shape;    // [dims]
  std::int64_t* strides;  // [dims], in elements; null for a contiguous array
  std::uint64_t byte_offset;
};

struct ExchangeApi {
  std::uint32_t major, minor;
  const void* older_api;  // nullable
  void (*allocate)();
  void (*managed_from_object)();
  void (*managed_to_object)();
  // Nullable. Describes an array, which stays the owner of its memory and of the shape and strides. Not 0: an error of
  // Python is set.
  int (*from_object)(void* object, Array* array);
  void (*current_stream)();
};

}  // namespace fused_topk::cpu::dlpack
