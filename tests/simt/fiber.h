// SPDX-License-Identifier: Apache-2.0
// Fibers: call stacks between which one thread of the host switches.
#pragma once

#include "simt.h"

namespace simt {

constexpr size_t kStackSize = 1 << 17;
constexpr size_t kStackGuard = 4096;

struct Fiber {
  void* stack_pointer = nullptr;
  u8* stack = nullptr;  // [kStackSize], the first kStackGuard bytes not to be touched; null: the host's own
};

// The next switch to it calls `entry`, which must not return.
void restart(Fiber& fiber, void (*entry)());
// Saves in `from` where the host's thread is, and goes on in `to`.
void switch_fiber(Fiber& from, const Fiber& to);
// The first thing that `entry` calls.
void enter_fiber();

// Tell AddressSanitizer, if it is in the process, that these bytes may not, or may, be touched.
void poison(const void* address, size_t size);
void unpoison(const void* address, size_t size);

}  // namespace simt
