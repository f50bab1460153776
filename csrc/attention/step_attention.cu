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
// warp has 16 of them, which tensor cores multiply with 16 keys at a time. While it does, the next keys and values travel
// to shared memory, from the places that the table says. So a prompt's key is read from global memory once for the rows of a block.
//
// A text's keys are cut into parts, whose length depends on the text alone, and parts are merged in one order. So the same text gives
// the same bits in every batch. A block has a part or two, or all of a row where there are rows enough for the GPU.
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
  float* states;        // [blocks of rows and heads, warps_in_rows, parts, kStateWords]; for several parts
  u32* tickets;         // [blocks of rows and heads], zero before and after each launch; for several parts
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
// How many blocks must fit on a multiprocessor. 8.6, 8.9 and 12.0 have shared memory for two.
template <u32 D>
constexpr u32 kBlocks = D > 64 || (__CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900) || __CUDA_ARCH__ >= 1200 ? 2 : 4;
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
  u32 first, count;  // of the beams of the block's rows
  u32 prompt, written;
  u32 window;  // 0: all

  // Whether the text's token number i is out of the window.
  __device__ __forceinline__ bool hides(u32 i) const { return window != 0 && i + window < prompt + written; }

  struct Key {
    u32 place;
    u32 beam;  // whose it is
  };

  // The keys of a block: those of the prompt, then those that each of its beams has written.
  __device__ __forceinline__ u32 num_keys() const { return prompt + count * written; }

  __device__ __forceinline__ Key key(u32 i) const {
    if (i < prompt) {
      const bool is_text = __ldg(table + 2 + i / 32) >> i % 32 & 1;
      return {i, is_text && !hides(i) ? kEveryBeam : kNoBeam};
    }
    const u32 beam = first + (i - prompt) / written, token = (i - prompt) % written;
    if (hides(prompt + token)) return {0, kNoBeam};
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

// Keys and values of 16 places for each warp, in shared memory.
template <class FORMAT, u32 D>
struct Stage {
  static constexpr u32 kPlaces = kWarps * kKeys;
  // How many there are: others are filled while one is read. Two of the largest heads are more than some GPUs have.
  static constexpr u32 kCount = D > 192 ? 1 : 2;

  // With 8 numbers behind each row, the rows that lanes read at a time are in different banks.
  typename FORMAT::Bits keys[kPlaces][D + 8];
  typename FORMAT::Bits values[kPlaces][kOwn<D> + 8];
  u32 beams[kPlaces];  // whose they are: see Text

  // Begins to copy a warp's 16 places. key: of lane l the one that l % 16 stands for. All lanes of the warp call it.
  __device__ __forceinline__ void copy(const StepAttention& wanted, u32 warp, Text::Key key,
                                       const typename FORMAT::Bits* from_keys,
                                       const typename FORMAT::Bits* from_values) {
    copy_rows<D>(keys + warp * kKeys, key, from_keys, wanted.key_strides[2]);
    copy_rows<kOwn<D>>(values + warp * kKeys, key, from_values, wanted.value_strides[2]);
    if (lane_id() < kKeys) beams[warp * kKeys + lane_id()] = key.beam;
  }

 private:
  template <u32 NUMBERS, class ROW>
  __device__ __forceinline__ static void copy_rows(ROW* rows, Text::Key key, const typename FORMAT::Bits* from,
                                                   i64 stride) {
    constexpr u32 kVectors = NUMBERS / 8;
#pragma unroll 4
    for (u32 n = 0; n < kVectors * kKeys / kWarpSize; ++n) {
      const u32 row = (n * kWarpSize + lane_id()) / kVectors, dim = (n * kWarpSize + lane_id()) % kVectors * 8;
      const u32 place = __shfl_sync(kAllLanes, key.place, row);
      const bool is_read = __shfl_sync(kAllLanes, key.beam, row) != kNoBeam;
      copy_async(rows[row] + dim, from + place * stride + dim, is_read);
    }
  }
};

// Where the eight numbers of a query or key begin that this lane reads as its number j. Which dimension is which column of a product
// does not matter; lanes that read at a time find different banks.
template <u32 D>
__device__ __forceinline__ u32 vector_of(u32 j) {
  const u32 c = lane_id() % 4;
  return j + 1 == D / 32 && j % 2 == 0 ? 32 * j + 8 * c : 64 * (j / 2) + 16 * c + 8 * (j % 2);
}

// Whether a row of the matrix is one of that beam's.
__device__ __forceinline__ bool has_row(u32 groups, u32 beam, u32 row) {
  return beam != kNoBeam && row - beam * groups < groups;
}

// Takes 16 keys and values of a stage, from place `first` on, into the state of a warp's rows. PLAIN: whether all rows look at all of
// these, and scores have no cap. queries[half]: of row g + 8 half. first_row: of the warp. All lanes call it.
template <bool PLAIN, class FORMAT, u32 D>
__device__ __forceinline__ void take(State<D>& state, const StepAttention& wanted, const uint4 (&queries)[2][D / 32],
                                     const Stage<FORMAT, D>& stage, u32 first, u32 first_row) {
  const u32 g = lane_id() / 4, c = lane_id() % 4;
  // scores[tile][i]: row g + i / 2 * 8, key 8 tile + 2 c + i % 2.
  float scores[2][4] = {};
#pragma unroll
  for (u32 tile = 0; tile < 2; ++tile)
#pragma unroll
    for (u32 j = 0; j < D / 32; ++j) {
      const uint4 key = *reinterpret_cast<const uint4*>(stage.keys[first + 8 * tile + g] + vector_of<D>(j));
      const uint4 low = queries[0][j], high = queries[1][j];
      add_product(FORMAT(), scores[tile], {low.x, high.x, low.y, high.y}, {key.x, key.y});
      add_product(FORMAT(), scores[tile], {low.z, high.z, low.w, high.w}, {key.z, key.w});
    }

  // The columns of this lane's scores are its rows of the values.
  const auto column = [&](u32 i) { return first + 2 * c + i % 2 + i / 2 * 8; };
  // From scores to logits in units of log2(e). x[half][i]: of row g + 8 half, key column(i).
  const bool is_capped = !PLAIN && wanted.cap != 0.0f;
  const float unit = wanted.scale * (is_capped ? 2.0f * kLog2E / wanted.cap : kLog2E);
  float x[2][4];
#pragma unroll
  for (u32 i = 0; i < 4; ++i)
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      float y = scores[i / 2][2 * half + i % 2] * unit;
      if constexpr (!PLAIN) {
        // tanh
        if (is_capped) y = wanted.cap * kLog2E * (1.0f - 2.0f * reciprocal_approx(exp2_approx(y) + 1.0f));
        const u32 beam = stage.beams[column(i)];
        if (beam != kEveryBeam && !has_row(wanted.groups, beam, first_row + 8 * half + g)) y = -FUSED_TOPK_INFINITY;
      }
      x[half][i] = y;
    }
  float factors[2];
  u32 weights[4];
#pragma unroll
  for (u32 half = 0; half < 2; ++half) {
    float greatest = max_nan(max_nan(x[half][0], x[half][1]), max_nan(x[half][2], x[half][3]));
    greatest = max_nan(greatest, __shfl_xor_sync(kAllLanes, greatest, 1));
    greatest = max_nan(greatest, __shfl_xor_sync(kAllLanes, greatest, 2));
    const float base = state.raise(half, greatest, factors[half]);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) x[half][i] = exp2_approx(x[half][i] - base);
    state.d[half] += (x[half][0] + x[half][1]) + (x[half][2] + x[half][3]);
    // weights[1] is of row g + 8, weights[2] of the second eight keys.
    weights[half] = pair_of(FORMAT(), x[half][0], x[half][1]);
    weights[2 + half] = pair_of(FORMAT(), x[half][2], x[half][3]);
  }
  // Mostly no maximum has changed.
  if (__any_sync(kAllLanes, factors[0] != 1.0f || factors[1] != 1.0f))
    state.each([&](float& y, u32 half) { y *= factors[half]; });
