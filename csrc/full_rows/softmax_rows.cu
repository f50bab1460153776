// SPDX-License-Identifier: Apache-2.0
// softmax, log_softmax and logsumexp of full rows, with the online normalizer.
//
//     out[row][i] = e^((x_i - m) / T) / d,   or (x_i - m) / T - log d,   or one m / T + log d a row
//
// A row can be written only after all of it has been read. So its logits wait on the chip, and each crosses the memory
// bus once in each direction. The kernels differ in who owns a row. That depends on V, the format and the GPU, never on
// the number of rows:
//   softmax_warp_rows_kernel     a warp, in its registers
//   softmax_block_rows_kernel    a block, in its registers
//   softmax_shared_rows_kernel   a block, in its registers and in shared memory
//   softmax_grid_rows_kernel     many blocks, which exchange their (m, d) through global memory, then take another row
//   softmax_long_rows_kernel     a block on each multiprocessor; the logits that do not fit there are read twice
#include "waiting.cuh"

namespace fused_topk::full_rows {

constexpr u32 kMostWarps = 32;

// Writes a row's logsumexp and returns true, if the launch asks for it.
__device__ __forceinline__ bool write_logsumexp(const FullRows& problem, u32 row, const RowValues& values,
                                                bool is_writer) {
  if (problem.kind != kLogSumExp) return false;
  if (is_writer) static_cast<float*>(problem.out)[row] = values.logsumexp();
  return true;
}

// A warp owns a row. A block has 4 warps.
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
  fold<IN>(state, vectors, x.temperature.scale());
  const RowValues values(warp_merge(state, x.temperature.scale()), x.temperature, problem.kind);
  if (write_logsumexp(problem, row, values, lane_id() == 0)) return;
#pragma unroll
  for (u32 u = 0; u < VECTORS; ++u) {
    if (u * kStep < x.end) x.write(u * kStep + lane_id() * IN::kPerVector, vectors[u], values);
  }
}

// Warps into a block: merges the threads' states, in every thread. All threads call it. It has one barrier; another
// must precede the next use of `warps`.
__device__ __forceinline__ Normalizer block_merge(Normalizer state, Scale scale, Normalizer (&warps)[kMostWarps]) {
  state = warp_merge(state, scale);
  if (lane_id() == 0) warps[threadIdx.x / kWarpSize] = state;
  __syncthreads();
  const bool is_warp = lane_id() < blockDim.x / kWarpSize;
  return warp_merge(is_warp ? warps[lane_id()] : Normalizer(), scale);
}

// A block owns a row, which waits in its registers.
template <class IN, class OUT, u32 VECTORS, bool ALIGNED>
__global__ void __launch_bounds__(1024, tuned_blocks(tuning::kBlockRows, 1024))
    softmax_block_rows_kernel(const __grid_constant__ FullRows problem) {
  __shared__ Normalizer warps[kMostWarps];
  const u32 row = blockIdx.x;
  const FullRow<IN, OUT, ALIGNED> x(problem, row);
  const u32 step = blockDim.x * IN::kPerVector;
  const u32 token = threadIdx.x * IN::kPerVector;
  Vector vectors[VECTORS];
#pragma unroll
  for (u32 u = 0; u < VECTORS; ++u) vectors[u] = x.load(token + u * step);
  Normalizer state;
  fold<IN>(state, vectors, x.temperature.scale());
  const RowValues values(block_merge(state, x.temperature.scale(), warps), x.temperature, problem.kind);
  if (write_logsumexp(problem, row, values, threadIdx.x == 0)) return;
  // The condition is uniform in the block: a warp writes together.
#pragma unroll
  for (u32 u = 0; u < VECTORS; ++u) {
    if (u * step < x.end) x.write(token + u * step, vectors[u], values);
  }
}

