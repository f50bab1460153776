// SPDX-License-Identifier: Apache-2.0
// Attention of the newest token of each beam to its text. It is softmax + top-k with another third component: o, the sum of the
// values v by their weights, in the place of the k best.
//
//     identity = (-inf, 0, 0)        of(x, v) = (x, 1, v)
//     a + b    = (m, a.d e^(a.m - m) + b.d e^(b.m - m), a.o e^(a.m - m) + b.o e^(b.m - m)),   m = max(a.m, b.m)
//
// At the end attention is o / d. Every scope merges such states: the 16 keys of a product, a warp's share of the keys, the warps
// of a block, the blocks of a text (the last one to arrive merges, as in softmax + top-k), and a sink (x, 1, 0).
//
// Beams of a sequence share the keys of its prompt. The keys of the tokens that a beam has written since lie where its ancestors
// wrote them, which a table says (Text). The queries of all beams and heads that share a key head are the rows of one matrix. A
// warp has 16 of them, which tensor cores multiply with 16 keys at a time. So a prompt's key is read once for 16 rows, and keys
// go from global memory to registers, to which place there the tables decide: nothing is copied.
//
// A text's keys are cut into parts, whose length depends on the text alone, and parts are merged in one order. So the same text gives
// the same bits in every batch. A block has one part, or all of a row where there are rows enough for the GPU.
#include "tile_product.cuh"

namespace fused_topk {

// What a launch computes. fused_topk/backends/cuda_attention.py fills it by field names.
struct StepAttention {
  const void* queries;  // [batch * beams, key_heads * groups, D]
  const void* keys;     // [batch, key_heads, places, D]
  const void* values;   // like keys
  const void* table;    // int32; see Text
  const void* sinks;    // nullable; [key_heads * groups], in the format of the queries
  void* out;            // [batch * beams, key_heads * groups, D], contiguous
  float* states;        // [blocks of tiles and heads, warps_in_rows, parts, kStateWords]; for several parts
  u32* tickets;         // [blocks of tiles and heads], zero before and after each launch; for several parts
  i64 query_strides[2];
  i64 key_strides[3];
  i64 value_strides[3];
  i64 table_strides[2];
  u32 beams;
  u32 key_heads;
  u32 groups;         // query heads to a key head
  u32 warps_in_rows;  // how many of a block's warps have rows of their own; the others share their keys
  u32 keys_of_part;   // a multiple of 16
  u32 parts;          // for which there are states
  u32 parts_of_block;
  u32 window;   // how many of the last tokens may be looked at; 0: all
  float scale;  // of the scores
  float cap;    // of the scores, cap tanh(x / cap); 0: none
};

namespace attention {

constexpr u32 kRows = 16, kKeys = 16;
constexpr u32 kEveryBeam = ~0u, kNoBeam = ~0u - 1;

constexpr u32 kWarps = 4;
// How many dimensions of o a warp has registers for. Two blocks share the values of more.
template <u32 D>
constexpr u32 kOwn = D <= 128 ? D : D / 2;
// Whether registers hold 16 keys and their values beside o. More spill, 128 on compute capability 10.
template <u32 D>
constexpr bool kLoadsAtOnce = D <= (__CUDA_ARCH__ < 1000 ? 128 : 96);
// How many blocks must fit on a multiprocessor. One more spills on compute capabilities below 9.0.
template <u32 D>
constexpr u32 kBlocks = D > 64                ? 2
                        : __CUDA_ARCH__ < 900 ? 3
                                              : 4;
// Of a warp's state in memory: m, d and o of each lane.
template <u32 D>
constexpr u32 kStateWords = (4 + kOwn<D> / 2) * kWarpSize;

// A text and its beams, as the table [batch, beams, 2 + words + written] says: how many places the prompt has; how many tokens
// are written behind it; bits, 32 a word, which places of the prompt are text; and, unless there is one beam, among which beam's
// places each written token of this beam's past lies. Token t of beam j was written to place prompt + t * beams + j.
struct Text {
  const int* table;  // of the text's first beam
  u32 beam_stride;
  u32 beams;
  u32 first;  // beam of the tile
  u32 tile_beams;
  u32 prompt, written;
  u32 hidden;  // how many of the first tokens are out of the window

