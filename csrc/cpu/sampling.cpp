// SPDX-License-Identifier: Apache-2.0
// Draws from rows, on several threads. A task is a row, or several short ones. With fewer rows than the threads can
// share evenly it is a part of a row, and the thread that finishes the last part of a row draws from it.
//
// A row is read once, block by block. This gives the normalizer of each block and, if a filter needs it, a list of the row's
// best. Top-k, top-p and min-p keep the best of a row. So a candidate, the border, says what is kept: the tokens that do
// not rank behind it. Mostly the list has the border, and a token is drawn from the list. Without filters the blocks'
// sums say which block has the token, and that block is read again.
//
// Where what is kept is longer than the list, the row is read again. With top-p, a sample of the row says between which
// logits the border should be. The second read sums the weights above these, block by block, and lists the tokens between.
// If they show that the border is elsewhere, two reads find it by the leading bits of the keys, whatever the row, and one
// sums what is kept. With min-p the border is known, and the tokens up to it are listed, or summed if they are many.
//
// The token of a uniform number u is the first, by index, at which the running sum of the kept weights exceeds u times
// their total. Weights are off by 2^-21 relatively (vectors.h) and sums are float64, so a draw is exact to 2^-20 of the
// total.
//
// With noise of the caller's the tokens that are kept race (sampling_row.h): those of the list, or those of all blocks, which are
// read again.
#include "sampling.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "../draws/philox.h"
#include "sampling_kept.h"
#include "shares.h"

namespace fused_topk::cpu {
namespace {

// So many tokens are listed if top-k does not say how many are kept. Top-p mostly keeps fewer tokens of a language
// model's rows.
constexpr u32 kListed = 128;
// Room for tokens that tie with the k-th, besides k / 8.
constexpr u32 kRoomForTies = 16;
// A block is summed in stretches of so many elements until the one with the token is found.
constexpr u32 kStretch = 256;

// What the parts of a row leave for the last of them.
struct SharedRow {
  std::vector<BlockNormalizer> own;       // [blocks]
  std::vector<BlockNormalizer> tempered;  // [blocks]
  std::vector<std::vector<u64>> lists;    // [parts]
  std::atomic<u32> parts_left;
};

struct Solver {
  const SampleProblem& problem;
  const VectorKernels& kernels = *problem.kernels;
  const Temperature one{1.0};
  const u64 rows = u64(problem.sizes[0]);
  const u32 vocab_size = problem.vocab_size;
  const KeptOfRows kept_of{kernels, vocab_size};
  const u32 blocks = (vocab_size - 1) / kBlock + 1;

  u32 threads() const { return useful_threads(rows * vocab_size, problem.threads); }

  void run() const {
    const u32 parts = parts_of_a_row(rows, blocks, threads());
    if (parts > 1) {
      run_parts(parts);
      return;
    }
    const u64 at_once = tasks_at_once(rows, kElementsAtOnce, vocab_size, threads());
    for_each_task((rows + at_once - 1) / at_once, [&](u64 task, SampleWorkspace& workspace) {
      for (u64 number = task * at_once; number < std::min(rows, (task + 1) * at_once); ++number) {
        const SampleRow row = row_at(number);
        Selection* const selection = selection_of(row, workspace);
        resize(row, workspace.own, workspace.tempered);
        read(row, 0, row.reader.blocks(), selection, workspace.own.data(), workspace.tempered.data(), workspace);
        draw(row, selection, workspace);
      }
    });
  }

