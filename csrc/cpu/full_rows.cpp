// SPDX-License-Identifier: Apache-2.0
// softmax, log_softmax and logsumexp of full rows, on several threads.
//
// A row is read in blocks. Each block has a normalizer. The row's normalizer is their merge, in the order of the
// blocks, so the result does not depend on the threads. If the cache holds a row, softmax keeps the exponentials in the
// place of the result, relative to their block's maximum, and scales them at the end: one exponential an element and
// one read from memory. The exponentials of a longer row are computed twice, which costs less than writing and reading
// them.
//
// Rows of at most kShortRow elements are solved several at a time, by one call of the table's short_rows.
//
// With many rows, a task is a row or several short ones. With fewer rows than the threads can share evenly, a task is a
// part of a row, and all parts are summed before the first is written.
#include "full_rows.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "row_state.h"
#include "shares.h"

namespace fused_topk::cpu {
namespace {

// Elements whose exponentials a core's second-level cache holds until they are scaled.
constexpr u32 kMostKept = 1u << 17;

struct Workspace {
  alignas(64) float buffer[kBlock];
  std::vector<BlockNormalizer> normalizers;  // of a row's blocks, if one thread has the whole row
  std::vector<float> terms;
};

struct Solver {
  const FullRowProblem& problem;
  const VectorKernels& kernels = *problem.kernels;
  const u64 rows;
  u32 blocks;  // of a row
  u32 parts;   // of a row
  Temperature temperature;
  // Only with more than one part.
  std::vector<BlockNormalizer> normalizers;  // [rows, blocks]
  std::unique_ptr<float[]> kept;             // nullable; [rows, vocab_size]
  std::vector<FinishedRow> results;          // [rows]
  // Only for a gradient, which is (coefficient p + the amount of a token) / T.
  std::vector<float> coefficients;  // [rows]
  std::vector<float> amounts;       // [rows, k]

  explicit Solver(const FullRowProblem& p) : problem(p), rows(rows_of(p.sizes)), temperature(p.scale.temperature) {
    blocks = (p.vocab_size - 1) / kBlock + 1;
    parts = parts_of_a_row(rows, blocks, threads());
    if (!p.gradient) return;
    coefficients.resize(rows);
    amounts.resize(rows * p.gradient->k);
    for (u64 row = 0; row < rows; ++row) prepare_gradient(row, amounts.data() + row * p.gradient->k);
  }

  // amounts_of_row: [k]
  void prepare_gradient(u64 row, float* amounts_of_row) {
    const TopkGradient& g = *problem.gradient;
    const RowReader reader(problem, row);
    const bool are_softmax = g.value_kind == ValueKind::kProbabilities;
    const float* const values = g.values + row * g.k;
    double sum = 0.0;
    for (u32 i = 0; i < g.k && g.grad_values; ++i) {
      // The value of a hidden token is constant.
      if (reader.may_hide() && reader.hides(u32(g.indices[row * g.k + i]))) continue;
      amounts_of_row[i] = g.grad_values[row * g.k + i] * (are_softmax ? values[i] : 1.0f);
      sum += amounts_of_row[i];
    }
    double coefficient = g.grad_logsumexp ? g.grad_logsumexp[row] : 0.0;
    if (g.normalize_over != NormalizeOver::kTopK) {
      coefficient -= sum;
    } else {
      for (u32 i = 0; i < g.k; ++i) {
        amounts_of_row[i] -= float(sum * (are_softmax ? values[i] : std::exp(values[i])));
      }
    }
    coefficients[row] = float(coefficient);
  }

  u32 threads() const { return useful_threads(rows * problem.vocab_size, problem.threads); }

