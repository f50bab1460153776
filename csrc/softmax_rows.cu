// SPDX-License-Identifier: Apache-2.0
// softmax, log_softmax and logsumexp of full rows, with the online normalizer.
//
//     out[row][i] = e^((x_i - m) / T) / d,   or (x_i - m) / T - log d,   or one m / T + log d a row
//
// A row can be written only when all of it has been read. So the logits wait on the chip, and memory sees one read and
// one write of each; the kernels differ in where they wait, and that depends on V alone:
//   softmax_warp_rows_kernel     registers of a warp
//   softmax_block_rows_kernel    registers of a block, and its shared memory for the first half of longer rows
//   softmax_cluster_rows_kernel  the same of 2, 4 or 8 blocks, which exchange their (m, d) through shared memory
//   softmax_long_rows_kernel     nowhere: read twice, the second time from the L2 cache where the row fits
// Reading order: order.h, normalizer.h, platform.cuh, row.cuh (formats), cluster.cuh, full_row.cuh, this file.
#include "cluster.cuh"
#include "full_row.cuh"

namespace fused_topk::full_rows {

// Vectors that a thread loads before it uses the first: 128 bytes, so that 1024 threads keep memory busy.
constexpr u32 kVectorsInFlight = 8;
constexpr u32 kMostWarps = 16;
constexpr u32 kMostBlocks = 8;

struct BlockShared {
  Normalizer warps[kMostWarps];
  Normalizer blocks[kMostBlocks];
  u32 ticket;
};

// Writes a row's logsumexp, if that is what is asked for.
__device__ __forceinline__ bool write_logsumexp(const FullRows& problem, u32 row, const RowValues& values,
                                                bool is_writer) {
  if (problem.kind != kLogSumExp) return false;
  if (is_writer) static_cast<float*>(problem.out)[row] = values.logsumexp();
  return true;
}

// A warp owns a row, and 4 warps make a block.
template <class IN, class OUT, bool ALIGNED>
__global__ void __launch_bounds__(128) softmax_warp_rows_kernel(const __grid_constant__ FullRows problem) {
  const u32 row = blockIdx.x * 4 + threadIdx.x / kWarpSize;
  if (row >= problem.rows) return;
  const FullRow<IN, OUT, ALIGNED> x(problem, row);
  constexpr u32 kStep = kWarpSize * IN::kPerVector;
  Vector vectors[kVectorsInFlight];
#pragma unroll
  for (u32 u = 0; u < kVectorsInFlight; ++u) vectors[u] = x.load(u * kStep + lane_id() * IN::kPerVector);
  Normalizer state;
  fold<IN>(state, vectors, x.scale);
  const RowValues values(warp_merge(state, x.scale), x.inverse_temperature, problem.kind);
  if (write_logsumexp(problem, row, values, lane_id() == 0)) return;
#pragma unroll
  for (u32 u = 0; u < kVectorsInFlight; ++u) {
    if (u * kStep < x.end) x.template write<false>(u * kStep + lane_id() * IN::kPerVector, vectors[u], values);
  }
}

// Warps into a block: the merge over the threads, in every thread. All threads call it, once; it has one barrier.
__device__ __forceinline__ Normalizer block_merge(Normalizer state, float scale, Normalizer (&warps)[kMostWarps]) {
  state = warp_merge(state, scale);
  if (lane_id() == 0) warps[threadIdx.x / kWarpSize] = state;
  __syncthreads();
  const bool is_warp = lane_id() < blockDim.x / kWarpSize;
  return warp_merge(is_warp ? warps[lane_id()] : Normalizer(), scale);
}

// BLOCKS blocks own a row, each vectors_per_block of its vectors: at most kVectorsInFlight a thread in registers, and
// as many in dynamic shared memory, where only the thread that wrote a vector reads it: no barrier.
template <class IN, class OUT, u32 BLOCKS, bool ALIGNED>
__device__ __forceinline__ void softmax_of_block(const FullRows& problem) {
  extern __shared__ uint4 kept[];  // [kVectorsInFlight, blockDim.x], or none
  __shared__ BlockShared shared;
  const u32 rank = blockIdx.x % BLOCKS;
  const u32 row = blockIdx.x / BLOCKS;
  if constexpr (BLOCKS > 1) cluster_arrive();

  FullRow<IN, OUT, ALIGNED> x(problem, row);
  const u32 step = blockDim.x * IN::kPerVector;
  // Of the row's elements, this block's.
  const u32 begin = rank * problem.vectors_per_block * IN::kPerVector;
  x.end = min(x.end, begin + problem.vectors_per_block * IN::kPerVector);
  const bool uses_shared = problem.vectors_per_block > kVectorsInFlight * blockDim.x;
  u32 token = begin + threadIdx.x * IN::kPerVector;

  Normalizer state;
  Vector vectors[kVectorsInFlight];
  if (uses_shared) {
#pragma unroll
    for (u32 u = 0; u < kVectorsInFlight; ++u) vectors[u] = x.load(token + u * step);
    fold<IN>(state, vectors, x.scale);
#pragma unroll
    for (u32 u = 0; u < kVectorsInFlight; ++u) {
      const u32(&w)[4] = vectors[u].words;
      kept[u * blockDim.x + threadIdx.x] = {w[0], w[1], w[2], w[3]};
    }
    token += kVectorsInFlight * step;
  }
#pragma unroll
  for (u32 u = 0; u < kVectorsInFlight; ++u) vectors[u] = x.load(token + u * step);
  fold<IN>(state, vectors, x.scale);

  state = block_merge(state, x.scale, shared.warps);
  if constexpr (BLOCKS > 1) {
    // All blocks of the cluster have begun.
    cluster_wait();
    if (threadIdx.x < BLOCKS) store_in_block(&shared.blocks[rank], threadIdx.x, state);
    cluster_arrive();
    cluster_wait();
    state = warp_merge(lane_id() < BLOCKS ? shared.blocks[lane_id()] : Normalizer(), x.scale);
  }

  const RowValues values(state, x.inverse_temperature, problem.kind);
  if (write_logsumexp(problem, row, values, rank == 0 && threadIdx.x == 0)) return;
  // The condition is the block's: a warp writes together.
  const u32 first = token - threadIdx.x * IN::kPerVector;
#pragma unroll
  for (u32 u = 0; u < kVectorsInFlight; ++u) {
    if (first + u * step < x.end) x.template write<false>(token + u * step, vectors[u], values);
  }
  if (uses_shared) {
    token -= kVectorsInFlight * step;
#pragma unroll
    for (u32 u = 0; u < kVectorsInFlight; ++u) {
      const uint4 w = kept[u * blockDim.x + threadIdx.x];
      x.template write<false>(token + u * step, {{w.x, w.y, w.z, w.w}}, values);
    }
  }
}

// Threads that must fit on a multiprocessor: at 1024 a thread has 64 registers. So one block of 512 can load while
// another writes. Compute capability 7.5, which has no packed maximum, needs more registers, and so does an unaligned row
// that is written with twice the bytes that it was read with.
template <class IN, class OUT, bool ALIGNED>
constexpr u32 resident_threads() {
  return __CUDA_ARCH__ >= 800 && (ALIGNED || sizeof(typename IN::Bits) == sizeof(typename OUT::Bits)) ? 1024 : 512;
}

template <class IN, class OUT, bool ALIGNED>
__global__ void __launch_bounds__(512, resident_threads<IN, OUT, ALIGNED>() / 512)
    softmax_block_rows_kernel(const __grid_constant__ FullRows problem) {
  softmax_of_block<IN, OUT, 1, ALIGNED>(problem);
}

#if __CUDA_ARCH__ >= 900
template <class IN, class OUT, u32 BLOCKS, bool ALIGNED>
__global__ void __cluster_dims__(BLOCKS) __launch_bounds__(512, resident_threads<IN, OUT, ALIGNED>() / 512)
    softmax_cluster_rows_kernel(const __grid_constant__ FullRows problem) {
  softmax_of_block<IN, OUT, BLOCKS, ALIGNED>(problem);
}
#endif

// A block's turn in softmax_long_rows_kernel: which chunk of which row, and whether to sum it or to write it.
struct Turn {
  bool writes;
  u32 row;
  u32 chunk;