  void run_parts(u32 parts) const {
    const std::unique_ptr<SharedRow[]> shared(new SharedRow[rows]);
    for (u64 number = 0; number < rows; ++number) {
      resize(row_at(number), shared[number].own, shared[number].tempered);
      shared[number].lists.resize(parts);
      shared[number].parts_left.store(parts, std::memory_order_relaxed);
    }
    for_each_task(rows * parts, [&](u64 task, SampleWorkspace& workspace) {
      const SampleRow row = row_at(task / parts);
      const u32 part = u32(task % parts);
      SharedRow& of_row = shared[row.number];
      Selection* const selection = selection_of(row, workspace);
      const u32 of_all = row.reader.blocks();
      const u32 first = begin_of(part, of_all, parts), end = begin_of(part + 1, of_all, parts);
      read(row, first, end, selection, of_row.own.data(), of_row.tempered.data(), workspace);
      if (selection) {
        u32 count;
        const u64* const best = selection->trimmed(&count);
        of_row.lists[part].assign(best, best + count);
      }
      // Releases what this part wrote, and acquires what the others did.
      if (of_row.parts_left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
      if (selection) {
        selection->restart();
        for (const std::vector<u64>& list : of_row.lists) selection->add_candidates(list.data(), u32(list.size()));
      }
      workspace.own.swap(of_row.own);
      workspace.tempered.swap(of_row.tempered);
      draw(row, selection, workspace);
    });
  }

  // Calls do_task(task, the thread's workspace) for all tasks.
  template <class TASK>
  void for_each_task(u64 tasks, const TASK& do_task) const {
    share_tasks(threads(), tasks, 1, [&](const auto& for_each) {
      SampleWorkspace workspace;
      for_each([&](u64 task) { do_task(task, workspace); });
    });
  }

  // Null if the row needs no list.
  Selection* selection_of(const SampleRow& row, SampleWorkspace& workspace) const {
    const u32 length = list_length(row);
    return length ? &workspace.selection_of(kernels, length, vocab_size) : nullptr;
  }

  void resize(const SampleRow& row, std::vector<BlockNormalizer>& own, std::vector<BlockNormalizer>& tempered) const {
    own.resize(row.reader.blocks());
    if (row.needs_sum()) tempered.resize(row.reader.blocks());
  }

  SampleRow row_at(u64 number) const {
    const SampleProblem& p = problem;
    const double temperature = p.temperatures(number);
    const i64 k = p.top_k(number);
    return {number,
            RowReader(p, number),
            Temperature(temperature > 0.0 ? temperature : 1.0),
            !(temperature > 0.0),
            k > 0 && k < i64(vocab_size) ? u32(k) : 0,
            p.top_p(number),
            p.min_p(number)};
  }

  u32 list_length(const SampleRow& row) const {
    u64 length = problem.logprobs;
    if (row.is_greedy) {
      length = std::max<u64>(length, 1);
    } else if (row.k) {
      length = std::max<u64>(length, u64(row.k) + kRoomForTies + row.k / 8);
    } else if (row.has_filter()) {
      length = std::max<u64>(length, kListed);
    }
    return u32(std::min<u64>(length, vocab_size));
  }

  // Draws from a row. The workspace has its normalizers; the selection, if there is one, has its best tokens.
  void draw(const SampleRow& row, Selection* selection, SampleWorkspace& workspace) const {
    const BlockNormalizer own = merged(workspace.own.data(), row.reader.blocks(), 1.0);
    const float m = own.m;
    const double log_d = std::log(own.d);
    const u64* const best = selection ? selection->sorted() : nullptr;
    if (problem.logprobs) list_best(row, best, m, log_d);
    if (!std::isfinite(m) || row.is_greedy) {
      take_best(row, best ? best[0] : best_of(row, workspace), m, log_d);
      return;
    }

    u64 border = kKeepAll;
    if (row.has_filter()) {
      u32 kept = kept_of_list(row, best, list_length(row), m, workspace);
      if (!kept) {
        border = row.k ? last_of_key(key_of(best[row.k - 1])) : last_of_key(kNegativeInfinityKey);
        bool has_sums = false;
        if (row.has_top_p()) {
          const u64 estimated = row.k ? kKeepAll : kept_of.border_by_estimate(row, m, workspace);
          has_sums = estimated != kKeepAll;
          border = has_sums ? estimated : std::max(border, kept_of.border_of_top_p(row, border, m, workspace));
        }
        if (row.has_min_p()) {
          const u64 likely = kept_of.border_of_min_p(row, m);
          has_sums &= likely <= border;
          border = std::max(border, likely);
        }
        if (!has_sums) kept = kept_of.list_kept(row, border, m, workspace);
        if (!has_sums && !kept) kept_of.sum_kept(row, border, m, workspace);
      }
      if (kept) {
        draw_from_list(row, kept, m, log_d, workspace);
        return;
      }
    } else {
      workspace.sums.resize(row.reader.blocks());
      for (u32 block = 0; block < row.reader.blocks(); ++block)
        workspace.sums[block] = relative_to(m, workspace.tempered[block], row);
    }
    draw_from_blocks(row, border, m, log_d, workspace);
  }

  // Reads blocks first .. end. Writes their normalizers, and offers the elements to the selection, if there is one.
  void read(const SampleRow& row, u32 first, u32 end, Selection* selection, BlockNormalizer* own_normalizers,
            BlockNormalizer* tempered_normalizers, SampleWorkspace& workspace) const {
    const bool is_tempered = row.needs_sum() && row.temperature.inverse != 1.0;
    Exponential own = one.exponential, tempered = row.temperature.exponential;
    const u32 item_size = row.reader.item_size();
    for (u32 block = first; block < end; ++block) {
      const u32 n = row.reader.elements_of(block);
      const float* const x = row.reader.load(block, workspace.buffer);
      const char* const next = row.reader.behind(block);
      const float greatest = kernels.maximum(x, n);
      own.reference = tempered.reference = reference_point(greatest);
      const double d = kernels.sum_exp(x, n, own, next, item_size);
      const BlockNormalizer normalizer = own_normalizers[block] = normalizer_of(kernels, x, n, greatest, d);
      if (row.needs_sum()) {
        tempered_normalizers[block] = {normalizer.m,
                                       is_tempered ? kernels.sum_exp(x, n, tempered, next, item_size) : d};
      }
      if (selection) selection->add_block(x, n, block * kBlock, greatest, normalizer.has_nan());
    }
  }

  // The best token of a row that has no list.
  u64 best_of(const SampleRow& row, SampleWorkspace& workspace) const {
    Selection selection(kernels, 1, vocab_size);
    for (u32 block = 0; block < row.reader.blocks(); ++block) {
      const u32 n = row.reader.elements_of(block);
      const float* const x = row.reader.load(block, workspace.buffer);
      selection.add_block(x, n, block * kBlock, kernels.maximum(x, n), true);
    }
    return selection.sorted()[0];
  }

  void list_best(const SampleRow& row, const u64* best, float m, double log_d) const {
    const u32 count = problem.logprobs;
    problem.logsumexp[row.number] = float(std::isinf(m) ? double(m) : m + log_d);
    for (u32 i = 0; i < count; ++i) {
      problem.best_indices[row.number * count + i] = index_of(best[i]);
      problem.best_values[row.number * count + i] = own_log_prob(logit_of(best[i]), m, log_d);
    }
  }

  static float own_log_prob(float x, float m, double log_d) {
    return std::isfinite(m) && std::isfinite(log_d) ? float(double(x) - m - log_d) : kNaN;
  }

  void take_best(const SampleRow& row, u64 best, float m, double log_d) const {
    const bool has_distribution = std::isfinite(m) && problem.temperatures(row.number) == 0.0;
    const float log_prob = !problem.truncated ? own_log_prob(logit_of(best), m, log_d) : has_distribution ? 0.0f : kNaN;
    if (problem.kept_counts) {
      problem.kept_counts[row.number] = has_distribution;
      problem.kept_logsumexp[row.number] = has_distribution ? m : kNaN;
    }
    std::fill_n(problem.tokens + row.number * problem.num_samples, problem.num_samples, i64(index_of(best)));
    std::fill_n(problem.log_probs + row.number * problem.num_samples, problem.num_samples, log_prob);
  }

  // How many of the list are kept, with their weights in the workspace; 0 if what is kept is longer than the list.
  u32 kept_of_list(const SampleRow& row, const u64* best, u32 length, float m, SampleWorkspace& workspace) const {
    bool has_border = length == vocab_size;
    u32 kept = length;
    if (row.k) {
      const u32 kth = key_of(best[row.k - 1]);
      while (kept > row.k && key_of(best[kept - 1]) < kth) --kept;
      has_border |= kept < length;
      // top-p needs the sum of all tokens that top-k keeps. Tokens that tie with the k-th may be missing in the list.
      if (!has_border && row.has_top_p()) return 0;
    }
    std::vector<KeptToken>& tokens = workspace.kept;
    tokens.resize(kept);
    double total = 0.0;
    for (u32 i = 0; i < kept; ++i) {
      tokens[i] = {index_of(best[i]), key_of(best[i]) != kNegativeInfinityKey, weight_of(row, logit_of(best[i]), m)};
      total += tokens[i].weight;
    }
    if (row.has_top_p()) {
      if (!row.k) total = sum_of_all(row, m, workspace);
      double before = tokens[0].weight;
      u32 within = 1;
      while (within < kept && before < row.top_p * total) before += tokens[within++].weight;
      has_border |= within < kept || before >= row.top_p * total;
      kept = within;
    }
    if (row.has_min_p()) {
      const u32 before = kept;
      while (kept > 1 && tokens[kept - 1].weight < row.min_p) --kept;
      has_border |= kept < before;
    }
    return has_border ? kept : 0;
  }

  // u times the total, and always less than the total.
  double aim_of(const SampleRow& row, u32 sample, double total) const {
    const SampleProblem& p = problem;
    // Rows with seeds of their own need no row number to draw different numbers.
    const u32 stream = p.seed.of_rows ? 0 : p.first_row + u32(row.number);
    const double u = uniform_number(u64(p.seed(row.number)), u64(p.counter(row.number)), sample, stream);
    return std::min(u * total, std::nextafter(total, 0.0));
  }

  Race race_of(const SampleRow& row, float m) const { return Race(row, m, problem.noise + row.number * vocab_size); }

  void write_kept(const SampleRow& row, u64 count, float m, double total) const {
    problem.kept_counts[row.number] = i64(count);
    problem.kept_logsumexp[row.number] = float(m * row.temperature.inverse + std::log(total));
  }

  void write(const SampleRow& row, u32 sample, u32 token, float x, float m, double log_d, double total) const {
    const u64 place = row.number * problem.num_samples + sample;
    problem.tokens[place] = token;
    problem.log_probs[place] = problem.truncated ? float((double(x) - m) * row.temperature.inverse - std::log(total))
                                                 : own_log_prob(x, m, log_d);
  }

  // The logit of a token that may be drawn.
  float logit_at(const SampleRow& row, u32 token) const {
    float x;
    kernels.load[problem.dtype](row.reader.at(token), 1, 1, &x);
    return x;
  }

  void draw_from_list(const SampleRow& row, u32 count, float m, double log_d, SampleWorkspace& workspace) const {
    KeptToken* const tokens = workspace.kept.data();
    std::sort(tokens, tokens + count, [](const KeptToken& a, const KeptToken& b) { return a.index < b.index; });
    std::vector<double>& sums = workspace.sums;
    sums.resize(count);
    double total = 0.0;
    u32 finite = 0;
    for (u32 i = 0; i < count; ++i) {
      sums[i] = total += tokens[i].weight;
      finite += tokens[i].is_finite;
    }
    if (problem.kept_counts) write_kept(row, finite, m, total);
    if (problem.noise) {
      Race race = race_of(row, m);
      for (u32 i = 0; i < count; ++i)
        if (tokens[i].is_finite) race.offer(logit_at(row, tokens[i].index), tokens[i].index);
      write(row, 0, race.winner(), logit_at(row, race.winner()), m, log_d, total);
      return;
    }
    for (u32 sample = 0; sample < problem.num_samples; ++sample) {
      const auto at = std::upper_bound(sums.begin(), sums.end(), aim_of(row, sample, total));
      const u32 token = tokens[at - sums.begin()].index;
      write(row, sample, token, logit_at(row, token), m, log_d, total);
    }
  }

  // workspace.sums has, for each block, the sum of what is kept of it.
  void draw_from_blocks(const SampleRow& row, u64 border, float m, double log_d, SampleWorkspace& workspace) const {
    std::vector<double>& sums = workspace.sums;
    const Exponential exponential = exponential_of(row, m);
    double total = 0.0;
    for (double& sum : sums) sum = total += sum;
    if (problem.kept_counts) write_kept(row, kept_of.count_kept(row, border, workspace), m, total);
    if (problem.noise) {
      Race race = race_of(row, m);
      for (u32 block = 0; block < row.reader.blocks(); ++block) {
        const u32 n = row.reader.elements_of(block);
        const float* const x = kept_of.load_kept(row, block, border, workspace);
        kernels.full_rows->exp_terms(x, n, exponential, workspace.terms, x, 0);
        race.offer_block(x, workspace.terms, n, block * kBlock);
      }
      write(row, 0, race.winner(), logit_at(row, race.winner()), m, log_d, total);
      return;
    }
    for (u32 sample = 0; sample < problem.num_samples; ++sample) {
      const double aim = aim_of(row, sample, total);
      const u32 block = u32(std::upper_bound(sums.begin(), sums.end(), aim) - sums.begin());
      const u32 token = draw_in_block(row, block, block ? aim - sums[block - 1] : aim, border, exponential, workspace);
      write(row, sample, token, logit_at(row, token), m, log_d, total);
    }
  }

  // The first token of the block at which the running sum exceeds `rest`. If rounding keeps the sum below `rest`: the last
  // token with a weight above 0. If all weights round to 0: the greatest logit.
  u32 draw_in_block(const SampleRow& row, u32 block, double rest, u64 border, const Exponential& exponential,
                    SampleWorkspace& workspace) const {
    const float* const x = kept_of.load_kept(row, block, border, workspace);
    const u32 n = row.reader.elements_of(block);
    u32 first = 0;
    double rest_of_first = rest;
    for (u32 begin = 0; begin < n; begin += kStretch) {
      const double sum = kernels.sum_exp(x + begin, std::min(kStretch, n - begin), exponential, x, 0);
      if (sum > 0.0) {
        first = begin;
        rest_of_first = rest;
      }
      if (rest < sum) break;
      rest -= sum;
    }
    const u32 end = std::min(n, first + kStretch);
    u32 last = n;
    for (u32 i = first; i < end; ++i) {
      const double weight = weight_of(row, x[i], exponential.reference);
      if (weight > 0.0) last = i;
      if (rest_of_first < weight) break;
      rest_of_first -= weight;
    }
    if (last == n) last = u32(std::max_element(x, x + n) - x);
    return block * kBlock + last;
  }
};

}  // namespace

void solve(const SampleProblem& problem) {
  if (problem.sizes[0]) Solver{problem}.run();
}

}  // namespace fused_topk::cpu
