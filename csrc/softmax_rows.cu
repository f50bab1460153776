// SPDX-License-Identifier: Apache-2.0
// softmax, log_softmax and logsumexp of full rows, with the online normalizer.
//
//     out[row][i] = e^((x_i - m) / T) / d,   or (x_i - m) / T - log d,   or one m / T + log d a row
//
// A row can be written only when all of it has been read. So the logits wait on the chip, and memory sees one read and
// one write of each; the kernels differ in who owns a row, and that depends on V alone:
//   softmax_warp_rows_kernel     a warp
//   softmax_block_rows_kernel    a block
//   softmax_cluster_rows_kernel  2, 4 or 8 blocks, which exchange their (m, d) through shared memory
//   softmax_grid_rows_kernel     up to one block on each multiprocessor, which exchange them through global memory
// A thread keeps a few vectors in registers and the block the rest in shared memory. Of a row too long for even the last
// of them, what does not fit is read twice.
// Reading order: order.h, normalizer.h, platform.cuh, row.cuh (formats), cluster.cuh, full_row.cuh, this file.
#include "cluster.cuh"
#include "full_row.cuh"

namespace fused_topk::full_rows {

constexpr u32 kMostWarps = 32;
constexpr u32 kMostBlocks = 8;

// Writes a row's logsumexp, if that is what is asked for.
__device__ __forceinline__ bool write_logsumexp(const FullRows& problem, u32 row, const RowValues& values,
                                                bool is_writer) {
  if (problem.kind != kLogSumExp) return false;
  if (is_writer) static_cast<float*>(problem.out)[row] = values.logsumexp();
  return true;
}

// A warp owns a row, and 4 warps make a block.
template <class IN, class OUT, u32 VECTORS, bool ALIGNED>
__global__ void __launch_bounds__(128) softmax_warp_rows_kernel(const __grid_constant__ FullRows problem) {
  const u32 row = blockIdx.x * 4 + threadIdx.x / kWarpSize;
  if (row >= problem.rows) return;
  const FullRow<IN, OUT, ALIGNED> x(problem, row);
  constexpr u32 kStep = kWarpSize * IN::kPerVector;
  Vector vectors[VECTORS];
#pragma unroll
  for (u32 u = 0; u < VECTORS; ++u) vectors[u] = x.load(u * kStep + lane_id() * IN::kPerVector);
  Normalizer state;
  fold<IN>(state, vectors, x.scale);
  const RowValues values(warp_merge(state, x.scale), x.inverse_temperature, problem.kind);
  if (write_logsumexp(problem, row, values, lane_id() == 0)) return;
#pragma unroll
  for (u32 u = 0; u < VECTORS; ++u) {
    if (u * kStep < x.end) x.template write<false>(u * kStep + lane_id() * IN::kPerVector, vectors[u], values);
  }
}

// Warps into a block: the merge over the threads, in every thread. All threads call it; it has one barrier, and another
// must come before `warps` is used again.
__device__ __forceinline__ Normalizer block_merge(Normalizer state, float scale, Normalizer (&warps)[kMostWarps]) {
  state = warp_merge(state, scale);
  if (lane_id() == 0) warps[threadIdx.x / kWarpSize] = state;
  __syncthreads();
  const bool is_warp = lane_id() < blockDim.x / kWarpSize;
  return warp_merge(is_warp ? warps[lane_id()] : Normalizer(), scale);
}

// How many of a row's elements each of `blocks` blocks owns: whole warps' vectors, so that no two share a line of memory.
template <class IN>
__device__ __forceinline__ u32 elements_per_block(u32 V, u32 blocks) {
  constexpr u32 kWarpElements = kWarpSize * IN::kPerVector;
  return ((V - 1) / kWarpElements / blocks + 1) * kWarpElements;
}

// The vectors of a row that wait in a block: of each thread VECTORS in registers, and more in shared memory, where only
// the thread that asked for a vector touches it: no barrier. A thread's vectors are blockDim.x vectors apart.
template <class IN, class OUT, u32 VECTORS, bool ALIGNED>
class WaitingVectors {
 public:
  using Row = FullRow<IN, OUT, ALIGNED>;

  // slots: [shared_vectors, blockDim.x]
  __device__ __forceinline__ WaitingVectors(Vector* slots, u32 shared_vectors)
      : step_(blockDim.x * IN::kPerVector), shared_vectors_(shared_vectors), slots_(slots + threadIdx.x) {}

