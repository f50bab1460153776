// SPDX-License-Identifier: Apache-2.0
// The Python module fused_topk._cpu. It takes addresses, sizes and strides and knows neither torch nor numpy. Its
// callers, fused_topk/operators/ by way of backends/cpu.py, have checked them all.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../ladder/ladder.h"
#include "expert_rows.h"
#include "full_rows.h"
#include "linear_rows.h"
#include "merge.h"
#include "ranks.h"
#include "sampling.h"
#include "token_sums.h"

namespace nb = nanobind;

namespace fused_topk::cpu {
namespace {

#if defined(__x86_64__)
// Not every compiler's __builtin_cpu_supports knows f16c. It also needs AVX, which the caller asks for.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

// The tables that this machine can run, best first.
const std::vector<const VectorKernels*>& supported_kernels() {
  static const std::vector<const VectorKernels*> supported = [] {
    std::vector<const VectorKernels*> result;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512) result.push_back(&kAvx512Kernels);
    if (avx2) result.push_back(&kAvx2Kernels);
#endif
    result.push_back(&kBaselineKernels);
    return result;
  }();
  return supported;
}

}  // namespace

const VectorKernels& kernels_named(std::string_view name) {
  if (name.empty()) return *supported_kernels().front();
  for (const VectorKernels* kernels : supported_kernels()) {
    if (name == kernels->name) return *kernels;
  }
  throw std::invalid_argument("this machine has no instruction set named '" + std::string(name) + "'");
}

namespace {

// Releases Python's lock where a call reads so many elements. With few, releasing and taking it costs as much as the call.
class MaybeWithoutGil {
 public:
  explicit MaybeWithoutGil(u64 elements) {
    if (elements > 4096) released_.emplace();
  }

 private:
  std::optional<nb::gil_scoped_release> released_;
};

u64 elements_of(const LogitRows& rows) { return rows_of(rows.sizes) * rows.vocab_size; }

// A request that has only its rows so far.
template <class PROBLEM>
PROBLEM problem_of(const LogitRows& rows) {
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

  void operator()(const RowAddresses& rows, std::uintptr_t out, u32 threads) const { run(rows, out, threads, nullptr); }

  // For a request for softmax: the gradient of the logits, given those of the k best.
  void gradient(const RowAddresses& rows, u32 k, u32 value_kind, u32 normalize_over, std::uintptr_t values,
                std::uintptr_t indices, std::uintptr_t grad_values, std::uintptr_t grad_logsumexp, std::uintptr_t out,
                u32 threads) const {
    const TopkGradient given{k,
                             ValueKind(value_kind),
                             NormalizeOver(normalize_over),
                             pointer<const float>(values),
                             pointer<const i64>(indices),
                             pointer<const float>(grad_values),
                             pointer<const float>(grad_logsumexp)};
    run(rows, out, threads, &given);
  }

 private:
  void run(const RowAddresses& rows, std::uintptr_t out, u32 threads, const TopkGradient* gradient) const {
    const MaybeWithoutGil without_gil(elements_of(request_));
    FullRowProblem p = request_;
    point_to(p, rows, threads);
    p.out = pointer<char>(out);
    p.gradient = gradient;
    solve(p);
  }

  FullRowProblem request_;
};

// The k experts of each row, in the same way.
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

// The k best of an LM head's logits, or all of them. One call: its product takes far longer than reading the arguments.
// clang-format off: one argument group a line, as cpu.py passes them
void linear_topk(const LogitRows& rows, const RowAddresses& addresses, u32 depth,
                 std::uintptr_t hidden, i64 hidden_stride, std::uintptr_t weight, i64 weight_stride,
                 std::uintptr_t bias, i64 bias_stride,
                 u32 k, u32 value_kind, u32 normalize_over,
                 std::uintptr_t values, std::uintptr_t indices, std::uintptr_t logsumexp,
                 std::uintptr_t state, std::uintptr_t product, u32 threads) {
  // clang-format on
  const nb::gil_scoped_release without_gil;
  auto p = problem_of<LinearProblem>(rows);
  point_to(p, addresses, threads);
  p.k = k;
  p.value_kind = ValueKind(value_kind);
  p.normalize_over = NormalizeOver(normalize_over);
  p.values = pointer<void>(values);
  p.indices = pointer<i64>(indices);
  p.logsumexp = pointer<float>(logsumexp);
  p.depth = depth;
  p.hidden = pointer<const char>(hidden);
  p.hidden_stride = hidden_stride;
  p.weight = pointer<const char>(weight);
  p.weight_stride = weight_stride;
  p.bias = pointer<const char>(bias);
  p.bias_stride = bias_stride;
  p.state = pointer<float>(state);
  p.product = pointer<char>(product);
  solve(p);
}

// The merge of the states of parts, in the same way. Each tensor's strides are those of [parts, sizes..., width], or
// without the width.
class Merge {
 public:
  // clang-format off: one argument group a line, as cpu.py passes them
  Merge(u32 dtype, std::vector<i64> shape, std::vector<i64> logits_strides, std::vector<i64> indices_strides,
        std::vector<i64> m_strides, std::vector<i64> d_strides, i64 part_lengths_stride,
        double temperature, std::vector<i64> temperature_strides,
        u32 k, u32 value_kind, bool normalize_topk)
      // clang-format on
      : request_{} {
    request_.kernels = &kernels_named("");
    request_.dtype = DType(dtype);
    request_.parts = u32(shape.front());
    request_.width = u32(shape.back());
    request_.sizes.assign(shape.begin() + 1, shape.end() - 1);
    request_.logits = of_parts(std::move(logits_strides), true);
    request_.indices = of_parts(std::move(indices_strides), true);
    request_.m = of_parts(std::move(m_strides), false);
    request_.d = of_parts(std::move(d_strides), false);
    request_.part_lengths_stride = part_lengths_stride;
    request_.scale = {temperature, nullptr, std::move(temperature_strides)};
    request_.k = k;
    request_.value_kind = ValueKind(value_kind);
    request_.normalize_topk = normalize_topk;
  }

