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
#include "sampling.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>
#include <vector>

#include "../draws/philox.h"
#include "full_row_kernels.h"
#include "row_state.h"
#include "selection.h"
#include "shares.h"

namespace fused_topk::cpu {
namespace {

// Listed where no top-k says how many are kept. What top-p keeps of a language model's rows is mostly less.
constexpr u32 kListed = 128;
// Room for tokens that tie with the k-th, besides k / 8.
constexpr u32 kRoomForTies = 16;
// A block is summed in stretches of so many elements until the one with the token is found.
constexpr u32 kStretch = 256;
// The border of top-p is searched by so many leading bits of the keys, where its estimate fails.
constexpr u32 kBinBits = 16;
// The estimate is from about so many tokens of a row, and at least so many of each block.
constexpr u32 kSampled = 8192, kSampledOfBlock = 256;
constexpr u32 kBins = 1024;
// Standard deviations of the estimate on either side.
constexpr double kDeviations = 3.0;
// Tokens between the bounds of an estimate, and tokens that are drawn from as a list.
constexpr u32 kMostBetween = 1 << 13, kMostListed = 2048;

// No candidate ranks behind it.
constexpr u64 kKeepAll = 0;

float logit_of(u64 candidate) { return logit_of_key(key_of(candidate)); }

// Ranks behind every token with that key.
u64 last_of_key(u32 key) { return u64(key) << 32; }

// At least so many elements.
template <class T>
T* room_for(std::vector<T>& list, size_t count) {
  if (list.size() < count) list.resize(count);
  return list.data();
}

// What is asked of a row.
struct Row {
  u64 number;
  RowReader reader;
  Temperature temperature;
  bool is_greedy;
  u32 k;  // 0: top-k keeps all
  double top_p;
  double min_p;

  bool has_top_p() const { return top_p < 1.0; }
  bool has_min_p() const { return min_p > 0.0; }
  bool has_filter() const { return k || has_top_p() || has_min_p(); }
  // Whether the sum of all weights at this temperature is needed.
  bool needs_sum() const { return !is_greedy && !k && (has_top_p() || !has_min_p()); }
};

struct KeptToken {
  u32 index;
  bool is_finite;  // not -inf
  double weight;
};

// Logits from `low` on, below `end`.
struct Band {
  float low, end;
};

struct Workspace {
  alignas(64) float buffer[kBlock];
  alignas(64) float terms[kBlock];
  std::vector<BlockNormalizer> own;       // of the blocks, at temperature 1
  std::vector<BlockNormalizer> tempered;  // at the row's temperature
  std::vector<double> sums;               // [blocks]: running sums of the kept weights
  std::unique_ptr<Selection> selection;
  u32 listed = 0;
  std::vector<KeptToken> kept;
  std::vector<double> bins;
  std::vector<u64> of_bin;
  // These never get shorter.
  std::vector<u64> candidates;
  std::vector<float> values;  // of listed tokens, as the next two
  std::vector<float> weights;
  std::vector<u32> indices;
  std::vector<int> bin_of;
  std::vector<u32> begins;  // [blocks + 1]: where the tokens of each block begin

  Selection& selection_of(const VectorKernels& kernels, u32 k, u32 vocab_size) {
    if (listed != k) {
      selection.reset(new Selection(kernels, k, vocab_size));
      listed = k;
    }
    selection->restart();
    return *selection;
  }
};

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
  const u32 blocks = (vocab_size - 1) / kBlock + 1;

  u32 threads() const { return useful_threads(rows * vocab_size, problem.threads); }

