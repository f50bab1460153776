// SPDX-License-Identifier: Apache-2.0
#include "fiber.h"

// These functions exist only in a process with AddressSanitizer, which must be told of stacks and storage.
extern "C" {
__attribute__((weak)) void __asan_poison_memory_region(const void* address, size_t size);
__attribute__((weak)) void __asan_unpoison_memory_region(const void* address, size_t size);
__attribute__((weak)) void __sanitizer_start_switch_fiber(void** fake_stack, const void* stack, size_t size);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void* fake_stack, const void** from, size_t* from_size);

// Saves the registers that a call preserves and the stack pointer, and goes on where `to` was saved.
void simt_switch(void** from, void* to);
}

asm(R"(
.text
.globl simt_switch
.hidden simt_switch
.type simt_switch, @function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch, .-simt_switch
)");

namespace simt {

namespace {

const void* host_stack;
size_t host_stack_size;

}  // namespace

void restart(Fiber& fiber, void (*entry)()) {
  unpoison(fiber.stack + kStackGuard, kStackSize - kStackGuard);
  void** top = reinterpret_cast<void**>(fiber.stack + kStackSize);
  // Six registers, the address at which to go on, and null as the return address of `entry`, where debuggers stop.
  for (int word = 1; word <= 8; ++word) top[-word] = nullptr;
  top[-2] = reinterpret_cast<void*>(entry);
  fiber.stack_pointer = top - 8;
}

void switch_fiber(Fiber& from, const Fiber& to) {
  if (__sanitizer_start_switch_fiber)
    __sanitizer_start_switch_fiber(nullptr, to.stack ? to.stack : host_stack, to.stack ? kStackSize : host_stack_size);
  simt_switch(&from.stack_pointer, to.stack_pointer);
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
}

void enter_fiber() {
  if (!__sanitizer_finish_switch_fiber) return;
  const void* from;
  size_t size;
  __sanitizer_finish_switch_fiber(nullptr, &from, &size);
  // The first fiber is entered from there.
  if (!host_stack) host_stack = from, host_stack_size = size;
}

void poison(const void* address, size_t size) {
  if (__asan_poison_memory_region) __asan_poison_memory_region(address, size);
}

void unpoison(const void* address, size_t size) {
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(address, size);
}

}  // namespace simt
