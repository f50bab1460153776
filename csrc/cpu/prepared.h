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

inline u64 elements_of(const LogitRows& rows) {
  u64 elements = rows.vocab_size;
  for (const i64 size : rows.sizes) elements *= u64(size);
  return elements;
}

// With fewer elements, releasing and taking Python's lock costs as much as the call.
constexpr u64 kWorthReleasing = 4096;

// softmax + top-k of tensors of one shape and layout. Python passes all that does not change from call to call once; a
// call passes the addresses.
class Topk {
 public:
  Topk(const LogitRows& rows, u32 k, u32 value_kind, u32 normalize_over, const std::vector<i64>& beam_scores_strides)
      : request_{} {
    static_cast<LogitRows&>(request_) = rows;
    elements_ = elements_of(request_);
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
    std::optional<nb::gil_scoped_release> without_gil;
    if (elements_ > kWorthReleasing) without_gil.emplace();
    Problem p = request_;
    p.threads = threads;
    point_to(p, rows);
    p.values = pointer<void>(values);
    p.indices = pointer<i64>(indices);
    p.logsumexp = pointer<float>(logsumexp);
    p.beam_scores = pointer<const float>(beam_scores);
    solve(p);
  }

 private:
  Problem request_;
  u64 elements_;
};

// softmax, log_softmax or logsumexp of full rows, in the same way.
class FullRows {
 public:
  FullRows(const LogitRows& rows, u32 kind, u32 out_dtype) : request_{} {
    static_cast<LogitRows&>(request_) = rows;
    elements_ = elements_of(request_);
    request_.kind = FullRowKind(kind);
    request_.out_dtype = DType(out_dtype);
  }

  void operator()(const RowAddresses& rows, std::uintptr_t out, u32 threads) const {
    std::optional<nb::gil_scoped_release> without_gil;
    if (elements_ > kWorthReleasing) without_gil.emplace();
    FullRowProblem p = request_;
    p.threads = threads;
    point_to(p, rows);
    p.out = pointer<char>(out);
    solve(p);
  }

 private:
  FullRowProblem request_;
  u64 elements_;
};

// The experts of rows, in the same way.
class Router {
 public:
  Router(const LogitRows& rows, u32 k, u32 scoring, u32 groups, u32 topk_groups, bool sums_two, bool normalizes,
         double scale)
      : request_{} {
    static_cast<LogitRows&>(request_) = rows;
    elements_ = elements_of(request_);
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
    std::optional<nb::gil_scoped_release> without_gil;
    if (elements_ > kWorthReleasing) without_gil.emplace();
    RouterProblem p = request_;
    p.threads = threads;
    point_to(p, rows);
    p.wanted.bias = pointer<const float>(bias);
    p.wanted.weights = pointer<float>(weights);
    p.wanted.experts = pointer<void>(experts);
    p.wanted.are_short = are_short;
    solve(p);
  }

 private:
  RouterProblem request_;
  u64 elements_;
};

}  // namespace fused_topk::cpu
