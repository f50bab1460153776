// SPDX-License-Identifier: Apache-2.0
// The sums that log-probabilities, entropy and tail of given tokens are made of, in one read of each row:
//
//     (m, d, s) of the tokens that count       moments.h
//     (m, d) of those that are left without the row's given tokens
//
// A block has a row. A lane sums what it reads at a time relative to a maximum of its own, and merges that into its states; where
// none of the given tokens is among it, both states take the same sums. Then lanes and warps are merged in a fixed order, and at last
// the sums that an earlier piece of the row has left. The kernel also stores the logits of the given tokens.
#include "../algebra/moments.h"
#include "../rows/problem.cuh"
#include "../rows/row_logits.cuh"

namespace fused_topk {

// What a launch computes. fused_topk/operators/token_spread.py fills it by field names.
struct RowSums {
  const i64* tokens;   // [rows, num_tokens]; one that is not among the row's: none
  float* sums;         // [rows, 5]: m, d, s, and m and d of the rest. The rows are added to what they hold
  void* token_logits;  // [rows, num_tokens], in the logits' format; written where the token is in the row
  i64 first_token;     // the row's logits are those of the tokens from here on
  u32 num_tokens;
  u32 sums_all;  // 1: m, d and s are of the whole row, whatever the mask hides
  u32 has_rest;  // 1: the sums of the rest are wanted
};

namespace tokens {

constexpr u32 kMostThreads = 320;
constexpr u32 kMostWarps = kMostThreads / kWarpSize;
constexpr float kLn2 = 0.6931471805599453f;

using Sums = Moments<float>;

__device__ __forceinline__ Sums merge(const Sums& a, const Sums& b, Scale scale) {
  return merge_moments(a, b, scale.factor, exp2_approx);
}

// Those of a warp, the same in every lane. All 32 lanes call it.
__device__ __forceinline__ Sums warp_merge(Sums x, Scale scale) {
  rebase(x, warp_max(x.m), scale.factor, exp2_approx);
  return {x.m, warp_sum(x.d), warp_sum(x.s)};
}

// The sums of a lane's vectors, without the elements whose bit of `omitted` is set: bit u * kPerVector + e.
template <class FORMAT, u32 VECTORS>
__device__ __forceinline__ Sums sum(const Vector (&vectors)[VECTORS], u32 omitted, Scale scale) {
  constexpr u32 n = FORMAT::kPerVector;
  static_assert(VECTORS * n <= 32, "a bit for each element");
  const auto logit = [&](u32 u, u32 e) {
    return omitted >> (u * n + e) & 1u ? -FUSED_TOPK_INFINITY : FORMAT::decode(vectors[u].words, e);
  };
  Sums result;
#pragma unroll
  for (u32 u = 0; u < VECTORS; ++u)
#pragma unroll
    for (u32 e = 0; e < n; ++e) result.m = max_nan(result.m, logit(u, e));
  const float base = reference_point(result.m);
#pragma unroll
  for (u32 u = 0; u < VECTORS; ++u)
#pragma unroll
    for (u32 e = 0; e < n; ++e) {
      const float y = (logit(u, e) - base) * scale.factor;
      const float weight = exp2_approx(y);
      result.d += weight;
      result.s += weight == 0.0f ? 0.0f : y * weight;
    }
  return result;
}

// The bits of `omitted` for the tokens that a warp reads, which are those from `first` on. bits: [kWarpSize] of the warp. All 32
// lanes call it.
template <class READER>
__device__ __forceinline__ u32 given_among(const i64* tokens, u32 num_tokens, i64 first, u32* bits) {
  constexpr u32 n = READER::kPerVector;
  bits[lane_id()] = 0;
  __syncwarp();
  for (u32 i = lane_id(); i < num_tokens; i += kWarpSize) {
    const i64 place = __ldg(tokens + i) - first;
    if (place < 0 || place >= READER::kElements) continue;
    const u32 vector = u32(place) / n;
    atomicOr(bits + vector % kWarpSize, 1u << (vector / kWarpSize * n + u32(place) % n));
  }
  __syncwarp();
  return bits[lane_id()];
}

// How many blocks of kMostThreads must fit on a multiprocessor. So a thread has 64 registers, which elsewhere are too few.
constexpr u32 kBlocks = __CUDA_ARCH__ >= 860 && __CUDA_ARCH__ <= 900 ? 3 : 2;

// Grid: (rows); at most kMostThreads a block.
template <class FORMAT>
__global__ void __launch_bounds__(kMostThreads, kBlocks)
    token_sums_kernel(const __grid_constant__ Problem problem, const __grid_constant__ RowSums wanted) {
  using Reader = PartReader<FORMAT>;
  using Bits = typename FORMAT::Bits;
  __shared__ u32 given[kMostThreads];
  __shared__ Sums of_warps[2][kMostWarps];
  const u32 row = blockIdx.x, warp = threadIdx.x / kWarpSize, num_warps = blockDim.x / kWarpSize;
  const Scale scale = problem.temperature_of(row).scale();
  const RowMask none{nullptr, 0, kMaskBytes};
  const RowMask mask = problem.mask ? problem.row_mask(row) : none;
  const auto* const data = static_cast<const Bits*>(problem.logits) + problem.logits_offset(row);
  const RowLogits<FORMAT> allowed{data, mask, problem.length<kMaskBoth>(row)};
  const RowLogits<FORMAT> summed{data, wanted.sums_all ? none : mask, allowed.V};
  const bool is_masked_later = wanted.sums_all && mask.data;
  const i64* const tokens = wanted.tokens + i64(row) * wanted.num_tokens;

  Sums all, rest;
#pragma unroll 1
  for (u32 first = warp * Reader::kElements; first < allowed.V; first += num_warps * Reader::kElements) {
    Vector vectors[Reader::kVectors];
    Reader{summed}.load(first, vectors);
    Sums own = sum<FORMAT>(vectors, 0, scale);
    all = merge(all, own, scale);
    if (!wanted.has_rest) continue;
    u32* const bits = given + warp * kWarpSize;
    const u32 omitted = given_among<Reader>(tokens, wanted.num_tokens, wanted.first_token + first, bits);
    if (is_masked_later) {
#pragma unroll
      for (u32 u = 0; u < Reader::kVectors; ++u)
        hide<FORMAT>(vectors[u], mask.template allowed<FORMAT::kPerVector>(Reader::token(first, u), allowed.V));
    }
    if (omitted != 0 || is_masked_later) own = sum<FORMAT>(vectors, omitted, scale);
    rest = merge(rest, own, scale);
  }
  all = warp_merge(all, scale);
  rest = warp_merge(rest, scale);
  if (lane_id() == 0) {
    of_warps[0][warp] = all;
    of_warps[1][warp] = rest;
  }
  Bits* const token_logits = static_cast<Bits*>(wanted.token_logits) + i64(row) * wanted.num_tokens;
  for (u32 i = threadIdx.x; i < wanted.num_tokens; i += blockDim.x) {
    const i64 token = __ldg(tokens + i) - wanted.first_token;
    if (token < 0 || token >= problem.V) continue;
    const bool is_hidden = token >= allowed.V || (mask.data && !mask.template allowed<1>(u32(token), allowed.V));
    token_logits[i] = is_hidden ? Bits(FORMAT::kNegativeInfinity) : __ldg(data + token);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  float* const sums = wanted.sums + i64(row) * 5;
  all = {sums[0], sums[1], sums[2] * kLog2E};
  rest = {sums[3], sums[4], 0.0f};
#pragma unroll 1
  for (u32 i = 0; i < num_warps; ++i) {
    all = merge(all, of_warps[0][i], scale);
    if (wanted.has_rest) rest = merge(rest, of_warps[1][i], scale);
  }
  sums[0] = all.m;
  sums[1] = all.d;
  sums[2] = all.s * kLn2;
  sums[3] = rest.m;
  sums[4] = rest.d;
}

}  // namespace tokens
}  // namespace fused_topk
