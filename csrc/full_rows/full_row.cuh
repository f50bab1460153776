// SPDX-License-Identifier: Apache-2.0
// Full rows: the argument of a launch, and how a vector of a row is read, turned into results and written.
//
// An element's thread depends on its index alone, never on its address. So a row has the same sum, bit for bit, at any
// address. Assumes that the row's elements are adjacent and aligned to their own size.
#pragma once

#include "../rows/numbers.cuh"
#include "../rows/row.cuh"

namespace fused_topk {

// What a launch writes.
enum FullRowKind : u32 { kSoftmax = 0, kLogSoftmax = 1, kLogSumExp = 2 };

// The argument, passed by value. Each 64 bytes of it cost a launch a fetch from memory: the fields that every launch
// reads come first. fused_topk/layout/full_row_launch.py fills it by field names.
struct FullRows {
  const void* logits;  // [rows, V]: row r at r / inner_rows * outer_stride + r % inner_rows * inner_stride
  void* out;           // [rows, V] of the OUT format; [rows] float for kLogSumExp
  i64 inner_stride;    // in elements, like outer_stride
  u32 inner_rows;
  u32 V;
  RowNumbers numbers;
  unsigned char kind;  // FullRowKind
  bool result_stays;   // the result fits in L2. Then logits are read with evict-first
  u16 shared_vectors;  // of each thread, in shared memory; even
  u32 rows;
  i64 outer_stride;
  u32 blocks_per_row;
  Normalizer* parts;  // [owners, 2, blocks_per_row]; null, like counters, where a block or a warp owns a row
  u32* counters;      // [owners], zero before and after each launch
};

// Turns a row's logits into results, once its normalizer is known.
struct RowValues {
  float m;
  Temperature temperature;
  float last;  // 1 / d for kSoftmax, else log d
  u32 kind;

  __device__ __forceinline__ RowValues(Normalizer row, Temperature temperature, u32 kind)
      : m(row.m), temperature(temperature), kind(kind) {
    // As in torch, a row has no probabilities if it has a NaN or a +inf, or if all of it is -inf.
    const float d = fabsf(m) < FUSED_TOPK_INFINITY ? row.d : not_a_number();
    last = kind == kSoftmax ? __frcp_rn(d) : logf(d);
  }
  __device__ __forceinline__ float logsumexp() const {
    return temperature.scaled(m) + (fabsf(m) == FUSED_TOPK_INFINITY ? 0.0f : last);
  }
  // x: [COUNT] logits; become results.
  template <u32 COUNT>
  __device__ __forceinline__ void apply(float (&x)[COUNT]) const {
    if (kind == kLogSoftmax) {
#pragma unroll
      for (u32 e = 0; e < COUNT; ++e) x[e] = temperature.log_weight(x[e], m) - last;
    } else {
#pragma unroll
      for (u32 e = 0; e < COUNT; ++e) x[e] = temperature.scale().weight(x[e], m) * last;
    }
  }
};

// A row: its elements [0, length) are read and [0, end) written, a vector at a time. Rows with lengths are not ALIGNED:
// they may end within a vector.
template <class IN, class OUT, bool ALIGNED>
struct FullRow {
  static constexpr u32 kPerVector = IN::kPerVector;
  static constexpr u32 kOutVectors = kPerVector / OUT::kPerVector;

  const char* in;
  char* out;
  u32 length;
  u32 end;
  Temperature temperature;
  CachePolicy policy;  // of aligned loads; the others have no registers left for one

  __device__ __forceinline__ FullRow(const FullRows& problem, u32 row) : FullRow(problem, row, problem.result_stays) {}
  // leaves_first: the lines of the L2 cache that are read leave it first.
  __device__ __forceinline__ FullRow(const FullRows& problem, u32 row, bool leaves_first)
      : length(ALIGNED ? problem.V : problem.numbers.length_of(row, problem.V)), end(problem.V), policy(leaves_first) {
    i64 offset = row * problem.inner_stride;
    // Few rows need this division, which takes as long as a barrier. The branch spares the others from it.
    if (row >= problem.inner_rows) {
      const u32 outer = row / problem.inner_rows;
      offset += outer * (problem.outer_stride - problem.inner_rows * problem.inner_stride);
    }
    in = static_cast<const char*>(problem.logits) + offset * i64(sizeof(typename IN::Bits));
    out = static_cast<char*>(problem.out) + i64(row) * problem.V * i64(sizeof(typename OUT::Bits));
    temperature = problem.numbers.temperature_of(row);
  }

