// SPDX-License-Identifier: Apache-2.0
// How the rows of a call are shared by threads. A task is a row or, where there are few, a part of a row.
#pragma once

#include <algorithm>
#include <atomic>

#include "thread_pool.h"
#include "vector_kernels.h"

namespace fused_topk::cpu {

// Each thread gets at least kFewestElements elements, and more in a larger team, up to kMostElements: a team wakes as a
// whole, and a larger one takes longer.
// Measured with two threads (Xeon model 207, 2026-11-25), 4096 elements beside 16384: 2048 x 8 k = 2 23.8 us and 35.7,
// 128 x 128 k = 8 15.7 and 22.2, 1 x 32000 k = 8 12.3 and 14.7. With more threads a guess.
constexpr u64 kFewestElements = 4096, kMostElements = 16384;
// Enough tasks that the threads have about equal shares, even if one starts late. A guess, as the following ones.
constexpr u32 kTasksPerThread = 4;
// A part of a row has at least so many blocks.
constexpr u32 kBlocksPerPart = 4;
// Rows of fewer elements than this are handed out several at a time.
constexpr u64 kElementsAtOnce = 16384;

// How many of the threads are worth waking.
inline u32 useful_threads(u64 elements, u32 threads) {
  const u64 of_thread = std::clamp<u64>(kFewestElements / 2 * threads, kFewestElements, kMostElements);
  return u32(std::clamp<u64>(elements / of_thread, 1, threads));
}

// Into how many parts each row is cut. `blocks`: of a row.
inline u32 parts_of_a_row(u64 rows, u32 blocks, u32 threads) {
  const u64 tasks = threads == 1 ? 1 : kTasksPerThread * u64(threads);
  if (rows == 0 || rows >= tasks) return 1;
  return u32(std::clamp<u64>(blocks / kBlocksPerPart, 1, (tasks - 1) / rows + 1));
}

// The first block of a part, in a row of `blocks` blocks and `parts` parts.
inline u32 begin_of(u32 part, u32 blocks, u32 parts) { return u32(u64(blocks) * part / parts); }

// How many tasks are handed out at once: so many that they have `elements` elements together, but no more than a thread's
// share of all tasks.
inline u64 tasks_at_once(u64 tasks, u64 elements, u32 vocab_size, u32 threads) {
  return std::clamp<u64>(elements / vocab_size, 1, std::max<u64>(1, (tasks + threads - 1) / threads));
}

// Runs thread(for_each) on at most `threads` threads. Within it, for_each(do_task) calls do_task(task) for this thread's
// share of the tasks. A thread fetches `at_once` tasks at a time.
template <class THREAD>
inline void share_tasks(u32 threads, u64 tasks, u64 at_once, const THREAD& thread) {
  std::atomic<u64> next_task{0};
  const auto for_each = [&](const auto& do_task) {
    for (;;) {
      const u64 first = next_task.fetch_add(at_once, std::memory_order_relaxed);
      if (first >= tasks) return;
      for (u64 task = first; task < std::min(tasks, first + at_once); ++task) do_task(task);
    }
  };
  run_on_threads(u32(std::min<u64>(threads, (tasks + at_once - 1) / at_once)), [&] { thread(for_each); });
}

}  // namespace fused_topk::cpu