  void run() const {
    const u32 parts = parts_of_a_row(rows, blocks, threads());
    if (parts > 1) {
      run_parts(parts);
      return;
    }
    const u64 at_once = tasks_at_once(rows, kElementsAtOnce, vocab_size, threads());
    for_each_task((rows + at_once - 1) / at_once, [&](u64 task, Workspace& workspace) {
      for (u64 number = task * at_once; number < std::min(rows, (task + 1) * at_once); ++number) {
        const Row row = row_at(number);
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
    for_each_task(rows * parts, [&](u64 task, Workspace& workspace) {
      const Row row = row_at(task / parts);
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
      Workspace workspace;
      for_each([&](u64 task) { do_task(task, workspace); });
    });
  }

  // Null where no list is needed.
  Selection* selection_of(const Row& row, Workspace& workspace) const {
    const u32 length = list_length(row);
    return length ? &workspace.selection_of(kernels, length, vocab_size) : nullptr;
  }

  void resize(const Row& row, std::vector<BlockNormalizer>& own, std::vector<BlockNormalizer>& tempered) const {
    own.resize(row.reader.blocks());
    if (row.needs_sum()) tempered.resize(row.reader.blocks());
  }

  Row row_at(u64 number) const {
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

  u32 list_length(const Row& row) const {
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
  void draw(const Row& row, Selection* selection, Workspace& workspace) const {
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
          const u64 estimated = row.k ? kKeepAll : border_by_estimate(row, m, workspace);
          has_sums = estimated != kKeepAll;
          border = has_sums ? estimated : std::max(border, border_of_top_p(row, border, m, workspace));
        }
        if (row.has_min_p()) {
          const u64 likely = border_of_min_p(row, m);
          has_sums &= likely <= border;
          border = std::max(border, likely);
        }
        if (!has_sums) kept = list_kept(row, border, m, workspace);
        if (!has_sums && !kept) sum_kept(row, border, m, workspace);
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
  void read(const Row& row, u32 first, u32 end, Selection* selection, BlockNormalizer* own_normalizers,
            BlockNormalizer* tempered_normalizers, Workspace& workspace) const {
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

  // The first in the order, of a row for which there is no list.
  u64 best_of(const Row& row, Workspace& workspace) const {
    Selection selection(kernels, 1, vocab_size);
    for (u32 block = 0; block < row.reader.blocks(); ++block) {
      const u32 n = row.reader.elements_of(block);
      const float* const x = row.reader.load(block, workspace.buffer);
      selection.add_block(x, n, block * kBlock, kernels.maximum(x, n), true);
    }
    return selection.sorted()[0];
  }

  void list_best(const Row& row, const u64* best, float m, double log_d) const {
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

  void take_best(const Row& row, u64 best, float m, double log_d) const {
    const bool has_distribution = std::isfinite(m) && problem.temperatures(row.number) == 0.0;
    const float log_prob = !problem.truncated ? own_log_prob(logit_of(best), m, log_d) : has_distribution ? 0.0f : kNaN;
    if (problem.kept_counts) {
      problem.kept_counts[row.number] = has_distribution;
      problem.kept_logsumexp[row.number] = has_distribution ? m : kNaN;
    }
    std::fill_n(problem.tokens + row.number * problem.num_samples, problem.num_samples, i64(index_of(best)));
    std::fill_n(problem.log_probs + row.number * problem.num_samples, problem.num_samples, log_prob);
  }

  static Exponential exponential_of(const Row& row, float m) {
    Exponential exponential = row.temperature.exponential;
    exponential.reference = m;
    return exponential;
  }

  double weight_of(const Row& row, float x, float m) const {
    return std::exp((double(x) - m) * row.temperature.inverse);
  }

  // How many of the list are kept, with their weights in the workspace; 0 if what is kept is longer than the list.
  u32 kept_of_list(const Row& row, const u64* best, u32 length, float m, Workspace& workspace) const {
    bool has_border = length == vocab_size;
    u32 kept = length;
    if (row.k) {
      const u32 kth = key_of(best[row.k - 1]);
      while (kept > row.k && key_of(best[kept - 1]) < kth) --kept;
      has_border |= kept < length;
      // Without the sum of all that tie with the k-th, top-p has nothing to be relative to.
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

  double sum_of_all(const Row& row, float m, const Workspace& workspace) const {
    double sum = 0.0;
    for (u32 i = 0; i < row.reader.blocks(); ++i) sum += relative_to(m, workspace.tempered[i], row);
    return sum;
  }

  static double relative_to(float m, const BlockNormalizer& of_block, const Row& row) {
    return of_block.d == 0.0 ? 0.0 : of_block.d * std::exp((double(of_block.m) - m) * row.temperature.inverse);
  }

  // u times the total, below the total.
  double aim_of(const Row& row, u32 sample, double total) const {
    const SampleProblem& p = problem;
    // Rows with a seed of their own are told apart by it.
    const u32 stream = p.seed.of_rows ? 0 : p.first_row + u32(row.number);
    const double u = uniform_number(u64(p.seed(row.number)), u64(p.counter(row.number)), sample, stream);
    return std::min(u * total, std::nextafter(total, 0.0));
  }

  void write_kept(const Row& row, u64 count, float m, double total) const {
    problem.kept_counts[row.number] = i64(count);
    problem.kept_logsumexp[row.number] = float(m * row.temperature.inverse + std::log(total));
  }

  // Tokens that do not rank behind the border, of a row that was not listed.
  u64 count_kept(const Row& row, u64 border, Workspace& workspace) const {
    u64 count = 0;
    for (u32 block = 0; block < row.reader.blocks(); ++block) {
      const float* const x = load_kept(row, block, border, workspace);
      for (u32 i = 0; i < row.reader.elements_of(block); ++i) count += x[i] != -kInfinity;
    }
    return count;
  }

  void write(const Row& row, u32 sample, u32 token, float x, float m, double log_d, double total) const {
    const u64 place = row.number * problem.num_samples + sample;
    problem.tokens[place] = token;
    problem.log_probs[place] = problem.truncated ? float((double(x) - m) * row.temperature.inverse - std::log(total))
                                                 : own_log_prob(x, m, log_d);
  }

  // The logit of a token that may be drawn.
  float logit_at(const Row& row, u32 token) const {
    float x;
    kernels.load[problem.dtype](row.reader.at(token), 1, 1, &x);
    return x;
  }

  void draw_from_list(const Row& row, u32 count, float m, double log_d, Workspace& workspace) const {
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
    for (u32 sample = 0; sample < problem.num_samples; ++sample) {
      const auto at = std::upper_bound(sums.begin(), sums.end(), aim_of(row, sample, total));
      const u32 token = tokens[at - sums.begin()].index;
      write(row, sample, token, logit_at(row, token), m, log_d, total);
    }
  }

  // With the sum of what is kept of each block in the workspace.
  void draw_from_blocks(const Row& row, u64 border, float m, double log_d, Workspace& workspace) const {
    std::vector<double>& sums = workspace.sums;
    const Exponential exponential = exponential_of(row, m);
    double total = 0.0;
    for (double& sum : sums) sum = total += sum;
    if (problem.kept_counts) write_kept(row, count_kept(row, border, workspace), m, total);
    for (u32 sample = 0; sample < problem.num_samples; ++sample) {
      const double aim = aim_of(row, sample, total);
      const u32 block = u32(std::upper_bound(sums.begin(), sums.end(), aim) - sums.begin());
      const u32 token = draw_in_block(row, block, block ? aim - sums[block - 1] : aim, border, exponential, workspace);
      write(row, sample, token, logit_at(row, token), m, log_d, total);
    }
  }

  // The elements of a block, -inf where they rank behind the border.
  const float* load_kept(const Row& row, u32 block, u64 border, Workspace& workspace) const {
    const float* const x = row.reader.load(block, workspace.buffer);
    if (border == kKeepAll) return x;
    const u32 n = row.reader.elements_of(block), begin = block * kBlock;
    const float least = logit_of(border);
    // Of those that tie with the border the first ones.
    const u32 cut = std::min(index_of(border), vocab_size - 1);
    const u32 ties = cut < begin ? 0 : std::min(n, cut - begin + 1);
    float* const y = workspace.buffer;
    for (u32 i = 0; i < ties; ++i) y[i] = x[i] >= least ? x[i] : -kInfinity;
    for (u32 i = ties; i < n; ++i) y[i] = x[i] > least ? x[i] : -kInfinity;
    return y;
  }

  // The first token of the block at which the running sum exceeds `rest`. If rounding keeps the sum below `rest`: the last
  // token with a weight above 0. If all weights round to 0: the greatest logit.
  u32 draw_in_block(const Row& row, u32 block, double rest, u64 border, const Exponential& exponential,
                    Workspace& workspace) const {
    const float* const x = load_kept(row, block, border, workspace);
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

  // Weights fall with the keys: bisection.
  u64 border_of_min_p(const Row& row, float m) const {
    u32 high = key_of_logit(m), low = kNegativeInfinityKey;
    while (low < high) {
      const u32 middle = low + (high - low) / 2;
      if (weight_of(row, logit_of_key(middle), m) < row.min_p) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return last_of_key(high);
  }

  // Sums what is kept of each block.
  void sum_kept(const Row& row, u64 border, float m, Workspace& workspace) const {
    const Exponential exponential = exponential_of(row, m);
    workspace.sums.resize(row.reader.blocks());
    for (u32 block = 0; block < row.reader.blocks(); ++block) {
      const float* const x = load_kept(row, block, border, workspace);
      workspace.sums[block] = kernels.sum_exp(x, row.reader.elements_of(block), exponential, x, 0);
    }
  }

  // Lists the tokens that do not rank behind the border, with their weights, and returns how many they are; 0 if they are too
  // many for that.
  u32 list_kept(const Row& row, u64 border, float m, Workspace& workspace) const {
    u64* const list = room_for(workspace.candidates, kMostListed);
    u32 size = 0;
    for (u32 block = 0; block < row.reader.blocks(); ++block) {
      const u32 n = row.reader.elements_of(block);
      const float* const x = row.reader.load(block, workspace.buffer);
      if (kernels.append_candidates(x, 0, n, block * kBlock, logit_of(border), list, &size, kMostListed) < n) return 0;
    }
    size = u32(std::remove_if(list, list + size, [=](u64 each) { return each < border; }) - list);
    float* const values = room_for(workspace.values, size);
    for (u32 i = 0; i < size; ++i) values[i] = logit_of(list[i]);
    const float* const weights = weigh(row, size, m, workspace);
    workspace.kept.resize(size);
    for (u32 i = 0; i < size; ++i)
      workspace.kept[i] = {index_of(list[i]), key_of(list[i]) != kNegativeInfinityKey, weights[i]};
    return size;
  }

  // The weights of the first of the workspace's values.
  const float* weigh(const Row& row, u32 count, float m, Workspace& workspace) const {
    const float* const values = workspace.values.data();
    float* const weights = room_for(workspace.weights, count);
    kernels.full_rows->exp_terms(values, count, exponential_of(row, m), weights, values, 0);
    return weights;
  }

  // Sums weights [count] by bins of the values, from `top` down, into the workspace. Returns the bin of each.
  static const int* fill_bins(const float* values, const float* weights, u32 count, float top, float per_logit,
                              Workspace& workspace) {
    std::vector<double>& bins = workspace.bins;
    bins.assign(kBins, 0.0);
    int* const bin_of = room_for(workspace.bin_of, count);
    for (u32 i = 0; i < count; ++i) bin_of[i] = int(std::min(float(kBins - 1), (top - values[i]) * per_logit));
    for (u32 i = 0; i < count; ++i) bins[bin_of[i]] += weights[i];
    return bin_of;
  }

  // The border of top-p: the last token of the shortest prefix of the sorted row whose weights sum to top_p of all. Also leaves
  // the sums of what is kept of each block in the workspace. kKeepAll, if the border is not where a sample of the row has it.
  u64 border_by_estimate(const Row& row, float m, Workspace& workspace) const {
    const double total = sum_of_all(row, m, workspace), aim = aim_of_top_p(row, total);
    const Band band = estimated_band(row, total - aim, m, workspace);
    const Exponential exponential = exponential_of(row, m);
    float* const values = room_for(workspace.values, kMostBetween + kBlock);
    u32* const indices = room_for(workspace.indices, kMostBetween + kBlock);
    workspace.sums.resize(row.reader.blocks());
    workspace.begins.resize(row.reader.blocks() + 1);
    u32 size = 0, count = 0;
    double above = 0.0;
    for (u32 block = 0; block < row.reader.blocks() && size <= kMostBetween; ++block) {
      const float* const x = row.reader.load(block, workspace.buffer);
      workspace.sums[block] = kernels.sum_exp_above(x, row.reader.elements_of(block), block * kBlock, band.low,
                                                    band.end, exponential, &count, values, indices, &size);
      above += workspace.sums[block];
      workspace.begins[block + 1] = size;
    }
    if (size > kMostBetween) return kKeepAll;
    const float* const weights = weigh(row, size, m, workspace);
    // By bins of the logit first, so that few tokens are sorted.
    const float top = std::min(band.end, m), per_logit = float(kBins) / std::max(top - band.low, 1e-30f);
    const int* const bin_of = fill_bins(values, weights, size, top, per_logit, workspace);
    const std::vector<double>& bins = workspace.bins;
    int bin = 0;
    double before = above;
    while (bin < int(kBins) && before + bins[bin] < aim) before += bins[bin++];
    if (bin == int(kBins) || above >= aim) return kKeepAll;
    std::vector<u64>& of_bin = workspace.of_bin;
    of_bin.clear();
    for (u32 i = 0; i < size; ++i)
      if (bin_of[i] == bin) of_bin.push_back(make_candidate(key_of_logit(values[i]), indices[i]));
    const u64 border = border_of_bin(row, before, aim, kKeepAll, m, workspace);
    const float least = logit_of(border);
    for (u32 block = 0; block < row.reader.blocks(); ++block) {
      double sum = 0.0;
      for (u32 i = workspace.begins[block]; i < workspace.begins[block + 1]; ++i) {
        const bool is_kept = (values[i] > least) | ((values[i] == least) & (indices[i] <= index_of(border)));
        sum += is_kept ? weights[i] : 0.0f;
      }
      workspace.sums[block] += sum;
    }
    return border;
  }

  // At least one token is kept, also by a top_p of 0.
  static double aim_of_top_p(const Row& row, double total) {
    return std::max(row.top_p * total, std::numeric_limits<double>::min());
  }

  // Where the border of top-p should be: the tokens behind it weigh `rest`. A sample bounds what the tokens below a logit weigh.
  Band estimated_band(const Row& row, double rest, float m, Workspace& workspace) const {
    const u32 of_block = std::max(kSampledOfBlock, std::min(kBlock, kSampled / row.reader.blocks()));
    float* const values = room_for(workspace.values, u64(row.reader.blocks()) * of_block);
    u32 count = 0;
    for (u32 block = 0; block < row.reader.blocks(); ++block) {
      const u32 n = std::min(row.reader.elements_of(block), of_block);
      row.reader.load_first(block, n, values + count);
      count += n;
    }
    const float* const weights = weigh(row, count, m, workspace);
    // All tokens below the last bin weigh far less than the rest.
    const double depth = std::log(1e3 * vocab_size / std::max(rest, 1e-300));
    const float per_logit = float(std::min(kBins / depth * row.temperature.inverse, 1e30));
    fill_bins(values, weights, count, m, per_logit, workspace);
    const std::vector<double>& bins = workspace.bins;
    Band band = {-std::numeric_limits<float>::max(), kInfinity};
    // A token of the sample stands for so many. None of a bin weighs more than `greatest`.
    const double each = std::min(double(vocab_size), double(row.reader.blocks()) * kBlock) / count,
                 growth = std::exp(depth / kBins);
    double sum = 0.0, variance = 0.0, greatest = std::exp(-depth);
    for (u32 bin = kBins; bin-- > 0;) {
      greatest *= growth;
      sum += each * bins[bin];
      variance += each * each * greatest * bins[bin];
      const double far = (sum - rest) * (sum - rest);
      const bool is_sure = far >= kDeviations * kDeviations * variance;
      const float top = m - float(bin) / per_logit;
      if (is_sure && sum <= rest) band.low = top;
      if (is_sure && sum > rest && bin) {
        band.end = top;
        break;
      }
    }
    return band;
  }

  // The border among the tokens of a bin, given what those above it weigh. least: the border if there are none.
  u64 border_of_bin(const Row& row, double before, double aim, u64 least, float m, Workspace& workspace) const {
    std::vector<u64>& of_bin = workspace.of_bin;
    std::sort(of_bin.begin(), of_bin.end(), [](u64 a, u64 b) { return a > b; });
    u64 border = least;
    for (const u64 candidate : of_bin) {
      if (before >= aim) break;
      border = candidate;
      before += weight_of(row, logit_of(candidate), m);
    }
    return border;
  }

  // The border of top-p of any row. Counts only tokens not behind `least`. Sums the weights by the leading bits of the keys, and
  // sorts only the tokens of the bin that has the border.
  u64 border_of_top_p(const Row& row, u64 least, float m, Workspace& workspace) const {
    std::vector<double>& bins = workspace.bins;
    bins.assign(size_t(1) << kBinBits, 0.0);
    const Exponential exponential = exponential_of(row, m);
    const u32 least_key = key_of(least);
    for (u32 block = 0; block < row.reader.blocks(); ++block) {
      const u32 n = row.reader.elements_of(block);
      const float* const x = row.reader.load(block, workspace.buffer);
      kernels.full_rows->exp_terms(x, n, exponential, workspace.terms, x, 0);
      for (u32 i = 0; i < n; ++i) {
        const u32 key = key_of_logit(x[i]);
        if (key >= least_key) bins[key >> (32 - kBinBits)] += workspace.terms[i];
      }
    }
    double total = 0.0;
    for (size_t bin = bins.size(); bin-- > 0;) total += bins[bin];
    const double aim = aim_of_top_p(row, total);
    double before = 0.0;
    u32 bin = u32(bins.size()) - 1;
    while (bin > least_key >> (32 - kBinBits) && before + bins[bin] < aim) before += bins[bin--];

    std::vector<u64>& of_bin = workspace.of_bin;
    of_bin.clear();
    for (u32 block = 0; block < row.reader.blocks(); ++block) {
      const u32 n = row.reader.elements_of(block);
      const float* const x = row.reader.load(block, workspace.buffer);
      for (u32 i = 0; i < n; ++i) {
        const u32 key = key_of_logit(x[i]);
        if (key >> (32 - kBinBits) == bin && key >= least_key)
          of_bin.push_back(make_candidate(key, block * kBlock + i));
      }
    }
    return border_of_bin(row, before, aim, least, m, workspace);
  }
};

}  // namespace

void solve(const SampleProblem& problem) {
  if (problem.sizes[0]) Solver{problem}.run();
}

}  // namespace fused_topk::cpu