  // The vector that starts at element `token`, a multiple of kPerVector. From the length on it is -inf.
  __device__ __forceinline__ Vector load(u32 token) const {
    if (token >= length) return all_negative_infinity<IN>();
    const char* address = in + u64(token) * sizeof(typename IN::Bits);
    if constexpr (ALIGNED) {
      const uint4 v = load_with_policy(address, policy);
      return {{v.x, v.y, v.z, v.w}};
    }
    const u32 shift = u32(reinterpret_cast<u64>(in) % 16);
    // A straddling read touches up to 16 bytes before and after the vector.
    if (token > 0 && token + 2 * kPerVector <= length) {
      return straddle(load_16_bytes(address - shift), load_16_bytes(address - shift + 16), shift);
    }
    return load_elements(address, token);
  }

  // load() to a slot of shared memory, in the background if the hardware can. Only the calling thread sees the copy,
  // after wait_copies().
  __device__ __forceinline__ void copy(Vector* slot, u32 token) const {
    if (ALIGNED && kHasAsyncCopy && token < end) {
      copy_async(slot, in + u64(token) * sizeof(typename IN::Bits), policy);
    } else {
      *slot = load(token);
    }
  }

  // Writes the results of a vector's logits. All lanes of a warp call it, with adjacent vectors. LEAVES_FIRST: the
  // lines of the L2 cache that are written leave it first.
  template <bool LEAVES_FIRST = false>
  __device__ __forceinline__ void write(u32 token, const Vector& logits, const RowValues& values) const {
    float y[kPerVector];
#pragma unroll
    for (u32 e = 0; e < kPerVector; ++e) y[e] = IN::decode(logits.words, e);
    values.apply(y);
    Vector results[kOutVectors];
#pragma unroll
    for (u32 o = 0; o < kOutVectors; ++o) results[o] = OUT::encode(y + o * OUT::kPerVector);
    if constexpr (ALIGNED) {
      if (token >= end) return;
#pragma unroll
      for (u32 o = 0; o < kOutVectors; ++o) {
        store_16_bytes<LEAVES_FIRST>(out_address(token + o * OUT::kPerVector), results[o]);
      }
    } else {
      write_unaligned<LEAVES_FIRST>(token, results);
    }
  }

 private:
  __device__ __forceinline__ char* out_address(u32 token) const {
    return out + u64(token) * sizeof(typename OUT::Bits);
  }

  __device__ __forceinline__ Vector load_elements(const char* address, u32 token) const {
    const auto* elements = reinterpret_cast<const typename IN::Bits*>(address);
    return vector_of<IN>([&](u32 e) { return token + e < length ? __ldg(elements + e) : IN::kNegativeInfinity; });
  }

  template <bool LEAVES_FIRST>
  static __device__ __forceinline__ void store_16_bytes(char* address, const Vector& v) {
    const uint4 words = {v.words[0], v.words[1], v.words[2], v.words[3]};
    if constexpr (LEAVES_FIRST) {
      __stcs(reinterpret_cast<uint4*>(address), words);
    } else {
      *reinterpret_cast<uint4*>(address) = words;
    }
  }

