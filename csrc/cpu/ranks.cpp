// SPDX-License-Identifier: Apache-2.0
// The ranks of tokens in their rows, on several threads.
//
// A rank is the number of tokens with a greater key than the target's, and of tokens with the same key up to an end. The
// end is just behind the target, or the end of the row if all ties count. A task counts the tokens of a part of a row.
#include "ranks.h"

#include <algorithm>
#include <vector>

#include "shares.h"

namespace fused_topk::cpu {
namespace {

struct Target {
  u32 key;
  u32 end;  // tokens before `end` count if they have this key
};

struct Ranking {
  const RankProblem& problem;
  const u32 n;  // targets of a row
  const u64 rows;
  u32 parts;                // of a row
  std::vector<i64> counts;  // [rows, parts, n]

  explicit Ranking(const RankProblem& p) : problem(p), n(p.num_targets), rows(rows_of(p.sizes)) {
    parts = parts_of_a_row(rows, (p.vocab_size - 1) / kBlock + 1, threads());
    counts.resize(rows * parts * n);
  }

  u32 threads() const { return useful_threads(rows * problem.vocab_size, problem.threads); }

  void run() {
    const u64 tasks = rows * parts, at_once = tasks_at_once(tasks, kElementsAtOnce, problem.vocab_size, threads());
    share_tasks(threads(), tasks, at_once, [&](const auto& for_each) {
      std::vector<Target> targets(n);
      std::vector<float> buffer(kBlock);
      for_each([&](u64 task) { count(task / parts, u32(task % parts), targets.data(), buffer.data()); });
    });
    for (u64 i = 0; i < rows * n; ++i) {
      i64 rank = 0;
      for (u32 part = 0; part < parts; ++part) rank += counts[(i / n * parts + part) * n + i % n];
      problem.ranks[i] = problem.targets[i] < 0 ? 0 : rank;
    }
  }

  // targets: [n]. buffer: [kBlock]
  void count(u64 row, u32 part, Target* targets, float* buffer) {
    const u32 vocab_size = problem.vocab_size;
    const RowReader reader(problem, row);
    for (u32 i = 0; i < n; ++i) {
      const u32 token = u32(std::clamp<i64>(problem.targets[row * n + i], 0, vocab_size - 1));
      targets[i] = {key_of_logit(reader.logit(token)), problem.counts_ties ? vocab_size : token + 1};
    }
    i64* const own = &counts[(row * parts + part) * n];
    const u32 blocks = reader.blocks(), end = begin_of(part + 1, blocks, parts);
    for (u32 block = begin_of(part, blocks, parts); block < end; ++block) {
      const u32 begin = block * kBlock, size = reader.elements_of(block);
      const float* const x = reader.load(block, buffer);
      for (u32 i = 0; i < n; ++i) {
        const u32 ties = std::min(size, targets[i].end - std::min(begin, targets[i].end));
        own[i] += problem.kernels->count_above(x, ties, targets[i].key - 1);
        own[i] += problem.kernels->count_above(x + ties, size - ties, targets[i].key);
      }
    }
    // Tokens behind the blocks are -inf. They tie with a target of -inf.
    const u32 read = std::min(vocab_size, blocks * kBlock);
    for (u32 i = 0; i < n && part == 0; ++i) {
      if (targets[i].key == kNegativeInfinityKey && targets[i].end > read) own[i] += targets[i].end - read;
    }
  }
};

}  // namespace

void solve(const RankProblem& problem) { Ranking(problem).run(); }

}  // namespace fused_topk::cpu
