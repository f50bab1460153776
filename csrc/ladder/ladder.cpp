// SPDX-License-Identifier: Apache-2.0
#include "ladder.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "../cpu/full_row_kernels.h"
#include "../cpu/row_state.h"
#include "../cpu/selection.h"
#include "../cpu/shares.h"

namespace fused_topk::cpu {
namespace {

// For a greater x, e^x overflows float32.
constexpr float kLargestArgument = 88.72283f;

struct Climber {
  const LadderProblem& problem;
  const VectorKernels& kernels = *problem.kernels;
  const FullRowKernels& full_rows = *problem.kernels->full_rows;
  const Temperature temperature{1.0};

  // A part of a row.
  struct Span {
    const float* x;
    float* y;
    u32 first, end;
  };

  // Calls do_block(first element, count) for each block of a span. That is one pass over memory: a cache holds a block,
  // not a row.
  template <class BLOCK>
  static void pass(const Span& span, const BLOCK& do_block) {
    for (u32 i = span.first; i < span.end; i += kBlock) do_block(i, std::min(kBlock, span.end - i));
  }

  Exponential relative_to(float reference) const {
    Exponential result = temperature.exponential;
    result.reference = reference;
    return result;
  }

  float maximum(const Span& span) const {
    float m = -kInfinity;
    pass(span, [&](u32 i, u32 n) { m = std::max(m, kernels.maximum(span.x + i, n)); });
    return m;
  }

  double sum(const Span& span, float reference) const {
    double d = 0.0;
    pass(span, [&](u32 i, u32 n) { d += sum_of_block(span.x + i, n, reference); });
    return d;
  }

  double sum_of_block(const float* x, u32 n, float reference) const {
    return kernels.sum_exp(x, n, relative_to(reference), x + n, sizeof(float));
  }

  // Naive: nothing is subtracted. The exponential of a logit above kLargestArgument is infinite.
  double naive_sum(const Span& span) const {
    double d = 0.0;
    pass(span, [&](u32 i, u32 n) {
      const bool overflows = kernels.maximum(span.x + i, n) > kLargestArgument;
      d += overflows ? std::numeric_limits<double>::infinity() : sum_of_block(span.x + i, n, 0.0f);
    });
    return d;
  }

  BlockNormalizer online_block(const float* x, u32 n) const {
    const float m = kernels.maximum(x, n);
    return {m, sum_of_block(x, n, reference_point(m))};
  }

  BlockNormalizer online(const Span& span) const {
    BlockNormalizer state{-kInfinity, 0.0};
    pass(span, [&](u32 i, u32 n) { state = merge(state, online_block(span.x + i, n), 1.0); });
    return state;
  }

  void write(const Span& span, float reference, double d) const {
    pass(span, [&](u32 i, u32 n) {
      full_rows.exp_scaled(span.x + i, n, relative_to(reference), float(1.0 / d), span.y + i);
    });
  }

  void write_naive(const Span& span, double d) const {
    if (std::isfinite(d)) return write(span, 0.0f, d);
    for (u32 i = span.first; i < span.end; ++i) span.y[i] = std::exp(span.x[i]) / float(d);
  }

  // The exponentials, relative to the maximum of their block, wait in the place of the result.
  void kept(const Span& span) const {
    std::vector<BlockNormalizer> blocks;
    BlockNormalizer state{-kInfinity, 0.0};
    pass(span, [&](u32 i, u32 n) {
      const float m = kernels.maximum(span.x + i, n);
      const Exponential e = relative_to(reference_point(m));
      blocks.push_back({m, full_rows.exp_terms(span.x + i, n, e, span.y + i, span.x + i + n, sizeof(float))});
      state = merge(state, blocks.back(), 1.0);
    });
    pass(span, [&](u32 i, u32 n) {
      const double relative = std::exp(double(blocks[(i - span.first) / kBlock].m) - state.m);
      full_rows.scale(span.y + i, n, float(relative / state.d), span.y + i);
    });
  }