// A block owns a row, which waits in its registers and in shared memory.
template <class IN, class OUT, u32 VECTORS, bool ALIGNED>
__global__ void __launch_bounds__(1024) softmax_shared_rows_kernel(const __grid_constant__ FullRows problem) {
  extern __shared__ Vector slots[];  // [problem.shared_vectors, blockDim.x]
  __shared__ Normalizer warps[kMostWarps];
  const u32 row = blockIdx.x;
  const FullRow<IN, OUT, ALIGNED> x(problem, row);
  WaitingVectors<IN, OUT, VECTORS, ALIGNED> waiting(slots, problem.shared_vectors, 0, blockDim.x * IN::kPerVector);
  waiting.ask(x);
  Normalizer state;
  waiting.add_to(state, x.temperature.scale());
  const RowValues values(block_merge(state, x.temperature.scale(), warps), x.temperature, problem.kind);
  if (write_logsumexp(problem, row, values, threadIdx.x == 0)) return;
  waiting.write(x, values);
}

// The states of a block's warps, for two merges. Kernels declare floats for them: no constructor can run in shared
// memory.
using WarpStates = Normalizer[2][kMostWarps];

// The blocks that own a row together, then every `owners_`-th row after it. They wait for each other through global
// memory. So all blocks of the launch must run at the same time: a cooperative launch.
class Owner {
 public:
  __device__ __forceinline__ explicit Owner(const FullRows& problem)
      : problem_(problem),
        owner_(blockIdx.x / problem.blocks_per_row),
        rank_(blockIdx.x % problem.blocks_per_row),
        owners_(gridDim.x / problem.blocks_per_row) {}

  __device__ __forceinline__ u32 first_row() const { return owner_; }
  __device__ __forceinline__ u32 row_after(u32 row) const { return row + owners_; }
  __device__ __forceinline__ bool is_writer() const { return rank_ == 0 && threadIdx.x == 0; }
  __device__ __forceinline__ u32 rank() const { return rank_; }

  // Blocks into a row: merges the states of all blocks, in every thread of each. turn: the number of rows before this
  // one.
  __device__ __forceinline__ Normalizer merge_blocks(Normalizer state, Scale scale, u32 turn, WarpStates& warps) const {
    const u32 blocks = problem_.blocks_per_row;
    state = block_merge(state, scale, warps[0]);
    // Two sets of parts: a block may begin the next row while another still reads this one's.
    Normalizer* const parts = problem_.parts + (owner_ * 2 + turn % 2) * blocks;
    if (threadIdx.x == 0) {
      parts[rank_] = state;
      u32* const counter = problem_.counters + owner_;
      take_ticket(counter, blocks * ((problem_.rows - owner_ - 1) / owners_ + 1));
      // The last arrival of the last row leaves 0.
      while (true) {
        const u32 arrived = tickets_taken(counter);
        if (arrived == 0 || arrived >= blocks * (turn + 1)) break;
        __nanosleep(20);
      }
    }
    __syncthreads();
    // Every block merges them in the same order, which depends on the number of blocks alone.
    state = Normalizer();
    for (u32 i = threadIdx.x; i < blocks; i += blockDim.x) {
      const float2 part = load_from_other_block(reinterpret_cast<const float2*>(parts) + i);
      state = merge(state, {part.x, part.y}, scale);
    }
    return block_merge(state, scale, warps[1]);
  }

 private:
  const FullRows& problem_;
  u32 owner_;
  u32 rank_;
  u32 owners_;
};

