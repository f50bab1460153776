// SPDX-License-Identifier: Apache-2.0
// The k experts of each token and their weights, for mixture-of-experts layers: a warp has a token.
//
// A lane holds up to 32 of the experts' keys. With groups, the keys go through shared memory: some lanes find the two
// best keys of each group, and the keys of groups that are not kept are erased. Then the best key of the warp is taken
// k times. Lane i gets the i-th expert and computes that expert's score again, because keeping all scores would cost as
// many registers as the keys. Comes after problem.cuh and scores.h.
//
// What it should take on an H100 (computed, not measured): the bytes of the logits at 3 TB/s, or about 150 + experts /
// 32 * (40 + 5 k) + 14 k instructions a token, of which a multiprocessor issues 4 a cycle, whichever is more: 1.7 us
// for 4096 x 128 with k = 8, and 20 us for 16384 x 512 with k = 10 (read in 11). Few tokens wait for one load, and for
// k times two reductions of a warp: 1 us. A launch adds about 1.5 us.
#include "../rows/problem.cuh"
#include "scores.h"

namespace fused_topk {

// How tokens are routed. fused_topk/layout/router_launch.py fills it by field names. A Problem says what is read and
// where results go: its values are the weights, and its indices are the experts.
struct Routing {
  const float* bias;  // nullable; [experts], from a multiple of 16 bytes on
  u32 groups;
  u32 topk_groups;       // that are kept
  u32 group_size;        // experts of a group
  u32 log2_group_lanes;  // lanes that look at a group together
  u32 group_turns;       // experts that each of these looks at
  u32 sums_two;          // 1: a group is kept by the sum of its two best, 0: by the best
  u32 normalizes;
  float scale;
  u32 are_short;  // 1: experts are int, 0: i64
};

namespace routers {

constexpr u32 kTokensOfBlock = 4;

// The operations of scores.h on one expert. The compiler fuses none of these.
//
// reciprocal() and sqrt() are the instructions that __frcp_rn and __fsqrt_rn have for all but extreme numbers, rounded
// to nearest. For those numbers the compiler calls functions, and it keeps registers in memory across so many calls.
struct LaneMath {
  using Float = float;
  static __device__ __forceinline__ float of(float x) { return x; }
  static __device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
  static __device__ __forceinline__ float sub(float a, float b) { return __fadd_rn(a, -b); }
  static __device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
  static __device__ __forceinline__ float reciprocal(float x) {
    const float y = reciprocal_approx(x);
    return __fmaf_rn(y, -__fmaf_rn(x, y, -1.0f), y);
  }
  static __device__ __forceinline__ float sqrt(float x) {
    // Scaled, so that the remainder is not subnormal.
    const bool is_small = x < 0x1p-64f;
    const float scaled = is_small ? x * 0x1p64f : x;
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(scaled));
    const float approximate = __fmul_rn(scaled, y);
    const float remainder = __fmaf_rn(-approximate, approximate, scaled);
    const float root = __fmaf_rn(remainder, __fmul_rn(y, 0.5f), approximate);
    return x > 0.0f && x < FUSED_TOPK_INFINITY ? (is_small ? root * 0x1p-32f : root) : x;
  }
  static __device__ __forceinline__ float power_of_two(float shifted) {
    return __uint_as_float(__float_as_uint(shifted) << 23);
  }
  static __device__ __forceinline__ float negative_magnitude(float x) { return -fabsf(x); }
  static __device__ __forceinline__ float if_negative(float x, float a, float b) { return x < 0.0f ? a : b; }
  static __device__ __forceinline__ float zero_if_less(float result, float y, float limit) {
    return y < limit ? 0.0f : result;
  }
};

// The logits of a token. Lanes take its vectors of 16 bytes in turn.
template <class FORMAT>
struct Token {
  static constexpr u32 kPerVector = FORMAT::kPerVector;
  using Bits = typename FORMAT::Bits;

