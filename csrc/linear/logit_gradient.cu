// SPDX-License-Identifier: Apache-2.0
// The backward pass of an LM head: turns the logits of a piece of the vocabulary, in place, into the gradient with respect to
// them.
//
//     g = ((c + b z) e^z + t e^((x - m') / T) + a) / T,   z = (x - m) / T,   0 where the mask hides the token
//
// Each row has its c, b, m, t, m' and T. b comes from the entropy. t comes from the tail, and is 0 for the row's given tokens. a is the sum
// of the list entries of the row for this token; most tokens have none. g is summed in float32 and rounded once, so that p - 1 keeps its
// digits where p is near 1.
#include "../rows/numbers.cuh"
#include "../rows/row.cuh"

namespace fused_topk {

// The argument of a launch. fused_topk/layout/launch.py fills it by field names.
struct LogitGradients {
  void* logits;              // [rows, tokens], adjacent in a row; become their gradient
  const float* m;            // [rows]
  const float* coefficient;  // [rows]: c
  const float* slope;        // nullable; [rows]: b
  const float* rest_m;       // nullable; [rows]: m'
  const float* rest;         // with rest_m; [rows]: t
  RowNumbers numbers;
  const void* listed;  // nullable; [rows, length] of gradients::Listed
  const void* mask;    // nullable; of these tokens; see RowMask
  i64 row_stride;      // of the logits, in elements
  i64 mask_row_stride, mask_element_stride;
  u32 tokens;
  u32 start;   // the token at which the logits begin
  u32 length;  // of a list
  u32 mask_kind;
  u32 sums_all;  // 1: the mask only says for which tokens t is 0
};

namespace gradients {

// An amount that is added at a token. A row's list is sorted by `place`. Several entries may have the same token, and tokens may lie
// outside of these logits.
struct alignas(8) Listed {
  float amount;
  int place;  // twice the token, and 1 for a given one; negative: none

  __device__ __forceinline__ int token() const { return place >> 1; }
  __device__ __forceinline__ bool is_given() const { return place & 1; }
};

constexpr u32 kThreads = 256;
constexpr u32 kVectors = 2;  // of a thread
constexpr u32 kSpanVectors = kThreads * kVectors;

// e^z is 0 for this z, and b z is finite.
constexpr float kLeastLog = -1e4f;

// Some tokens of a row.
template <class FORMAT>
class Span {
 public:
  using Bits = typename FORMAT::Bits;
  static constexpr u32 n = FORMAT::kPerVector;

  // begin: the first token of the span. All tokens of this file are counted from the first token of these logits.
  __device__ __forceinline__ Span(const LogitGradients& problem, u32 row, u32 begin)
      : x_(static_cast<Bits*>(problem.logits) + row * problem.row_stride),
        begin_(begin),
        tokens_(problem.tokens),
        is_aligned_(reinterpret_cast<u64>(x_) % 16 == 0),
        has_mask_(problem.mask),
        sums_all_(problem.sums_all),
        has_rest_(problem.rest_m),
        m_(reference_point(__ldg(problem.m + row))),
        coefficient_(__ldg(problem.coefficient + row)),
        slope_(problem.slope ? __ldg(problem.slope + row) : 0.0f),
        rest_m_(problem.rest_m ? reference_point(__ldg(problem.rest_m + row)) : 0.0f),
        rest_(problem.rest_m ? __ldg(problem.rest + row) : 0.0f),
        temperature_(problem.numbers.temperature_of(row)) {
    const i64 offset = row * problem.mask_row_stride * (problem.mask_kind == kMaskBits ? 4 : 1);
    mask_ = {static_cast<const char*>(problem.mask) + offset, problem.mask_element_stride, problem.mask_kind};
  }

  // The first token of vector u of this thread.
  __device__ __forceinline__ u32 token(u32 u) const { return begin_ + (u * kThreads + threadIdx.x) * n; }

  // Loads this thread's vectors.
  __device__ __forceinline__ void load(Vector (&vectors)[kVectors]) const {
    // The condition is the same for all threads and almost always true. Then all loads are issued without a branch
    // between them.
    if (is_aligned_ && begin_ + kSpanVectors * n <= tokens_) {
#pragma unroll
      for (u32 u = 0; u < kVectors; ++u) vectors[u] = load_vector(token(u));
    } else {
#pragma unroll
      for (u32 u = 0; u < kVectors; ++u) vectors[u] = is_whole(token(u)) ? load_vector(token(u)) : load_rest(token(u));
    }
  }

  // Writes the gradient of a vector of logits, without the listed amounts.
  __device__ __forceinline__ void write(u32 token, const Vector& logits) const {
    const u32 allowed = has_mask_ ? mask_.template allowed<n>(token, tokens_) : ~0u;
    float y[n];
#pragma unroll
    for (u32 e = 0; e < n; ++e) {
      const bool is_allowed = allowed >> e & 1;
      y[e] = is_allowed || sums_all_ ? gradient(FORMAT::decode(logits.words, e), 0.0f, is_allowed) : 0.0f;
    }
    const Vector v = FORMAT::encode(y);
    if (is_whole(token)) {
      *reinterpret_cast<uint4*>(x_ + token) = {v.words[0], v.words[1], v.words[2], v.words[3]};
      return;
    }
#pragma unroll
    for (u32 e = 0; e < n; ++e)
      if (token + e < tokens_) x_[token + e] = element<FORMAT>(v, e);
  }

