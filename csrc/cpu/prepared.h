// SPDX-License-Identifier: Apache-2.0
// Requests that are prepared once and then run on any tensors of the same layout.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "expert_rows.h"
#include "full_rows.h"
#include "problem.h"

namespace fused_topk::cpu {

namespace nb = nanobind;

// Releases Python's lock where a call reads so many elements. With few, releasing and taking it costs as much as the call.
class MaybeWithoutGil {
 public:
  explicit MaybeWithoutGil(u64 elements) {
    if (elements > 4096) released_.emplace();
  }

 private:
  std::optional<nb::gil_scoped_release> released_;
};

inline u64 elements_of(const LogitRows& rows) { return rows_of(rows.sizes) * rows.vocab_size; }

// A request of which only the rows are known.
template <class PROBLEM>
inline PROBLEM problem_of(const LogitRows& rows) {
  PROBLEM problem{};
  static_cast<LogitRows&>(problem) = rows;
  return problem;
}

// softmax + top-k of tensors of one shape and layout. Python passes all that does not change from call to call once; a
// call passes the addresses.
class Topk {
 public:
  Topk(const LogitRows& rows, u32 k, u32 value_kind, u32 normalize_over, const std::vector<i64>& beam_scores_strides)
      : request_(problem_of<Problem>(rows)) {
    request_.k = k;
    request_.value_kind = ValueKind(value_kind);
    request_.normalize_over = NormalizeOver(normalize_over);
    if (!beam_scores_strides.empty()) {
      request_.beam_scores_strides[0] = beam_scores_strides.at(0);
      request_.beam_scores_strides[1] = beam_scores_strides.at(1);
    }
  }

  void operator()(const RowAddresses& rows, std::uintptr_t values, std::uintptr_t indices, std::uintptr_t logsumexp,
                  std::uintptr_t beam_scores, u32 threads) const {
    const MaybeWithoutGil without_gil(elements_of(request_));
    Problem p = request_;
    point_to(p, rows, threads);
    p.values = pointer<void>(values);
    p.indices = pointer<i64>(indices);
    p.logsumexp = pointer<float>(logsumexp);
    p.beam_scores = pointer<const float>(beam_scores);
    solve(p);
  }

 private:
  Problem request_;
};

// softmax, log_softmax or logsumexp of full rows, in the same way.
class FullRows {
 public:
  FullRows(const LogitRows& rows, u32 kind, u32 out_dtype) : request_(problem_of<FullRowProblem>(rows)) {
    request_.kind = FullRowKind(kind);
    request_.out_dtype = DType(out_dtype);
  }

  void operator()(const RowAddresses& rows, std::uintptr_t out, u32 threads) const {
    const MaybeWithoutGil without_gil(elements_of(request_));
    FullRowProblem p = request_;
    point_to(p, rows, threads);
    p.out = pointer<char>(out);
    solve(p);
  }

 private:
  FullRowProblem request_;
};

// The experts of rows, in the same way.
class Router {
 public:
  Router(const LogitRows& rows, u32 k, u32 scoring, u32 groups, u32 topk_groups, bool sums_two, bool normalizes,
         double scale)
      : request_(problem_of<RouterProblem>(rows)) {
    ExpertRows& wanted = request_.wanted;
    wanted.n = request_.vocab_size;
    wanted.k = k;
    wanted.scoring = routers::Scoring(scoring);
    wanted.groups = groups;
    wanted.topk_groups = topk_groups;
    wanted.sums_two = sums_two;
    wanted.normalizes = normalizes;
    wanted.scale = float(scale);
  }

  void operator()(const RowAddresses& rows, std::uintptr_t bias, std::uintptr_t weights, std::uintptr_t experts,
                  bool are_short, u32 threads) const {
    const MaybeWithoutGil without_gil(elements_of(request_));
    RouterProblem p = request_;
    point_to(p, rows, threads);
    p.wanted.bias = pointer<const float>(bias);
    p.wanted.weights = pointer<float>(weights);
    p.wanted.experts = pointer<void>(experts);
    p.wanted.are_short = are_short;
    solve(p);
  }

 private:
  RouterProblem request_;
};

}  // namespace fused_topk::cpu
