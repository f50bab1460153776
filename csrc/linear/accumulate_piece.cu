// SPDX-License-Identifier: Apache-2.0
// Adds a piece of the vocabulary to the states (m, d, T) that earlier pieces have left for the same rows: the loop of Algorithm
// 4, over several launches. It serves LM heads, whose logits exist one piece at a time.
//
//     (m, d, T) = what the pieces before have left; at first (-inf, 0, {})
//     for each tile x of the piece:
//         T = best k of T and x                     RunningBest
//         (m, d) = (m, d) + x                       PartFolder
//     leave (m, d, T)
//
// The kernel also stores the logits of given target tokens, and counts the tokens that rank before the first target.
//
// A warp has a row, and lane i has the i-th entry of T. So k is at most 32. From the second piece on T is full from the
// start, and few tiles hold an element that enters T.
#include "../rows/numbers.cuh"
#include "../topk/bound.cuh"
#include "../topk/part_folder.cuh"

namespace fused_topk {

// The argument of a launch. fused_topk/layout/launch.py fills it by field names.
struct Piece {
  const void* logits;  // [rows, tokens]; every row starts at a multiple of 16 bytes
  i64 row_stride;      // in elements
  RowNumbers numbers;
  void* values;         // [rows, k]: T's logits, in their own format
  i64* indices;         // [rows, k]: T's tokens in the vocabulary; -1: no entry
  float* state;         // [2, rows]: m, d
  const i64* targets;   // nullable; [rows, num_targets]: tokens in the vocabulary
  void* target_logits;  // [rows, num_targets], in their own format; written where the token is in the piece
  i64* target_ranks;    // [rows]; the tokens of the piece that rank before the first target are added
  u32 rows, tokens, k, num_targets;
  u32 first_token;  // of the piece, in the vocabulary
  u32 is_first;     // 1: no piece comes before it, and values, indices and state are not read
};

namespace pieces {

constexpr u32 kRowsPerBlock = 4;

// T of a row. Lane i has the i-th entry and the bits of its logit: a key has lost the sign of a zero and the payload of
// a NaN.
template <class FORMAT>
class RunningBest {
 public:
  using Bits = typename FORMAT::Bits;

  __device__ __forceinline__ explicit RunningBest(u32 k)
      : k_(k), entry_(kNoCandidate), bits_(FORMAT::kNegativeInfinity), threshold_(kNoCandidate) {}

  // values, indices: [k] of the row
  __device__ __forceinline__ void load(const Bits* values, const i64* indices) {
    if (lane_id() < k_) {
      const i64 token = indices[lane_id()];
      bits_ = values[lane_id()];
      if (token >= 0) entry_ = make_candidate(order_key(FORMAT::decode(Bits(bits_))), u32(token));
    }
    threshold_ = __shfl_sync(kAllLanes, entry_, k_ - 1);
  }
  __device__ __forceinline__ void store(Bits* values, i64* indices) const {
    if (lane_id() >= k_) return;
    values[lane_id()] = Bits(bits_);
    indices[lane_id()] = entry_ == kNoCandidate ? -1 : i64(index_of(entry_));
  }

  // Adds the reader's tile to T. Tiles come in the order of their tokens. All 32 lanes call it.
  template <class READER>
  __device__ __forceinline__ void take(const READER& x, u32 first_token) {
    // The greatest key of the lane's elements. An element whose key equals the least key of T ranks behind T's entry,
    // because its token comes later.
    u32 lane_key = order_key(x.lane_max());
    const u32 lanes = __ballot_sync(kAllLanes, lane_key > key_of(threshold_));
    if (lanes == 0) return;
    // k lanes have an element whose key is at least `bound`.
    const u32 bound = __popc(lanes) > k_ ? nth_greatest(lane_key, k_) : kNoKey;
    // The lane with the greatest element comes first. After it, the elements of other lanes seldom pass.
#pragma unroll 1
    while (true) {
      const u32 greatest = warp_max(lane_key);
      if (greatest == kNoKey || greatest < max(bound, key_of(threshold_))) return;
      const u32 lane = __ffs(__ballot_sync(kAllLanes, lane_key == greatest)) - 1;
      if (lane_id() == lane) lane_key = kNoKey;
      take_lane(x, lane, bound, first_token);
    }
  }

