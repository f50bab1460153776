// SPDX-License-Identifier: Apache-2.0
// The merge of the states of a row's parts, rows on several threads.
//
// The parts' lists are sorted, so the best of all is the best of their first entries, k times over. The normalizers are
// merged in float64, in the order of the parts.
#include "merge.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "shares.h"
#include "topk_row.h"

namespace fused_topk::cpu {
namespace {

// A thread takes rows with so many entries together at once. No thread is woken for less. A guess.
constexpr u64 kEntriesPerTask = 4096;

constexpr i64 kNoToken = -1;

// The best entry of a part that is not chosen yet.
struct Head {
  u32 key;    // kNoKey if none is left
  u32 place;  // in the part's list
  i64 token;  // in the whole vocabulary
};

// Whether a ranks before b. If two parts have the same token, neither does: the caller then keeps the earlier part's.
bool ranks_before(const Head& a, const Head& b) { return a.key > b.key || (a.key == b.key && a.token < b.token); }

struct Merger {
  const MergeProblem& problem;
  std::vector<i64> starts;  // [parts], the token at which each begins
  const u64 rows;

  explicit Merger(const MergeProblem& p) : problem(p), starts(p.parts, 0), rows(rows_of(p.sizes)) {
    for (u32 part = 1; p.part_lengths && part < p.parts; ++part) {
      starts[part] = starts[part - 1] + p.part_lengths[(part - 1) * p.part_lengths_stride];
    }
  }

  void run() {
    const u64 entries = u64(problem.parts) * problem.width + problem.k;
    const u64 rows_at_once = std::max<u64>(1, kEntriesPerTask / entries);
    share_tasks(problem.threads, rows, rows_at_once, [this](const auto& for_each) {
      std::vector<Head> heads(problem.parts);
      for_each([&](u64 row) { merge_row(row, heads); });
    });
  }

  const char* of_row(const OfParts& x, u32 part, u64 row, u32 item_size) const {
    return x.base + (part * x.part_stride + offset_of(row, problem.sizes, x.row_strides)) * item_size;
  }

  const char* logit_at(u32 part, u64 row, u32 place) const {
    const u32 item_size = kItemSize[problem.dtype];
    return of_row(problem.logits, part, row, item_size) + place * problem.logits.element_stride * item_size;
  }

  // The entry at `place` of a part's list, if there is one.
  Head head_at(u32 part, u64 row, u32 place) const {
    constexpr Head kNone = {kNoKey, 0, std::numeric_limits<i64>::max()};
    if (place >= problem.width) return kNone;
    const char* const tokens = of_row(problem.indices, part, row, sizeof(i64));
    i64 token;
    std::memcpy(&token, tokens + place * problem.indices.element_stride * i64(sizeof token), sizeof token);
    if (token < 0) return kNone;
    float logit;
    problem.kernels->load[problem.dtype](logit_at(part, row, place), 1, 1, &logit);
    return {key_of_logit(logit), place, token + starts[part]};
  }

  BlockNormalizer state_of(u32 part, u64 row) const {
    float m, d;
    std::memcpy(&m, of_row(problem.m, part, row, sizeof m), sizeof m);
    std::memcpy(&d, of_row(problem.d, part, row, sizeof d), sizeof d);
    return {m, d};
  }

  void merge_row(u64 row, std::vector<Head>& heads) const {
    const double inverse = Temperature(temperature_of(problem.scale, problem.sizes, row)).inverse;
    BlockNormalizer sum = state_of(0, row);
    for (u32 part = 1; part < problem.parts; ++part) sum = merge(sum, state_of(part, row), inverse);

    const bool are_logits = problem.value_kind == ValueKind::kLogits || problem.value_kind == ValueKind::kState;
    const u32 item_size = are_logits ? kItemSize[problem.dtype] : u32(sizeof(float));
    char* const values = problem.values + row * problem.k * item_size;
    i64* const tokens = problem.result_indices + row * problem.k;
    for (u32 part = 0; part < problem.parts; ++part) heads[part] = head_at(part, row, 0);
    for (u32 i = 0; i < problem.k; ++i) {
      u32 best = 0;
      for (u32 part = 1; part < problem.parts; ++part) {
        if (ranks_before(heads[part], heads[best])) best = part;
      }
      const Head head = heads[best];
      const bool is_token = head.key != kNoKey;
      tokens[i] = is_token ? head.token : kNoToken;
      if (are_logits) {
        write_logit(problem.dtype, is_token ? logit_at(best, row, head.place) : nullptr, values + i * item_size);
      } else {
        reinterpret_cast<float*>(values)[i] = is_token ? logit_of_key(head.key) : -kInfinity;
      }
      if (is_token) heads[best] = head_at(best, row, head.place + 1);
    }
    if (problem.value_kind == ValueKind::kState) {
      problem.logsumexp[row] = sum.m;
      problem.logsumexp[rows + row] = float(sum.d);
      return;
    }
    const FinishedRow finished(sum, inverse);
    problem.logsumexp[row] = finished.logsumexp();
    if (are_logits) return;
    finish_values(problem.value_kind, problem.normalize_topk, finished, problem.k, reinterpret_cast<float*>(values));
  }
};

}  // namespace

void solve(const MergeProblem& problem) { Merger(problem).run(); }

}  // namespace fused_topk::cpu
