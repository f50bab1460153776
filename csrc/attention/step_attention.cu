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
// How many keys of a prompt are taken at a time where each warp has rows of its own.
constexpr u32 kManyKeys = 32;
constexpr u32 kEveryBeam = ~0u, kNoBeam = ~0u - 1;

constexpr u32 kWarps = 4;
// How many dimensions of o a warp has registers for. Two blocks share the values of more.
template <u32 D>
constexpr u32 kOwn = D <= 128 ? D : D / 2;
// How many blocks must fit on a multiprocessor. Others than 8.0 and 9.0 have less shared memory, or need more registers.
template <u32 D>
constexpr u32 kBlocks = D > 64 || (__CUDA_ARCH__ != 800 && __CUDA_ARCH__ != 900) ? 2 : 4;
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

  // What the table says of key i.
  __device__ __forceinline__ u32 entry(u32 i) const {
    if (i < prompt) return u32(__ldg(table + 2 + i / 32));
    if (i >= num_keys() || beams == 1) return 0;
    return u32(__ldg(table + beam_of(i) * beam_stride + 2 + (prompt + 31) / 32 + (i - prompt) % written));
  }

  // entry: what the table says. It is loaded a while before, so that nobody waits for it.
  __device__ __forceinline__ Key key(u32 i, u32 entry) const {
    if (i < prompt) return {i, entry >> i % 32 & 1 && !hides(i) ? kEveryBeam : kNoBeam};
    const u32 token = (i - prompt) % written;
    if (hides(prompt + token)) return {0, kNoBeam};
    return {prompt + token * beams + entry, beam_of(i)};
  }

 private:
  __device__ __forceinline__ u32 beam_of(u32 i) const { return first + (i - prompt) / written; }
};

// The state of 16 rows, spread over a warp as the sums of products are (tile_product.cuh): this lane has rows g and g + 8. Column
// n of the product o[t] is dimension 8 t + n of those that the block has.
template <u32 D>
struct State {
  float m[2], d[2];  // in units of log2(e)
  float o[kOwn<D> / 8][4];