  void operator()(std::uintptr_t logits, std::uintptr_t indices, std::uintptr_t m, std::uintptr_t d,
                  std::uintptr_t part_lengths, std::uintptr_t row_temperature, std::uintptr_t values,
                  std::uintptr_t result_indices, std::uintptr_t logsumexp, u32 threads) const {
    const MaybeWithoutGil without_gil(u64(request_.parts) * request_.width * rows_of(request_.sizes));
    MergeProblem p = request_;
    p.threads = threads;
    p.logits.base = pointer<const char>(logits);
    p.indices.base = pointer<const char>(indices);
    p.m.base = pointer<const char>(m);
    p.d.base = pointer<const char>(d);
    p.part_lengths = pointer<const int>(part_lengths);
    p.scale.row_temperature = pointer<const float>(row_temperature);
    p.values = pointer<char>(values);
    p.result_indices = pointer<i64>(result_indices);
    p.logsumexp = pointer<float>(logsumexp);
    solve(p);
  }

 private:
  static OfParts of_parts(std::vector<i64> strides, bool has_elements) {
    OfParts result{};
    if (has_elements) result.element_stride = pop(strides);
    result.part_stride = strides.front();
    result.row_strides.assign(strides.begin() + 1, strides.end());
    return result;
  }

  MergeProblem request_;
};

// Draws from the rows of a tensor [rows, vocab_size]. Each parameter is a number, and the address of one a row or 0.
// clang-format off: one argument group a line, as cpu.py passes them
void sample(const LogitRows& rows, const RowAddresses& addresses,
            i64 top_k, std::uintptr_t row_top_k,
            double top_p, std::uintptr_t row_top_p, double min_p, std::uintptr_t row_min_p,
            i64 seed, std::uintptr_t row_seed, i64 counter, std::uintptr_t row_counter, u32 first_row,
            std::uintptr_t noise,
            u32 num_samples, u32 logprobs, bool truncated,
            std::uintptr_t tokens, std::uintptr_t log_probs,
            std::uintptr_t best_values, std::uintptr_t best_indices, std::uintptr_t logsumexp,
            std::uintptr_t kept_counts, std::uintptr_t kept_logsumexp,
            u32 threads) {
  // clang-format on
  auto p = problem_of<SampleProblem>(rows);
  point_to(p, addresses, threads);
  // Draws take their temperatures as float64.
  p.temperatures = {p.scale.temperature, reinterpret_cast<const double*>(p.scale.row_temperature)};
  p.scale.row_temperature = nullptr;
  p.top_k = {top_k, pointer<const i64>(row_top_k)};
  p.top_p = {top_p, pointer<const double>(row_top_p)};
  p.min_p = {min_p, pointer<const double>(row_min_p)};
  p.seed = {seed, pointer<const i64>(row_seed)};
  p.counter = {counter, pointer<const i64>(row_counter)};
  p.first_row = first_row;
  p.noise = pointer<const float>(noise);
  p.num_samples = num_samples;
  p.logprobs = logprobs;
  p.truncated = truncated;
  p.tokens = pointer<i64>(tokens);
  p.log_probs = pointer<float>(log_probs);
  p.best_values = pointer<float>(best_values);
  p.best_indices = pointer<i64>(best_indices);
  p.logsumexp = pointer<float>(logsumexp);
  p.kept_counts = pointer<i64>(kept_counts);
  p.kept_logsumexp = pointer<float>(kept_logsumexp);
  const MaybeWithoutGil without_gil(elements_of(p));
  solve(p);
}

// The ranks of targets [rows, num_targets] in their rows.
void target_ranks(const LogitRows& rows, const RowAddresses& addresses, std::uintptr_t targets, u32 num_targets,
                  bool counts_ties, std::uintptr_t ranks, u32 threads) {
  auto p = problem_of<RankProblem>(rows);
  point_to(p, addresses, threads);
  p.targets = pointer<const i64>(targets);
  p.num_targets = num_targets;
  p.counts_ties = counts_ties;
  p.ranks = pointer<i64>(ranks);
  const MaybeWithoutGil without_gil(elements_of(p));
  solve(p);
}

// Adds rows to their sums [rows, kSums].
void token_sums(const LogitRows& rows, const RowAddresses& addresses, std::uintptr_t tokens, u32 num_tokens,
                bool sums_all, bool has_rest, std::uintptr_t sums, std::uintptr_t token_logits, u32 threads) {
  auto p = problem_of<TokenSumsProblem>(rows);
  point_to(p, addresses, threads);
  p.tokens = pointer<const i64>(tokens);
  p.num_tokens = num_tokens;
  p.sums_all = sums_all;
  p.has_rest = has_rest;
  p.sums = pointer<float>(sums);
  p.token_logits = pointer<char>(token_logits);
  const MaybeWithoutGil without_gil(elements_of(p));
  solve(p);
}

void ladder(u32 rung, u64 rows, u32 vocab_size, u32 k, std::uintptr_t x, std::uintptr_t y, std::uintptr_t values,
            std::uintptr_t indices, u32 threads) {
  const nb::gil_scoped_release without_gil;
  climb({&kernels_named(""), threads, Rung(rung), rows, vocab_size, k, pointer<const float>(x), pointer<float>(y),
         pointer<float>(values), pointer<i64>(indices)});
}

}  // namespace