  struct Key {
    u32 place;
    u32 beam;  // whose it is
  };

  // The keys of a tile: those of the prompt, then those of each written token, one for each beam of the tile.
  __device__ __forceinline__ u32 num_keys() const { return prompt + tile_beams * written; }

  __device__ __forceinline__ Key key(u32 i) const {
    if (i < prompt) {
      const bool is_text = __ldg(table + 2 + i / 32) >> i % 32 & 1;
      return {i, is_text && i >= hidden ? kEveryBeam : kNoBeam};
    }
    const u32 token = (i - prompt) / tile_beams, beam = first + (i - prompt) % tile_beams;
    if (token >= written || prompt + token < hidden) return {0, kNoBeam};
    const u32 words = (prompt + 31) / 32;
    const u32 writer = beams == 1 ? 0 : __ldg(table + beam * beam_stride + 2 + words + token);
    return {prompt + token * beams + writer, beam};
  }
};

// The state of 16 rows, spread over a warp as the sums of products are (tile_product.cuh): this lane has rows g and g + 8. Column
// n of the product o[h][e] is dimension 32 h + 4 n + e of those that the block has.
template <u32 D>
struct State {
  float m[2], d[2];  // in units of log2(e)
  float o[kOwn<D> / 32][4][4];

  __device__ __forceinline__ State() {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) m[half] = -FUSED_TOPK_INFINITY, d[half] = 0.0f;
    each([](float& x, u32) { x = 0.0f; });
  }

  // Calls take(number, half) for all of o; half: 0 for row g, 1 for row g + 8.
  template <class TAKE>
  __device__ __forceinline__ void each(TAKE take) {
#pragma unroll
    for (u32 h = 0; h < kOwn<D> / 32; ++h)
#pragma unroll
      for (u32 e = 0; e < 4; ++e)
#pragma unroll
        for (u32 i = 0; i < 4; ++i) take(o[h][e][i], i / 2);
  }

  // Makes `greatest` part of the maximum of a row. Returns what to subtract from scores.
  __device__ __forceinline__ float raise(u32 half, float greatest, float& factor) {
    const float before = m[half];
    m[half] = max_nan(before, greatest);
    const float base = reference_point(m[half]);
    factor = exp2_approx(before - base);
    d[half] *= factor;
    return base;
  }

  // Merges a state. load(i): word i of its lane.
  template <class LOAD>
  __device__ __forceinline__ void merge(LOAD load) {
    float mine[2], theirs[2];
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const float other = load(half);
      theirs[half] = exp2_approx(other - raise(half, other, mine[half]));
      d[half] += load(2 + half) * theirs[half];
    }
    u32 i = 4;
    each([&](float& x, u32 half) { x = x * mine[half] + load(i++) * theirs[half]; });
  }

  // store(i, word)
  template <class STORE>
  __device__ __forceinline__ void leave(STORE store) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) store(half, m[half]), store(2 + half, d[half]);
    u32 i = 4;
    each([&](float& x, u32) { store(i++, x); });
  }
};

// Merges the states of the warps that share rows into that of the first one. share: of this warp, of `shares`, a power of two. All
// threads of the block call it.
template <u32 D>
__device__ __forceinline__ void merge_warps(State<D>& state, float* shared, u32 share, u32 shares, u32 tiles,
                                            u32 tile) {
  for (u32 half = shares / 2; half > 0; half /= 2) {
    float* const left = shared + ((share % half) * tiles + tile) * kStateWords<D> + lane_id();
    __syncthreads();
    if (share >= half && share < 2 * half) state.leave([&](u32 i, float x) { left[i * kWarpSize] = x; });
    __syncthreads();
    if (share < half) state.merge([&](u32 i) { return left[i * kWarpSize]; });
  }
}