#pragma unroll
  for (u32 h = 0; h < kOwn<D> / 32; ++h) {
    uint2 values[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) values[i] = *reinterpret_cast<const uint2*>(stage.values[column(i)] + 32 * h + 4 * g);
#pragma unroll
    for (u32 e = 0; e < 4; ++e) {
      const auto word = [&](u32 i) { return e < 2 ? values[i].x : values[i].y; };
      add_product(FORMAT(), state.o[h][e], weights, {halves(word(0), word(1), e % 2), halves(word(2), word(3), e % 2)});
    }
  }
}

// Grid: (blocks of rows, batch * key_heads * D / kOwn, blocks of parts). So blocks of the same keys run at a time.
template <class FORMAT, u32 D>
__global__ void __launch_bounds__(kWarps* kWarpSize, kBlocks<D>)
    step_attention_kernel(const __grid_constant__ StepAttention wanted) {
  using Bits = typename FORMAT::Bits;
  constexpr u32 kStages = Stage<FORMAT, D>::kCount, kPlaces = Stage<FORMAT, D>::kPlaces;
  // Stages; and, when they have been read, the states of warps that share rows.
  extern __shared__ __align__(128) Vector memory[];
  __shared__ u32 ticket;
  auto* const stages = reinterpret_cast<Stage<FORMAT, D>*>(memory);
  auto* const merging = reinterpret_cast<float*>(memory);
  const u32 warp = threadIdx.x / kWarpSize, g = lane_id() / 4, c = lane_id() % 4;
  const u32 tiles = wanted.warps_in_rows, tile = warp % tiles, share = warp / tiles, shares = kWarps / tiles;
  const u32 first_dim = blockIdx.y % (D / kOwn<D>)*kOwn<D>, sequence_head = blockIdx.y / (D / kOwn<D>);
  const u32 batch = sequence_head / wanted.key_heads, head = sequence_head % wanted.key_heads;
  const u32 groups = wanted.groups, rows = wanted.beams * groups, rows_of_block = tiles * kRows;
  const u32 first_of_block = blockIdx.x * rows_of_block, first_row = first_of_block + tile * kRows;

  Text text;
  text.table = static_cast<const int*>(wanted.table) + batch * wanted.table_strides[0];
  text.beam_stride = u32(wanted.table_strides[1]);
  text.beams = wanted.beams;
  text.prompt = u32(__ldg(text.table));
  text.written = u32(__ldg(text.table + 1));
  text.window = wanted.window;
  text.first = first_of_block / groups;
  text.count = min(first_of_block + rows_of_block - 1, rows - 1) / groups - text.first + 1;
  // No block has more beams. So all blocks agree on the number of parts.
  const u32 most_beams = min((rows_of_block + groups - 2) / groups + 1, wanted.beams);
  const u32 parts = (text.prompt + most_beams * text.written + wanted.keys_of_part - 1) / wanted.keys_of_part;
  const u32 first_part = blockIdx.z * wanted.parts_of_block;
  if (first_part >= parts) return;

  const Bits* const keys =
      static_cast<const Bits*>(wanted.keys) + batch * wanted.key_strides[0] + head * wanted.key_strides[1];
  const Bits* const values = static_cast<const Bits*>(wanted.values) + batch * wanted.value_strides[0] +
                             head * wanted.value_strides[1] + first_dim;
  uint4 queries[2][D / 32];
#pragma unroll
  for (u32 half = 0; half < 2; ++half) {
    const u32 row = first_row + 8 * half + g;
    const Bits* const query = static_cast<const Bits*>(wanted.queries) +
                              (batch * wanted.beams + row / groups) * wanted.query_strides[0] +
                              (head * groups + row % groups) * wanted.query_strides[1];
#pragma unroll
    for (u32 j = 0; j < D / 32; ++j)
      queries[half][j] = row < rows ? *reinterpret_cast<const uint4*>(query + vector_of<D>(j)) : uint4{0, 0, 0, 0};
  }
  // Warps that share keys wait for each other.
  const auto wait = [&] {
    if (tiles == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  };
  const u32 place = blockIdx.y * gridDim.x + blockIdx.x;
  const auto state_of = [&](u32 part) {
    return wanted.states + (i64(place * tiles + tile) * wanted.parts + part) * kStateWords<D> + lane_id();
  };

  State<D> state;
#pragma unroll 1
  for (u32 part = first_part; part < min(first_part + wanted.parts_of_block, parts); ++part) {
    state = State<D>();
    const u32 begin = part * wanted.keys_of_part, end = min(begin + wanted.keys_of_part, text.num_keys());
    // The key of this lane in stage n of the part.
    const auto key_of = [&](u32 n) {
      const u32 i = begin + n * kPlaces + warp * kKeys + lane_id() % kKeys;
      return i < end ? text.key(i) : Text::Key{0, kNoBeam};
    };
    const u32 number = end > begin ? (end - begin + kPlaces - 1) / kPlaces : 0;
    // The table is read one stage before the keys.
    Text::Key next = key_of(0);
    const auto copy = [&](u32 n) {
      if (n < number) stages[n % kStages].copy(wanted, warp, next, keys, values);
      commit_copies();
      next = key_of(n + 1);
    };
    __syncthreads();
    for (u32 n = 0; n + 1 < kStages; ++n) copy(n);
#pragma unroll 1
    for (u32 n = 0; n < number; ++n) {
      wait();
      copy(n + kStages - 1);
      wait_copies<kStages - 1>();
      wait();
      const Stage<FORMAT, D>& stage = stages[n % kStages];
      const auto is_of_warp = [&](u32 beam) {
        return beam != kNoBeam && beam * groups < first_row + kRows && (beam + 1) * groups > first_row;
      };
#pragma unroll 1
      for (u32 first = share * tiles * kKeys; first < (share + 1) * tiles * kKeys; first += kKeys) {
        const u32 beam = stage.beams[first + lane_id() % kKeys];
        if (__all_sync(kAllLanes, beam == kEveryBeam) && wanted.cap == 0.0f) {
          take<true>(state, wanted, queries, stage, first, first_row);
        } else if (__any_sync(kAllLanes, beam == kEveryBeam || is_of_warp(beam))) {
          take<false>(state, wanted, queries, stage, first, first_row);
        }
      }
    }
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      state.d[half] += __shfl_xor_sync(kAllLanes, state.d[half], 1);
      state.d[half] += __shfl_xor_sync(kAllLanes, state.d[half], 2);
    }
    merge_warps(state, merging, share, shares, tiles, tile);
    if (parts > 1 && share == 0) state.leave([&](u32 i, float x) { state_of(part)[i * kWarpSize] = x; });
  }

  if (parts > 1) {
    const u32 blocks = (parts + wanted.parts_of_block - 1) / wanted.parts_of_block;
    __syncthreads();
    if (threadIdx.x == 0) ticket = take_ticket(wanted.tickets + place, blocks);
    __syncthreads();
    if (ticket != blocks - 1) return;
    state = State<D>();
    for (u32 part = share; part < parts; part += shares) {
      const float* const of_part = state_of(part);
      state.merge([&](u32 i) { return load_from_other_block(of_part + i * kWarpSize); });
    }
    merge_warps(state, merging, share, shares, tiles, tile);
  }
  if (share != 0) return;
#pragma unroll
  for (u32 half = 0; half < 2; ++half) {
    u32 row = first_row + g + 8 * half;
    // So what was computed of it before is not kept in registers since then.
    keep_opaque(row);
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