NB_MODULE(_cpu, module) {
  using Strides = std::vector<i64>;
  // Caches of plans hold requests until the process ends, when the module may be gone before them.
  nb::set_leak_warnings(false);
  nb::class_<LogitRows>(module, "LogitRows");
  module.def("logit_rows", &logit_rows);
  nb::class_<Topk>(module, "Topk")
      .def(nb::init<const LogitRows&, u32, u32, u32, const Strides&>())
      .def("__call__", &Topk::operator());
  nb::class_<FullRows>(module, "FullRows")
      .def(nb::init<const LogitRows&, u32, u32>())
      .def("__call__", &FullRows::operator())
      .def("gradient", &FullRows::gradient);
  nb::class_<Router>(module, "Router")
      .def(nb::init<const LogitRows&, u32, u32, u32, u32, bool, bool, double>())
      .def("__call__", &Router::operator());
  module.def("linear_topk", &linear_topk);
  nb::class_<Merge>(module, "Merge")
      .def(nb::init<u32, Strides, Strides, Strides, Strides, Strides, i64, double, Strides, u32, u32, bool>())
      .def("__call__", &Merge::operator());
  module.def("sample", &sample);
  module.def("target_ranks", &target_ranks);
  module.def("token_sums", &token_sums);
  module.def("ladder", &ladder);
  module.def(
      "instruction_sets",
      [] {
        std::vector<std::string> names;
        for (const VectorKernels* kernels : supported_kernels()) names.emplace_back(kernels->name);
        return names;
      },
      "All that this machine can run, best first: each may be asked for by name.");
}

}  // namespace fused_topk::cpu
