// SPDX-License-Identifier: Apache-2.0
// The ladder from three passes over a row to one. Each rung is a kernel to be read, not the fastest of its kind. Its
// comment says what it adds, and how often it accesses memory for each element. demos/ladder.py explains, times and
// draws the rungs. The package's own kernels are softmax_rows.cu and softmax_topk.cu.
//
// All rungs: float32, x [rows, V] and y [rows, V] without gaps, e^x as 2^(x log2 e). Blocks have 256 threads unless a
// rung says otherwise. Reading order: order.h, normalizer.h, platform.cuh, this file from top to bottom.
#include "../rows/platform.cuh"

namespace fused_topk::ladder {

constexpr u32 kThreads = 256;
constexpr u32 kWarps = kThreads / kWarpSize;

__device__ __forceinline__ float exponential(float x) { return exp2_approx(x * kLog2E); }
__device__ __forceinline__ Normalizer merge(Normalizer a, Normalizer b) {
  return fused_topk::merge(a, b, kLog2E, exp2_approx);
}
__device__ __forceinline__ float add(float a, float b) { return a + b; }

// The textbook's tree: half of the threads add the other half's values, then a quarter, and so on. One barrier a step.
// The result is in every thread. All threads of the block call it; a barrier must come before the next call.
template <class T, class COMBINE>
__device__ T block_tree(T value, T (&slots)[kThreads], COMBINE combine) {
  slots[threadIdx.x] = value;
  __syncthreads();
  for (u32 half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) slots[threadIdx.x] = combine(slots[threadIdx.x], slots[threadIdx.x + half]);
    __syncthreads();
  }
  return slots[0];
}

// ---- 1. Naive: y_i = e^(x_i) / sum_j e^(x_j). 2 reads, 1 write. Above 88.7 e^x is inf, and y NaN. ----

__global__ void __launch_bounds__(kThreads) naive_softmax_kernel(const float* x, float* y, u32 V) {
  __shared__ float slots[kThreads];
  x += u64(blockIdx.x) * V;
  y += u64(blockIdx.x) * V;
  float d = 0.0f;
  for (u32 i = threadIdx.x; i < V; i += kThreads) d += exponential(x[i]);
  d = block_tree(d, slots, add);
  for (u32 i = threadIdx.x; i < V; i += kThreads) y[i] = exponential(x[i]) / d;
}

// ---- 2. Safe: m = max_j x_j first, then y_i = e^(x_i - m) / sum_j e^(x_j - m). 3 reads, 1 write. ----

__global__ void __launch_bounds__(kThreads) safe_softmax_kernel(const float* x, float* y, u32 V) {
  __shared__ float maxima[kThreads];
  __shared__ float sums[kThreads];
  x += u64(blockIdx.x) * V;
  y += u64(blockIdx.x) * V;
  float m = -FUSED_TOPK_INFINITY;
  for (u32 i = threadIdx.x; i < V; i += kThreads) m = max_nan(m, x[i]);
  m = block_tree(m, maxima, max_nan);
  const float base = reference_point(m);
  float d = 0.0f;
  for (u32 i = threadIdx.x; i < V; i += kThreads) d += exponential(x[i] - base);
  d = block_tree(d, sums, add);
  for (u32 i = threadIdx.x; i < V; i += kThreads) y[i] = exponential(x[i] - base) / d;
}

// ---- 3. Online: maximum and sum in one pass. Whenever the maximum grows, what was summed so far shrinks:
//          m' = max(m, x),  d' = d e^(m - m') + e^(x - m').   2 reads, 1 write. ----

__device__ __forceinline__ Normalizer online_pass(const float* x, u32 first, u32 end, u32 step) {
  Normalizer state;
  for (u32 i = first; i < end; i += step) state = merge(state, {x[i], 1.0f});
  return state;
}