  // Sums run ahead of writes by a row and some more, so that a row's sum is mostly complete when its first write asks
  // for it; and not by more than that, so that the row is still in the L2 cache. A row is written last chunk first: of
  // a row that is longer than the cache, the end is what is in it.
  __device__ __forceinline__ Turn(u32 turn, u32 rows, u32 chunks, bool sums_only) {
    constexpr u32 kAhead = 128;
    const u32 total = rows * chunks;
    const u32 lead = sums_only ? total : min(total, chunks + kAhead);
    u32 number = turn;
    writes = false;
    if (turn >= lead) {
      const u32 rest = turn - lead;
      const u32 pairs = total - lead;
      writes = rest >= 2 * pairs || rest % 2 == 0;
      number = rest >= 2 * pairs ? rest - pairs : rest / 2 + (writes ? 0 : lead);
    }
    row = number / chunks;
    chunk = number - row * chunks;
    if (writes) chunk = chunks - 1 - chunk;
  }
};

__device__ __forceinline__ bool is_set(const u32* flag) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value != 0;
}
__device__ __forceinline__ void set(u32* flag, u32 value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// A block owns a chunk of vectors_per_block = blockDim.x * kVectorsInFlight vectors, twice: once one block sums it, and
// once another writes it. Blocks take their turn when they begin to run, so whatever a block waits for has a block that
// runs and that waits for nothing: it cannot hang, however few blocks run at a time.
template <class IN, class OUT, bool ALIGNED>
__global__ void __launch_bounds__(256, resident_threads<IN, OUT, ALIGNED>() / 256)
    softmax_long_rows_kernel(const __grid_constant__ FullRows problem) {
  __shared__ BlockShared shared;
  u32* const turns = problem.counters;
  u32* const arrivals = problem.counters + 1;        // [rows] chunks summed
  u32* const is_summed = arrivals + problem.rows;    // [rows] flags
  u32* const departures = is_summed + problem.rows;  // [rows] chunks written
  const bool sums_only = problem.kind == kLogSumExp;
  const u32 chunk_length = problem.vectors_per_block * IN::kPerVector;
  const u32 chunks = (problem.V - 1) / chunk_length + 1;
  Normalizer* const row_sums = problem.parts + u64(problem.rows) * chunks;

  if (threadIdx.x == 0) shared.ticket = take_ticket(turns, gridDim.x);
  __syncthreads();
  const Turn turn(shared.ticket, problem.rows, chunks, sums_only);
  const FullRow<IN, OUT, ALIGNED> x(problem, turn.row);
  const u32 first = turn.chunk * chunk_length;
  const u32 step = blockDim.x * IN::kPerVector;
  const u32 token = first + threadIdx.x * IN::kPerVector;
  Vector vectors[kVectorsInFlight];
#pragma unroll
  for (u32 u = 0; u < kVectorsInFlight; ++u) vectors[u] = x.load(token + u * step);

  if (turn.writes) {
    if (threadIdx.x == 0) {
      while (!is_set(is_summed + turn.row)) __nanosleep(100);
    }
    __syncthreads();
    const float2 row = load_from_other_block(reinterpret_cast<const float2*>(row_sums) + turn.row);
    const RowValues values({row.x, row.y}, x.inverse_temperature, problem.kind);
    // The last to have read the flag leaves it as it was found.
    if (threadIdx.x == 0 && take_ticket(departures + turn.row, chunks) == chunks - 1) set(is_summed + turn.row, 0);
#pragma unroll
    for (u32 u = 0; u < kVectorsInFlight; ++u) {
      if (first + u * step < x.end) x.template write<true>(token + u * step, vectors[u], values);
    }
    return;
  }

  Normalizer state;
  fold<IN>(state, vectors, x.scale);
  state = block_merge(state, x.scale, shared.warps);
  Normalizer* const parts = problem.parts + u64(turn.row) * chunks;
  if (threadIdx.x == 0) {
    parts[turn.chunk] = state;
    shared.ticket = take_ticket(arrivals + turn.row, chunks);
  }
  __syncthreads();
  if (shared.ticket != chunks - 1) return;

  // The last of the row's chunks merges them, in an order that depends on their number alone.
  state = Normalizer();
  for (u32 i = threadIdx.x; i < chunks; i += blockDim.x) {
    const float2 part = load_from_other_block(reinterpret_cast<const float2*>(parts) + i);
    state = merge(state, {part.x, part.y}, x.scale, exp2_approx);
  }
  state = block_merge(state, x.scale, shared.warps);
  const RowValues values(state, x.inverse_temperature, problem.kind);
  if (write_logsumexp(problem, turn.row, values, threadIdx.x == 0)) return;
  if (threadIdx.x == 0) {
    row_sums[turn.row] = state;
    set(is_summed + turn.row, 1);
  }
}

}  // namespace fused_topk::full_rows
