// SPDX-License-Identifier: Apache-2.0
// The experts of all rows, on several threads. A task is as many rows as a buffer holds.
#include "expert_rows.h"

#include <algorithm>
#include <atomic>

#include "row_state.h"
#include "shares.h"
#include "thread_pool.h"

namespace fused_topk::cpu {

void solve(const RouterProblem& p) {
  const ExpertRows& wanted = p.wanted;
  u64 rows = 1;
  for (const i64 size : p.sizes) rows *= u64(size);
  const u32 threads = useful_threads(rows * wanted.n, p.threads);
  const u64 rows_at_once = tasks_at_once(rows, kBlock, wanted.n, threads);
  const u64 tasks = (rows + rows_at_once - 1) / rows_at_once;
  std::atomic<u64> next_task{0};
  run_on_threads(u32(std::min<u64>(threads, tasks)), [&] {
    alignas(64) float buffer[kBlock];
    for (;;) {
      const u64 first = next_task.fetch_add(1, std::memory_order_relaxed) * rows_at_once;
      if (first >= rows) return;
      ExpertRows some = wanted;
      some.rows = u32(std::min(rows - first, rows_at_once));
      some.x = read_allowed(p, first, some.rows, buffer);
      some.weights += first * wanted.k;
      some.experts = static_cast<char*>(wanted.experts) + first * wanted.k * (wanted.are_short ? 4 : 8);
      p.kernels->experts->route(some);
    }
  });
}

}  // namespace fused_topk::cpu
