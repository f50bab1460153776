// SPDX-License-Identifier: Apache-2.0
// The rows of a problem, on several threads.
//
// A task is a part of a row: a range of its blocks. With many rows it is the whole row. With fewer rows than the
// threads can share evenly, a row has several parts. The thread that finishes the last part of a row merges the parts
// and writes the row's results. The thread that finishes the last beam of a batch entry merges the beams. The results
// are the same to the last bit, however rows are cut: the k best are exact, and a row's normalizer is the merge of its
// blocks' normalizers in their order.
//
// Rows as short as an expert router's, beams among them, are solved several at a time, by router_kernels.cpp.
//
// Error of logsumexp and log-probabilities, in units of 2^-24. The exponentials and their sum put d off by at most 7.7
// (vectors.h). The rounding of x - m changes log d by at most the mean of |x - m| / T under the row's probabilities.
// That is the row's entropy less log d, at most log V; most float16 and bfloat16 logits have an exact x - m. All else
// is float64 and is rounded to float32 once. So
//     |error| <= (7.7 + log V - log d) 2^-24 + 2^-24 |result|,    under 1.4e-6 + 2^-24 |result| at V = 2^22.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "selection.h"
#include "shares.h"
#include "topk_row.h"

namespace fused_topk::cpu {
namespace {

// A row and its place among the others.
struct Row {
  u64 number;
  RowReader reader;
  Temperature temperature;
};

struct Solver {
  // What a thread needs to work on a part.
  struct Workspace {
    explicit Workspace(const Solver& solver)
        : normalizers(solver.parts == 1 ? solver.blocks : 0),
          selection(*solver.problem.kernels, solver.k, solver.problem.vocab_size),
          beam_selection(solver.make_beam_selection()) {}

    alignas(64) float buffer[kBlock];
    std::vector<BlockNormalizer> normalizers;
    Selection selection;
    std::unique_ptr<Selection> beam_selection;
  };

  const Problem& problem;
  const u64 rows;
  u32 blocks;  // of a row
  u32 parts;   // of a row
  u32 k;       // of a row: less than the problem's k where a beam has fewer tokens
  u64 beams = 0;
  Temperature temperature;  // of all rows, if they have one

  // What parts leave for the last part of their row. Only with parts > 1.
  std::unique_ptr<BlockNormalizer[]> normalizers;  // [rows, blocks]
  std::vector<u64> part_lists;                     // [rows, parts, k]
  std::vector<u32> part_sizes;                     // [rows, parts]
  std::unique_ptr<std::atomic<u32>[]> parts_left;  // [rows]

  // What rows leave for the last beam of their batch entry. Only with beams.
  std::vector<float> beam_values;                  // [rows, k]
  std::vector<i64> beam_tokens;                    // [rows, k]
  std::unique_ptr<std::atomic<u32>[]> beams_left;  // [rows / beams]

  explicit Solver(const Problem& p) : problem(p), rows(rows_of(p.sizes)), temperature(p.scale.temperature) {
    blocks = (p.vocab_size - 1) / kBlock + 1;
    k = std::min(p.k, p.vocab_size);
    parts = parts_of_a_row(rows, blocks, threads());
    if (parts > 1) {
      normalizers.reset(new BlockNormalizer[rows * blocks]);
      part_lists.resize(rows * parts * k);
      part_sizes.resize(rows * parts);
      parts_left = counters(rows, parts);
    }
    if (p.beam_scores) {
      beams = u64(p.sizes[1]);
      beam_values.resize(rows * k);
      beam_tokens.resize(rows * k);
      beams_left = counters(rows / std::max<u64>(beams, 1), u32(beams));
    }
  }

  u32 threads() const { return useful_threads(rows * problem.vocab_size, problem.threads); }

  static std::unique_ptr<std::atomic<u32>[]> counters(u64 count, u32 value) {
    std::unique_ptr<std::atomic<u32>[]> result(new std::atomic<u32>[count]);
    for (u64 i = 0; i < count; ++i) result[i].store(value, std::memory_order_relaxed);
    return result;
  }

  void run() {
    if (rows == 0) return;
    if (is_routed()) {
      route();
      return;
    }
    const u64 at_once = tasks_at_once(rows * parts, kElementsAtOnce, problem.vocab_size, threads());
    share_tasks(threads(), rows * parts, at_once, [this](const auto& for_each) {
      Workspace workspace(*this);
      for_each([&](u64 task) { do_part(task / parts, u32(task % parts), workspace); });
    });
  }