  // The k best of the span's z, which is x or y. With `sums`, the same pass computes the normalizer.
  void select(const Span& span, const float* z, Selection& selection, BlockNormalizer* sums) const {
    selection.restart();
    pass(span, [&](u32 i, u32 n) {
      if (sums) *sums = merge(*sums, online_block(z + i, n), 1.0);
      selection.add_block(z + i, n, i, kernels.maximum(z + i, n), false);
    });
  }

  void row(u64 number, Selection& selection) const {
    const Span span{problem.x + number * problem.V, problem.y + number * problem.V, 0, problem.V};
    BlockNormalizer state{0.0f, 1.0};
    bool selects_probabilities = false;
    switch (problem.rung) {
      case Rung::kNaive:
        return write_naive(span, naive_sum(span));
      case Rung::kSafe:
      case Rung::kSafeThenTopK:
        state.m = reference_point(maximum(span));
        state.d = sum(span, state.m);
        write(span, state.m, state.d);
        selects_probabilities = true;
        break;
      case Rung::kOnline:
      case Rung::kOnlineThenTopK:
        state = online(span);
        write(span, reference_point(state.m), state.d);
        selects_probabilities = true;
        break;
      case Rung::kKept:
        return kept(span);
      case Rung::kSplit:
        return;
      case Rung::kSafeTopK:
        state = {maximum(span), 0.0};
        selection.restart();
        pass(span, [&](u32 i, u32 n) {
          state.d += sum_of_block(span.x + i, n, reference_point(state.m));
          selection.add_block(span.x + i, n, i, kernels.maximum(span.x + i, n), false);
        });
        break;
      case Rung::kOnlineTopK:
        state = {-kInfinity, 0.0};
        select(span, span.x, selection, &state);
        break;
    }
    if (problem.k == 0) return;
    if (selects_probabilities) select(span, span.y, selection, nullptr);
    const u64* best = selection.sorted();
    for (u32 i = 0; i < problem.k; ++i) {
      float value = logit_of_key(key_of(best[i]));
      if (!selects_probabilities) value = float(std::exp(double(value) - state.m) / state.d);
      problem.values[number * problem.k + i] = value;
      problem.indices[number * problem.k + i] = index_of(best[i]);
    }
  }

  // Each thread makes its own do_task = make_task(). Together they call do_task(number) for all numbers below `tasks`.
  template <class TASK>
  void on_threads(u64 tasks, const TASK& make_task) const {
    share_tasks(problem.threads, tasks, 1, [&](const auto& for_each) { for_each(make_task()); });
  }

  // Each thread has a part of every row. It leaves the normalizers of its parts. When all are there, it merges them and
  // writes.
  void split() const {
    const u32 parts = problem.threads;
    std::vector<BlockNormalizer> partial(problem.rows * parts);
    const auto span_of = [&](u64 task) {
      const u64 number = task / parts, part = task % parts;
      return Span{problem.x + number * problem.V, problem.y + number * problem.V, u32(problem.V * part / parts),
                  u32(problem.V * (part + 1) / parts)};
    };
    on_threads(partial.size(), [&] { return [&](u64 task) { partial[task] = online(span_of(task)); }; });
    on_threads(partial.size(), [&] {
      return [&](u64 task) {
        const BlockNormalizer* parts_of_row = &partial[task / parts * parts];
        BlockNormalizer state = parts_of_row[0];
        for (u32 part = 1; part < parts; ++part) state = merge(state, parts_of_row[part], 1.0);
        write(span_of(task), reference_point(state.m), state.d);
      };
    });
  }

  void run() const {
    if (problem.rung == Rung::kSplit) return split();
    on_threads(problem.rows, [&] {
      return [this, selection = std::make_shared<Selection>(kernels, std::max(problem.k, 1u), problem.V)](u64 number) {
        row(number, *selection);
      };
    });
  }
};

}  // namespace

void climb(const LadderProblem& problem) { Climber{problem}.run(); }

}  // namespace fused_topk::cpu