  void run() {
    if (problem.vocab_size <= kShortRow) {
      solve_short_rows();
      return;
    }
    if (parts == 1) {
      for_each_task(rows, tasks_at_once(rows, kElementsAtOnce, problem.vocab_size, threads()),
                    [this](u64 row, Workspace& workspace) {
                      workspace.normalizers.resize(blocks);
                      float* const terms = terms_of(row, workspace);
                      sum_blocks(row, 0, 1, terms, workspace.normalizers.data(), workspace);
                      const FinishedRow result = finish(row, workspace.normalizers.data());
                      write_blocks(row, 0, blocks, terms, workspace.normalizers.data(), result, workspace);
                    });
      return;
    }
    normalizers.resize(rows * blocks);
    if (keeps_terms() && problem.out_dtype != kFloat32) kept.reset(new float[rows * problem.vocab_size]);
    for_each_part([this](u64 row, u32 part, Workspace& workspace) {
      sum_blocks(row, part, parts, terms_of(row, workspace), &normalizers[row * blocks], workspace);
    });
    for (u64 row = 0; row < rows; ++row) results.push_back(finish(row, &normalizers[row * blocks]));
    if (problem.kind == FullRowKind::kLogSumExp) return;
    for_each_part([this](u64 row, u32 part, Workspace& workspace) {
      const u32 first = begin_of(part, blocks, parts), end = begin_of(part + 1, blocks, parts);
      write_blocks(row, first, end, terms_of(row, workspace), &normalizers[row * blocks], results[row], workspace);
    });
  }

  // A task is as many rows as a workspace holds.
  void solve_short_rows() const {
    const u64 rows_at_once = tasks_at_once(rows, kBlock, problem.vocab_size, threads());
    for_each_task((rows + rows_at_once - 1) / rows_at_once, 1, [&](u64 task, Workspace& workspace) {
      const u64 first = task * rows_at_once;
      solve_short_rows(first, u32(std::min(rows - first, rows_at_once)), workspace.buffer);
    });
  }

  void solve_short_rows(u64 first, u32 count, float* buffer) const {
    const u32 n = problem.vocab_size;
    const float* const x = read_allowed(problem, first, count, buffer);  // [count, n]
    const u32 width = problem.kind == FullRowKind::kLogSumExp ? 1 : n;
    char* const out = problem.out + first * width * kItemSize[problem.out_dtype];
    float* const y = problem.out_dtype == kFloat32 ? reinterpret_cast<float*>(out) : buffer;  // [count, width]
    const FullRowKernels& full_rows = *kernels.full_rows;
    for_each_temperature(problem, temperature, first, count, [&](u32 begin, u32 some, const Temperatures& t) {
      full_rows.short_rows(problem.kind, x + u64(begin) * n, some, n, t, y + u64(begin) * width);
    });
    for (u32 i = 0; i < count && problem.gradient; ++i) differentiate(first + i, 0, n, y + u64(i) * n);
    if (problem.out_dtype != kFloat32) full_rows.store[problem.out_dtype](y, count * n, out);
  }

  // Calls do_task(task, the thread's workspace) for all tasks.
  template <class TASK>
  void for_each_task(u64 tasks, u64 at_once, const TASK& do_task) const {
    share_tasks(threads(), tasks, at_once, [&](const auto& for_each) {
      Workspace workspace;
      for_each([&](u64 task) { do_task(task, workspace); });
    });
  }

  template <class PART>
  void for_each_part(const PART& do_part) const {
    for_each_task(rows * parts, 1,
                  [&](u64 task, Workspace& workspace) { do_part(task / parts, u32(task % parts), workspace); });
  }

  Temperature temperature_at(u64 row) const {
    return problem.scale.row_temperature ? Temperature(temperature_of(problem, row)) : temperature;
  }

  char* out_of(u64 row) const { return problem.out + row * problem.vocab_size * kItemSize[problem.out_dtype]; }

  // Depends on vocab_size alone, so that a row's bits do not depend on the other rows.
  bool keeps_terms() const { return problem.kind == FullRowKind::kSoftmax && problem.vocab_size <= kMostKept; }

  // Where a row's exponentials are kept, [vocab_size]; null if they are not kept.
  float* terms_of(u64 row, Workspace& workspace) const {
    if (!keeps_terms()) return nullptr;
    if (problem.out_dtype == kFloat32) return reinterpret_cast<float*>(out_of(row));
    if (kept) return kept.get() + row * problem.vocab_size;
    workspace.terms.resize(problem.vocab_size);
    return workspace.terms.data();
  }

