// SPDX-License-Identifier: Apache-2.0
// The experts of all rows, on several threads. A task is as many rows as a buffer holds.
#include "expert_rows.h"

#include <algorithm>

#include "row_state.h"
#include "shares.h"

namespace fused_topk::cpu {

void solve(const RouterProblem& p) {
  const ExpertRows& wanted = p.wanted;
  const u64 rows = rows_of(p.sizes);
  const u32 threads = useful_threads(rows * wanted.n, p.threads);
  const u64 rows_at_once = tasks_at_once(rows, kBlock, wanted.n, threads);
  const u64 tasks = (rows + rows_at_once - 1) / rows_at_once;
  share_tasks(threads, tasks, 1, [&](const auto& for_each) {
    alignas(64) float buffer[kBlock];
    for_each([&](u64 task) {
      const u64 first = task * rows_at_once;
      ExpertRows some = wanted;
      some.rows = u32(std::min(rows - first, rows_at_once));
      some.x = read_allowed(p, first, some.rows, buffer);
      some.weights += first * wanted.k;
      some.experts = static_cast<char*>(wanted.experts) + first * wanted.k * (wanted.are_short ? 4 : 8);
      p.kernels->experts->route(some);
    });
  });
}

}  // namespace fused_topk::cpu