 private:
  // Adds one lane's elements to T. Each lane looks at one of them.
  template <class READER>
  __device__ __forceinline__ void take_lane(const READER& x, u32 lane, u32 bound, u32 first_token) {
    static_assert(READER::RowTile::kPerLane == kWarpSize, "one for each lane");
    constexpr u32 n = READER::kPerVector;
    const u32 index = x.tile().first + (lane_id() / n * kWarpSize + lane) * n + lane_id() % n;
    u64 candidate = kNoCandidate;
    u32 bits = 0;
    if (index < x.V()) {
      bits = x.bits_again(index);
      candidate = make_candidate(order_key(FORMAT::decode(Bits(bits))), first_token + index);
    }
    u32 hits = __ballot_sync(kAllLanes, candidate > threshold_ && key_of(candidate) >= bound);
#pragma unroll 1
    for (; hits != 0; hits &= hits - 1) {
      const u32 source = __ffs(hits) - 1;
      const u64 hit = __shfl_sync(kAllLanes, candidate, source);
      if (hit > threshold_) insert(hit, __shfl_sync(kAllLanes, bits, source));
    }
  }
  // All 32 lanes call it with the same entry.
  __device__ __forceinline__ void insert(u64 entry, u32 bits) {
    const u64 entry_before = __shfl_up_sync(kAllLanes, entry_, 1);
    const u32 bits_before = __shfl_up_sync(kAllLanes, bits_, 1);
    const u32 place = __popc(__ballot_sync(kAllLanes, entry_ > entry));
    if (lane_id() >= place) {
      entry_ = lane_id() == place ? entry : entry_before;
      bits_ = lane_id() == place ? bits : bits_before;
    }
    threshold_ = __shfl_sync(kAllLanes, entry_, k_ - 1);
  }

  u32 k_;
  u64 entry_;
  u32 bits_;
  u64 threshold_;  // the k-th entry: T takes what is greater
};

// Counts a row's tokens that rank before a target.
template <class READER>
class RankCount {
 public:
  // target: a token counted from the first token of the piece; it may lie outside of the piece. logit: the target's
  // logit.
  __device__ __forceinline__ RankCount(i64 target, u32 tokens, float logit)
      : target_(target < 0        ? -1
                : target < tokens ? int(target)
                                  : int(tokens)),
        logit_(logit),
        count_(0) {}

  __device__ __forceinline__ void take(const READER& x) {
    constexpr u32 n = READER::kPerVector;
    const int first = int(x.tile().first);
    // Of tokens with equal logits the first one ranks first. Elements past the end of the row are -inf, which is
    // greater than no logit.
    const bool wins_ties = first + int(READER::RowTile::kElements) <= target_;
    const bool is_mixed = !wins_ties && first < target_;
#pragma unroll
    for (u32 u = 0; u < READER::kVectors; ++u)
#pragma unroll
      for (u32 e = 0; e < n; ++e) {
        const float y = x.tile().logit(u, e);
        const bool wins = is_mixed ? int(x.tile().index(u, e)) < target_ : wins_ties;
        count_ += y > logit_ || (wins && y == logit_);
      }
  }
  // All 32 lanes call it.
  __device__ __forceinline__ u32 sum() const { return warp_sum(count_); }