  // Writes the gradient of one logit, with a listed amount.
  __device__ __forceinline__ void write(u32 token, Bits logit, float amount, bool is_given) const {
    const bool is_allowed = !has_mask_ || mask_.template allowed<1>(token, tokens_);
    if (!is_allowed && !sums_all_) return;
    const float y[n] = {gradient(FORMAT::decode(logit), amount, is_allowed && !is_given)};
    x_[token] = element<FORMAT>(FORMAT::encode(y), 0);
  }

 private:
  __device__ __forceinline__ Vector load_vector(u32 token) const {
    // Not __ldg: the kernel also writes this memory.
    const uint4 v = *reinterpret_cast<const uint4*>(x_ + token);
    return {{v.x, v.y, v.z, v.w}};
  }
  // Zeros behind the row.
  __device__ __forceinline__ Vector load_rest(u32 token) const {
    return vector_of<FORMAT>([&](u32 e) { return token + e < tokens_ ? x_[token + e] : Bits(0); });
  }
  __device__ __forceinline__ bool is_whole(u32 token) const { return is_aligned_ && token + n <= tokens_; }
  // is_left: whether the token is one of the tail's.
  __device__ __forceinline__ float gradient(float x, float amount, bool is_left) const {
    // Of z = -inf nothing is left.
    const float z = fmaxf(temperature_.log_weight(x, m_), kLeastLog);
    if (has_rest_ && is_left) amount += rest_ * temperature_.scale().weight(x, rest_m_);
    return temperature_.scaled(fmaf(slope_, z, coefficient_) * temperature_.scale().weight(x, m_) + amount);
  }

  Bits* x_;  // [tokens]
  u32 begin_, tokens_;
  bool is_aligned_, has_mask_, sums_all_, has_rest_;
  float m_, coefficient_, slope_, rest_m_, rest_;
  Temperature temperature_;
  RowMask mask_;
};

__device__ __forceinline__ Listed load(const Listed* address) {
  const uint2 v = __ldg(reinterpret_cast<const uint2*>(address));
  return {__uint_as_float(v.x), int(v.y)};
}

// The start of a range of at most kThreads entries of the list. The first entry whose token is at least `token` lies in this range or
// right behind it.
__device__ __forceinline__ u32 place_before(const Listed* list, u32 length, int token) {
  u32 low = 0;
  u32 high = length;
  while (high - low > kThreads) {
    const u32 middle = (low + high) / 2;
    const bool is_below = load(list + middle).token() < token;
    low = is_below ? middle + 1 : low;
    high = is_below ? high : middle;
  }
  return low;
}

// How many blocks must fit on a multiprocessor. A thread has 40 registers. 7.5 has only 32 warps. H200, 2048 x 11776, bf16: 30 us; with
// 4 vectors and 4 blocks 40, with 1 vector 38.
constexpr u32 kBlocks = __CUDA_ARCH__ == 750 ? 4 : 6;

// Grid: (rows, spans of a row).
template <class FORMAT>
__global__ void __launch_bounds__(kThreads, kBlocks)
    logit_gradient_kernel(const __grid_constant__ LogitGradients problem) {
  __shared__ Vector logits[kSpanVectors];
  const u32 begin = blockIdx.y * (kSpanVectors * FORMAT::kPerVector);
  const Span<FORMAT> span(problem, blockIdx.x, begin);
  Vector vectors[kVectors];
  span.load(vectors);
  // Starts the loads of the list here, so that they are in flight together with the loads of the logits.
  const Listed* const list = static_cast<const Listed*>(problem.listed) + i64(blockIdx.x) * problem.length;
  const u32 end = min(begin + kSpanVectors * FORMAT::kPerVector, problem.tokens);
  const int first = int(problem.start + begin), last = int(problem.start + (end - 1));
  const u32 place = place_before(list, problem.length, first);
#pragma unroll
  for (u32 u = 0; u < kVectors; ++u) {
    logits[u * kThreads + threadIdx.x] = vectors[u];
    span.write(span.token(u), vectors[u]);
  }
  // An entry's thread reads a logit that another thread has stored, and overwrites the gradient that this thread has
  // written.
  __syncthreads();
  const auto* const elements = reinterpret_cast<const typename FORMAT::Bits*>(logits);
#pragma unroll 1
  for (u32 i = place + threadIdx.x; i < problem.length; i += kThreads) {
    const Listed own = load(list + i);
    if (own.token() > last) break;
    // The first of equal tokens takes the amounts of all, in their order.
    if (own.token() < first || (i > 0 && load(list + i - 1).token() == own.token())) continue;
    float amount = own.amount;
    bool is_given = own.is_given();
    for (u32 j = i + 1; j < problem.length; ++j) {
      const Listed other = load(list + j);
      if (other.token() != own.token()) break;
      amount += other.amount;
      is_given = is_given || other.is_given();
    }
    const u32 token = u32(own.token()) - problem.start;
    span.write(token, elements[token - begin], amount, is_given);
  }
}

}  // namespace gradients
}  // namespace fused_topk
