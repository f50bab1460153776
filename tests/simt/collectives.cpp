// SPDX-License-Identifier: Apache-2.0
// Where threads wait for each other: the warp's collectives, the block's barrier.
#include <cstdio>
#include <cstring>

#include "machine.h"

namespace simt {

namespace {

std::string hex(u32 mask) {
  char text[16];
  std::snprintf(text, sizeof text, "%08x", mask);
  return text;
}

[[noreturn]] void fail(const std::string& what, const void* code) {
  machine.report("divergence", machine.name_of(current->id, current->past.time) + what + Machine::place(code), code,
                 true);
  __builtin_unreachable();
}

// Every lane of `mask` calls this with the same name and mask. The last one calls complete(warp), which sets the `result` of
// each of these lanes from what all of them brought.
template <class COMPLETE>
u64 meet(const char* name, u32 mask, u64 value, u32 source_lane, const void* code, COMPLETE complete) {
  machine.step(code);
  Thread& self = *current;
  Warp& warp = *self.warp;
  if (!(mask >> self.lane & 1))
    fail(" calls " + std::string(name) + " with a mask that leaves itself out, " + hex(mask), code);
  if (mask & ~warp.present || mask & warp.exited)
    fail(" calls " + std::string(name) + " with a mask that names lanes which have exited or never were, " +
             hex(mask & (~warp.present | warp.exited)) + " of " + hex(mask),
         code);
  self.brought = value;
  self.source_lane = source_lane;
  const u32 own = 1u << self.lane;
  // Some lanes of the mask may still wait at another collective, with another mask.
  bool is_last = (mask & ~warp.meeting) == own;
  for (u32 rest = mask & ~own; is_last && rest; rest &= rest - 1) {
    const Thread& other = warp.lanes[__builtin_ctz(rest)];
    is_last = other.waits_with == mask && (other.waits_at == name || std::strcmp(other.waits_at, name) == 0);
  }
  if (!is_last) {
    warp.meeting |= own;
    machine.wait(name, mask, code);
    return self.result;
  }
  ++machine.counts.warp_collectives;
  self.code = code;
  complete(warp);
  warp.meeting &= ~mask;
  for (u32 rest = mask & ~own; rest; rest &= rest - 1) machine.wake(warp.lanes[__builtin_ctz(rest)]);
  return self.result;
}

template <class FUNCTION>
void for_each_lane(const Warp& warp, u32 mask, FUNCTION function) {
  for (u32 rest = mask; rest; rest &= rest - 1) function(warp.lanes[__builtin_ctz(rest)]);
}

// What each lane of `mask` did before happens before whatever these lanes do after.
void order_lanes(const Warp& warp, u32 mask) {
  if (!machine.launch().tracks_memory) return;
  Gathering gathering;
  for_each_lane(warp, mask, [&](Thread& lane) { gathering.tell(lane); });
  for_each_lane(warp, mask, [&](Thread& lane) { gathering.listen(lane); });
}

}  // namespace

void sync_warp(u32 mask) {
  meet("__syncwarp", mask, 0, 0, __builtin_return_address(0), [mask](Warp& warp) { order_lanes(warp, mask); });
}

u64 shuffle(const char* name, u32 mask, u64 value, u32 source_lane) {
  const void* code = __builtin_return_address(0);
  return meet(name, mask, value, source_lane, code, [=](Warp& warp) {
    for_each_lane(warp, mask, [&](Thread& lane) {
      if (!(mask >> lane.source_lane & 1))
        fail(" completes " + std::string(name) + " of lanes " + hex(mask) + ", in which lane " +
                 std::to_string(lane.lane) + " reads lane " + std::to_string(lane.source_lane),
             code);
      lane.result = warp.lanes[lane.source_lane].brought;
    });
  });
}

u32 ballot(const char* name, u32 mask, bool claim) {
  return u32(meet(name, mask, claim, 0, __builtin_return_address(0), [mask](Warp& warp) {
    u32 claims = 0;
    for_each_lane(warp, mask, [&](Thread& lane) { claims |= u32(lane.brought) << lane.lane; });
    for_each_lane(warp, mask, [&](Thread& lane) { lane.result = claims; });
  }));
}

u32 reduce(const char* name, u32 mask, u32 value, Reduction reduction) {
  return u32(meet(name, mask, value, 0, __builtin_return_address(0), [=](Warp& warp) {
    auto both = [reduction](u32 a, u32 b) {
      switch (reduction) {
        case Reduction::kAdd:
          return a + b;
        case Reduction::kMax:
          return a < b ? b : a;
        case Reduction::kSignedMax:
          return int(a) < int(b) ? b : a;
      }
      return 0u;
    };
    const u32 first = __builtin_ctz(mask);
    u32 all = u32(warp.lanes[first].brought);
    for_each_lane(warp, mask & (mask - 1), [&](Thread& lane) { all = both(all, u32(lane.brought)); });
    for_each_lane(warp, mask, [&](Thread& lane) { lane.result = all; });
  }));
}

u32 block_barrier(const char* name, bool claim) {
  const void* code = __builtin_return_address(0);
  machine.step(code);
  Thread& self = *current;
  Barrier& barrier = self.block->barrier;
  if (barrier.arrived && std::strcmp(barrier.name, name) != 0)
    fail(" calls " + std::string(name) + ", where others have called " + barrier.name, code);
  barrier.name = name;
  barrier.claims += claim;
  if (machine.launch().tracks_memory) barrier.gathering.tell(self);
  barrier.waiting.push_back(&self);
  if (++barrier.arrived < machine.launch().threads) {
    machine.wait(name, 0, code);
    return u32(self.result);
  }
  ++machine.counts.block_barriers;
  for (Thread* thread : barrier.waiting) {
    thread->result = barrier.claims;
    if (machine.launch().tracks_memory) barrier.gathering.listen(*thread);
    machine.wake(*thread);
  }
  barrier.waiting.clear();
  barrier.arrived = barrier.claims = 0;
  barrier.gathering = Gathering();
  return u32(self.result);
}

}  // namespace simt