__global__ void __launch_bounds__(kThreads) online_softmax_kernel(const float* x, float* y, u32 V) {
  __shared__ Normalizer slots[kThreads];
  x += u64(blockIdx.x) * V;
  y += u64(blockIdx.x) * V;
  const Normalizer row = block_tree(online_pass(x, threadIdx.x, V, kThreads), slots, merge);
  for (u32 i = threadIdx.x; i < V; i += kThreads) y[i] = exponential(x[i] - reference_point(row.m)) / row.d;
}

// ---- 4. The same with warp shuffles: lanes exchange registers. One barrier of eight is left. 2 reads, 1 write. ----

__device__ __forceinline__ Normalizer shuffle_tree(Normalizer state) {
  for (u32 step = kWarpSize / 2; step > 0; step /= 2) {
    state = merge(state, {__shfl_xor_sync(kAllLanes, state.m, step), __shfl_xor_sync(kAllLanes, state.d, step)});
  }
  return state;
}

// Over the block, in every thread. All threads call it, once: it leaves `warps` in use.
template <u32 WARPS>
__device__ __forceinline__ Normalizer block_shuffle_tree(Normalizer state, Normalizer (&warps)[WARPS]) {
  state = shuffle_tree(state);
  if (lane_id() == 0) warps[threadIdx.x / kWarpSize] = state;
  __syncthreads();
  return shuffle_tree(lane_id() < WARPS ? warps[lane_id()] : Normalizer());
}

__global__ void __launch_bounds__(kThreads) shuffle_softmax_kernel(const float* x, float* y, u32 V) {
  __shared__ Normalizer warps[kWarps];
  x += u64(blockIdx.x) * V;
  y += u64(blockIdx.x) * V;
  const Normalizer row = block_shuffle_tree(online_pass(x, threadIdx.x, V, kThreads), warps);
  for (u32 i = threadIdx.x; i < V; i += kThreads) y[i] = exponential(x[i] - reference_point(row.m)) / row.d;
}

// ---- 5. 16 bytes a load, and the row stays in registers: 1 read, 1 write. As many threads as the row needs, V a
//         multiple of 4 and at most 16384. ----

constexpr u32 kHeld = 8;  // vectors a thread

__global__ void __launch_bounds__(512) register_softmax_kernel(const float4* x, float4* y, u32 V) {
  __shared__ Normalizer warps[kWarpSize];
  const u32 vectors = V / 4;
  x += u64(blockIdx.x) * vectors;
  y += u64(blockIdx.x) * vectors;
  if (threadIdx.x < kWarpSize) warps[threadIdx.x] = Normalizer();
  __syncthreads();

  float4 held[kHeld];
#pragma unroll
  for (u32 u = 0; u < kHeld; ++u) {
    const u32 i = u * blockDim.x + threadIdx.x;
    const float none = -FUSED_TOPK_INFINITY;
    held[u] = i < vectors ? x[i] : float4{none, none, none, none};
  }
  // The whole row is in registers. So the maximum comes first, and then one exponential an element instead of two.
  Normalizer state;
#pragma unroll
  for (u32 u = 0; u < kHeld; ++u) {
    state.m = max_nan(state.m, max_nan(max_nan(held[u].x, held[u].y), max_nan(held[u].z, held[u].w)));
  }
  const float base = reference_point(state.m);
#pragma unroll
  for (u32 u = 0; u < kHeld; ++u) {
    state.d += exponential(held[u].x - base) + exponential(held[u].y - base);
    state.d += exponential(held[u].z - base) + exponential(held[u].w - base);
  }
  const Normalizer row = block_shuffle_tree(state, warps);
  const float m = reference_point(row.m), inverse = 1.0f / row.d;
#pragma unroll
  for (u32 u = 0; u < kHeld; ++u) {
    const u32 i = u * blockDim.x + threadIdx.x;
    if (i < vectors) {
      y[i] = {exponential(held[u].x - m) * inverse, exponential(held[u].y - m) * inverse,
              exponential(held[u].z - m) * inverse, exponential(held[u].w - m) * inverse};
    }
  }
}