  __device__ __forceinline__ u32 elements() const { return (VECTORS + shared_vectors_) * step_; }

  // Asks for all vectors from the row's element `first` on, then adds them to `state` as they come.
  __device__ __forceinline__ void load(const Row& x, u32 first, Normalizer& state) {
    const u32 token = first + threadIdx.x * IN::kPerVector;
#pragma unroll
    for (u32 u = 0; u < VECTORS; ++u) vectors_[u] = x.load(token + u * step_);
    // Two halves, so that there is less left to add when the last has come.
    const u32 half = shared_vectors_ / 2;
    copy(x, token, 0, half);
    copy(x, token, half, shared_vectors_);
    fold<IN>(state, vectors_, x.scale);
    wait_copies<1>();
    add_shared(state, x.scale, 0, half);
    wait_copies<0>();
    add_shared(state, x.scale, half, shared_vectors_);
  }

  // Writes what was loaded from `first` on.
  template <bool STREAMING>
  __device__ __forceinline__ void write(const Row& x, u32 first, const RowValues& values) const {
    const u32 token = first + threadIdx.x * IN::kPerVector;
    // The condition is the block's: a warp writes together.
#pragma unroll
    for (u32 u = 0; u < VECTORS; ++u) {
      if (first + u * step_ < x.end) x.template write<STREAMING>(token + u * step_, vectors_[u], values);
    }
#pragma unroll 2
    for (u32 u = 0; u < shared_vectors_; ++u) {
      const u32 past = (VECTORS + u) * step_;
      if (first + past < x.end) x.template write<STREAMING>(token + past, slots_[u * blockDim.x], values);
    }
  }

 private:
  Vector vectors_[VECTORS];
  u32 step_;
  u32 shared_vectors_;
  Vector* slots_;

  __device__ __forceinline__ void copy(const Row& x, u32 token, u32 begin, u32 end) {
#pragma unroll 4
    for (u32 u = begin; u < end; ++u) x.copy(slots_ + u * blockDim.x, token + (VECTORS + u) * step_);
    commit_copies();
  }

