// SPDX-License-Identifier: Apache-2.0
// One instruction set's table of router_kernels.h, built like vector_kernels.cpp: the normalizers of a group of rows, and
// the values of the tokens that router_choice.h chooses.
#include "router_kernels.h"

#include "router_choice.h"
#include "side_by_side.h"

namespace fused_topk::cpu {
namespace {

// ---- Arithmetic with rows in the lanes ----

static_assert(kGroup % kRows == 0);

typedef float RowFloats __attribute__((vector_size(4 * kGroup)));
typedef double RowDoubles __attribute__((vector_size(8 * kGroup)));
typedef i64 RowMask __attribute__((vector_size(8 * kGroup)));

// bits_of_key of order.h. The key of NaN becomes another NaN.
inline RowFloats logits_of(const u32 (&of_rows)[kGroup]) {
  Keys keys;
  __builtin_memcpy(&keys, of_rows, sizeof keys);
  const Keys is_positive = (Keys)((SignedKeys)keys >> 31);
  return (RowFloats)(keys ^ (~is_positive | 0x80000000u));
}

inline RowDoubles widen(RowFloats x) {
#if defined(__AVX512F__)
  return (RowDoubles)_mm512_maskz_cvtps_pd(0xFF, (__m256)x);
#else
  return __builtin_convertvector(x, RowDoubles);
#endif
}

inline RowFloats narrow(RowDoubles x) {
#if defined(__AVX512F__)
  return (RowFloats)_mm512_maskz_cvtpd_ps(0xFF, (__m512d)x);
#else
  return __builtin_convertvector(x, RowFloats);
#endif
}

inline bool is_any(RowMask lanes) {
  typedef i64 Half __attribute__((vector_size(4 * kGroup)));
  const Half half = half_of<Half>(lanes, 0) | half_of<Half>(lanes, 1);
  return (half[0] | half[1] | half[2] | half[3]) != 0;
}

// The normalizers of a group of rows. A lane without a row repeats the last row.
struct Group {
  RowFloats m;  // the greatest logit that is not a NaN
  RowDoubles d;
};

inline RowDoubles load_rows(const float (&of_rows)[kGroup]) {
  RowFloats lanes;
  __builtin_memcpy(&lanes, of_rows, sizeof lanes);
  return widen(lanes);
}

// The exponentials of a group of rows, with a row in each lane.
struct LaneExponentials {
  struct Fields {
    Floats reference, inverse_c, c_high, c_low, lowest;
  } fields;

  // Lane i has row (from + i) % kGroup of the group. reference: what is subtracted from each row's logits.
  LaneExponentials(const RouterRows& rows, u32 first, RowFloats reference, u32 from) {
    const Temperatures& t = rows.temperatures;
    constexpr u32 kBytes = sizeof(Floats) < sizeof reference ? sizeof(Floats) : sizeof reference;
    Floats references;
    for (u32 i = 0; i < sizeof references; i += kBytes) {
      __builtin_memcpy(reinterpret_cast<char*>(&references) + i, reinterpret_cast<const char*>(&reference) + from * 4,
                       kBytes);
    }
    const Exponential& e = *t.exponentials;
    fields = {references, broadcast(e.inverse_c), broadcast(e.c_high), broadcast(e.c_low), broadcast(e.lowest)};
    for (u32 i = 0; i < kLanes && t.differ; ++i) {
      const u32 row = first + (from + i) % kGroup;
      const Exponential& of_row = t.exponentials[row < rows.rows ? row : rows.rows - 1];
      fields.inverse_c[i] = of_row.inverse_c;
      fields.c_high[i] = of_row.c_high;
      fields.c_low[i] = of_row.c_low;
      fields.lowest[i] = of_row.lowest;
    }
  }