  // Depends only on what is asked of one row, so that the bits of a row's results do not depend on the other rows.
  bool is_routed() const {
    const bool is_short = problem.vocab_size <= kMostExperts && k <= kMostChosen;
    // The router takes the normalizer and the choice from the same logits. With kAll the mask is for the choice alone.
    const bool is_one_row = !problem.mask || problem.normalize_over != NormalizeOver::kAll;
    return is_short && is_one_row && problem.value_kind != ValueKind::kState;
  }

  // The rows of an expert router. A task is as many rows as a buffer holds.
  void route() {
    const u64 rows_at_once = kBlock / problem.vocab_size;
    const u64 tasks = (rows + rows_at_once - 1) / rows_at_once;
    share_tasks(threads(), tasks, 1, [this, rows_at_once](const auto& for_each) {
      alignas(64) float buffer[kBlock];
      const std::unique_ptr<Selection> beam_selection = make_beam_selection();
      for_each([&](u64 task) {
        const u64 first = task * rows_at_once;
        const u32 count = u32(std::min(rows - first, rows_at_once));
        route(first, count, buffer);
        for (u32 row = 0; row < count && beams; ++row) finish_beam(first + row, *beam_selection);
      });
    });
  }

  void route(u64 first, u32 count, float* buffer) {
    const Problem& p = problem;
    const float* const x = read_allowed(p, first, count, buffer);
    const bool are_logits = p.value_kind == ValueKind::kLogits;
    float* const values = beams ? beam_values.data() : static_cast<float*>(p.values);
    i64* const indices = beams ? beam_tokens.data() : p.indices;
    for_each_temperature(p, temperature, first, count, [&](u32 begin, u32 some, const Temperatures& t) {
      const u64 row = first + begin;
      p.kernels->router->route({x + u64(begin) * p.vocab_size, some, p.vocab_size, k, t, p.value_kind, p.normalize_over,
                                are_logits ? nullptr : values + row * k, indices + row * k,
                                are_logits ? nullptr : p.logsumexp + row});
    });
    if (are_logits) copy_logits(first, count, x);
  }

  // The chosen logits bit for bit, and -inf for tokens that are not allowed. x: [count, vocab_size]
  void copy_logits(u64 first, u32 count, const float* x) const {
    const u32 item_size = kItemSize[problem.dtype];
    const i64* const indices = problem.indices + first * k;
    char* value = static_cast<char*>(problem.values) + first * k * item_size;
    for (u32 row = 0; row < count; ++row, x += problem.vocab_size) {
      const char* const logits = logits_of(problem, first + row);
      for (u32 i = 0; i < k; ++i, value += item_size) {
        const i64 index = indices[row * k + i];
        const bool is_infinite = x[index] == -kInfinity;
        const char* const logit = logits + index * problem.logits_element_stride * item_size;
        write_logit(problem.dtype, is_infinite ? nullptr : logit, value);
      }
    }
  }

  Row row_at(u64 number) const {
    return {number, RowReader(problem, number), Temperature(temperature_of(problem, number))};
  }

