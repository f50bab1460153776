// SPDX-License-Identifier: Apache-2.0
// The ranks of target tokens in their rows. A rank is the number of tokens whose logit is greater than that of the target, or
// equal to it and before an end. The end is the target itself, so that ranks are places in the order (order.h), or the end of
// the row, so that all ties count.
//
// A block has a target. Where targets are few, several blocks share one, and the last block to arrive adds their
// counts. Counts are integers, so they do not depend on the launch. The row is read once for each of its targets,
// mostly from the L2 cache, where softmax + top-k of the row has left it.
#include "../rows/problem.cuh"
#include "../rows/row_logits.cuh"

namespace fused_topk {

// What a launch computes. fused_topk/operators/ranks.py fills it by field names.
struct TargetRanks {
  const i64* targets;  // [rows, num_targets]; negative: none
  i64* ranks;          // [rows, num_targets]; 0 where there is no target
  u32* counts;         // nullable; [rows, num_targets, blocks_per_target]
  u32* tickets;        // nullable; [rows, num_targets], zero before and after each launch
  u32 num_targets;
  u32 blocks_per_target;
  u32 counts_ties;  // 1: all tokens that tie with a target count, else those up to it
};

namespace ranks {

constexpr u32 kThreads = 256;
constexpr u32 kWarps = kThreads / kWarpSize;

template <class FORMAT>
__device__ __forceinline__ RowLogits<FORMAT> logits_of(const Problem& problem, u32 row) {
  // The strides of tensors that a call does not have are 0.
  return {static_cast<const typename FORMAT::Bits*>(problem.logits) + problem.logits_offset(row),
          problem.mask ? problem.row_mask(row) : RowMask{nullptr, 0, kMaskBytes}, problem.length<kMaskBoth>(row)};
}

// The number of this thread's tokens whose key is above `key`, or equal to `key` for tokens before `end`. All threads
// of the blocks of a target call it.
template <class FORMAT>
__device__ __forceinline__ u32 count(const RowLogits<FORMAT>& logits, u32 key, u32 end, u32 blocks) {
  using Reader = PartReader<FORMAT>;
  const Reader reader{logits};
  u32 result = 0;
  const u32 warp = blockIdx.y * kWarps + threadIdx.x / kWarpSize;
  // Elements past the end of the row read as -inf. They do not count, because they are not before `end`.
  const auto take = [&](float x, u32 token) { result += order_key(x) > key - (token < end); };
  reader.for_each(warp * Reader::kElements, logits.V, take, blocks * kWarps * Reader::kElements);
  if (key == kNegativeInfinityKey && blockIdx.y == 0 && threadIdx.x == 0) {
    // Tokens behind the row's length that no warp has read.
    const u32 read = (logits.V + Reader::kElements - 1) / Reader::kElements * Reader::kElements;
    result += end > read ? end - read : 0;
  }
  return result;
}

// The sum over a block, in its first warp. counts: [kWarps] of shared memory. All threads of the block call it.
__device__ __forceinline__ u32 block_sum(u32 value, u32* counts) {
  const u32 of_warp = warp_sum(value);
  if (lane_id() == 0) counts[threadIdx.x / kWarpSize] = of_warp;
  __syncthreads();
  return warp_sum(lane_id() < kWarps ? counts[lane_id()] : 0u);
}

// Grid: (rows * num_targets, blocks_per_target).
template <class FORMAT>
__global__ void __launch_bounds__(kThreads)
    target_ranks_kernel(const __grid_constant__ Problem problem, const __grid_constant__ TargetRanks wanted) {
  __shared__ u32 counts[kWarps];
  const u32 place = blockIdx.x, blocks = wanted.blocks_per_target;
  const RowLogits<FORMAT> logits = logits_of<FORMAT>(problem, place / wanted.num_targets);
  const i64 target = __ldg(wanted.targets + place);
  // Whatever the target, nothing outside of the row is read.
  const u32 token = u32(target < 0 ? 0 : target < problem.V ? target : problem.V - 1);
  const u32 key = token < logits.V ? order_key(logits(token)) : kNegativeInfinityKey;
  u32 rank = block_sum(count(logits, key, wanted.counts_ties ? problem.V : token + 1, blocks), counts);
  if (threadIdx.x >= kWarpSize) return;
  if (blocks > 1) {
    u32* const of_blocks = wanted.counts + i64(place) * blocks;
    u32 ticket = 0;
    if (lane_id() == 0) {
      of_blocks[blockIdx.y] = rank;
      ticket = take_ticket(wanted.tickets + place, blocks);
    }
    // What the first lane has seen of other blocks, the others see too.
    __syncwarp();
    if (__shfl_sync(kAllLanes, ticket, 0) != blocks - 1) return;
    rank = 0;
    for (u32 block = lane_id(); block < blocks; block += kWarpSize) rank += load_from_other_block(of_blocks + block);
    rank = warp_sum(rank);
  }
  if (lane_id() == 0) wanted.ranks[place] = target < 0 ? 0 : rank;
}

}  // namespace ranks
}  // namespace fused_topk
