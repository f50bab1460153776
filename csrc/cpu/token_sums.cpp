// SPDX-License-Identifier: Apache-2.0
// The sums that log-probabilities, entropy and tail are made of, in one read of each row, on several threads.
//
// A block of a row has a state (m, d, s), and the m and d of what is left without the given tokens. Only a block that has one of the
// tokens is summed twice. The states are merged in float64 in the order of the blocks, so the result does not depend on the threads.
#include "token_sums.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "../algebra/moments.h"
#include "row_state.h"
#include "shares.h"

namespace fused_topk::cpu {
namespace {

struct State {
  Moments<double> all;
  Moments<double> rest;
};

struct TokenSolver {
  const TokenSumsProblem& problem;
  const VectorKernels& kernels = *problem.kernels;
  const u64 rows;
  u32 blocks;                 // of a row
  u32 parts;                  // of a row
  std::vector<State> states;  // [rows, blocks]

  explicit TokenSolver(const TokenSumsProblem& p) : problem(p), rows(rows_of(p.sizes)) {
    blocks = (p.vocab_size - 1) / kBlock + 1;
    parts = parts_of_a_row(rows, blocks, threads());
    states.resize(rows * blocks);
  }

  u32 threads() const { return useful_threads(rows * problem.vocab_size, problem.threads); }

  void run() {
    const u64 tasks = rows * parts,
              at_once = tasks_at_once(tasks, kElementsAtOnce, problem.vocab_size / parts + 1, threads());
    share_tasks(threads(), tasks, at_once, [&](const auto& for_each) {
      std::vector<float> buffer(2 * kBlock);
      for_each([&](u64 task) { sum_part(task / parts, u32(task % parts), buffer.data()); });
    });
    for (u64 row = 0; row < rows; ++row) finish(row);
  }

  // buffer: [2 * kBlock]
  void sum_part(u64 row, u32 part, float* buffer) {
    const RowReader reader(problem, row);
    Exponential exponential = Temperature(temperature_of(problem, row)).exponential;
    const u32 end = begin_of(part + 1, reader.blocks(), parts);
    for (u32 block = begin_of(part, reader.blocks(), parts); block < end; ++block) {
      const u32 n = reader.elements_of(block);
      const float* const x = reader.load(block, buffer, !problem.sums_all);
      State& state = states[row * blocks + block];
      state.all = sum(x, n, exponential, reader.behind(block), reader.item_size());
      if (problem.has_rest) state.rest = rest(reader, row, block, x, n, exponential, buffer + kBlock, state.all);
    }
    if (part == 0) find_tokens(reader, row);
  }

  Moments<double> sum(const float* x, u32 n, Exponential exponential, const char* next, u32 item_size) const {
    const float greatest = kernels.maximum(x, n);
    exponential.reference = reference_point(greatest);
    double s;
    const double d = kernels.sum_exp_moment(x, n, exponential, next, item_size, &s);
    return {normalizer_of(kernels, x, n, greatest, d).m, d, s};
  }

  // The state without the given tokens, and without hidden ones.
  Moments<double> rest(const RowReader& reader, u64 row, u32 block, const float* x, u32 n,
                       const Exponential& exponential, float* left, const Moments<double>& all) const {
    const i64* const tokens = problem.tokens + row * problem.num_tokens;
    const i64 begin = i64(block) * kBlock;
    bool is_copied = problem.sums_all && reader.has_mask();
    if (is_copied) {
      std::copy(x, x + n, left);
      reader.hide(block, left);
    }
    for (u32 i = 0; i < problem.num_tokens; ++i) {
      if (tokens[i] < begin || tokens[i] >= begin + n) continue;
      if (!is_copied) std::copy(x, x + n, left);
      is_copied = true;
      left[tokens[i] - begin] = -kInfinity;
    }
    return is_copied ? sum(left, n, exponential, nullptr, 0) : all;
  }

  void find_tokens(const RowReader& reader, u64 row) const {
    const u32 item_size = reader.item_size();
    for (u32 i = 0; i < problem.num_tokens; ++i) {
      const u64 place = row * problem.num_tokens + i;
      const i64 token = problem.tokens[place];
      if (token < 0 || token >= problem.vocab_size) continue;
      const bool is_hidden = reader.logit(u32(token)) == -kInfinity;
      const void* const source =
          is_hidden ? static_cast<const void*>(&kNegativeInfinity[problem.dtype]) : reader.at(u32(token));
      std::memcpy(problem.token_logits + place * item_size, source, item_size);
    }
  }

  void finish(u64 row) const {
    float* const sums = problem.sums + row * kSums;
    const double inverse = Temperature(temperature_of(problem, row)).inverse;
    const auto exp = [](double y) { return std::exp(y); };
    Moments<double> all{sums[0], sums[1], sums[2]}, rest{sums[3], sums[4], 0.0};
    const u32 read = RowReader(problem, row).blocks();
    for (u32 block = 0; block < read; ++block) {
      const State& state = states[row * blocks + block];
      all = merge_moments(all, state.all, inverse, exp);
      if (problem.has_rest) rest = merge_moments(rest, state.rest, inverse, exp);
    }
    const float result[kSums] = {all.m, float(all.d), float(all.s), rest.m, float(rest.d)};
    std::copy(result, result + kSums, sums);
  }
};

}  // namespace

void solve(const TokenSumsProblem& problem) { TokenSolver(problem).run(); }

}  // namespace fused_topk::cpu
