// SPDX-License-Identifier: Apache-2.0
// The vectors of a row that wait in a block until the row's normalizer is known. Each thread has some in registers and
// the rest in shared memory. A thread touches only what it has requested itself, so there is no barrier.
#pragma once

#include "full_row.cuh"

namespace fused_topk::full_rows {

template <class IN, class OUT, u32 VECTORS, bool ALIGNED>
class WaitingVectors {
 public:
  using Row = FullRow<IN, OUT, ALIGNED>;

  // slots: [shared_vectors, blockDim.x]. The block takes blockDim.x vectors from element `first` on, another blockDim.x
  // vectors from first + step on, and so on. Whole warps take adjacent vectors, so no two blocks write to one line of
  // memory. Blocks that share a row read it side by side.
  __device__ __forceinline__ WaitingVectors(Vector* slots, u32 shared_vectors, u32 first, u32 step)
      : slots_(slots + threadIdx.x), shared_vectors_(shared_vectors), first_(first), step_(step) {}

  // Requests all vectors. They are in flight when it returns.
  __device__ __forceinline__ void ask(const Row& x) {
    ask_registers(x);
    ask_shared(x);
  }
  __device__ __forceinline__ void ask_registers(const Row& x) {
#pragma unroll
    for (u32 u = 0; u < VECTORS; ++u) vectors_[u] = x.load(token(u));
  }
  __device__ __forceinline__ void ask_shared(const Row& x) {
#pragma unroll(kAtATime)
    for (u32 u = 0; u < shared_vectors_; u += 2) ask_pair(x, u);
  }

  // Folds the requested vectors into `state`, as they arrive.
  __device__ __forceinline__ void add_to(Normalizer& state, Scale scale) const {
    fold<IN>(state, vectors_, scale);
#pragma unroll 1
    for (u32 u = 0; u < shared_vectors_; u += 2) {
      wait_for_pairs(shared_vectors_ / 2 - u / 2 - 1);
      const Vector pair[2] = {slots_[u * blockDim.x], slots_[(u + 1) * blockDim.x]};
      fold<IN>(state, pair, scale);
    }
  }

  // Writes the results of all vectors, up to x.end.
  template <bool LEAVES_FIRST = false>
  __device__ __forceinline__ void write(const Row& x, const RowValues& values) const {
#pragma unroll
    for (u32 u = 0; u < VECTORS; ++u) write_one<LEAVES_FIRST>(x, values, u, vectors_[u]);
#pragma unroll(kAtATime)
    for (u32 u = 0; u < shared_vectors_; ++u) write_one<LEAVES_FIRST>(x, values, VECTORS + u, slots_[u * blockDim.x]);
  }

  // Writes like write(), and requests the vectors of the next row, each as soon as its place is free. So memory reads
  // and writes at the same time. next() returns the next row, which becomes x.
  template <class NEXT>
  __device__ __forceinline__ void write_and_ask(Row& x, const RowValues& values, NEXT next) {
    if constexpr (ALIGNED && kHasAsyncCopy) {
      const Row next_x = next();
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u) {
        write_one(x, values, u, vectors_[u]);
        vectors_[u] = next_x.load(token(u));
      }
#pragma unroll 1
      for (u32 u = 0; u < shared_vectors_; u += 2) {
#pragma unroll
        for (u32 v = u; v < u + 2; ++v) write_one(x, values, VECTORS + v, slots_[v * blockDim.x]);
        ask_pair(next_x, u);
      }
      x = next_x;
    } else {
      write(x, values);
      x = next();
      ask(x);
    }
  }

 private:
  // Unaligned vectors take more registers to read and to write.
  static constexpr u32 kAtATime = ALIGNED ? 2 : 1;

  Vector vectors_[VECTORS];
  Vector* slots_;
  u32 shared_vectors_;
  u32 first_;
  u32 step_;

  __device__ __forceinline__ u32 token(u32 u) const { return first_ + u * step_ + threadIdx.x * IN::kPerVector; }

  // The condition is uniform in the block: a warp writes together.
  template <bool LEAVES_FIRST = false>
  __device__ __forceinline__ void write_one(const Row& x, const RowValues& values, u32 u, const Vector& vector) const {
    if (first_ + u * step_ < x.end) x.template write<LEAVES_FIRST>(token(u), vector, values);
  }

  __device__ __forceinline__ void ask_pair(const Row& x, u32 u) {
#pragma unroll
    for (u32 v = u; v < u + 2; ++v) x.copy(slots_ + v * blockDim.x, token(VECTORS + v));
    commit_copies();
  }

  // Waits until at most `pending` of this thread's pairs are in flight. With more than
  // 4 pairs pending it may wait for more pairs than asked.
  static __device__ __forceinline__ void wait_for_pairs(u32 pending) {
    if (pending >= 4) {
      wait_copies<4>();
    } else if (pending >= 2) {
      wait_copies<2>();
    } else if (pending == 1) {
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
  }
};

}  // namespace fused_topk::full_rows