  __device__ __forceinline__ void add_shared(Normalizer& state, float scale, u32 begin, u32 end) const {
#pragma unroll 1
    for (u32 u = begin; u < end; u += 2) {
      const Vector pair[2] = {slots_[u * blockDim.x], slots_[(u + 1) * blockDim.x]};
      fold<IN>(state, pair, scale);
    }
  }
};

// BLOCKS blocks own a row.
template <class IN, class OUT, u32 VECTORS, u32 BLOCKS, bool ALIGNED>
__device__ __forceinline__ void softmax_of_block(const FullRows& problem) {
  extern __shared__ Vector slots[];  // [shared_vectors, blockDim.x]
  __shared__ Normalizer warps[kMostWarps];
  __shared__ Normalizer blocks[kMostBlocks];
  const u32 rank = blockIdx.x % BLOCKS;
  const u32 row = blockIdx.x / BLOCKS;
  if constexpr (BLOCKS > 1) cluster_arrive();

  FullRow<IN, OUT, ALIGNED> x(problem, row);
  u32 first = 0;
  if constexpr (BLOCKS > 1) {
    const u32 count = elements_per_block<IN>(problem.V, BLOCKS);
    first = rank * count;
    x.end = min(x.end, first + count);
  }
  WaitingVectors<IN, OUT, VECTORS, ALIGNED> waiting(slots, problem.shared_vectors);
  Normalizer state;
  waiting.load(x, first, state);
  state = block_merge(state, x.scale, warps);
  if constexpr (BLOCKS > 1) {
    // All blocks of the cluster have begun.
    cluster_wait();
    if (threadIdx.x < BLOCKS) store_in_block(&blocks[rank], threadIdx.x, state);
    cluster_arrive();
    cluster_wait();
    state = warp_merge(lane_id() < BLOCKS ? blocks[lane_id()] : Normalizer(), x.scale);
  }
  const RowValues values(state, x.inverse_temperature, problem.kind);
  if (write_logsumexp(problem, row, values, rank == 0 && threadIdx.x == 0)) return;
  waiting.template write<false>(x, first, values);
}

// Blocks that must fit on a multiprocessor. 0 leaves it to the compiler, which then spends few registers on a thread: as it
// was measured on compute capability 9.0; on other targets it even spills for that.
#if __CUDA_ARCH__ == 900
constexpr u32 kResidentBlocks = 0;
#else
constexpr u32 kResidentBlocks = 1;
#endif

template <class IN, class OUT, u32 VECTORS, bool ALIGNED>
__global__ void __launch_bounds__(1024, kResidentBlocks)
    softmax_block_rows_kernel(const __grid_constant__ FullRows problem) {
  softmax_of_block<IN, OUT, VECTORS, 1, ALIGNED>(problem);
}

#if __CUDA_ARCH__ >= 900
template <class IN, class OUT, u32 VECTORS, u32 BLOCKS, bool ALIGNED>
__global__ void __cluster_dims__(BLOCKS) __launch_bounds__(1024)
    softmax_cluster_rows_kernel(const __grid_constant__ FullRows problem) {
  softmax_of_block<IN, OUT, VECTORS, BLOCKS, ALIGNED>(problem);
}
#endif

__device__ __forceinline__ u32 load_acquire(const u32* counter) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// Groups of blocks_per_row blocks, each of which takes every so-many-th row. The blocks of a group wait for each other, so
// all blocks of the launch must run at the same time: a cooperative launch.
template <class IN, class OUT, u32 VECTORS, bool ALIGNED>
__global__ void __launch_bounds__(512, 1) softmax_grid_rows_kernel(const __grid_constant__ FullRows problem) {
  extern __shared__ Vector slots[];  // [shared_vectors, blockDim.x]
  __shared__ Normalizer warps[2][kMostWarps];
  const u32 blocks = problem.blocks_per_row;
  const u32 groups = gridDim.x / blocks;
  const u32 group = blockIdx.x / blocks;
  const u32 rank = blockIdx.x - group * blocks;
  u32* const counter = problem.counters + group;
  const u32 arrivals = blocks * ((problem.rows - group - 1) / groups + 1);
  const u32 count = elements_per_block<IN>(problem.V, blocks);
  const u32 begin = rank * count;
  const u32 step = blockDim.x * IN::kPerVector;
  WaitingVectors<IN, OUT, VECTORS, ALIGNED> waiting(slots, problem.shared_vectors);
  // What does not fit on the chip comes first, in whole turns of a loop.
  const u32 excess = count > waiting.elements() ? count - waiting.elements() : 0;
  const u32 first = begin + (excess + VECTORS * step - 1) / (VECTORS * step) * (VECTORS * step);

  u32 turn = 0;
#pragma unroll 1
  for (u32 row = group; row < problem.rows; row += groups, ++turn) {
    FullRow<IN, OUT, ALIGNED> x(problem, row);
    x.end = min(x.end, begin + count);
    Normalizer state;
    Vector vectors[VECTORS];
#pragma unroll 1
    for (u32 token = begin + threadIdx.x * IN::kPerVector; token < first; token += VECTORS * step) {
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u) vectors[u] = x.load(token + u * step);
      fold<IN>(state, vectors, x.scale);
    }
    waiting.load(x, first, state);
    state = block_merge(state, x.scale, warps[0]);

    // Twice as many parts as blocks: one may begin the next row while another still reads this one's.
    Normalizer* const parts = problem.parts + (group * 2 + turn % 2) * blocks;
    if (threadIdx.x == 0) {
      parts[rank] = state;
      take_ticket(counter, arrivals);
      // The last arrival of all leaves 0.
      while (true) {
        const u32 arrived = load_acquire(counter);
        if (arrived == 0 || arrived >= blocks * (turn + 1)) break;
        __nanosleep(20);
      }
    }
    __syncthreads();
    // Every block merges them, in an order that depends on their number alone.
    state = Normalizer();
    for (u32 i = threadIdx.x; i < blocks; i += blockDim.x) {
      const float2 part = load_from_other_block(reinterpret_cast<const float2*>(parts) + i);
      state = merge(state, {part.x, part.y}, x.scale, exp2_approx);
    }
    state = block_merge(state, x.scale, warps[1]);

    const RowValues values(state, x.inverse_temperature, problem.kind);
    if (write_logsumexp(problem, row, values, rank == 0 && threadIdx.x == 0)) continue;
    waiting.template write<true>(x, first, values);
    // Last read first: of a row that is longer than the L2 cache, the end is what is in it.
#pragma unroll 1
    for (u32 at = first; at > begin;) {
      at -= VECTORS * step;
      const u32 token = at + threadIdx.x * IN::kPerVector;
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u) vectors[u] = x.load(token + u * step);
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u) {
        if (at + u * step < x.end) x.template write<true>(token + u * step, vectors[u], values);
      }
    }
  }
}

}  // namespace fused_topk::full_rows