  // Writes to a row that starts between two 16-byte boundaries. Each 16 aligned bytes hold the tail of one vector and
  // the head of the next. The lane with the head writes them; the lane before hands it the tail. The elements left at
  // the ends of the warp's stretch and of the row are written one by one.
  template <bool LEAVES_FIRST>
  __device__ __forceinline__ void write_unaligned(u32 token, Vector (&results)[kOutVectors]) const {
    constexpr u32 n = OUT::kPerVector;
    const u32 before = u32(reinterpret_cast<u64>(out) % 16);
    const u32 head = (16 - before) / sizeof(typename OUT::Bits);
    bool is_whole[kOutVectors + 1];
    u32 count[kOutVectors];
#pragma unroll
    for (u32 o = 0; o < kOutVectors; ++o) {
      const u32 first = token + o * n;
      count[o] = first < end ? min(end - first, n) : 0;
      const bool has_tail_before = o > 0 || lane_id() > 0 || before == 0;
      is_whole[o] = has_tail_before && count[o] >= head;
    }
    is_whole[kOutVectors] = __shfl_down_sync(kAllLanes, u32(is_whole[0]), 1) && lane_id() + 1 < kWarpSize;
#pragma unroll
    for (u32 o = 0; o < kOutVectors; ++o) {
      const u32 first_alone = is_whole[o] ? head : 0;
      const u32 end_alone = min(is_whole[o + 1] ? head : n, count[o]);
      if (first_alone < end_alone) {
        auto* elements = reinterpret_cast<typename OUT::Bits*>(out_address(token + o * n));
#pragma unroll
        for (u32 e = 0; e < n; ++e) {
          if (e >= first_alone && e < end_alone) {
            elements[e] = element<OUT>(results[o], e);
          }
        }
      }
      // Rotates the bytes to their places in 16 aligned ones: the head behind the tail.
      rotate(results[o], (16 - before) % 16);
    }
    Vector tail;
#pragma unroll
    for (u32 w = 0; w < 4; ++w) tail.words[w] = __shfl_up_sync(kAllLanes, results[kOutVectors - 1].words[w], 1);
#pragma unroll
    for (u32 o = 0; o < kOutVectors; ++o) {
      Vector whole;
#pragma unroll
      for (u32 w = 0; w < 4; ++w) {
        const u32 of_tail = before <= 4 * w ? 0u : before >= 4 * w + 4 ? ~0u : 0xFFFFu;
        whole.words[w] = (tail.words[w] & of_tail) | (results[o].words[w] & ~of_tail);
      }
      if (is_whole[o]) store_16_bytes<LEAVES_FIRST>(out_address(token + o * n) - before, whole);
      tail = results[o];
    }
  }

  // Rotates by `count` bytes, a multiple of the element size: byte i + count moves to byte i.
  static __device__ __forceinline__ void rotate(Vector& v, u32 count) {
    u32(&w)[4] = v.words;
    const u32 first[4] = {w[0], w[1], w[2], w[3]};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) w[i] = count & 4 ? first[(i + 1) % 4] : first[i];
    const u32 second[4] = {w[0], w[1], w[2], w[3]};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) w[i] = count & 8 ? second[(i + 2) % 4] : second[i];
    if constexpr (OUT::kPerVector == 8) {
      const u32 third[4] = {w[0], w[1], w[2], w[3]};
#pragma unroll
      for (u32 i = 0; i < 4; ++i) w[i] = __funnelshift_r(third[i], third[(i + 1) % 4], count % 4 * 8);
    }
  }
};

// Folds COUNT vectors into the state: the paper's online step, a few vectors at a time.
template <class IN, u32 COUNT>
__device__ __forceinline__ void fold(Normalizer& state, const Vector (&vectors)[COUNT], Scale scale) {
  float m = state.m;
#pragma unroll
  for (u32 u = 0; u < COUNT; ++u) {
    const u32(&words)[4] = vectors[u].words;
    if constexpr (IN::kHasMaxPairs) {
      const u32 pair[4] = {IN::max_pairs(IN::max_pairs(words[0], words[1]), IN::max_pairs(words[2], words[3]))};
      m = max_nan(m, max_nan(IN::decode(pair, 0), IN::decode(pair, 1)));
    } else {
#pragma unroll
      for (u32 e = 0; e < IN::kPerVector; ++e) m = max_nan(m, IN::decode(words, e));
    }
  }
  const float base = reference_point(m);
  float d = state.d * scale.weight(state.m, base);
#pragma unroll
  for (u32 u = 0; u < COUNT; ++u) {
    // A copy that the compiler takes for another vector, so it decodes the vector again. Keeping the decoded floats
    // would take a register each.
    Vector v = vectors[u];
    if constexpr (IN::kPerVector == 8) {
#pragma unroll
      for (u32 w = 0; w < 4; ++w) keep_opaque(v.words[w]);
    }
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (u32 e = 0; e < IN::kPerVector; ++e) sum[e % 2] += scale.weight(IN::decode(v.words, e), base);
    d += sum[0] + sum[1];
  }
  state = {m, d};
}

}  // namespace fused_topk
