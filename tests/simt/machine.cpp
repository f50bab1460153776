// SPDX-License-Identifier: Apache-2.0
#include "machine.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <map>

namespace simt {

Machine machine;
Thread* current = nullptr;

namespace {

Fiber host;

// Gives the host's thread to a thread of the machine, or, for null, back to Machine::run.
void switch_context(Thread* to) {
  Thread* from = current;
  current = to;
  switch_fiber(from ? from->fiber : host, to ? to->fiber : host);
}

void fiber_entry() {
  enter_fiber();
  machine.run_thread();
}

// Address space for that many objects, kept for the next launch; memory only where it is touched.
u8* reserve(u8*& area, size_t& reserved, size_t count, size_t size, size_t guard) {
  if (count * size > reserved) {
    if (area) {
      // What is mapped there next, such as a kernel's library, would be poisoned still.
      unpoison(area, reserved);
      munmap(area, reserved);
    }
    reserved = count * size;
    area = static_cast<u8*>(
        mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    for (size_t i = 0; guard && i < count; ++i) mprotect(area + i * size, guard, PROT_NONE);
  }
  return area;
}

std::string name_of_block(Index i, Index grid) {
  std::string name = "block " + std::to_string(i.x);
  if (grid.y > 1 || grid.z > 1) name += "," + std::to_string(i.y) + "," + std::to_string(i.z);
  return name;
}

}  // namespace

const u8* image_of(const void* address) {
  Dl_info info;
  return dladdr(address, &info) ? static_cast<const u8*>(info.dli_fbase) : nullptr;
}

void Machine::run(const Launch& launch) {
  launch_ = launch;
  const u32 num_blocks = launch.grid.x * launch.grid.y * launch.grid.z;
  const u32 slots = launch.max_blocks;
  reports_.clear();
  reported_.clear();
  variables_.clear();
  resting_.clear();
  is_stopped_ = false;
  counts = {};
  steps_ = idle_rounds_ = 0;
  random_state_ = launch.seed * 0x9E3779B97F4A7C15ull + 0x1234567;
  steps_to_switch_ = 1;

  static u8* stacks;
  static size_t stacks_size, shared_size;
  const u32 num_threads = slots * launch_.threads;
  reserve(stacks, stacks_size, num_threads, kStackSize, kStackGuard);
  reserve(shared_windows, shared_size, slots, kSharedWindow, 0);
  threads = std::vector<Thread>(num_threads);
  blocks_ = std::vector<Block>(slots);
  lives_.assign(slots, {});
  Clock::set_threads(num_threads);
  for (u32 i = 0; i < num_threads; ++i) {
    threads[i].id = i;
    threads[i].fiber.stack = stacks + size_t(i) * kStackSize;
  }
  for (u32 slot = 0; slot < slots; ++slot) blocks_[slot].shared = shared_windows + slot * kSharedWindow;

  order_.clear();
  for (u32 i = num_blocks; i-- > 0;) order_.push_back(i);
  if (launch.schedule == Schedule::kReverse) std::reverse(order_.begin(), order_.end());
  if (launch.schedule >= Schedule::kRandom)
    for (size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[random() % i]);
  is_favourite_a_block_ = slots > 1 && random() % 2 == 0;
  favourite_ = u32(random() % (is_favourite_a_block_ ? slots : (launch_.threads + kWarpSize - 1) / kWarpSize));

  while (!is_stopped_) {
    for (u32 slot = 0; slot < slots; ++slot) {
      if (blocks_[slot].alive != 0 || order_.empty()) continue;
      start_block(slot, order_.back());
      order_.pop_back();
    }
    Thread* next = pick();
    if (next) {
      switch_context(next);
    } else {
      const bool is_done =
          std::all_of(blocks_.begin(), blocks_.end(), [](const Block& block) { return block.alive == 0; });
      if (!is_done) report_deadlock();
      break;
    }
  }
  current = nullptr;
}

void Machine::start_block(u32 slot, u32 number) {
  Block& block = blocks_[slot];
  const Index grid = launch_.grid;
  block.slot = slot;
  block.index = {number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
  block.alive = launch_.threads;
  block.runnable_warps = 0;
  block.has_variable.clear();
  block.barrier = Barrier();
  poison(block.shared, kSharedWindow);

  Thread* first = &threads[slot * launch_.threads];
  u32 born = 0;
  for (u32 i = 0; i < launch_.threads; ++i) born = std::max(born, first[i].past.time);
  ++born;
  lives_[slot].push_back({born, block.index});
  for (u32 i = 0; i < launch_.threads; ++i) {
    Thread& thread = first[i];
    Warp& warp = block.warps[i / kWarpSize];
    if (i % kWarpSize == 0) warp = {&thread, 0, 0, 0, 0};
    thread.lane = i % kWarpSize;
    thread.index = {i, 0, 0};
    thread.block = &block;
    thread.warp = &warp;
    thread.past = Past();
    thread.past.time = thread.past.born = born;
    thread.waits_at = nullptr;
    thread.copies.clear();
    warp.present |= 1u << thread.lane;
    warp.runnable = warp.present;
    block.runnable_warps |= 1u << (i / kWarpSize);
    restart(thread.fiber, fiber_entry);
  }
}

void Machine::run_thread() {
  launch_.kernel(launch_.arguments);
  memory.settle();
  Thread& self = *current;
  Block& block = *self.block;
  const u32 bit = 1u << self.lane;
  self.warp->exited |= bit;
  set_runnable(self, false);
  idle_rounds_ = 0;
  if (--block.alive == 0) memory.remove_within(block.shared, kSharedWindow);
  // A new block's threads may get this stack: so it starts from elsewhere.
  switch_context(block.alive == 0 ? nullptr : pick());
  __builtin_unreachable();
}

void Machine::set_runnable(Thread& thread, bool is_runnable) {
  Warp& warp = *thread.warp;
  Block& block = *thread.block;
  const u32 lane = 1u << thread.lane;
  const u32 bit = 1u << (&warp - block.warps);
  warp.runnable = is_runnable ? warp.runnable | lane : warp.runnable & ~lane;
  block.runnable_warps = warp.runnable ? block.runnable_warps | bit : block.runnable_warps & ~bit;
}

void Machine::step(const void* code) {
  Thread& self = *current;
  memory.settle();
  self.code = code;
  if (++steps_ > launch_.max_steps)
    report("no end",
           name_of(self.id, self.past.time) + " still runs after " + std::to_string(steps_) + " steps" + place(code),
           code, true);
  if (launch_.schedule < Schedule::kRandom || --steps_to_switch_ > 0) return;
  steps_to_switch_ = 1 + random() % 128;
  switch_away();
}

void Machine::rest(const void* code) {
  step(code);
  set_runnable(*current, false);
  resting_.push_back(current);
  switch_away();
}

void Machine::wait(const char* at, u32 with, const void* code) {
  Thread& self = *current;
  self.waits_at = at;
  self.waits_with = with;
  self.code = code;
  set_runnable(self, false);
  switch_away();
}

void Machine::wake(Thread& thread) {
  if (&thread == current) return;
  idle_rounds_ = 0;
  thread.waits_at = nullptr;
  set_runnable(thread, true);
}

void Machine::switch_away() {
  Thread* next = pick();
  if (next == current) return;
  ++counts.switches;
  // If no thread can run, Machine::run finds out why.
  switch_context(next);
}

u32 Machine::pick_bit(u32 bits) {
  if (launch_.schedule == Schedule::kForward) return __builtin_ctz(bits);
  if (launch_.schedule == Schedule::kReverse) return 31 - __builtin_clz(bits);
  // The first at or after a random place, or else the first of all.
  const u32 later = bits & (~0u << (random() % 32));
  return __builtin_ctz(later ? later : bits);
}

Thread* Machine::pick() {
  // A block that has a warp to run, then one of its warps. If the schedule prefers some warps, these come first.
  const bool has_preference = launch_.schedule >= Schedule::kStarve;
  u32 start = 0;
  const u32 slots = u32(blocks_.size());
  if (launch_.schedule == Schedule::kReverse) start = slots - 1;
  if (launch_.schedule >= Schedule::kRandom) start = u32(random() % slots);
  const u32 stride = launch_.schedule == Schedule::kReverse ? slots - 1 : 1;
  for (bool is_picky : {true, false}) {
    if (is_picky && !has_preference) continue;
    for (u32 i = 0, slot = start; i < slots; ++i, slot = (slot + stride) % slots) {
      Block& block = blocks_[slot];
      u32 warps = block.runnable_warps;
      if (is_picky) {
        u32 favourites = is_favourite_a_block_ ? (slot == favourite_ ? ~0u : 0) : 1u << favourite_;
        warps &= launch_.schedule == Schedule::kRush ? favourites : ~favourites;
      }
      if (!warps) continue;
      Warp& warp = block.warps[pick_bit(warps)];
      return &warp.lanes[pick_bit(warp.runnable)];
    }
  }
  // The threads that rest get another turn, but not for ever.
  if (resting_.empty() || ++idle_rounds_ > 10000) return nullptr;
  for (Thread* thread : resting_) set_runnable(*thread, true);
  resting_.clear();
  return pick();
}

u64 Machine::random() {
  // splitmix64
  u64 x = random_state_ += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

void* Machine::shared_variable(const void* tag, size_t size, size_t alignment, const char* name) {
  Block& block = *current->block;
  size_t known = 0;
  while (known < variables_.size() && variables_[known].tag != tag) ++known;
  if (known == variables_.size()) {
    size_t offset = kDynamicShared;
    if (tag) {
      offset = known ? variables_[known - 1].end : 1024;
      // No more aligned than promised, and far enough from the last for an overrun to show.
      offset = (offset + 64 + 2 * alignment - 1) / (2 * alignment) * (2 * alignment) + alignment;
    } else {
      offset += alignment;
    }
    variables_.push_back({tag, offset, tag ? offset + size : variables_.empty() ? 1024 : variables_.back().end});
  }
  u8* address = block.shared + variables_[known].offset;
  if (block.has_variable.size() <= known) block.has_variable.resize(known + 1);
  if (!block.has_variable[known]) {
    block.has_variable[known] = true;
    unpoison(address, size);
    memory.add(name, address, size, false, nullptr, block.slot * launch_.threads, launch_.threads);
  }
  return address;
}

void Machine::report(const std::string& kind, const std::string& text, const void* code, bool stops) {
  const std::string key = kind + place(code);
  if (std::find(reported_.begin(), reported_.end(), key) == reported_.end()) {
    reported_.push_back(key);
    reports_ += kind + "\t" + text + "\n";
  }
  // A launch that goes wrong everywhere has said enough.
  if (stops || reported_.size() >= 20) {
    is_stopped_ = true;
    if (current) switch_context(nullptr);
  }
}

void Machine::report_deadlock() {
  std::string text;
  for (const Block& block : blocks_) {
    if (block.alive == 0) continue;
    std::map<std::string, u32> groups;
    for (u32 i = 0; i < launch_.threads; ++i) {
      const Thread& thread = threads[block.slot * launch_.threads + i];
      if (thread.warp->exited >> thread.lane & 1) {
        ++groups["have exited"];
      } else if (!thread.waits_at) {
        ++groups["poll" + place(thread.code)];
      } else {
        char with[32] = "";
        if (thread.waits_with) std::snprintf(with, sizeof with, " of lanes %08x", thread.waits_with);
        ++groups[std::string("wait at ") + thread.waits_at + with + place(thread.code)];
      }
    }
    text += text.empty() ? "" : "; ";
    text += name_of_block(block.index, launch_.grid) + ": of " + std::to_string(launch_.threads) + " threads";
    const char* separator = " ";
    for (const auto& [what, count] : groups) {
      text += separator + std::to_string(count) + " " + what;
      separator = ", ";
    }
  }
  report("deadlock", text, nullptr, false);
}

std::string Machine::name_of(u32 thread, u32 time) const {
  const u32 slot = thread / launch_.threads;
  const u32 i = thread % launch_.threads;
  Index block = {};
  for (const Life& life : lives_[slot])
    if (life.born <= time) block = life.block;
  return name_of_block(block, launch_.grid) + " thread " + std::to_string(i) + " (warp " +
         std::to_string(i / kWarpSize) + ", lane " + std::to_string(i % kWarpSize) + ")";
}

std::string Machine::place(const void* code) {
  if (!code) return "";
  const u8* const image = image_of(reinterpret_cast<const void*>(machine.launch().kernel));
  char text[32];
  std::snprintf(text, sizeof text, " @%lx", static_cast<unsigned long>(static_cast<const u8*>(code) - image));
  return text;
}

}  // namespace simt
