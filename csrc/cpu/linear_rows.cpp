// SPDX-License-Identifier: Apache-2.0
// The k best of the logits of an LM head, or all logits, on several threads, for a few rows.
//
// A part is a stretch of the vocabulary, for all rows: the weight is read once from memory. Within a part, the logits of
// a block of tokens are computed into a buffer of the nearest caches and then folded into the rows' states. When all parts
// are done, the threads share the rows, merge the parts of each, and write its results. As in rows.cpp a row's results do
// not depend on how the vocabulary is cut into parts: the k best are exact, and the normalizer is the merge of the blocks'
// normalizers in their order. They do not depend on the other rows either, because a logit's sum does not
// (linear_kernels.cpp).
//
// The errors of logsumexp and log-probabilities beyond those of the logits are bounded as in rows.cpp.
#include "linear_rows.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "selection.h"
#include "shares.h"
#include "topk_row.h"

namespace fused_topk::cpu {
namespace {

// A thread is worth waking for at least so many multiplications. A guess.
constexpr u64 kProductsPerThread = 1 << 16;
// More threads than this would only wait for the same memory, and each needs lists of its own.
constexpr u32 kMostThreads = 64;

// Memory for floats, aligned to a line of the cache.
class Floats {
 public:
  explicit Floats(size_t count) : lines_(count / 16 + 1) {}
  float* begin() { return reinterpret_cast<float*>(lines_.data()); }

 private:
  struct alignas(64) Line {
    float elements[16];
  };
  std::vector<Line> lines_;
};

struct LinearSolver {
  const LinearProblem& problem;
  const LinearKernels& linear;
  u32 rows;
  u32 blocks;  // of the vocabulary
  u32 parts;   // of the vocabulary
  u32 k;

  Floats hidden;                             // [rows, padded depth], arranged
  std::vector<Temperature> temperatures;     // [rows]
  std::vector<BlockNormalizer> normalizers;  // [rows, blocks]
  std::vector<std::vector<u64>> part_lists;  // [rows, parts], each part's k best

  explicit LinearSolver(const LinearProblem& p)
      : problem(p),
        linear(p.kernels->linear[p.dtype]),
        rows(u32(p.sizes[0])),
        blocks((p.vocab_size - 1) / kLinearBlock + 1),
        parts(parts_of(threads(), blocks)),
        k(p.k),
        hidden(size_t(rows) * linear.padded_depth(p.depth)),
        normalizers(size_t(rows) * blocks),
        part_lists(size_t(rows) * parts) {
    for (u32 row = 0; row < rows; ++row) temperatures.emplace_back(temperature_of(p, row));
  }

  u32 threads() const {
    const u64 useful = u64(rows) * problem.vocab_size * std::max(problem.depth, 1u) / kProductsPerThread;
    return u32(std::clamp<u64>(useful, 1, std::min(problem.threads, kMostThreads)));
  }

  // Enough parts that the threads have about equal shares, even if one starts late.
  static u32 parts_of(u32 threads, u32 blocks) {
    return threads == 1 ? 1 : std::min(blocks, kTasksPerThread * threads);
  }

  void run() {
    if (rows == 0) return;
    arrange();
    share_tasks(threads(), parts, 1, [this](const auto& for_each) {
      Floats logits(size_t(rows) * kLogitsStride);
      Floats bias(kLinearBlock);
      std::vector<Selection> selections(rows, Selection(*problem.kernels, k, problem.vocab_size));
      for_each([&](u64 part) { do_part(u32(part), logits.begin(), bias.begin(), selections); });
    });
    if (problem.product) return;
    share_tasks(threads(), rows, 1, [this](const auto& for_each) {
      Selection selection(*problem.kernels, k, 0);
      for_each([&](u64 row) { finish_row(u32(row), selection); });
    });
  }

  void arrange() {
    const u32 item_size = kItemSize[problem.dtype];
    Floats row(problem.depth);
    for (u32 r = 0; r < rows; ++r) {
      const char* const source = problem.hidden + r * problem.hidden_stride * item_size;
      for (u32 i = 0; i < problem.depth; i += kBlock) {
        const u32 n = std::min(kBlock, problem.depth - i);
        problem.kernels->load[problem.dtype](source + size_t(i) * item_size, 1, n, row.begin() + i);
      }
      linear.arrange(row.begin(), problem.depth, r, rows, hidden.begin());
    }
  }

  // logits: [rows, kLogitsStride] and bias_buffer: [kLinearBlock], scratch. selections: [rows]
  void do_part(u32 part, float* logits, float* bias_buffer, std::vector<Selection>& selections) {
    const u32 end = begin_of(part + 1, blocks, parts);
    for (Selection& selection : selections) selection.restart();
    for (u32 block = begin_of(part, blocks, parts); block < end; ++block)
      do_block(block, logits, bias_buffer, selections);
    if (problem.product) return;
    for (u32 row = 0; row < rows; ++row) {
      u32 count;
      const u64* const best = selections[row].trimmed(&count);
      part_lists[size_t(row) * parts + part].assign(best, best + count);
    }
  }

