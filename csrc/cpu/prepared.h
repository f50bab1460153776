// SPDX-License-Identifier: Apache-2.0
// Requests that are prepared once and then run on any tensors of the same layout.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "expert_rows.h"
#include "full_rows.h"
#include "problem.h"

namespace fused_topk::cpu {

namespace nb = nanobind;

// The table of an instruction set of this machine; "": the best one. Throws std::invalid_argument for another name.
const VectorKernels& kernels_named(std::string_view name);

template <class T>
inline T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Removes the last stride, the vocabulary's, and returns it.
inline i64 pop(std::vector<i64>& strides) {
  const i64 last = strides.back();
  strides.pop_back();
  return last;
}

// clang-format off: one argument group a line, in the order in which cpu.py passes them
inline LogitRows logit_rows(u32 dtype, std::vector<i64> shape, std::vector<i64> logits_strides,
                            double temperature, std::vector<i64> temperature_strides,
                            u32 mask_kind, std::vector<i64> mask_strides,
                            std::string_view instruction_set) {
  // clang-format on
  LogitRows rows{};
  rows.kernels = &kernels_named(instruction_set);
  rows.vocab_size = u32(pop(shape));
  rows.sizes = std::move(shape);
  rows.dtype = DType(dtype);
  rows.logits_element_stride = pop(logits_strides);
  rows.logits_strides = std::move(logits_strides);
  rows.temperature = temperature;
  rows.temperature_strides = std::move(temperature_strides);
  rows.mask_kind = MaskKind(mask_kind);
  if (!mask_strides.empty()) rows.mask_element_stride = pop(mask_strides);
  rows.mask_strides = std::move(mask_strides);
  return rows;
}

// The addresses of a call; 0 stands for a tensor that it does not have.
inline void point_to(LogitRows& rows, std::uintptr_t logits, std::uintptr_t row_temperature, std::uintptr_t mask) {
  rows.logits = pointer<const char>(logits);
  rows.row_temperature = pointer<const float>(row_temperature);
  rows.mask = pointer<const char>(mask);
}

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
  // clang-format off: one argument group a line, as cpu.py passes them
  Topk(u32 dtype, std::vector<i64> shape, std::vector<i64> logits_strides,
       double temperature, std::vector<i64> temperature_strides,
       u32 mask_kind, std::vector<i64> mask_strides,
       u32 k, u32 value_kind, u32 normalize_over,
       std::vector<i64> beam_scores_strides, std::string_view instruction_set)
      // clang-format on
      : request_{} {
    static_cast<LogitRows&>(request_) =
        logit_rows(dtype, std::move(shape), std::move(logits_strides), temperature, std::move(temperature_strides),
                   mask_kind, std::move(mask_strides), instruction_set);
    elements_ = elements_of(request_);
    request_.k = k;
    request_.value_kind = ValueKind(value_kind);
    request_.normalize_over = NormalizeOver(normalize_over);
    if (!beam_scores_strides.empty()) {
      request_.beam_scores_strides[0] = beam_scores_strides.at(0);
      request_.beam_scores_strides[1] = beam_scores_strides.at(1);
    }
  }

  void operator()(std::uintptr_t logits, std::uintptr_t row_temperature, std::uintptr_t mask, std::uintptr_t values,
                  std::uintptr_t indices, std::uintptr_t logsumexp, std::uintptr_t beam_scores, u32 threads) const {
    std::optional<nb::gil_scoped_release> without_gil;
    if (elements_ > kWorthReleasing) without_gil.emplace();
    Problem p = request_;
    p.threads = threads;
    point_to(p, logits, row_temperature, mask);
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
  // clang-format off: one argument group a line, as cpu.py passes them
  FullRows(u32 dtype, std::vector<i64> shape, std::vector<i64> logits_strides,
           double temperature, std::vector<i64> temperature_strides,
           u32 mask_kind, std::vector<i64> mask_strides,
           u32 kind, u32 out_dtype, std::string_view instruction_set)
      // clang-format on
      : request_{} {
    static_cast<LogitRows&>(request_) =
        logit_rows(dtype, std::move(shape), std::move(logits_strides), temperature, std::move(temperature_strides),
                   mask_kind, std::move(mask_strides), instruction_set);
    elements_ = elements_of(request_);
    request_.kind = FullRowKind(kind);
    request_.out_dtype = DType(out_dtype);
  }

  void operator()(std::uintptr_t logits, std::uintptr_t row_temperature, std::uintptr_t mask, std::uintptr_t out,
                  u32 threads) const {
    std::optional<nb::gil_scoped_release> without_gil;
    if (elements_ > kWorthReleasing) without_gil.emplace();
    FullRowProblem p = request_;
    p.threads = threads;
    point_to(p, logits, row_temperature, mask);
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
  // clang-format off: one argument group a line, as cpu.py passes them
  Router(u32 dtype, std::vector<i64> shape, std::vector<i64> logits_strides,
         double temperature, std::vector<i64> temperature_strides,
         u32 mask_kind, std::vector<i64> mask_strides,
         u32 k, u32 scoring, u32 groups, u32 topk_groups, bool sums_two, bool normalizes, double scale,
         std::string_view instruction_set)
      // clang-format on
      : request_{} {
    static_cast<LogitRows&>(request_) =
        logit_rows(dtype, std::move(shape), std::move(logits_strides), temperature, std::move(temperature_strides),
                   mask_kind, std::move(mask_strides), instruction_set);
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

  void operator()(std::uintptr_t logits, std::uintptr_t row_temperature, std::uintptr_t mask, std::uintptr_t bias,
                  std::uintptr_t weights, std::uintptr_t experts, bool are_short, u32 threads) const {
    std::optional<nb::gil_scoped_release> without_gil;
    if (elements_ > kWorthReleasing) without_gil.emplace();
    RouterProblem p = request_;
    p.threads = threads;
    point_to(p, logits, row_temperature, mask);
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
