// SPDX-License-Identifier: Apache-2.0
// What the emulated machine offers to kernels; cuda.h and ptx.h give it the names of CUDA and PTX. Nothing here is inlined
// into a kernel: the kernel's loads and stores are instrumented (kernel_calls.cpp), the machine's own are not.
#pragma once

#include <cstddef>

namespace simt {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 kWarpSize = 32;

struct Index {
  u32 x, y, z;
};

// Of the thread that asks. `const`: a thread never sees another value, whoever ran in between.
__attribute__((const)) Index thread_index();
__attribute__((const)) Index block_index();
__attribute__((const)) Index block_size();
__attribute__((const)) Index grid_size();

// Storage of the thread's block for one `__shared__` declaration, known by the address of its `tag`.
__attribute__((const)) void* shared_variable(const void* tag, size_t size, size_t alignment, const char* name);
__attribute__((const)) void* dynamic_shared(size_t alignment);
// The 32-bit address that PTX knows shared memory by, and back. A rank's own addresses name its own block.
u32 shared_address(const void* pointer);
void* shared_pointer(u32 address);

// The warp's collectives: each of the lanes in `mask` calls the same one with the same mask. `name` is for reports.
enum class Reduction { kAdd, kMax, kSignedMax };
void sync_warp(u32 mask);
u64 shuffle(const char* name, u32 mask, u64 value, u32 source_lane);
u32 ballot(const char* name, u32 mask, bool claim);
u32 reduce(const char* name, u32 mask, u32 value, Reduction reduction);

// The block's barrier: the result is how many of its threads claim.
u32 block_barrier(const char* name, bool claim);

// A load or store with a cache operator. The compiler does not instrument it, so it is checked here.
enum class Cache { kAny, kReadOnly };
void load(void* to, const void* from, size_t size, Cache cache);
void store(void* to, const void* from, size_t size);
// A copy that nothing checks.
void copy_unseen(void* to, const void* from, size_t size);

// cp.async: copies to shared memory, in batches. The machine makes a copy as late as it may, when its batch is waited for.
void copy_later(void* to, const void* from, size_t size, size_t read);
void commit_copies();
void wait_for_copies(u32 batches_under_way);

// Called by an atomic operation on the word before it reads and writes it: the check, the turn of another thread, and
// what the memory model makes of it. `acquires` and `releases`: as its instruction says.
enum class Atomic { kLoad, kStore, kExchange };
void before_atomic(const void* word, size_t size, Atomic operation, bool acquires = false, bool releases = false);

// Lets others go first: what a thread that polls must call.
void rest();
[[noreturn]] void trap(const char* message);

}  // namespace simt