// ---- 6. One row over many blocks: a kernel that leaves each block's (m, d), and one in which every block merges them
//         all before it writes its part. A part of only -inf adds nothing. 2 reads, 1 write. ----

// Blocks (parts, rows); part p of a row is elements [p V / parts, (p + 1) V / parts).
__global__ void __launch_bounds__(kThreads) partial_normalizer_kernel(const float* x, Normalizer* partial, u32 V) {
  __shared__ Normalizer slots[kThreads];
  const u32 part = blockIdx.x, parts = gridDim.x, row = blockIdx.y;
  const u32 first = u32(u64(V) * part / parts), end = u32(u64(V) * (part + 1) / parts);
  x += u64(row) * V;
  const Normalizer state = block_tree(online_pass(x, first + threadIdx.x, end, kThreads), slots, merge);
  if (threadIdx.x == 0) partial[row * parts + part] = state;
}

__global__ void __launch_bounds__(kThreads)
    merged_softmax_kernel(const float* x, const Normalizer* partial, float* y, u32 V) {
  __shared__ Normalizer slots[kThreads];
  const u32 part = blockIdx.x, parts = gridDim.x, row = blockIdx.y;
  const u32 first = u32(u64(V) * part / parts), end = u32(u64(V) * (part + 1) / parts);
  x += u64(row) * V;
  y += u64(row) * V;
  Normalizer state;
  for (u32 p = threadIdx.x; p < parts; p += kThreads) state = merge(state, partial[row * parts + p]);
  state = block_tree(state, slots, merge);
  for (u32 i = first + threadIdx.x; i < end; i += kThreads)
    y[i] = exponential(x[i] - reference_point(state.m)) / state.d;
}

// ---- 7. softmax + top-k. A thread keeps the K best that it has seen, in registers; then the lists are merged. ----

// A value and its index in 64 bits, greater where the value is greater, or equal and the index smaller (order.h).
__device__ __forceinline__ u64 candidate(float value, u32 index) {
  return make_candidate(fused_topk::order_key(__float_as_uint(value)), index);
}
__device__ __forceinline__ float value_of(u64 c) { return __uint_as_float(bits_of_key(key_of(c))); }

template <u32 K>
struct TopList {
  u64 best[K];  // sorted, greatest first

  __device__ __forceinline__ TopList() {
#pragma unroll
    for (u32 i = 0; i < K; ++i) best[i] = kNoCandidate;
  }
  // Inserts c at its place and drops the last entry. Most c are below the last entry, and nothing happens.
  __device__ __forceinline__ void insert(u64 c) {
    if (c <= best[K - 1]) return;
#pragma unroll
    for (u32 i = 0; i < K; ++i) {
      const u64 greater = best[i] > c ? best[i] : c;
      c = best[i] > c ? c : best[i];
      best[i] = greater;
    }
  }
  __device__ __forceinline__ void drop_first() {
#pragma unroll
    for (u32 i = 0; i + 1 < K; ++i) best[i] = best[i + 1];
    best[K - 1] = kNoCandidate;
  }
};

// The K best of 32 sorted lists, in order: K times the greatest first entry leaves its list. All lanes call it.
template <u32 K>
__device__ void warp_best(TopList<K>& list, u64* sorted) {
  for (u32 rank = 0; rank < K; ++rank) {
    u64 greatest = list.best[0];
    for (u32 step = kWarpSize / 2; step > 0; step /= 2) {
      const u64 other = __shfl_xor_sync(kAllLanes, greatest, step);
      greatest = other > greatest ? other : greatest;
    }
    // No two candidates of a row are equal.
    if (list.best[0] == greatest) list.drop_first();
    if (lane_id() == 0) sorted[rank] = greatest;
  }
  __syncwarp();
}