  const Fields& operator[](u32) const { return fields; }
};

// Overwrites x [count][kGroup] with the exponentials, relative to each row's reference. Writes whole vectors: if the count
// is odd, the next kGroup elements are overwritten too.
inline void exp_of_columns(const RouterRows& rows, u32 first, RowFloats reference, u32 count, float* x) {
  constexpr u32 kStep = kLanes < kGroup ? kGroup : kLanes;
  for (u32 from = 0; from < kGroup; from += kLanes) {
    const LaneExponentials e(rows, first, reference, from);
    u32 i = from;
    for (; i + 3 * kStep < count * kGroup; i += 4 * kStep) {
      Floats of_rows[4] = {load(x + i), load(x + i + kStep), load(x + i + 2 * kStep), load(x + i + 3 * kStep)};
      exp_in_place(of_rows, e);
      for (u32 v = 0; v < 4; ++v) store_vector(x + i + v * kStep, of_rows[v]);
    }
    for (; i < count * kGroup; i += kStep) {
      Floats of_rows[1] = {load(x + i)};
      exp_in_place(of_rows, e);
      store_vector(x + i, of_rows[0]);
    }
  }
}

// reference_point() of normalizer.h.
inline RowFloats reference_points(RowFloats m) { return m == -kInfinity ? RowFloats{} : m; }

// Rows of at most so many elements are summed with rows in the lanes. With elements in the lanes, a vector would hold few.
constexpr u32 kFewColumns = 32;

// The normalizers of the rows from `first` on. Overwrites the rows' elements, columns [n][kGroup], with the exponentials.
inline Group normalize_columns(const RouterRows& rows, u32 first, float (&columns)[kFewColumns][kGroup]) {
  // Two chains of operations, each half as long.
  const auto load_column = [&](u32 j) {
    RowFloats x;
    __builtin_memcpy(&x, columns[j], sizeof x);
    return x;
  };
  const u32 odd = rows.n % 2;
  RowFloats m = RowFloats{} - kInfinity, other_m = m;
  if (odd) m = load_column(0) > m ? load_column(0) : m;
  for (u32 j = odd; j < rows.n; j += 2) {
    const RowFloats x = load_column(j), y = load_column(j + 1);
    m = x > m ? x : m;
    other_m = y > other_m ? y : other_m;
  }
  m = other_m > m ? other_m : m;
  exp_of_columns(rows, first, reference_points(m), rows.n, columns[0]);
  RowDoubles d = odd ? load_rows(columns[0]) : RowDoubles{}, other_d = {};
  for (u32 j = odd; j < rows.n; j += 2) {
    d += load_rows(columns[j]);
    other_d += load_rows(columns[j + 1]);
  }
  return {m, d + other_d};
}

// The normalizers of rows x of any length.
inline Group normalize_rows(const RouterRows& rows, const float* const (&x)[kGroup], u32 first, u32 count) {
  const Temperatures& t = rows.temperatures;
  Group group = {};
  for (u32 begin = 0; begin < count; begin += kRows) {
    const ShortRows quad{{x[begin], x[begin + 1], x[begin + 2], x[begin + 3]}, {}, rows.n};
    const Normalizers normalizers = t.differ ? normalize<false>(quad, RowExponentials(t, first + begin, rows.rows))
                                             : normalize<false>(quad, SameExponential{*t.exponentials});
    for (u32 i = 0; i < kRows; ++i) {
      group.m[begin + i] = normalizers.m[i];
      group.d[begin + i] = normalizers.d[i];
    }
  }
  return group;
}

// Values of the chosen of rows whose normalizer is finite. z: (x - m) / T of the chosen; terms: e^z.
inline void write_values(const RouterRows& rows, u32 count, const RowDoubles (&z)[kMostChosen],
                         const float (&terms)[kMostChosen][kGroup], RowDoubles d, float* values) {
  float of_rows[kMostChosen][kGroup];
  const u32 k = rows.k;
  if (rows.value_kind == ValueKind::kLogProbabilities) {
    const RowDoubles log_d = logarithm(d);
    for (u32 i = 0; i < k; ++i) {
      const RowFloats lanes = narrow(z[i] - log_d);
      __builtin_memcpy(of_rows[i], &lanes, sizeof lanes);
    }
  } else {
    RowMask has_vanished = {};
    for (u32 i = 0; i < k; ++i) {
      const RowDoubles of_term = load_rows(terms[i]);
      has_vanished |= ~(of_term > 0.0);
      const RowFloats lanes = narrow(of_term / d);
      __builtin_memcpy(of_rows[i], &lanes, sizeof lanes);
    }
    // The float32 exponential has underflowed to 0. The result may still be a float32 above 0.
    if (is_any(has_vanished)) {
      for (u32 i = 0; i < k; ++i) {
        for (u32 r = 0; r < count; ++r) {
          if (!(terms[i][r] > 0.0f)) of_rows[i][r] = float(__builtin_exp(z[i][r]) / d[r]);
        }
      }
    }
  }
  for (u32 r = 0; r < count; ++r) {
    for (u32 i = 0; i < k; ++i) values[r * k + i] = of_rows[i][r];
  }
}

// Solves rows first .. first + count. x: these rows; the last one stands in for missing rows.
inline void route_group(const RouterRows& rows, const float* const (&x)[kGroup], u32 first, u32 count) {
  const u32 n = rows.n, k = rows.k;
  const Temperatures& t = rows.temperatures;
  i64* const indices = rows.indices + u64(first) * k;
  alignas(64) Keys keys[kMostExperts];
  alignas(64) float few_columns[kFewColumns][kGroup];
  for (u32 i = 0; i < n; i += 8) {
    Keys columns[8];
    load_columns(x, i, n, columns);
    for (u32 j = 0; j < 8; ++j) keys[i + j] = i + j < n ? order_keys(columns[j]) : Keys{} + kNoKey;
    if (n <= kFewColumns) __builtin_memcpy(few_columns[i], columns, sizeof columns);
  }
  Chosen chosen;
  choose(keys, n, k, chosen);
  for (u32 r = 0; r < count; ++r) {
    for (u32 i = 0; i < k; ++i) indices[r * k + i] = chosen.indices[i][r];
  }
  if (rows.value_kind == ValueKind::kLogits) return;

  const Group group =
      n <= kFewColumns ? normalize_columns(rows, first, few_columns) : normalize_rows(rows, x, first, count);
  RowDoubles inverse = RowDoubles{} + *t.inverses;
  for (u32 r = 0; r < kGroup && t.differ; ++r) {
    inverse[r] = t.inverses[first + r < rows.rows ? first + r : rows.rows - 1];
  }
  const RowDoubles m = widen(group.m);
  RowDoubles d = group.d;
  const RowDoubles scaled = m * inverse, whole = scaled + logarithm(d);
  // As Normalizers::is_finite.
  const bool are_finite = !is_any(~(d >= 1.0));
  float of_rows[kGroup];
  const RowFloats rounded = narrow(whole);
  __builtin_memcpy(of_rows, &rounded, sizeof of_rows);
  float* const logsumexp = rows.logsumexp + first;
  for (u32 r = 0; r < count; ++r) {
    const bool is_finite = group.d[r] >= 1.0;
    logsumexp[r] = is_finite ? of_rows[r] : holds_nan(x[r], n) ? kNaN : float(scaled[r]);
  }

  alignas(64) float terms[kMostChosen][kGroup];
  RowDoubles z[kMostChosen];
  for (u32 i = 0; i < k; ++i) {
    const RowFloats logits = logits_of(chosen.keys[i]);
    z[i] = (widen(logits) - m) * inverse;
    if (n > kFewColumns) {
      __builtin_memcpy(terms[i], &logits, sizeof logits);
    } else {
      for (u32 r = 0; r < kGroup; ++r) terms[i][r] = few_columns[chosen.indices[i][r]][r];
    }
  }
  if (n > kFewColumns) exp_of_columns(rows, first, group.m, k, terms[0]);
  if (rows.normalize_over == NormalizeOver::kTopK) {
    d = RowDoubles{};
    for (u32 i = 0; i < k; ++i) d += load_rows(terms[i]);
  }
  float* const values = rows.values + u64(first) * k;
  write_values(rows, count, z, terms, d, values);
  // A row without a finite normalizer has no probabilities. As in torch.softmax, they are NaN.
  for (u32 r = 0; r < count && !are_finite; ++r) {
    for (u32 i = 0; i < k && !(group.d[r] >= 1.0); ++i) values[r * k + i] = kNaN;
  }
}

void route(const RouterRows& rows) {
  for (u32 first = 0; first < rows.rows; first += kGroup) {
    const u32 count = rows.rows - first < kGroup ? rows.rows - first : kGroup;
    const float* x[kGroup];
    for (u32 r = 0; r < kGroup; ++r) x[r] = rows.x + (first + (r < count ? r : count - 1)) * rows.n;
    route_group(rows, x, first, count);
  }
}

}  // namespace

extern const RouterKernels FUSED_TOPK_TABLE(RouterKernels) = {route};

}  // namespace fused_topk::cpu