// The rows of a warp's tile: queries of one text and one key head, those of a beam's heads beside each other.
template <class FORMAT, u32 D>
struct Queries {
  using Bits = typename FORMAT::Bits;
  const Bits* first;  // the text's, of that key head
  i64 row_stride, head_stride;
  u32 groups, count;

  __device__ __forceinline__ uint4 load(u32 row, u32 dim) const {
    if (row >= count) return {0, 0, 0, 0};
    const u32 beam = row / groups;
    return *reinterpret_cast<const uint4*>(first + beam * row_stride + (row - beam * groups) * head_stride + dim);
  }
};

template <class VECTOR>
__device__ __forceinline__ VECTOR load_if(bool is_read, const void* address) {
  return is_read ? *static_cast<const VECTOR*>(address) : VECTOR{};
}

// Takes 16 keys and values into the state of a warp's rows. key: of lane l the one that l % 16 stands for. beams: of this lane's
// rows. All lanes call it.
template <class FORMAT, u32 D, class QUERY>
__device__ __forceinline__ void take(State<D>& state, const StepAttention& wanted, QUERY query, Text::Key key,
                                     const typename FORMAT::Bits* keys, const typename FORMAT::Bits* values,
                                     const u32 (&beams)[2]) {
  const u32 g = lane_id() / 4, c = lane_id() % 4;
  uint4 of_keys[2][D / 32];
  const auto load_keys = [&](u32 tile) {
    const u32 place = __shfl_sync(kAllLanes, key.place, 8 * tile + g);
    const bool is_read = __shfl_sync(kAllLanes, key.beam, 8 * tile + g) != kNoBeam;
#pragma unroll
    for (u32 j = 0; j < D / 32; ++j)
      of_keys[tile][j] = load_if<uint4>(is_read, keys + place * wanted.key_strides[2] + 8 * c + 32 * j);
  };
  // The columns of this lane's scores are its rows of the values.
  u32 owners[4], places[4];
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    const u32 column = 2 * c + i % 2 + i / 2 * 8;
    places[i] = __shfl_sync(kAllLanes, key.place, column);
    owners[i] = __shfl_sync(kAllLanes, key.beam, column);
  }
  uint2 of_values[4][kOwn<D> / 32];
  const auto load_values = [&] {
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
#pragma unroll
      for (u32 h = 0; h < kOwn<D> / 32; ++h)
        of_values[i][h] =
            load_if<uint2>(owners[i] != kNoBeam, values + places[i] * wanted.value_strides[2] + 4 * g + 32 * h);
  };
  // All loads are under way at once, as long as there are registers for them.
  if constexpr (kLoadsAtOnce<D>) {
    load_keys(0);
    load_keys(1);
    load_values();
  }

  // scores[tile][i]: row g + i / 2 * 8, key 8 tile + 2 c + i % 2. Which dimension is which column of a product does not matter.
  float scores[2][4] = {};
#pragma unroll
  for (u32 tile = 0; tile < 2; ++tile) {
    if constexpr (!kLoadsAtOnce<D>) {
      keep_memory_opaque();
      load_keys(tile);
    }
#pragma unroll
    for (u32 j = 0; j < D / 32; ++j) {
      const uint4 low = query(g, 32 * j + 8 * c), high = query(g + 8, 32 * j + 8 * c), of_key = of_keys[tile][j];
      add_product(FORMAT(), scores[tile], {low.x, high.x, low.y, high.y}, {of_key.x, of_key.y});
      add_product(FORMAT(), scores[tile], {low.z, high.z, low.w, high.w}, {of_key.z, of_key.w});
    }
  }

  if constexpr (!kLoadsAtOnce<D>) {
    keep_memory_opaque();
    load_values();
  }
  float factors[2], weights[2][4];