 private:
  int target_;
  float logit_;
  u32 count_;
};

// How a warp reads its row: like a warp of softmax_topk.cu that owns a row.
template <class FORMAT>
struct PieceReader {
  static constexpr Tuning kTuning =
      tuned(tuning::kTopk, 1, kTileByTile, 8 * sizeof(typename FORMAT::Bits), false, true);
  static constexpr u32 kVectors = kWarpSize / FORMAT::kPerVector;
  using Type = TileReader<FORMAT, kVectors, true, kNoMask, kTuning.ahead, kTuning.in_place>;
};

// Grid: (rows / 4). Dynamic shared memory: each warp's kWarpVectors.
template <class FORMAT, bool COUNTS_RANKS>
__global__ void __launch_bounds__(kRowsPerBlock* kWarpSize, PieceReader<FORMAT>::kTuning.resident_warps / kRowsPerBlock)
    accumulate_piece_kernel(const __grid_constant__ Piece piece) {
  using Reader = typename PieceReader<FORMAT>::Type;
  using Stream = typename Reader::Stream;
  using Bits = typename FORMAT::Bits;
  extern __shared__ __align__(128) Vector tile_slots[];

  const u32 warp = threadIdx.x / kWarpSize;
  const u32 row = blockIdx.x * kRowsPerBlock + warp;
  if (row >= piece.rows) return;
  Reader reader(static_cast<const Bits*>(piece.logits) + row * piece.row_stride, piece.tokens,
                tile_slots + warp * Stream::kWarpVectors);
  const u32 tiles = reader.tiles();
  reader.start_early(0, true);
  reader.start(0, true, 1, tiles > 1);

  Bits* const values = static_cast<Bits*>(piece.values) + i64(row) * piece.k;
  i64* const indices = piece.indices + i64(row) * piece.k;
  RunningBest<FORMAT> best(piece.k);
  Normalizer state;
  if (!piece.is_first) {
    best.load(values, indices);
    // Lane 0 has the sum so far; every lane has m.
    state = {piece.state[row], lane_id() == 0 ? piece.state[piece.rows + row] : 0.0f};
  }
  PartFolder<Reader> folder;
  folder.set_scale(piece.numbers.temperature_of(row).scale());
  folder.begin_part(state);
  // Where the piece has the target, its logit there counts.
  const i64* const targets = piece.targets + i64(row) * piece.num_targets;
  Bits* const target_logits = static_cast<Bits*>(piece.target_logits) + i64(row) * piece.num_targets;
  i64 target = 0;
  float target_logit = 0.0f;
  if constexpr (COUNTS_RANKS) {
    target = __ldg(targets) - piece.first_token;
    const bool is_here = target >= 0 && target < piece.tokens;
    target_logit = FORMAT::decode(is_here ? reader.raw_logit(u32(target)) : target_logits[0]);
  }
  RankCount<Reader> rank(target, piece.tokens, target_logit);
#pragma unroll 1
  for (u32 tile = 0; tile < tiles; ++tile) {
    reader.read(tile, tile + 1, tile + 1 < tiles);
    best.take(reader, piece.first_token);
    folder.fold(reader);
    if constexpr (COUNTS_RANKS) rank.take(reader);
    if constexpr (Stream::kInBackground) {
      const u32 ahead = tile + Stream::kAhead;
      reader.request(ahead, ahead < tiles);
    }
  }

  const Normalizer sum = folder.end_part();
  best.store(values, indices);
  // Wait until every lane has read m and the target's logit, which are now overwritten.
  __syncwarp();
  for (u32 i = lane_id(); i < piece.num_targets; i += kWarpSize) {
    const i64 place = __ldg(targets + i) - piece.first_token;
    if (place >= 0 && place < piece.tokens) target_logits[i] = reader.raw_logit(u32(place));
  }
  u32 before = 0;
  if constexpr (COUNTS_RANKS) before = rank.sum();
  if (lane_id() == 0) {
    if constexpr (COUNTS_RANKS) piece.target_ranks[row] += before;
    piece.state[row] = sum.m;
    piece.state[piece.rows + row] = sum.d;
  }
}

}  // namespace pieces
}  // namespace fused_topk
