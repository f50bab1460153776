// SPDX-License-Identifier: Apache-2.0
// What a launch may touch, and who touched it when: bounds, alignment, uninitialised bytes, and races.
//
// Two accesses to a byte, one of them a write, not both atomic, race unless one happened before the other: by the order
// of one thread, by a barrier that both threads' paths go through, or by an atomic that writes and releases, and one that
// reads what it wrote and acquires. Vector clocks (clock.h) decide that for any schedule, whichever came first in this one.
#pragma once

#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "clock.h"

namespace simt {

struct Thread;

// What memory knows of a thread.
struct Past {
  Clock known;   // what it knows of the other threads' times, and of its own up to its last barrier
  u32 time = 1;  // its own time
  u32 born = 1;  // earlier times are those of a thread that this one has replaced
};

enum ByteState : u8 { kOutside = 0, kUninitialised = 1, kInitialised = 2 };

// Accesses to a byte, at most one of each thread. None of them is known to have happened after another.
class AccessSet {
 public:
  AccessSet() = default;
  AccessSet(const AccessSet&) = delete;
  AccessSet& operator=(const AccessSet&) = delete;
  ~AccessSet() { clear(); }

  bool is_empty() const { return word_ == 0; }
  void clear();
  // Adds the thread's access, `first_thread` and `threads` being those that may touch the byte.
  void add(const Thread& thread, u32 first_thread, u32 threads);
  // Copies another's accesses into this empty one.
  void copy(const AccessSet& other);
  // An access that is not known to have happened before: the thread's number, or -1.
  int unordered_with(const Thread& thread) const;
  // The time of that thread's access.
  u32 time_of(u32 thread) const;

 private:
  struct Many {
    u32 first_thread;
    std::vector<u32> times;  // [threads], 0: none
  };
  static constexpr u64 kMany = 1ull << 63;
  Many* many() const { return reinterpret_cast<Many*>(word_ & ~kMany); }

  // 0: none; thread << 32 | time: one; kMany | address of a Many.
  u64 word_ = 0;
};

// The accesses to a byte from its last plain write on, and the place in the code of the latest access of each kind.
enum EarlierKind { kWritten, kRead, kAtomicallyWritten, kAtomicallyRead, kEarlierKinds };
struct Cell {
  AccessSet earlier[kEarlierKinds];
  const void* code[kEarlierKinds] = {};
};

struct Region {
  std::string name;
  u8* begin;
  size_t size;
  bool is_read_only;
  u8* state;                  // [size], ByteState
  u32 first_thread, threads;  // that may touch it; no `threads`: all
  // One cell for each byte; the first of a word speaks for all four until an access smaller than a word splits it.
  std::vector<Cell> cells;
  std::vector<bool> is_split;
  std::vector<u8> own_state;
};

enum class Access { kRead, kReadOnlyCache, kWrite, kAtomicRead, kAtomicWrite, kAtomic };

// What the threads of a barrier tell each other.
class Gathering {
 public:
  // All that the thread has done so far happens before whatever a thread does after it has listened.
  void tell(Thread& thread);
  // Called by a thread that has told and waited. It then knows all that the others have told.
  void listen(Thread& thread) const;

 private:
  Clock told_, last_;
};

class Memory {
 public:
  // Forgets everything.
  void clear();

  // `state` null: uninitialised, and kept here.
  void add(std::string name, void* begin, size_t size, bool is_read_only, u8* state, u32 first_thread, u32 threads);
  void remove_within(const u8* begin, size_t size);

  void access(Thread& thread, const void* address, size_t size, Access access, const void* code);
  // The bytes hold nothing that may be read.
  void forget(const void* address, size_t size);
  // Called after the last store of `current`. Reports a race if the store has changed the bytes of the doubt.
  void settle();
  // The order that an atomic operation makes: what the thread learns from the word, and what the word passes on.
  void order_atomic(Thread& thread, const void* word, bool is_store, bool acquires, bool releases);

 private:
  // Two lanes of a warp store to the same bytes in one instruction. CUDA lets one of them win, so this is no fault if both
  // store the same value. The check runs before the store, so the value is compared later, by settle().
  struct Doubt {
    const u8* address = nullptr;
    size_t size;
    u8 before[16];
    std::string text;
    const void* code;
  };

  Region* find(const u8* address);
  void check_order(Thread& thread, const Region& region, Cell& cell, size_t offset, size_t size, Access access,
                   const void* code);

  std::map<const u8*, Region> regions_;
  Region* last_ = nullptr;
  std::unordered_map<const u8*, Clock> told_;  // by atomics, of each word
  Doubt doubt_;
};

}  // namespace simt
