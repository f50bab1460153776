// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <cstring>

#include "machine.h"

namespace simt {

Memory memory;

namespace {

u64 stamp_of(const Thread& thread) { return u64(thread.id) << 32 | thread.past.time; }

bool happened_before(u32 thread, u32 time, const Thread& now) {
  return (thread == now.id && time >= now.past.born) || time <= now.past.known[thread];
}

std::string bytes_of(const Region& region, size_t offset, size_t size) {
  return std::to_string(size) + (size == 1 ? " byte" : " bytes") + " at byte " + std::to_string(offset) + " of " +
         region.name + " [" + std::to_string(region.size) + " bytes]";
}

bool is_atomic(Access access) { return access >= Access::kAtomicRead; }
bool reads(Access access) { return access != Access::kWrite && access != Access::kAtomicWrite; }
bool writes(Access access) { return access >= Access::kAtomicWrite || access == Access::kWrite; }

std::string verb(Access access) {
  return std::string(is_atomic(access) ? " atomically" : "") + (!writes(access) ? " reads "
                                                                : reads(access) ? " updates "
                                                                                : " writes ");
}

}  // namespace

void AccessSet::clear() {
  if (word_ & kMany) delete many();
  word_ = 0;
}

void AccessSet::add(const Thread& thread, u32 first_thread, u32 threads) {
  if (!(word_ & kMany)) {
    // An access that happened before this one adds nothing: what comes after this one comes after both.
    if (word_ == 0 || happened_before(u32(word_ >> 32), u32(word_), thread)) {
      word_ = stamp_of(thread);
      return;
    }
    auto* many = new Many{first_thread, std::vector<u32>(threads)};
    many->times[u32(word_ >> 32) - first_thread] = u32(word_);
    word_ = reinterpret_cast<u64>(many) | kMany;
  }
  many()->times[thread.id - many()->first_thread] = thread.past.time;
}

void AccessSet::copy(const AccessSet& other) {
  word_ = other.word_ & kMany ? reinterpret_cast<u64>(new Many(*other.many())) | kMany : other.word_;
}

int AccessSet::unordered_with(const Thread& thread) const {
  if (word_ == 0) return -1;
  if (!(word_ & kMany)) return happened_before(u32(word_ >> 32), u32(word_), thread) ? -1 : int(word_ >> 32);
  const std::vector<u32>& times = many()->times;
  for (u32 i = 0; i < times.size(); ++i)
    if (times[i] && !happened_before(many()->first_thread + i, times[i], thread)) return int(many()->first_thread + i);
  return -1;
}

u32 AccessSet::time_of(u32 thread) const {
  return word_ & kMany ? many()->times[thread - many()->first_thread] : u32(word_);
}

void Memory::clear() {
  regions_.clear();
  told_.clear();
  last_ = nullptr;
}

void Memory::add(std::string name, void* begin, size_t size, bool is_read_only, u8* state, u32 first_thread,
                 u32 threads) {
  Region region;
  region.name = std::move(name);
  region.begin = static_cast<u8*>(begin);
  region.size = size;
  region.is_read_only = is_read_only;
  region.first_thread = first_thread;
  region.threads = threads;
  if (!is_read_only) {
    region.cells = std::vector<Cell>((size + 3) / 4 * 4);
    region.is_split.resize((size + 3) / 4);
  }
  if (!state) region.own_state.assign(size, kUninitialised);
  region.state = state ? state : region.own_state.data();
  regions_[region.begin] = std::move(region);
  last_ = nullptr;
}

void Memory::remove_within(const u8* begin, size_t size) {
  regions_.erase(regions_.lower_bound(begin), regions_.lower_bound(begin + size));
  for (auto word = told_.begin(); word != told_.end();)
    word = size_t(word->first - begin) < size ? told_.erase(word) : std::next(word);
  last_ = nullptr;
}

Region* Memory::find(const u8* address) {
  if (last_ && size_t(address - last_->begin) < last_->size) return last_;
  auto next = regions_.upper_bound(address);
  if (next == regions_.begin()) return nullptr;
  Region& region = std::prev(next)->second;
  // One past the end still belongs to it, so that a report can name what was overrun.
  if (size_t(address - region.begin) >= region.size + 64) return nullptr;
  return last_ = &region;
}

void Memory::access(Thread& thread, const void* address, size_t size, Access access, const void* code) {
  const u8* first = static_cast<const u8*>(address);
  Region* region = find(first);
  if (!region) {
    // The kernel's own constants.
    if (!writes(access) && image_of(first) == image_of(reinterpret_cast<const void*>(machine.launch().kernel))) return;
    const bool is_local = [&] {
      for (const Thread& other : machine.threads)
        if (size_t(first - other.fiber.stack) < kStackSize) return true;
      return false;
    }();
    machine.report("out of bounds",
                   machine.name_of(thread.id, thread.past.time) + verb(access) + std::to_string(size) + " bytes " +
                       (is_local ? "of another thread's local memory" : "outside of every array") + machine.place(code),
                   code, true);
  }
  const size_t offset = first - region->begin;
  auto fail = [&](const char* kind, const char* what, bool stops) {
    machine.report(kind,
                   machine.name_of(thread.id, thread.past.time) + verb(access) + bytes_of(*region, offset, size) +
                       what + machine.place(code),
                   code, stops);
  };
  if (size <= 16 && (size & (size - 1)) == 0 && reinterpret_cast<u64>(address) % size != 0)
    fail("misaligned", ", which are not aligned to their size", true);
  if (offset + size > region->size) fail("out of bounds", ", past its end", true);
  u8* state = region->state + offset;
  for (size_t i = 0; i < size; ++i) {
    if (state[i] == kOutside) fail("out of bounds", ", in a gap between its rows", true);
    if (reads(access) && state[i] == kUninitialised) {
      fail("uninitialised", ", which nobody has written", false);
      // Once is enough.
      std::fill(state, state + size, kInitialised);
    }
  }
  if (region->is_read_only) {
    if (writes(access)) fail("write to an input", ", which is an input", true);
    return;
  }
  if (writes(access)) std::fill(state, state + size, kInitialised);
  for (size_t at = offset; at < offset + size;) {
    const size_t word = at / 4;
    Cell* cells = &region->cells[word * 4];
    const bool is_whole = at % 4 == 0 && at + 4 <= offset + size;
    if (!is_whole && !region->is_split[word]) {
      region->is_split[word] = true;
      for (u32 i = 1; i < 4; ++i) {
        for (u32 kind = 0; kind < kEarlierKinds; ++kind) cells[i].earlier[kind].copy(cells->earlier[kind]);
        std::copy(cells->code, cells->code + kEarlierKinds, cells[i].code);
      }
    }
    if (!region->is_split[word]) {
      check_order(thread, *region, *cells, offset, size, access, code);
      at += 4;
    } else {
      check_order(thread, *region, cells[at % 4], offset, size, access, code);
      at += 1;
    }
  }
}

void Memory::check_order(Thread& thread, const Region& region, Cell& cell, size_t offset, size_t size, Access access,
                         const void* code) {
  constexpr bool kEarlierWrites[] = {true, false, true, false};
  constexpr bool kEarlierIsAtomic[] = {false, false, true, true};
  constexpr const char* kEarlierVerb[] = {" wrote", " read", " wrote atomically", " read atomically"};
  for (u32 kind = 0; kind < kEarlierKinds; ++kind) {
    if (!(writes(access) || kEarlierWrites[kind]) || (is_atomic(access) && kEarlierIsAtomic[kind])) continue;
    const int other = cell.earlier[kind].unordered_with(thread);
    if (other < 0) continue;
    const std::string text = machine.name_of(thread.id, thread.past.time) + verb(access) +
                             bytes_of(region, offset, size) + machine.place(code) + ", which " +
                             machine.name_of(other, cell.earlier[kind].time_of(other)) + kEarlierVerb[kind] +
                             machine.place(cell.code[kind]) + "; no barrier or atomic orders the two";
    const bool is_same_instruction = access == Access::kWrite && kind == kWritten && code == cell.code[kind] &&
                                     machine.threads[other].warp == thread.warp && size <= sizeof doubt_.before;
    if (!is_same_instruction) {
      machine.report("race", text, code, false);
    } else if (!doubt_.address) {
      doubt_ = {region.begin + offset, size, {}, text, code};
      std::memcpy(doubt_.before, doubt_.address, size);
    }
  }
  if (access == Access::kReadOnlyCache &&
      !(cell.earlier[kWritten].is_empty() && cell.earlier[kAtomicallyWritten].is_empty()))
    machine.report("stale cache",
                   machine.name_of(thread.id, thread.past.time) + " reads " + bytes_of(region, offset, size) +
                       " through the read-only cache, though this launch wrote them" + machine.place(code),
                   code, false);
  // What comes after a plain write comes after all that this write comes after.
  if (access == Access::kWrite)
    for (AccessSet& earlier : cell.earlier) earlier.clear();
  const u32 own = (is_atomic(access) ? kAtomicallyWritten : kWritten) + (writes(access) ? 0 : 1);
  cell.earlier[own].add(thread, region.first_thread, region.threads ? region.threads : u32(machine.threads.size()));
  cell.code[own] = code;
}

void Memory::forget(const void* address, size_t size) {
  Region& region = *find(static_cast<const u8*>(address));
  std::fill_n(region.state + (static_cast<const u8*>(address) - region.begin), size, kUninitialised);
}

void Memory::settle() {
  if (!doubt_.address) return;
  const bool is_same_value = std::memcmp(doubt_.before, doubt_.address, doubt_.size) == 0;
  doubt_.address = nullptr;
  if (!is_same_value) machine.report("race", doubt_.text, doubt_.code, false);
}

void Memory::order_atomic(Thread& thread, const void* word, bool is_store, bool acquires, bool releases) {
  Past& past = thread.past;
  Clock& told = told_[static_cast<const u8*>(word)];
  const Clock before = told;
  // A plain store ends what the word had to tell; an atomic update passes it on.
  if (is_store) told = Clock();
  if (releases) {
    told.learn(past.known);
    told.learn(thread.id, past.time);
    ++past.time;
  }
  if (acquires) past.known.learn(before);
}

void Gathering::tell(Thread& thread) {
  Past& past = thread.past;
  if (!last_.is(past.known)) told_.learn(past.known);
  last_ = past.known;
  told_.learn(thread.id, past.time);
  ++past.time;
}

void Gathering::listen(Thread& thread) const { thread.past.known = told_; }

}  // namespace simt