  __device__ __forceinline__ State() {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) m[half] = -FUSED_TOPK_INFINITY, d[half] = 0.0f;
    each([](float& x, u32) { x = 0.0f; });
  }

  // Calls take(number, half) for all of o; half: 0 for row g, 1 for row g + 8.
  template <class TAKE>
  __device__ __forceinline__ void each(TAKE take) {
#pragma unroll
    for (u32 t = 0; t < kOwn<D> / 8; ++t)
#pragma unroll
      for (u32 i = 0; i < 4; ++i) take(o[t][i], i / 2);
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
    // A vote has a bit for each lane.
    const u32 are_read = __ballot_sync(kAllLanes, key.beam != kNoBeam);
    const auto copy_key = [&](u32 row, u32 dim, u32 place) {
      copy_vector(keys[warp * kKeys + row] + dim, from_keys + dim, place, wanted.key_strides[2], are_read >> row & 1);
    };
    const auto copy_value = [&](u32 row, u32 dim, u32 place) {
      copy_vector(values[warp * kKeys + row] + dim, from_values + dim, place, wanted.value_strides[2],
                  are_read >> row & 1);
    };
    if constexpr (kOwn<D> == D) {
      each_vector<D>(key.place,
                     [&](u32 row, u32 dim, u32 place) { copy_key(row, dim, place), copy_value(row, dim, place); });
    } else {
      each_vector<D>(key.place, copy_key);
      each_vector<kOwn<D>>(key.place, copy_value);
    }
    if (lane_id() < kKeys) beams[warp * kKeys + lane_id()] = key.beam;
  }

 private:
  // Calls copy(row, first number, place) for this lane's share of 16 rows.
  template <u32 NUMBERS, class COPY>
  __device__ __forceinline__ static void each_vector(u32 place, COPY copy) {
    constexpr u32 kVectors = NUMBERS / 8;
#pragma unroll 4
    for (u32 n = 0; n < kVectors * kKeys / kWarpSize; ++n) {
      const u32 row = (n * kWarpSize + lane_id()) / kVectors, dim = (n * kWarpSize + lane_id()) % kVectors * 8;
      copy(row, dim, __shfl_sync(kAllLanes, place, row));
    }
  }

  // One addition with a product of 32 bits: strides of places are less.
  __device__ __forceinline__ static void copy_vector(void* to, const typename FORMAT::Bits* from, u32 place, i64 stride,
                                                     bool is_read) {
    copy_async(to, reinterpret_cast<const char*>(from) + u64(place) * u32(2 * stride), is_read);
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

// Takes KEYS keys and values of a stage, from place `first` on, into the state of a warp's rows. PLAIN: whether all rows look at all
// of these, scores have no cap, and the scale is not negative. queries[half]: of row g + 8 half. first_row: of the warp. All lanes
// call it.
template <bool PLAIN, u32 KEYS, class FORMAT, u32 D>
__device__ __forceinline__ void take(State<D>& state, const StepAttention& wanted, const uint4 (&queries)[2][D / 32],
                                     const Stage<FORMAT, D>& stage, u32 first, u32 first_row) {
  const u32 g = lane_id() / 4, c = lane_id() % 4;
  // scores[tile][i]: row g + i / 2 * 8, key 8 tile + 2 c + i % 2.
  float scores[KEYS / 8][4] = {};
#pragma unroll
  for (u32 tile = 0; tile < KEYS / 8; ++tile)
#pragma unroll
    for (u32 j = 0; j < D / 32; ++j) {
      const uint4 key = *reinterpret_cast<const uint4*>(stage.keys[first + 8 * tile + g] + vector_of<D>(j));
      const uint4 low = queries[0][j], high = queries[1][j];
      add_product(FORMAT(), scores[tile], {low.x, high.x, low.y, high.y}, {key.x, key.y});
      add_product(FORMAT(), scores[tile], {low.z, high.z, low.w, high.w}, {key.z, key.w});
    }

  // The columns of this lane's scores are its rows of the values.
  const auto column = [&](u32 i) { return first + 2 * c + i % 2 + i / 2 * 8; };
  // x(half, i): of row g + 8 half, key column(i). times `unit` it is a logit in units of log2(e).
  const auto x = [&](u32 half, u32 i) -> float& { return scores[i / 2][2 * half + i % 2]; };
  const float unit = PLAIN ? wanted.scale * kLog2E : 1.0f;
  if constexpr (!PLAIN) {
    const bool is_capped = wanted.cap != 0.0f;
    const float to_logits = wanted.scale * (is_capped ? 2.0f * kLog2E / wanted.cap : kLog2E);
#pragma unroll
    for (u32 i = 0; i < KEYS / 4; ++i)
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        float y = x(half, i) * to_logits;
        // tanh
        if (is_capped) y = wanted.cap * kLog2E * (1.0f - 2.0f * reciprocal_approx(exp2_approx(y) + 1.0f));
        const u32 beam = stage.beams[column(i)];
        if (beam != kEveryBeam && !has_row(wanted.groups, beam, first_row + 8 * half + g)) y = -FUSED_TOPK_INFINITY;
        x(half, i) = y;
      }
  }
  float factors[2];
#pragma unroll
  for (u32 half = 0; half < 2; ++half) {
    float greatest = -FUSED_TOPK_INFINITY;
#pragma unroll
    for (u32 i = 0; i < KEYS / 4; i += 2) greatest = max_nan(greatest, max_nan(x(half, i), x(half, i + 1)));
    greatest = max_nan(greatest, __shfl_xor_sync(kAllLanes, greatest, 1));
    greatest = max_nan(greatest, __shfl_xor_sync(kAllLanes, greatest, 2));
    const float base = state.raise(half, greatest * unit, factors[half]);
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < KEYS / 4; i += 2) {
      x(half, i) = exp2_approx(fmaf(x(half, i), unit, -base));
      x(half, i + 1) = exp2_approx(fmaf(x(half, i + 1), unit, -base));
      sum += x(half, i) + x(half, i + 1);
    }
    state.d[half] += sum;
  }
  // Mostly no maximum has changed.
  if (__any_sync(kAllLanes, factors[0] != 1.0f || factors[1] != 1.0f))
    state.each([&](float& y, u32 half) { y *= factors[half]; });
#pragma unroll
  for (u32 first_i = 0; first_i < KEYS / 4; first_i += 4) {
    // weights[1] is of row g + 8, weights[2] of the second eight keys.
    u32 weights[4];
#pragma unroll
    for (u32 n = 0; n < 4; ++n)
      weights[n] = pair_of(FORMAT(), x(n % 2, first_i + n / 2 * 2), x(n % 2, first_i + n / 2 * 2 + 1));
#pragma unroll
    for (u32 t = 0; t < kOwn<D> / 8; t += 2) {
      // Of 16 keys and the dimensions of two products.
      u32 values[4];
      load_transposed(values, stage.values[first + 4 * first_i + lane_id() % 16] + 8 * t + lane_id() / 16 * 8);
      add_product(FORMAT(), state.o[t], weights, {values[0], values[1]});
      add_product(FORMAT(), state.o[t + 1], weights, {values[2], values[3]});
    }
  }
}