#pragma unroll
  for (u32 half = 0; half < 2; ++half) {
    float greatest = -FUSED_TOPK_INFINITY;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      float x = scores[i / 2][2 * half + i % 2] * wanted.scale;
      if (wanted.cap != 0.0f) {
        // tanh
        x = wanted.cap * (1.0f - 2.0f / (exp2_approx(x * (2.0f * kLog2E / wanted.cap)) + 1.0f));
      }
      const bool is_seen = owners[i] == kEveryBeam || owners[i] == beams[half];
      weights[i / 2][2 * half + i % 2] = x = is_seen ? x * kLog2E : -FUSED_TOPK_INFINITY;
      greatest = max_nan(greatest, x);
    }
    greatest = max_nan(greatest, __shfl_xor_sync(kAllLanes, greatest, 1));
    greatest = max_nan(greatest, __shfl_xor_sync(kAllLanes, greatest, 2));
    const float base = state.raise(half, greatest, factors[half]);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      float& weight = weights[i / 2][2 * half + i % 2];
      weight = exp2_approx(weight - base);
      state.d[half] += weight;
    }
  }
  state.each([&](float& x, u32 half) { x *= factors[half]; });

  u32 of_weights[4];
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    // a[1] is of row g + 8, a[2] of the second eight keys.
    of_weights[i] = pair_of(FORMAT(), weights[i / 2][i % 2 * 2], weights[i / 2][i % 2 * 2 + 1]);
  }
#pragma unroll
  for (u32 h = 0; h < kOwn<D> / 32; ++h)
#pragma unroll
    for (u32 e = 0; e < 4; ++e) {
      const auto word = [&](u32 i) { return e < 2 ? of_values[i][h].x : of_values[i][h].y; };
      add_product(FORMAT(), state.o[h][e], of_weights,
                  {halves(word(0), word(1), e % 2), halves(word(2), word(3), e % 2)});
    }
}