// The K best of the block's lists, in order. Only the first warp has the result. All threads call it, once.
template <u32 K>
__device__ bool block_best(TopList<K>& list, u64 (&lists)[kWarps + 1][K]) {
  warp_best<K>(list, lists[threadIdx.x / kWarpSize]);
  __syncthreads();
  if (threadIdx.x >= kWarpSize) return false;
  TopList<K> of_warp;
#pragma unroll
  for (u32 i = 0; i < K; ++i) {
    if (threadIdx.x < kWarps) of_warp.best[i] = lists[threadIdx.x][i];
  }
  warp_best<K>(of_warp, lists[kWarps]);
  return true;
}

// Unfused: reads the probabilities that a softmax kernel has written. After safe softmax these are 5 accesses an
// element (3 reads, 1 write and this read), after online softmax 4.
template <u32 K>
__global__ void __launch_bounds__(kThreads, 1) topk_kernel(const float* y, float* values, i64* indices, u32 V) {
  __shared__ u64 lists[kWarps + 1][K];
  y += u64(blockIdx.x) * V;
  TopList<K> list;
  for (u32 i = threadIdx.x; i < V; i += kThreads) list.insert(candidate(y[i], i));
  if (!block_best<K>(list, lists)) return;
  for (u32 i = lane_id(); i < K; i += kWarpSize) {
    values[blockIdx.x * K + i] = value_of(lists[kWarps][i]);
    indices[blockIdx.x * K + i] = index_of(lists[kWarps][i]);
  }
}

// Fused: only K probabilities are ever computed and written.
template <u32 K>
__device__ __forceinline__ void write_best(const u64 (&best)[K], Normalizer row, float* values, i64* indices) {
  for (u32 i = lane_id(); i < K; i += kWarpSize) {
    values[blockIdx.x * K + i] = exponential(value_of(best[i]) - reference_point(row.m)) / row.d;
    indices[blockIdx.x * K + i] = index_of(best[i]);
  }
}

// Safe softmax + top-k fused: the maximum, then sum and candidates. 2 reads.
template <u32 K>
__global__ void __launch_bounds__(kThreads)
    safe_softmax_topk_kernel(const float* x, float* values, i64* indices, u32 V) {
  __shared__ float maxima[kThreads];
  __shared__ float sums[kThreads];
  __shared__ u64 lists[kWarps + 1][K];
  x += u64(blockIdx.x) * V;
  float m = -FUSED_TOPK_INFINITY;
  for (u32 i = threadIdx.x; i < V; i += kThreads) m = max_nan(m, x[i]);
  m = block_tree(m, maxima, max_nan);
  float d = 0.0f;
  TopList<K> list;
  for (u32 i = threadIdx.x; i < V; i += kThreads) {
    d += exponential(x[i] - reference_point(m));
    list.insert(candidate(x[i], i));
  }
  d = block_tree(d, sums, add);
  if (block_best<K>(list, lists)) write_best<K>(lists[kWarps], {m, d}, values, indices);
}

// Online softmax + top-k fused, Algorithm 4 of the paper: (m, d) and the list travel together. 1 read.
template <u32 K>
__global__ void __launch_bounds__(kThreads)
    online_softmax_topk_kernel(const float* x, float* values, i64* indices, u32 V) {
  __shared__ Normalizer warps[kWarps];
  __shared__ u64 lists[kWarps + 1][K];
  x += u64(blockIdx.x) * V;
  Normalizer state;
  TopList<K> list;
  for (u32 i = threadIdx.x; i < V; i += kThreads) {
    const float value = x[i];
    state = merge(state, {value, 1.0f});
    list.insert(candidate(value, i));
  }
  const Normalizer row = block_shuffle_tree(state, warps);
  if (block_best<K>(list, lists)) write_best<K>(lists[kWarps], row, values, indices);
}

}  // namespace fused_topk::ladder