// What a block is of the grid.
template <u32 D>
struct Block {
  u32 rows;   // which of the blocks of rows
  u32 place;  // of its rows and head among all
  u32 batch, head, first_dim;

  __device__ __forceinline__ explicit Block(u32 key_heads) {
    rows = blockIdx.x;
    u32 y = blockIdx.y;
    // So what is computed of it is not kept in registers while keys are taken.
    keep_opaque(rows), keep_opaque(y);
    place = y * gridDim.x + rows;
    const u32 sequence_head = y / (D / kOwn<D>);
    batch = sequence_head / key_heads, head = sequence_head % key_heads;
    first_dim = y % (D / kOwn<D>)*kOwn<D>;
  }
};

// What all threads of a block know. In shared memory, so that it takes no registers while keys are taken.
template <class BITS>
struct Task {
  Text text;
  const BITS* keys;  // of the head, [places, D]
  const BITS* values;
  u32 parts;
  u32 ticket;
};

// Grid: (blocks of rows, batch * key_heads * D / kOwn, blocks of parts). So blocks of the same keys run at a time.
template <class FORMAT, u32 D>
__global__ void __launch_bounds__(kWarps* kWarpSize, kBlocks<D>)
    step_attention_kernel(const __grid_constant__ StepAttention wanted) {
  using Bits = typename FORMAT::Bits;
  constexpr u32 kStages = Stage<FORMAT, D>::kCount, kPlaces = Stage<FORMAT, D>::kPlaces;
  // Stages; and, when they have been read, the states of warps that share rows.
  extern __shared__ __align__(128) Vector memory[];
  __shared__ Task<Bits> task;
  auto* const stages = reinterpret_cast<Stage<FORMAT, D>*>(memory);
  auto* const merging = reinterpret_cast<float*>(memory);
  const u32 warp = threadIdx.x / kWarpSize, g = lane_id() / 4, c = lane_id() % 4;
  // Of 1, 2 and 4 tiles the logarithm is tiles / 2.
  const u32 tiles = wanted.warps_in_rows, tile = warp & (tiles - 1), share = warp >> tiles / 2;
  const u32 shares = kWarps >> tiles / 2;
  const Block<D> block(wanted.key_heads);
  const u32 groups = wanted.groups, rows = wanted.beams * groups, rows_of_block = tiles * kRows;
  const u32 first_of_block = block.rows * rows_of_block, first_row = first_of_block + tile * kRows;

  if (threadIdx.x == 0) {
    Text& text = task.text;
    text.table = static_cast<const int*>(wanted.table) + block.batch * wanted.table_strides[0];
    text.beam_stride = u32(wanted.table_strides[1]);
    text.beams = wanted.beams;
    text.prompt = u32(__ldg(text.table));
    text.written = u32(__ldg(text.table + 1));
    text.window = wanted.window;
    text.first = first_of_block / groups;
    text.count = min(first_of_block + rows_of_block - 1, rows - 1) / groups - text.first + 1;
    task.keys = static_cast<const Bits*>(wanted.keys) + block.batch * wanted.key_strides[0] +
                block.head * wanted.key_strides[1];
    task.values = static_cast<const Bits*>(wanted.values) + block.batch * wanted.value_strides[0] +
                  block.head * wanted.value_strides[1] + block.first_dim;
    // No block has more beams. So all blocks agree on the number of parts.
    const u32 most_beams = min((rows_of_block + groups - 2) / groups + 1, wanted.beams);
    task.parts = (text.prompt + most_beams * text.written + wanted.keys_of_part - 1) / wanted.keys_of_part;
  }
  __syncthreads();
  const Text& text = task.text;
  const u32& parts = task.parts;
  const u32 first_part = blockIdx.z * wanted.parts_of_block;
  if (first_part >= parts) return;

  uint4 queries[2][D / 32];
#pragma unroll
  for (u32 half = 0; half < 2; ++half) {
    const u32 row = first_row + 8 * half + g;
    const Bits* const query = static_cast<const Bits*>(wanted.queries) +
                              (block.batch * wanted.beams + row / groups) * wanted.query_strides[0] +
                              (block.head * groups + row % groups) * wanted.query_strides[1];
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
  const auto state_of = [&](u32 part) {
    const u32 place = Block<D>(wanted.key_heads).place * tiles + tile;
    return wanted.states + (i64(place) * wanted.parts + part) * kStateWords<D> + lane_id();
  };

  const bool is_plain = wanted.cap == 0.0f && wanted.scale >= 0.0f;
  State<D> state;
#pragma unroll 1
  for (u32 part = first_part; part < min(first_part + wanted.parts_of_block, parts); ++part) {
    state = State<D>();
    const u32 begin = part * wanted.keys_of_part, end = min(begin + wanted.keys_of_part, text.num_keys());
    // The key of this lane in the stage that begins with key `at`.
    const auto number = [&](u32 at) { return at + warp * kKeys + lane_id() % kKeys; };
    u32 entry = text.entry(number(begin));
    const auto copy = [&](u32 at) {
      if (at < end) {
        const u32 i = number(at);
        const Text::Key key = i < end ? text.key(i, entry) : Text::Key{0, kNoBeam};
        stages[at / kPlaces % kStages].copy(wanted, warp, key, task.keys, task.values);
      }
      commit_copies();
      entry = text.entry(number(at + kPlaces));
    };
    __syncthreads();
    if constexpr (kStages == 2) copy(begin);
#pragma unroll 1
    for (u32 at = begin; at < end; at += kPlaces) {
      // One barrier says both that the stage is full and that all have read the one that is filled next.
      if constexpr (kStages == 1) wait(), copy(at);
      wait_copies<0>();
      wait();
      if constexpr (kStages == 2) copy(at + kPlaces);
      const Stage<FORMAT, D>& stage = stages[at / kPlaces % kStages];
      const auto is_of_warp = [&](u32 beam) {
        return beam != kNoBeam && beam * groups < first_row + kRows && (beam + 1) * groups > first_row;
      };
      // Most of a prompt. With more keys at a time, maxima merge less often.
      if (tiles == kWarps && is_plain) {
        const u32 beam = stage.beams[lane_id()], other = stage.beams[kWarpSize + lane_id()];
        if (__all_sync(kAllLanes, beam == kEveryBeam && other == kEveryBeam)) {
#pragma unroll 1
          for (u32 first = 0; first < kPlaces; first += kManyKeys)
            take<true, kManyKeys>(state, wanted, queries, stage, first, first_row);
          continue;
        }
      }
#pragma unroll 1
      for (u32 first = share * tiles * kKeys; first < (share + 1) * tiles * kKeys; first += kKeys) {
        const u32 beam = stage.beams[first + lane_id() % kKeys];
        if (is_plain && __all_sync(kAllLanes, beam == kEveryBeam)) {
          take<true, kKeys>(state, wanted, queries, stage, first, first_row);
        } else if (__any_sync(kAllLanes, beam == kEveryBeam || is_of_warp(beam))) {
          take<false, kKeys>(state, wanted, queries, stage, first, first_row);
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
    if (threadIdx.x == 0) task.ticket = take_ticket(wanted.tickets + Block<D>(wanted.key_heads).place, blocks);
    __syncthreads();
    if (task.ticket != blocks - 1) return;
    state = State<D>();
    for (u32 part = share; part < parts; part += shares) {
      const float* const of_part = state_of(part);
      state.merge([&](u32 i) { return load_from_other_block(of_part + i * kWarpSize); });
    }
    merge_warps(state, merging, share, shares, tiles, tile);
  }
  if (share != 0) return;
  const Block<D> again(wanted.key_heads);
#pragma unroll
  for (u32 half = 0; half < 2; ++half) {
    const u32 row = (again.rows * tiles + tile) * kRows + g + 8 * half;
    if (row >= wanted.beams * groups) continue;
    const u32 q_head = again.head * groups + row % groups;
    float factor = 1.0f;
    if (wanted.sinks) {
      const float sink = FORMAT::decode(__ldg(static_cast<const Bits*>(wanted.sinks) + q_head)) * kLog2E;
      state.d[half] += exp2_approx(sink - state.raise(half, sink, factor));
    }
    factor /= state.d[half];
    Bits* const out = static_cast<Bits*>(wanted.out) + again.first_dim +
                      (i64(again.batch * wanted.beams + row / groups) * wanted.key_heads * groups + q_head) * D;
#pragma unroll
    for (u32 t = 0; t < kOwn<D> / 8; ++t) {
      const float (&y)[4] = state.o[t];
      *reinterpret_cast<u32*>(out + 8 * t + 2 * c) = pair_of(FORMAT(), y[2 * half] * factor, y[2 * half + 1] * factor);
    }
  }
}

}  // namespace attention
}  // namespace fused_topk