// Grid: (blocks of parts, blocks of tiles, batch * key_heads * D / kOwn).
template <class FORMAT, u32 D>
__global__ void __launch_bounds__(kWarps* kWarpSize, kBlocks<D>)
    step_attention_kernel(const __grid_constant__ StepAttention wanted) {
  using Bits = typename FORMAT::Bits;
  __shared__ float shared[kWarps / 2 * kStateWords<D>];
  __shared__ u32 ticket;
  const u32 warp = threadIdx.x / kWarpSize, g = lane_id() / 4, c = lane_id() % 4;
  const u32 tiles = wanted.warps_in_rows, tile = warp % tiles, share = warp / tiles, shares = kWarps / tiles;
  const u32 first_dim = blockIdx.z % (D / kOwn<D>)*kOwn<D>, sequence_head = blockIdx.z / (D / kOwn<D>);
  const u32 batch = sequence_head / wanted.key_heads, head = sequence_head % wanted.key_heads;
  const u32 groups = wanted.groups, rows = wanted.beams * groups, first_row = (blockIdx.y * tiles + tile) * kRows;

  Text text;
  text.table = static_cast<const int*>(wanted.table) + batch * wanted.table_strides[0];
  text.beam_stride = u32(wanted.table_strides[1]);
  text.beams = wanted.beams;
  text.prompt = u32(__ldg(text.table));
  text.written = u32(__ldg(text.table + 1));
  const u32 length = text.prompt + text.written;
  text.hidden = wanted.window != 0 && wanted.window < length ? length - wanted.window : 0;
  // A tile has at most that many beams. So has each tile of the block, and all its warps agree on the parts that have keys.
  const u32 most_beams = min((kRows + groups - 2) / groups + 1, wanted.beams);
  const u32 parts = (text.prompt + most_beams * text.written + wanted.keys_of_part - 1) / wanted.keys_of_part;
  const u32 first_part = blockIdx.x * wanted.parts_of_block;
  if (first_part >= parts) return;
  text.first = min(first_row, rows - 1) / groups;
  text.tile_beams = min(first_row + kRows - 1, rows - 1) / groups - text.first + 1;

  const Queries<FORMAT, D> queries{static_cast<const Bits*>(wanted.queries) +
                                       batch * wanted.beams * wanted.query_strides[0] +
                                       head * groups * wanted.query_strides[1],
                                   wanted.query_strides[0], wanted.query_strides[1], groups, rows};
  const Bits* const keys =
      static_cast<const Bits*>(wanted.keys) + batch * wanted.key_strides[0] + head * wanted.key_strides[1];
  const Bits* const values = static_cast<const Bits*>(wanted.values) + batch * wanted.value_strides[0] +
                             head * wanted.value_strides[1] + first_dim;
  const u32 beams[2] = {(first_row + g) / groups, (first_row + g + 8) / groups};
  const auto query = [&](u32 row, u32 dim) { return queries.load(first_row + row, dim); };
  const u32 place = blockIdx.z * gridDim.y + blockIdx.y;
  float* const states = wanted.states + i64(place * tiles + tile) * wanted.parts * kStateWords<D> + lane_id();

  State<D> state;
#pragma unroll 1
  for (u32 part = first_part; part < min(first_part + wanted.parts_of_block, parts); ++part) {
    state = State<D>();
    const u32 end = min((part + 1) * wanted.keys_of_part, text.num_keys());
    const auto key_at = [&](u32 i) { return i < end ? text.key(i) : Text::Key{0, kNoBeam}; };
    u32 i = part * wanted.keys_of_part + share * kKeys;
    Text::Key next = key_at(i + lane_id() % kKeys);
#pragma unroll 1
    for (; i < end; i += shares * kKeys) {
      // So the table is read while the keys before are multiplied, where registers hold one more key.
      const Text::Key key = D > 192 ? key_at(i + lane_id() % kKeys) : next;
      if constexpr (D <= 192) next = key_at(i + shares * kKeys + lane_id() % kKeys);
      if (__any_sync(kAllLanes, key.beam != kNoBeam)) take<FORMAT, D>(state, wanted, query, key, keys, values, beams);
    }
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      state.d[half] += __shfl_xor_sync(kAllLanes, state.d[half], 1);
      state.d[half] += __shfl_xor_sync(kAllLanes, state.d[half], 2);
    }
    merge_warps(state, shared, share, shares, tiles, tile);
    if (parts > 1 && share == 0)
      state.leave([&](u32 i, float x) { states[i64(part) * kStateWords<D> + i * kWarpSize] = x; });
  }

  if (parts > 1) {
    const u32 blocks = (parts + wanted.parts_of_block - 1) / wanted.parts_of_block;
    __syncthreads();
    if (threadIdx.x == 0) ticket = take_ticket(wanted.tickets + place, blocks);
    __syncthreads();
    if (ticket != blocks - 1) return;
    state = State<D>();
    for (u32 part = share; part < parts; part += shares) {
      const float* const of_part = states + i64(part) * kStateWords<D>;
      state.merge([&](u32 i) { return load_from_other_block(of_part + i * kWarpSize); });
    }
    merge_warps(state, shared, share, shares, tiles, tile);
  }
  if (share != 0) return;
#pragma unroll
  for (u32 half = 0; half < 2; ++half) {
    const u32 row = first_row + g + 8 * half;
    if (row >= rows) continue;
    const u32 q_head = head * groups + row % groups;
    float factor = 1.0f;
    if (wanted.sinks) {
      const float sink = FORMAT::decode(__ldg(static_cast<const Bits*>(wanted.sinks) + q_head)) * kLog2E;
      state.d[half] += exp2_approx(sink - state.raise(half, sink, factor));
    }
    factor /= state.d[half];
    Bits* const out = static_cast<Bits*>(wanted.out) + first_dim +
                      (i64(batch * wanted.beams + row / groups) * wanted.key_heads * groups + q_head) * D;
#pragma unroll
    for (u32 h = 0; h < kOwn<D> / 32; ++h) {
      float y[8];
#pragma unroll
      for (u32 e = 0; e < 8; ++e) y[e] = state.o[h][e % 4][2 * half + e / 4] * factor;
      *reinterpret_cast<Vector*>(out + 32 * h + 8 * c) = FORMAT::encode(y);
    }
  }
}

}  // namespace attention
}  // namespace fused_topk