  void do_part(u64 number, u32 part, Workspace& workspace) {
    const Row row = row_at(number);
    workspace.selection.restart();
    const u32 first = begin_of(part, row.reader.blocks(), parts), end = begin_of(part + 1, row.reader.blocks(), parts);
    if (parts == 1) {
      scan(row, first, end, workspace.normalizers.data(), workspace);
      finish_row(row, workspace.normalizers.data(), workspace);
      return;
    }
    BlockNormalizer* const row_normalizers = normalizers.get() + number * blocks;
    scan(row, first, end, row_normalizers + first, workspace);
    u32* const sizes = part_sizes.data() + number * parts;
    u64* const lists = part_lists.data() + number * parts * k;
    const u64* best = workspace.selection.trimmed(&sizes[part]);
    std::copy(best, best + sizes[part], lists + u64(part) * k);

    // Releases what this part wrote, and acquires what the others did.
    if (parts_left[number].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    workspace.selection.restart();
    for (u32 i = 0; i < parts; ++i) workspace.selection.add_candidates(lists + u64(i) * k, sizes[i]);
    finish_row(row, row_normalizers, workspace);
  }

  // Reads blocks first .. end once. Writes their normalizers, and adds their candidates to the workspace's selection.
  void scan(const Row& row, u32 first, u32 end, BlockNormalizer* block_normalizers, Workspace& workspace) const {
    const VectorKernels& kernels = *problem.kernels;
    const RowReader& reader = row.reader;
    const bool hides_later = reader.has_mask() && problem.normalize_over == NormalizeOver::kAll;
    Exponential exponential = row.temperature.exponential;

    for (u32 block = first; block < end; ++block) {
      const u32 n = reader.elements_of(block);
      const float* const x = reader.load(block, workspace.buffer, !hides_later);
      float greatest = kernels.maximum(x, n);
      if (problem.value_kind == ValueKind::kLogits) {
        workspace.selection.add_block(x, n, block * kBlock, greatest, kernels.has_nan(x, n));
        continue;
      }
      exponential.reference = reference_point(greatest);
      const double d = kernels.sum_exp(x, n, exponential, reader.behind(block), reader.item_size());
      const BlockNormalizer normalizer = *block_normalizers++ = normalizer_of(kernels, x, n, greatest, d);
      if (hides_later) {
        reader.hide(block, workspace.buffer);
        greatest = kernels.maximum(x, n);
      }
      workspace.selection.add_block(x, n, block * kBlock, greatest, normalizer.has_nan());
    }
  }

  // The results of a row whose candidates are in the workspace's selection.
  void finish_row(const Row& row, const BlockNormalizer* block_normalizers, Workspace& workspace) {
    const u64* best = workspace.selection.sorted();
    if (problem.value_kind == ValueKind::kLogits) {
      write_logits(row, best);
      return;
    }
    const BlockNormalizer sum = merged(block_normalizers, row.reader.blocks(), row.temperature.inverse);
    if (problem.value_kind == ValueKind::kState) {
      problem.logsumexp[row.number] = sum.m;
      problem.logsumexp[rows + row.number] = float(sum.d);
      write_logits(row, best);
      return;
    }
    const FinishedRow finished(sum, row.temperature.inverse);
    problem.logsumexp[row.number] = finished.logsumexp();

    if (!problem.beam_scores) {
      write_indices(best, k, problem.indices + row.number * k);
      write_values(problem, finished, best, k, static_cast<float*>(problem.values) + row.number * k);
    } else {
      write_indices(best, k, beam_tokens.data() + row.number * k);
      write_values(problem, finished, best, k, beam_values.data() + row.number * k);
      finish_beam(row.number, *workspace.beam_selection);
    }
  }

  // The chosen logits bit for bit, and -inf for tokens that are not allowed.
  void write_logits(const Row& row, const u64* best) const {
    write_indices(best, k, problem.indices + row.number * k);
    const u32 item_size = kItemSize[problem.dtype];
    char* value = static_cast<char*>(problem.values) + row.number * k * item_size;
    for (u32 i = 0; i < k; ++i, value += item_size) {
      const bool is_infinite = key_of(best[i]) == kNegativeInfinityKey;
      write_logit(problem.dtype, is_infinite ? nullptr : row.reader.at(index_of(best[i])), value);
    }
  }

  std::unique_ptr<Selection> make_beam_selection() const {
    return std::unique_ptr<Selection>(beams ? new Selection(*problem.kernels, problem.k, 0) : nullptr);
  }

  // Called when the list of a beam is written. The call for the last beam of a batch entry merges the entry's lists.
  void finish_beam(u64 row, Selection& selection) {
    const u64 entry = row / beams;
    if (beams_left[entry].fetch_sub(1, std::memory_order_acq_rel) == 1) finish_beams(entry, selection);
  }

  // The k best of a batch entry, by accumulated value. The lists of its beams stand one after the other. So of equal
  // values the smaller beam's comes first, and within a beam its row's order holds.
  void finish_beams(u64 entry, Selection& selection) {
    const u64 first_row = entry * beams;
    const char* const scores = reinterpret_cast<const char*>(problem.beam_scores);
    std::vector<u64> candidates(beams * k);
    std::vector<float> accumulated(beams * k);
    for (u64 beam = 0; beam < beams; ++beam) {
      float score;
      const i64 at = i64(entry) * problem.beam_scores_strides[0] + i64(beam) * problem.beam_scores_strides[1];
      std::memcpy(&score, scores + at * i64(sizeof score), sizeof score);
      for (u32 i = 0; i < k; ++i) {
        const u64 place = beam * k + i;
        accumulated[place] = score + beam_values[first_row * k + place];
        candidates[place] = make_candidate(key_of_logit(accumulated[place]), u32(place));
      }
    }
    selection.restart();
    selection.add_candidates(candidates.data(), u32(candidates.size()));
    const u64* best = selection.sorted();
    float* const values = static_cast<float*>(problem.values) + entry * problem.k;
    i64* const indices = problem.indices + entry * problem.k;
    for (u32 i = 0; i < problem.k; ++i) {
      const u32 place = index_of(best[i]);
      values[i] = accumulated[place];
      indices[i] = i64(place / k) * problem.vocab_size + beam_tokens[first_row * k + place];
    }
  }
};

}  // namespace

void solve(const Problem& problem) { Solver(problem).run(); }

}  // namespace fused_topk::cpu
