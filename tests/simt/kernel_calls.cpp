// SPDX-License-Identifier: Apache-2.0
// The functions that a kernel calls and that wait for no other thread: indices, memory. And those that the compiler
// makes it call: with -fsanitize=thread, a function __tsan_* before every load and store. ThreadSanitizer's own library is
// not linked; only its functions' names are used.
#include <cstring>

#include "machine.h"

namespace simt {

namespace {

void check(const void* address, size_t size, Access access, const void* code) {
  // The host's own code, or a local variable.
  if (!current || size_t(static_cast<const u8*>(address) - current->fiber.stack) < kStackSize) return;
  ++machine.counts.accesses;
  machine.step(code);
  if (machine.launch().tracks_memory) memory.access(*current, address, size, access, code);
}

void check_bytes(const void* address, size_t size, Access access, const void* code) {
  for (size_t i = 0; i < size; ++i) check(static_cast<const u8*>(address) + i, 1, access, code);
}

}  // namespace

Index thread_index() { return current->index; }
Index block_index() { return current->block->index; }
Index block_size() { return {machine.launch().threads, 1, 1}; }
Index grid_size() { return machine.launch().grid; }

void* shared_variable(const void* tag, size_t size, size_t alignment, const char* name) {
  return machine.shared_variable(tag, size, alignment, name);
}
void* dynamic_shared(size_t alignment) {
  return machine.shared_variable(nullptr, machine.launch().dynamic_shared, alignment, "dynamic shared memory");
}

void load(void* to, const void* from, size_t size, Cache cache) {
  check(from, size, cache == Cache::kReadOnly ? Access::kReadOnlyCache : Access::kRead, __builtin_return_address(0));
  std::memcpy(to, from, size);
}

void store(void* to, const void* from, size_t size) {
  check(to, size, Access::kWrite, __builtin_return_address(0));
  std::memcpy(to, from, size);
}

void copy_unseen(void* to, const void* from, size_t size) { std::memcpy(to, from, size); }

u32 shared_address(const void* pointer) { return u32(static_cast<const u8*>(pointer) - machine.shared_windows); }
void* shared_pointer(u32 address) { return machine.shared_windows + address; }

void copy_later(void* to, const void* from, size_t size, size_t read) {
  const void* code = __builtin_return_address(0);
  if (size != 16 || read > size) trap("copies another number of bytes than 16, or reads more than it copies");
  // Even if it reads less. The write is checked below.
  if (reinterpret_cast<u64>(from) % size != 0) trap("copies from an address that is misaligned: no multiple of 16");
  if (read) check(from, read, Access::kRead, code);
  check(to, size, Access::kWrite, code);
  // Until the copy has been waited for, the bytes hold nothing that may be read.
  if (machine.launch().tracks_memory) memory.forget(to, size);
  if (current->copies.empty()) current->copies.emplace_back();
  current->copies.back().push_back({static_cast<u8*>(to), static_cast<const u8*>(from), read, size - read});
}

void commit_copies() {
  if (current->copies.empty()) current->copies.emplace_back();
  current->copies.emplace_back();
}

void wait_for_copies(u32 batches_under_way) {
  const void* code = __builtin_return_address(0);
  std::vector<std::vector<Copy>>& groups = current->copies;
  // The open group is not waited for.
  while (groups.size() > batches_under_way + 1) {
    for (const Copy& copy : groups.front()) {
      check(copy.to, copy.size + copy.zeros, Access::kWrite, code);
      std::memcpy(copy.to, copy.from, copy.size);
      std::memset(copy.to + copy.size, 0, copy.zeros);
    }
    groups.erase(groups.begin());
  }
}

void before_atomic(const void* word, size_t size, Atomic operation, bool acquires, bool releases) {
  const void* code = __builtin_return_address(0);
  ++machine.counts.atomics;
  const bool is_store = operation == Atomic::kStore;
  check(word, size,
        is_store                     ? Access::kAtomicWrite
        : operation == Atomic::kLoad ? Access::kAtomicRead
                                     : Access::kAtomic,
        code);
  if (machine.launch().tracks_memory) memory.order_atomic(*current, word, is_store, acquires, releases);
}

void rest() { machine.rest(__builtin_return_address(0)); }

void trap(const char* message) {
  const void* code = __builtin_return_address(0);
  machine.report("trap", machine.name_of(current->id, current->past.time) + " " + message + Machine::place(code), code,
                 true);
  __builtin_unreachable();
}

}  // namespace simt

extern "C" {

#define SIMT_CHECK(name, size, access) \
  void __tsan_##name(void* address) { simt::check(address, size, simt::Access::access, __builtin_return_address(0)); }
#define SIMT_CHECK_RANGE(name, access)                                                   \
  void __tsan_##name(void* address, size_t size) {                                       \
    simt::check_bytes(address, size, simt::Access::access, __builtin_return_address(0)); \
  }
#define SIMT_CHECK_UNALIGNED(name, size, access)                                         \
  void __tsan_##name(void* address) {                                                    \
    simt::check_bytes(address, size, simt::Access::access, __builtin_return_address(0)); \
  }

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
SIMT_CHECK(read1, 1, kRead)
SIMT_CHECK(read2, 2, kRead)
SIMT_CHECK(read4, 4, kRead)
SIMT_CHECK(read8, 8, kRead)
SIMT_CHECK(read16, 16, kRead)
SIMT_CHECK(write1, 1, kWrite)
SIMT_CHECK(write2, 2, kWrite)
SIMT_CHECK(write4, 4, kWrite)
SIMT_CHECK(write8, 8, kWrite)
SIMT_CHECK(write16, 16, kWrite)
SIMT_CHECK_UNALIGNED(unaligned_read2, 2, kRead)
SIMT_CHECK_UNALIGNED(unaligned_read4, 4, kRead)
SIMT_CHECK_UNALIGNED(unaligned_read8, 8, kRead)
SIMT_CHECK_UNALIGNED(unaligned_read16, 16, kRead)
SIMT_CHECK_UNALIGNED(unaligned_write2, 2, kWrite)
SIMT_CHECK_UNALIGNED(unaligned_write4, 4, kWrite)
SIMT_CHECK_UNALIGNED(unaligned_write8, 8, kWrite)
SIMT_CHECK_UNALIGNED(unaligned_write16, 16, kWrite)
// By PTX's memory model a volatile access is a relaxed atomic one.
SIMT_CHECK(volatile_read1, 1, kAtomicRead)
SIMT_CHECK(volatile_read2, 2, kAtomicRead)
SIMT_CHECK(volatile_read4, 4, kAtomicRead)
SIMT_CHECK(volatile_read8, 8, kAtomicRead)
SIMT_CHECK(volatile_read16, 16, kAtomicRead)
SIMT_CHECK(volatile_write1, 1, kAtomicWrite)
SIMT_CHECK(volatile_write2, 2, kAtomicWrite)
SIMT_CHECK(volatile_write4, 4, kAtomicWrite)
SIMT_CHECK(volatile_write8, 8, kAtomicWrite)
SIMT_CHECK(volatile_write16, 16, kAtomicWrite)
SIMT_CHECK_RANGE(read_range, kRead)
SIMT_CHECK_RANGE(write_range, kWrite)
}
