// SPDX-License-Identifier: Apache-2.0
// Random problems for csrc/cpu/rows.cpp, against a computation in float64 that sorts whole rows. A program of its own,
// for machines and checkers that Python does not run on or in: tests/cpp/aarch64.sh. Prints how many problems agreed,
// or the first that did not, and exits with 1.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "../../csrc/cpu/problem.h"

using namespace fused_topk;
using namespace fused_topk::cpu;

namespace {

std::mt19937 random_bits(20180508);

u32 below(u32 n) { return u32(random_bits() % n); }

template <class To, class From>
To bits_as(From from) {
  To to;
  static_assert(sizeof to == sizeof from);
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// Some rows of plain numbers, some of a few numbers with many ties, some of any bits at all.
float random_logit(u32 manner) {
  if (manner == 0) return float(std::normal_distribution<double>(0.0, 3.0)(random_bits));
  if (manner == 1) return float(int(below(5)) - 2);
  constexpr float kSpecial[] = {INFINITY, -INFINITY, NAN, -NAN, 0.0f, -0.0f, 1e-40f, 65504.0f, -1e4f};
  if (manner == 2 && below(3) == 0) return kSpecial[below(9)];
  return bits_as<float>(u32(random_bits()));
}

// The float32 of float16 bits, by the definition.
float half_value(u16 bits) {
  const int exponent = bits >> 10 & 31;
  const int fraction = bits & 1023;
  double magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  if (exponent == 31) magnitude = fraction ? NAN : INFINITY;
  return float(bits & 0x8000 ? -magnitude : magnitude);
}

struct Row {
  std::vector<float> logits;
  std::vector<bool> allowed;
};

bool close(double got, double want, double tolerance) {
  if (std::isnan(want) || std::isinf(want)) return std::isnan(want) ? std::isnan(got) : got == want;
  return std::fabs(got - want) <= tolerance;
}

// One random problem. Whether it agrees.
bool check() {
  const u32 rows = 1 + below(4);
  const u32 V = 1 + below(below(6) ? 300 : 70000);
  const u32 k = 1 + below(below(3) ? std::min(V, 70u) : V);
  const DType dtype = DType(below(kDTypes));
  const u32 item_size = dtype == kFloat32 ? 4 : 2;
  const i64 element_stride = 1 + below(2);
  const i64 row_stride = V * element_stride + below(5);
  const MaskKind mask_kind = MaskKind(below(3));
  const NormalizeOver over = NormalizeOver(below(3));
  const double temperature = below(2) ? 1.0 : 0.37;
  const u32 manner = below(4);

  // At an odd address now and then.
  const u32 start = below(2) * item_size + below(2);
  std::vector<char> memory(start + size_t(rows * row_stride) * item_size);
  std::vector<u8> bools(size_t(rows) * V);
  const u32 words = (V + 31) / 32;
  std::vector<u32> bits(size_t(rows) * words);
  std::vector<Row> expected(rows);
  for (u32 row = 0; row < rows; ++row) {
    for (u32 i = 0; i < V; ++i) {
      float x = random_logit(manner);
      char* const place = memory.data() + start + size_t(row * row_stride + i * element_stride) * item_size;
      if (dtype == kFloat32) {
        std::memcpy(place, &x, 4);
      } else {
        const u16 half =
            u16(manner == 0 ? (dtype == kBFloat16 ? bits_as<u32>(x) >> 16 : below(0x4800)) : random_bits());
        std::memcpy(place, &half, 2);
        x = dtype == kBFloat16 ? bits_as<float>(u32(half) << 16) : half_value(half);
      }
      const bool allowed = mask_kind == MaskKind::kNone || below(3) != 0;
      bools[size_t(row) * V + i] = allowed;
      bits[size_t(row) * words + i / 32] |= u32(allowed) << (i % 32);
      expected[row].logits.push_back(x);
      expected[row].allowed.push_back(allowed);
    }
  }

  std::vector<float> values(size_t(rows) * k), logsumexp(rows);
  std::vector<i64> indices(size_t(rows) * k);
  Problem p{};
  p.kernels = &kBaselineKernels;
  p.threads = 1 + below(3);
  p.sizes = {i64(rows)};
  p.vocab_size = V;
  p.k = k;
  p.dtype = dtype;
  p.value_kind = ValueKind::kLogProbabilities;
  p.normalize_over = over;
  p.logits = memory.data() + start;
  p.logits_strides = {row_stride};
  p.logits_element_stride = element_stride;
  p.scale.temperature = temperature;
  p.mask_kind = mask_kind;
  if (mask_kind == MaskKind::kBools) p.mask = reinterpret_cast<const char*>(bools.data());
  if (mask_kind == MaskKind::kBits) p.mask = reinterpret_cast<const char*>(bits.data());
  p.mask_strides = {mask_kind == MaskKind::kBools ? i64(V) : i64(words)};
  p.mask_element_stride = 1;
  p.values = values.data();
  p.indices = indices.data();
  p.logsumexp = logsumexp.data();
  solve(p);

  for (u32 row = 0; row < rows; ++row) {
    const Row& r = expected[row];
    const auto chosen_from = [&](u32 i) { return r.allowed[i] ? r.logits[i] : -INFINITY; };
    std::vector<u32> order(V);
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(), [&](u32 a, u32 b) {
      return order_key(bits_as<u32>(chosen_from(a))) > order_key(bits_as<u32>(chosen_from(b)));
    });
    const auto normalized_over = [&](auto logit, u32 n) {
      double m = -INFINITY;
      bool has_nan = false;
      for (u32 i = 0; i < n; ++i) {
        has_nan |= std::isnan(logit(i));
        m = std::max(m, double(logit(i)));
      }
      double d = 0.0;
      for (u32 i = 0; i < n; ++i) d += std::isinf(m) ? 1.0 : std::exp((logit(i) - m) / temperature);
      return has_nan ? double(NAN) : m / temperature + (std::isinf(m) ? 0.0 : std::log(d));
    };
    const double total =
        normalized_over([&](u32 i) { return over == NormalizeOver::kAll ? r.logits[i] : chosen_from(i); }, V);
    // Where the logits are huge, so is the rounding of the result.
    bool ok = close(logsumexp[row], float(total), 4e-6 + 3e-7 * std::fabs(total));
    const double relative_to = over == NormalizeOver::kTopK && std::isfinite(total)
                                   ? normalized_over([&](u32 i) { return chosen_from(order[i]); }, k)
                                   : total;
    for (u32 i = 0; i < k; ++i) {
      const double logit = chosen_from(order[i]) / temperature;
      const double value = std::isfinite(total) ? logit - relative_to : double(NAN);
      const double tolerance = 4e-6 + 3e-7 * (std::fabs(logit) + std::fabs(relative_to));
      ok =
          ok && indices[size_t(row) * k + i] == order[i] && close(values[size_t(row) * k + i], float(value), tolerance);
    }
    if (!ok) {
      std::printf("wrong: row %u of %u, V %u, k %u, dtype %u, mask %u, over %u, manner %u, threads %u\n", row, rows, V,
                  k, u32(dtype), u32(mask_kind), u32(over), manner, p.threads);
      return false;
    }
  }
  return true;
}

// One random problem of beams, against the merge of their own lists. Whether it agrees, bit for bit.
bool check_beams() {
  const u32 batch = 1 + below(3), beams = 1 + below(4);
  const u32 V = 1 + below(below(2) ? 300 : 30000);
  const u32 k = 1 + below(std::min(beams * V, 50u));
  const u32 rows = batch * beams, k_of_row = std::min(k, V);
  std::vector<float> logits(size_t(rows) * V), scores(rows * 2), row_values(rows * k_of_row), logsumexp(rows);
  std::vector<i64> row_indices(rows * k_of_row);
  const u32 manner = below(2);
  for (float& x : logits) x = random_logit(manner);
  for (float& x : scores) x = random_logit(manner);

  Problem p{};
  p.kernels = &kBaselineKernels;
  p.threads = 1;
  p.sizes = {i64(batch), i64(beams)};
  p.vocab_size = V;
  p.k = k_of_row;
  p.value_kind = ValueKind::kLogProbabilities;
  p.logits = reinterpret_cast<const char*>(logits.data());
  p.logits_strides = {i64(beams) * V, i64(V)};
  p.logits_element_stride = 1;
  p.scale.temperature = 1.0;
  p.mask_strides = {0, 0};
  p.values = row_values.data();
  p.indices = row_indices.data();
  p.logsumexp = logsumexp.data();
  solve(p);

  std::vector<float> values(batch * k);
  std::vector<i64> indices(batch * k);
  p.threads = 4;
  p.k = k;
  p.values = values.data();
  p.indices = indices.data();
  p.beam_scores = scores.data();
  p.beam_scores_strides[0] = 2;
  p.beam_scores_strides[1] = 2 * batch;
  solve(p);

  for (u32 entry = 0; entry < batch; ++entry) {
    struct Candidate {
      float value;
      i64 index;
    };
    std::vector<Candidate> candidates;
    for (u32 beam = 0; beam < beams; ++beam) {
      const float score = scores[entry * 2 + beam * 2 * batch];
      for (u32 i = 0; i < k_of_row; ++i) {
        const u32 place = (entry * beams + beam) * k_of_row + i;
        candidates.push_back({score + row_values[place], i64(beam) * V + row_indices[place]});
      }
    }
    std::stable_sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
      return order_key(bits_as<u32>(a.value)) > order_key(bits_as<u32>(b.value));
    });
    for (u32 i = 0; i < k; ++i) {
      const u32 place = entry * k + i;
      if (indices[place] == candidates[i].index && values[place] == candidates[i].value) continue;
      std::printf("wrong: entry %u of %u, %u beams, V %u, k %u, rank %u\n", entry, batch, beams, V, k, i);
      return false;
    }
  }
  return true;
}

}  // namespace

int main(int count, char** arguments) {
  const int problems = count > 1 ? std::atoi(arguments[1]) : 1000;
  for (int i = 0; i < problems; ++i) {
    if (!check() || (i % 4 == 0 && !check_beams())) return 1;
  }
  std::printf("%d problems agree, %s kernels\n", problems, kBaselineKernels.name);
}