  // Sums a part of the row's blocks. block_normalizers: of the row, [blocks].
  void sum_blocks(u64 row, u32 part, u32 of_parts, float* terms, BlockNormalizer* block_normalizers,
                  Workspace& workspace) const {
    Exponential exponential = temperature_at(row).exponential;
    const RowReader reader(problem, row);
    const u32 end = begin_of(part + 1, reader.blocks(), of_parts);
    for (u32 block = begin_of(part, reader.blocks(), of_parts); block < end; ++block) {
      const u32 n = reader.elements_of(block), item_size = reader.item_size();
      const float* const x = reader.load(block, workspace.buffer);
      const char* const next = reader.behind(block);
      const float greatest = kernels.maximum(x, n);
      exponential.reference = reference_point(greatest);
      const double d = terms ? kernels.full_rows->exp_terms(x, n, exponential, terms + block * kBlock, next, item_size)
                             : kernels.sum_exp(x, n, exponential, next, item_size);
      block_normalizers[block] = normalizer_of(kernels, x, n, greatest, d);
    }
  }

  // Turns y [n], the row's probabilities from token `begin` on, into the gradient of their logits.
  void differentiate(u64 row, u32 begin, u32 n, float* y) const {
    const FullRowKernels& full_rows = *kernels.full_rows;
    full_rows.scale(y, n, coefficients[row], y);
    const u32 k = problem.gradient->k;
    for (u64 i = row * k; i < (row + 1) * k; ++i) {
      const u64 place = u64(problem.gradient->indices[i]) - begin;
      if (place < n) y[place] += amounts[i];
    }
    const double inverse = temperature_at(row).inverse;
    if (inverse != 1.0) full_rows.scale(y, n, float(inverse), y);
    const RowReader reader(problem, row);
    // A hidden token has no gradient, even in a row without probabilities.
    for (u32 i = 0; i < n && reader.may_hide(); ++i) {
      if (y[i] != y[i] && reader.hides(begin + i)) y[i] = 0.0f;
    }
  }

  FinishedRow finish(u64 row, const BlockNormalizer* block_normalizers) const {
    const double inverse = temperature_at(row).inverse;
    const FinishedRow finished(merged(block_normalizers, RowReader(problem, row).blocks(), inverse), inverse);
    if (problem.kind == FullRowKind::kLogSumExp) reinterpret_cast<float*>(problem.out)[row] = finished.logsumexp();
    return finished;
  }

  void write_blocks(u64 row, u32 first, u32 end, const float* terms, const BlockNormalizer* block_normalizers,
                    const FinishedRow& result, Workspace& workspace) const {
    if (problem.kind == FullRowKind::kLogSumExp) return;
    const Temperature t = temperature_at(row);
    char* const out = out_of(row);
    const u32 out_size = kItemSize[problem.out_dtype];
    const FullRowKernels& full_rows = *kernels.full_rows;
    // y: where the block's results are formed, [n]. Results of 16 bits are formed in the buffer.
    const auto place = [&](u32 begin) {
      return problem.out_dtype == kFloat32 ? reinterpret_cast<float*>(out) + begin : workspace.buffer;
    };
    const auto store = [&](u32 begin, u32 n, const float* y) {
      if (problem.out_dtype != kFloat32) full_rows.store[problem.out_dtype](y, n, out + u64(begin) * out_size);
    };

    const RowReader reader(problem, row);
    Exponential exponential = t.exponential;
    exponential.reference = float(result.m);
    const float nothing = !result.is_finite() ? kNaN : problem.kind == FullRowKind::kLogSoftmax ? -kInfinity : 0.0f;
    for (u32 block = first; block < end; ++block) {
      const u32 begin = block * kBlock, of_block = std::min(kBlock, problem.vocab_size - begin);
      const u32 n = result.is_finite() && block < reader.blocks() ? reader.elements_of(block) : 0;
      float* const y = place(begin);
      if (n == 0) {
        // Nothing is read.
      } else if (terms) {
        const double below = block_normalizers[block].m - result.m;
        const double relative = below == 0.0 ? 1.0 : std::exp(below * t.inverse);
        full_rows.scale(terms + begin, n, float(relative / result.d), y);
      } else if (problem.kind == FullRowKind::kSoftmax) {
        full_rows.exp_scaled(reader.load(block, workspace.buffer), n, exponential, float(1.0 / result.d), y);
      } else {
        const float* const x = reader.load(block, workspace.buffer);
        full_rows.log_values(x, n, float(result.m), float(t.inverse), float(result.log_d), y);
      }
      std::fill(y + n, y + of_block, nothing);
      if (problem.gradient) differentiate(row, begin, of_block, y);
      store(begin, of_block, y);
    }
  }
};

}  // namespace

void solve(const FullRowProblem& problem) { Solver(problem).run(); }

}  // namespace fused_topk::cpu