  const Bits* logits;
  RowMask mask;
  u32 experts;
  u32 length;  // experts from there on count as -inf, and are not read

  __device__ __forceinline__ Token(const Problem& problem, u32 row)
      : logits(static_cast<const Bits*>(problem.logits) + problem.logits_offset(row)),
        mask{nullptr, 0, 0},
        experts(problem.V),
        length(problem.lengths ? problem.length<kLengths>(row) : problem.V) {
    if (problem.mask) mask = problem.row_mask(row);
  }

  // The expert of a lane's i-th logit.
  static __device__ __forceinline__ u32 expert(u32 i) {
    return (i / kPerVector * kWarpSize + lane_id()) * kPerVector + i % kPerVector;
  }
  // The logit of an expert; -inf if the mask hides the expert or it lies past the end.
  __device__ __forceinline__ float logit(u32 expert) const {
    const bool counts = expert < length && (!mask.data || mask.allowed<1>(expert, experts));
    return counts ? FORMAT::decode(__ldg(logits + expert)) : -FUSED_TOPK_INFINITY;
  }
  template <u32 N>
  __device__ __forceinline__ void load(float (&x)[N]) const {
    const bool has_vectors = experts % kPerVector == 0 && reinterpret_cast<u64>(logits) % sizeof(Vector) == 0;
    if (has_vectors && !mask.data && length == experts) {
#pragma unroll
      for (u32 i = 0; i < N; i += kPerVector) {
        const bool is_inside = expert(i) < experts;
        Vector vector = {};
        if (is_inside) vector = load_16_bytes(logits + expert(i));
#pragma unroll
        for (u32 e = 0; e < kPerVector; ++e)
          x[i + e] = is_inside ? FORMAT::decode(vector.words, e) : -FUSED_TOPK_INFINITY;
      }
    } else {
#pragma unroll
      for (u32 i = 0; i < N; ++i) x[i] = logit(expert(i));
    }
  }
  template <u32 N>
  static __device__ __forceinline__ void load_bias(const float* bias, u32 experts, float (&b)[N]) {
#pragma unroll
    for (u32 i = 0; i < N; i += 4) {
      if (experts % 4 == 0) {
        Vector vector = {};
        if (expert(i) < experts) vector = load_16_bytes(bias + expert(i));
#pragma unroll
        for (u32 e = 0; e < 4; ++e) b[i + e] = __uint_as_float(vector.words[e]);
      } else {
#pragma unroll
        for (u32 e = 0; e < 4; ++e) b[i + e] = expert(i + e) < experts ? __ldg(bias + expert(i + e)) : 0.0f;
      }
    }
  }
};

// A sum over the warp, in the order of the index's bits: `first`, then from the highest to the lowest. All lanes call
// it.
__device__ __forceinline__ float sum_of_lanes(float x, u32 lowest) {
#pragma unroll
  for (u32 step = kWarpSize / 2; step >= lowest; step /= 2) x = __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

// The scores of a token's experts, from its logits.
template <class FORMAT, u32 SCORING>
struct ScoresOf {
  float m, inverse;  // of softmax

  // All lanes call it.
  template <u32 N>
  __device__ __forceinline__ explicit ScoresOf(const float (&x)[N]) : m(0.0f), inverse(0.0f) {
    if constexpr (SCORING == kSoftmax) {
      m = x[0];
#pragma unroll
      for (u32 i = 1; i < N; ++i) m = max_nan(m, x[i]);
      m = warp_max(m);
      // Four neighbours are added first. A vector has one or two fours, which meet last: they differ in the lowest bit.
      constexpr u32 kFours = FORMAT::kPerVector / 4;
      float fours[N / 4];
#pragma unroll
      for (u32 i = 0; i < N / 4; ++i) {
        const float a = __fadd_rn(term(x[4 * i]), term(x[4 * i + 1]));
        fours[i] = __fadd_rn(a, __fadd_rn(term(x[4 * i + 2]), term(x[4 * i + 3])));
      }
#pragma unroll
      for (u32 half = N / 8; half >= kFours; half /= 2)
#pragma unroll
        for (u32 i = 0; i < half; ++i) fours[i] = __fadd_rn(fours[i], fours[i + half]);
      float d = sum_of_lanes(fours[0], 1);
      if constexpr (kFours == 2) d = __fadd_rn(d, sum_of_lanes(fours[1], 1));
      inverse = __frcp_rn(d);
    }
  }
  __device__ __forceinline__ float of(float x) const {
    if constexpr (SCORING == kSoftmax) return __fmul_rn(term(x), inverse);
    if constexpr (SCORING == kSigmoid) return sigmoid<LaneMath>(x);
    return sqrt_softplus<LaneMath>(x);
  }

 private:
  __device__ __forceinline__ float term(float x) const { return exponential<LaneMath>(LaneMath::sub(x, m)); }
};

// Erases the keys of experts whose groups are not kept. keys: [experts], those of the token; scores: [groups], scratch.
// Both are shared memory of the warp, all of whose lanes call it.
__device__ __forceinline__ void erase_groups(const Routing& routing, u32* keys, u32* scores) {
  const u32 lanes = 1u << routing.log2_group_lanes;
  const u32 sub = lane_id() % lanes;
  const u32 at_once = kWarpSize >> routing.log2_group_lanes;
  const u32 groups = routing.groups, size = routing.group_size;
  __syncwarp();
#pragma unroll 1
  for (u32 first = 0; first < groups; first += at_once) {
    const u32 g = first + (lane_id() >> routing.log2_group_lanes);
    u32 best = kNoKey, second = kNoKey;
    // Groups begin at different turns, so that the lanes read from different banks.
    u32 turn = g % routing.group_turns;
#pragma unroll 1
    for (u32 i = 0; i < routing.group_turns; ++i) {
      const u32 e = turn * lanes + sub;
      if (g < groups && e < size) {
        const u32 key = keys[g * size + e];
        second = max(second, min(best, key));
        best = max(best, key);
      }
      turn = turn + 1 == routing.group_turns ? 0 : turn + 1;
    }
#pragma unroll 1
    for (u32 step = 1; step < lanes; step *= 2) {
      const u32 other = __shfl_xor_sync(kAllLanes, best, step);
      second = max(max(second, __shfl_xor_sync(kAllLanes, second, step)), min(best, other));
      best = max(best, other);
    }
    if (routing.sums_two && size > 1)
      best = order_key(__fadd_rn(__uint_as_float(bits_of_key(best)), __uint_as_float(bits_of_key(second))));
    if (g < groups && sub == 0) scores[g] = best;
  }
  __syncwarp();
#pragma unroll 1
  for (u32 first = 0; first < groups; first += at_once) {
    const u32 g = first + (lane_id() >> routing.log2_group_lanes);
    if (g >= groups) continue;
    const u32 own = scores[g];
    u32 rank = 0;
#pragma unroll 1
    for (u32 other = 0; other < groups; ++other) rank += scores[other] > own || (scores[other] == own && other < g);
    if (rank < routing.topk_groups) continue;
#pragma unroll 1
    for (u32 e = sub; e < size; e += lanes) keys[g * size + e] = kNoKey;
  }
  __syncwarp();
}

// The place of the greatest of a lane's keys; of equal keys, the place of the first.
template <u32 N>
struct BestOfLane {
  u32 key, place;

  __device__ __forceinline__ explicit BestOfLane(const u32 (&keys)[N]) {
    u32 key_of[N], place_of[N];
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
      key_of[i] = keys[i];
      place_of[i] = i;
    }
#pragma unroll
    for (u32 step = 1; step < N; step *= 2) {
#pragma unroll
      for (u32 i = 0; i + step < N; i += 2 * step) {
        const bool is_later = key_of[i + step] > key_of[i];
        key_of[i] = is_later ? key_of[i + step] : key_of[i];
        place_of[i] = is_later ? place_of[i + step] : place_of[i];
      }
    }
    key = key_of[0];
    place = place_of[0];
  }
};

// How many blocks must fit on a multiprocessor: 4 blocks leave a thread 128 registers, and 6 leave it 80. Without this
// bound some compiler uses fewer registers, and spills. 0 sets no bound.
constexpr u32 resident_blocks(u32 per_lane) { return per_lane == 32 ? 4 : per_lane == 16 ? 6 : 0; }

// Grid: (tokens / 4). Dynamic shared memory: with groups, 8 bytes for each of the 4 x 32 x PER_LANE experts.
template <class FORMAT, u32 PER_LANE, u32 SCORING>
__global__ void __launch_bounds__(kTokensOfBlock* kWarpSize, resident_blocks(PER_LANE))
    route_experts_kernel(const __grid_constant__ Problem problem, const __grid_constant__ Routing routing) {
  extern __shared__ u32 keys_of_block[];
  const u32 warp = threadIdx.x / kWarpSize;
  const u32 row = blockIdx.x * kTokensOfBlock + warp;
  // Whole warps leave, never single lanes.
  if (row >= problem.rows) return;
  const u32 experts = problem.V, k = problem.k;
  using Row = Token<FORMAT>;
  const Row token(problem, row);
  float x[PER_LANE], bias[PER_LANE] = {};
  token.load(x);
  if (routing.bias) Row::load_bias(routing.bias, experts, bias);

  const ScoresOf<FORMAT, SCORING> scores(x);
  u32 keys[PER_LANE];
#pragma unroll
  for (u32 i = 0; i < PER_LANE; ++i) {
    const u32 key = order_key(__fadd_rn(scores.of(x[i]), bias[i]));
    keys[i] = x[i] == -FUSED_TOPK_INFINITY ? kNegativeInfinityKey : key;
  }
  if (routing.groups > 1) {
    u32* const shared = keys_of_block + warp * 2 * kWarpSize * PER_LANE;
#pragma unroll
    for (u32 i = 0; i < PER_LANE; ++i) shared[Row::expert(i)] = keys[i];
    erase_groups(routing, shared, shared + kWarpSize * PER_LANE);
#pragma unroll
    for (u32 i = 0; i < PER_LANE; ++i) keys[i] = shared[Row::expert(i)];
  }

  BestOfLane<PER_LANE> best(keys);
  u32 chosen = 0;
#pragma unroll 1
  for (u32 i = 0; i < k; ++i) {
    const u32 greatest = warp_max(best.key);
    const u32 own = Row::expert(best.place);
    const u32 taken = warp_min(best.key == greatest ? own : ~0u);
    if (lane_id() == i) chosen = taken;
    const u32 gone = taken == own ? best.place : PER_LANE;
#pragma unroll
    for (u32 j = 0; j < PER_LANE; ++j) keys[j] = j == gone ? kNoKey : keys[j];
    best = BestOfLane<PER_LANE>(keys);
  }

  const bool has_expert = lane_id() < k;
  float weight = scores.of(token.logit(chosen));
  if (routing.normalizes) {
    float total = has_expert ? weight : 0.0f;
    total = __fadd_rn(total, __shfl_xor_sync(kAllLanes, total, 1));
    total = __fadd_rn(total, __shfl_xor_sync(kAllLanes, total, 2));
    weight = __fdiv_rn(weight, __fadd_rn(sum_of_lanes(total, 4), kLeastSum));
  }
  if (!has_expert) return;
  const i64 out = i64(row) * k + lane_id();
  static_cast<float*>(problem.values)[out] = __fmul_rn(weight, routing.scale);
  if (routing.are_short) {
    reinterpret_cast<int*>(problem.indices)[out] = int(chosen);
  } else {
    problem.indices[out] = chosen;
  }
}

}  // namespace routers
}  // namespace fused_topk