// All of a row waits in its blocks.
template <class IN, class OUT, u32 VECTORS, bool ALIGNED>
__global__ void __launch_bounds__(512, tuned_blocks(tuning::kGridRows, 512))
    softmax_grid_rows_kernel(const __grid_constant__ FullRows problem) {
  using Row = FullRow<IN, OUT, ALIGNED>;
  extern __shared__ Vector slots[];  // [problem.shared_vectors, blockDim.x]
  __shared__ float warp_states[2][kMostWarps][2];
  auto& warps = reinterpret_cast<WarpStates&>(warp_states);
  const Owner owner(problem);
  const u32 step = blockDim.x * IN::kPerVector;
  WaitingVectors<IN, OUT, VECTORS, ALIGNED> waiting(slots, problem.shared_vectors, owner.rank() * step,
                                                    problem.blocks_per_row * step);
  u32 row = owner.first_row();
  Row x(problem, row);
  waiting.ask(x);
#pragma unroll 1
  for (u32 turn = 0;; ++turn) {
    Normalizer state;
    waiting.add_to(state, x.temperature.scale());
    state = owner.merge_blocks(state, x.temperature.scale(), turn, warps);
    const RowValues values(state, x.temperature, problem.kind);
    if (write_logsumexp(problem, row, values, owner.is_writer())) x.end = 0;
    row = owner.row_after(row);
    if (row >= problem.rows) {
      waiting.write(x, values);
      return;
    }
    waiting.write_and_ask(x, values, [&] { return Row(problem, row); });
  }
}

// The end of a row waits in its blocks, one on each multiprocessor, as much as fits. The logits before are read twice,
// by all blocks side by side.
template <class IN, class OUT, u32 VECTORS, bool ALIGNED>
__global__ void __launch_bounds__(768) softmax_long_rows_kernel(const __grid_constant__ FullRows problem) {
  using Row = FullRow<IN, OUT, ALIGNED>;
  extern __shared__ Vector slots[];  // [problem.shared_vectors, blockDim.x]
  __shared__ float warp_states[2][kMostWarps][2];
  auto& warps = reinterpret_cast<WarpStates&>(warp_states);
  const Owner owner(problem);
  const u32 token = threadIdx.x * IN::kPerVector;
  const u32 step = blockDim.x * IN::kPerVector;
  const u32 blocks = problem.blocks_per_row;
  const u32 waits = (VECTORS + problem.shared_vectors) * step * blocks;
  // A turn of a loop reads VECTORS vectors of each thread.
  const u32 stride = VECTORS * step * blocks;
  const u32 turns = problem.V > waits ? (problem.V - waits - 1) / stride + 1 : 0;
  const u32 mine = owner.rank() * VECTORS * step;
  const u32 twice = turns * stride;
  WaitingVectors<IN, OUT, VECTORS, ALIGNED> waiting(slots, problem.shared_vectors, twice + owner.rank() * step,
                                                    blocks * step);
  u32 row = owner.first_row();
#pragma unroll 1
  for (u32 number = 0; row < problem.rows; ++number) {
    const Row x(problem, row);
    // Some logits are read twice. The last of them should still be in the L2 cache for the second read. So the waiting
    // logits and the results leave the cache first.
#if __CUDA_ARCH__ == 900
    const Row last_time(problem, row, true);
#else
    // An unaligned row has no cache policy, so it serves both reads. For 9.0 a second Row costs no spills. For some
    // other targets NVRTC 12.9 spills the registers of a second Row.
    const Row last_time = ALIGNED ? Row(problem, row, true) : x;
#endif
    waiting.ask_shared(last_time);
    Normalizer state;
    Vector vectors[VECTORS];
#pragma unroll 1
    for (u32 turn = 0; turn < turns; ++turn) {
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u) vectors[u] = x.load(mine + turn * stride + u * step + token);
      fold<IN>(state, vectors, x.temperature.scale());
    }
    waiting.ask_registers(last_time);
    waiting.add_to(state, x.temperature.scale());
    state = owner.merge_blocks(state, x.temperature.scale(), number, warps);
    const RowValues values(state, x.temperature, problem.kind);
    if (!write_logsumexp(problem, row, values, owner.is_writer())) {
#pragma unroll 1
      for (u32 turn = turns; turn-- > 0;) {
        const u32 at = mine + turn * stride;
#pragma unroll
        for (u32 u = 0; u < VECTORS; ++u) vectors[u] = last_time.load(at + u * step + token);
#pragma unroll
        for (u32 u = 0; u < VECTORS; ++u) {
          last_time.template write<true>(at + u * step + token, vectors[u], values);
        }
      }
      waiting.template write<true>(last_time, values);
    }
    row = owner.row_after(row);
  }
}

}  // namespace fused_topk::full_rows