  void do_block(u32 block, float* logits, float* bias_buffer, std::vector<Selection>& selections) {
    const LinearProblem& p = problem;
    const u32 item_size = kItemSize[p.dtype];
    const u32 begin = block * kLinearBlock;
    const u32 n = std::min(kLinearBlock, p.vocab_size - begin);
    const char* const weight = p.weight + i64(begin) * p.weight_stride * item_size;
    linear.multiply({hidden.begin(), rows, p.depth, weight, p.weight_stride, n, logits});
    const float* bias = nullptr;
    if (p.bias) {
      p.kernels->load[p.dtype](p.bias + i64(begin) * p.bias_stride * item_size, p.bias_stride, n, bias_buffer);
      bias = bias_buffer;
    }
    // The first weights of the next block are fetched while the exponentials are computed.
    const char* next = weight + i64(n) * p.weight_stride * item_size;
    for (u32 row = 0; row < rows; ++row, next += n * sizeof(float)) {
      float* const x = logits + size_t(row) * kLogitsStride;
      linear.finish(x, bias, n);
      if (p.product) {
        write_product(row, begin, n, x);
        continue;
      }
      normalizers[size_t(row) * blocks + block] = fold(row, begin, n, x, next, selections[row]);
    }
  }

  bool has_normalizer() const { return problem.state || problem.value_kind != ValueKind::kLogits; }

  // Adds the logits x [n] of tokens begin .. begin + n to the row's candidates. Returns their normalizer if one is wanted.
  BlockNormalizer fold(u32 row, u32 begin, u32 n, float* x, const void* next, Selection& selection) const {
    const VectorKernels& kernels = *problem.kernels;
    const char* const mask = mask_of(problem, row);
    const bool mask_later = mask && problem.normalize_over == NormalizeOver::kAll;
    if (mask && !mask_later) apply_mask(problem, mask, begin, n, x);
    float greatest = kernels.maximum(x, n);
    if (!has_normalizer()) {
      selection.add_block(x, n, begin, greatest, kernels.has_nan(x, n));
      return {};
    }
    Exponential exponential = temperatures[row].exponential;
    exponential.reference = reference_point(greatest);
    const double d = kernels.sum_exp(x, n, exponential, next, sizeof(float));
    const BlockNormalizer result = normalizer_of(kernels, x, n, greatest, d);
    if (mask_later) {
      apply_mask(problem, mask, begin, n, x);
      greatest = kernels.maximum(x, n);
    }
    selection.add_block(x, n, begin, greatest, result.has_nan());
    return result;
  }

  void finish_row(u32 row, Selection& selection) {
    selection.restart();
    for (u32 part = 0; part < parts; ++part) {
      const std::vector<u64>& best = part_lists[size_t(row) * parts + part];
      selection.add_candidates(best.data(), u32(best.size()));
    }
    const BlockNormalizer* const of_blocks = normalizers.data() + size_t(row) * blocks;
    write(row, selection.sorted(), merged(of_blocks, blocks, temperatures[row].inverse));
  }

  void write(u32 row, const u64* best, const BlockNormalizer& sum) const {
    if (problem.state) {
      problem.state[2 * row] = sum.m;
      problem.state[2 * row + 1] = float(sum.d);
    }
    write_indices(best, k, problem.indices + size_t(row) * k);
    if (problem.value_kind == ValueKind::kLogits) {
      write_logits(row, best);
    } else {
      const FinishedRow finished(sum, temperatures[row].inverse);
      problem.logsumexp[row] = finished.logsumexp();
      write_values(problem, finished, best, k, static_cast<float*>(problem.values) + size_t(row) * k);
    }
  }

  // Writes the logits x [n] of tokens begin .. begin + n in the dtype of the weight.
  void write_product(u32 row, u32 begin, u32 n, const float* x) const {
    const u32 item_size = kItemSize[problem.dtype];
    char* const to = problem.product + (size_t(row) * problem.vocab_size + begin) * item_size;
    if (problem.dtype == kFloat32) {
      std::memcpy(to, x, n * sizeof(float));
      return;
    }
    for (u32 i = 0; i < n; ++i)
      std::memcpy(to + i * sizeof(u16), reinterpret_cast<const char*>(x + i) + 2, sizeof(u16));
  }

  // Writes the chosen logits in the dtype of the weight. A bfloat16 is the upper half of the float.
  void write_logits(u32 row, const u64* best) const {
    const u32 item_size = kItemSize[problem.dtype];
    char* value = static_cast<char*>(problem.values) + size_t(row) * k * item_size;
    for (u32 i = 0; i < k; ++i, value += item_size) {
      const u32 bits = bits_of_key(key_of(best[i])) >> (problem.dtype == kBFloat16 ? 16 : 0);
      std::memcpy(value, &bits, item_size);
    }
  }
};

}  // namespace

void solve(const LinearProblem& problem) { LinearSolver(problem).run(); }

}  // namespace fused_topk::cpu
