// SPDX-License-Identifier: Apache-2.0
// The emulated machine. Every CUDA thread is a fiber, and all fibers run on one thread of the host, so that a seed decides
// everything. A fiber runs until it waits for others. In some schedules the machine also takes the turn away from it before
// a load, a store or an atomic.
#pragma once

#include <string>
#include <vector>

#include "fiber.h"
#include "memory.h"
#include "simt.h"

namespace simt {

constexpr u32 kMaxWarps = 32;
// Shared memory of a block: static variables grow from the start, dynamic memory lies in the upper half.
constexpr size_t kSharedWindow = 1 << 19;
constexpr size_t kDynamicShared = kSharedWindow / 2;
struct Warp;
struct Block;

// A copy of cp.async: `size` bytes, then `zeros` bytes of zero.
struct Copy {
  u8* to;
  const u8* from;
  size_t size, zeros;
};

struct Thread {
  u32 id;    // among the threads that the machine holds at a time
  u32 lane;  // of its warp
  Index index;
  Block* block;
  Warp* warp;
  Past past;

  Fiber fiber;

  // The name of the collective or barrier that it waits at, null while it can run; `code`: where that is in the kernel.
  const char* waits_at;
  u32 waits_with;  // the mask of a collective of its warp; 0: the block's barrier
  const void* code;
  // What a lane brings to its warp's collective, and takes away.
  u64 brought, result;
  u32 source_lane;
  // Batches of cp.async copies that the thread has not waited for. The last batch is still open.
  std::vector<std::vector<Copy>> copies;
};

struct Warp {
  Thread* lanes;  // [present ones]
  // One bit a lane. `meeting`: waits at a collective of the warp.
  u32 present, runnable, exited, meeting;
};

struct Barrier {
  const char* name = nullptr;
  u32 arrived = 0;
  u32 claims = 0;
  std::vector<Thread*> waiting;
  Gathering gathering;
};

struct Block {
  u32 slot;
  Index index;
  u32 alive;  // threads
  u32 runnable_warps;
  Warp warps[kMaxWarps];
  Barrier barrier;
  u8* shared;
  std::vector<bool> has_variable;
};

// What decides which of the threads that can run does.
enum class Schedule : u32 {
  kForward,  // the first
  kReverse,  // the last
  kRandom,   // any
  kStarve,   // any, but one warp or one block only when no other can
  kRush,     // any, but one warp or one block whenever it can
};

struct Launch {
  void (*kernel)(void** arguments);
  void** arguments;
  Index grid;
  u32 threads;  // of a block
  u32 dynamic_shared;
  u32 max_blocks;  // at a time
  Schedule schedule;
  u64 seed;
  u64 max_steps;
  u32 tracks_memory;  // 0: AddressSanitizer does it, and the kernel's accesses are not seen here
};

// How often things happened in a launch.
struct Counts {
  u64 accesses, atomics, warp_collectives, block_barriers, switches;
};

class Machine {
 public:
  void run(const Launch& launch);

  // Notes a fault, once for every place in the code. `stops`: the launch cannot go on, and this call does not return.
  void report(const std::string& kind, const std::string& text, const void* code, bool stops);
  // "kind<tab>text" lines; a place in the code reads "@hex".
  const std::string& reports() const { return reports_; }
  const Launch& launch() const { return launch_; }

  std::string name_of(u32 thread, u32 time) const;
  static std::string place(const void* code);

  // step: the turn of `current` may end here, as the schedule says. rest: it ends here.
  void step(const void* code);
  void rest(const void* code);
  // `current` cannot go on until another wakes it.
  void wait(const char* at, u32 with, const void* code);
  void wake(Thread& thread);
  // The first function of every fiber.
  [[noreturn]] void run_thread();
  // `tag` null: the dynamic shared memory.
  void* shared_variable(const void* tag, size_t size, size_t alignment, const char* name);

  std::vector<Thread> threads;
  u8* shared_windows = nullptr;  // [blocks at a time, kSharedWindow]
  Counts counts = {};

 private:
  struct Variable {
    const void* tag;
    size_t offset, end;
  };
  struct Life {
    u32 born;
    Index block;
  };

  void start_block(u32 slot, u32 number);
  void set_runnable(Thread& thread, bool is_runnable);
  Thread* pick();
  void switch_away();
  void report_deadlock();
  u32 pick_bit(u32 bits);
  u64 random();

  Launch launch_ = {};
  std::vector<Block> blocks_;
  std::vector<u32> order_;  // of the blocks that have not started, last one first
  std::vector<Thread*> resting_;
  std::vector<Variable> variables_;
  std::vector<std::vector<Life>> lives_;  // of each slot
  std::vector<std::string> reported_;
  std::string reports_;
  bool is_stopped_ = false;
  u32 favourite_ = 0;
  bool is_favourite_a_block_ = false;
  u32 idle_rounds_ = 0;
  u64 random_state_ = 0;
  u64 steps_ = 0;
  u32 steps_to_switch_ = 0;
};

extern Machine machine;
extern Memory memory;
extern Thread* current;  // null: the host's own code runs

// Where the shared library that holds an address begins, such as the kernel's.
const u8* image_of(const void* address);

}  // namespace simt
