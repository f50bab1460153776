// SPDX-License-Identifier: Apache-2.0
// Reads a row of logits: a tile of 32 lanes x VECTORS x 16 bytes at a time, at any start address.
//
// An element's lane depends on its index alone, never on its address. So a row has the same sum, bit for bit, at any
// address. Elements past the end and hidden tokens read as -inf. Assumes that the row's elements are adjacent and
// aligned to their own size.
#pragma once

#include "format.cuh"

namespace fused_topk {

__device__ __forceinline__ Vector load_16_bytes(const void* address) {
  const uint4 v = __ldg(static_cast<const uint4*>(address));
  return {{v.x, v.y, v.z, v.w}};
}

// Bytes [shift, shift + 16) of two adjacent 16-byte vectors. `shift` is below 16 and uniform in the warp.
__device__ __forceinline__ Vector straddle(const Vector& low, const Vector& high, u32 shift) {
  u32 w[8] = {low.words[0],  low.words[1],  low.words[2],  low.words[3],
              high.words[0], high.words[1], high.words[2], high.words[3]};
#pragma unroll
  for (u32 i = 0; i < 7; ++i) w[i] = (shift & 4) ? w[i + 1] : w[i];
#pragma unroll
  for (u32 i = 0; i < 5; ++i) w[i] = (shift & 8) ? w[i + 2] : w[i];
  Vector out;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) out.words[i] = __funnelshift_r(w[i], w[i + 1], (shift & 3) * 8);
  return out;
}

// The same of two vectors in shared memory, for a shift that the compiler knows.
template <u32 SHIFT>
__device__ __forceinline__ Vector straddle(const Vector* low) {
  static_assert(SHIFT < 16);
  if constexpr (SHIFT == 0) return *low;
  const Vector a = low[0], b = low[1];
  const u32 w[8] = {a.words[0], a.words[1], a.words[2], a.words[3], b.words[0], b.words[1], b.words[2], b.words[3]};
  Vector out;
#pragma unroll
  for (u32 i = 0; i < 4; ++i)
    out.words[i] =
        SHIFT % 4 == 0 ? w[i + SHIFT / 4] : __funnelshift_r(w[i + SHIFT / 4], w[i + SHIFT / 4 + 1], SHIFT % 4 * 8);
  return out;
}

// One tile of a row. Each lane has VECTORS vectors: element e of vector u is token first + (u * 32 + lane) * n + e,
// for n elements in 16 bytes. The vectors are in registers. IN_PLACE: they stay in shared memory and are read from there at each use.
template <class FORMAT, u32 VECTORS, bool IN_PLACE = false>
struct Tile {
  static constexpr u32 kPerVector = FORMAT::kPerVector;
  static constexpr u32 kPerLane = VECTORS * kPerVector;
  static constexpr u32 kElements = kPerLane * kWarpSize;
  static constexpr u32 kLog2Elements = kElements == 1024 ? 10 : 8;
  static_assert(kElements == 1u << kLog2Elements, "a power of two");
  static_assert(kPerLane <= 32, "one bit of a word for each of a lane's elements");

  Vector vectors[VECTORS];
  const Vector* place;  // IN_PLACE: the lane's first vector
  u32 first;

  __device__ __forceinline__ Vector vector(u32 u) const { return IN_PLACE ? place[u * kWarpSize] : vectors[u]; }
  __device__ __forceinline__ u32 index(u32 u, u32 e) const {
    return first + (u * kWarpSize + lane_id()) * kPerVector + e;
  }
  // The offset, from the tile's first token, of the element of bit u * n + e: element e of vector u.
  static __device__ __forceinline__ u32 offset(u32 bit) {
    return (bit / kPerVector * kWarpSize + lane_id()) * kPerVector + bit % kPerVector;
  }
  __device__ __forceinline__ float logit(u32 u, u32 e) const { return FORMAT::decode(vector(u).words, e); }
  // A bit for each of the lane's elements: it lies within the row. `first`: the tile's first token.
  static __device__ __forceinline__ u32 is_element(u32 first, u32 V) {
    if (V - first >= kElements) return ~0u;
    u32 result = 0;
#pragma unroll
    for (u32 u = 0; u < VECTORS; ++u) {
      const u32 token = first + offset(u * kPerVector);
      const u32 count = token < V ? min(V - token, kPerVector) : 0;
      result |= ((1u << count) - 1) << (u * kPerVector);
    }
    return result;
  }
  // The greatest logit of a vector, NaN if any is NaN.
  __device__ __forceinline__ float maximum(u32 u) const { return maximum(vector(u)); }
  static __device__ __forceinline__ float maximum(const Vector& vector) {
    const u32(&words)[4] = vector.words;
    if constexpr (FORMAT::kHasMaxPairs) {
      const u32 pair[4] = {
          FORMAT::max_pairs(FORMAT::max_pairs(words[0], words[1]), FORMAT::max_pairs(words[2], words[3]))};
      return max_nan(FORMAT::decode(pair, 0), FORMAT::decode(pair, 1));
    } else {
      float greatest = FORMAT::decode(words, 0);
#pragma unroll
      for (u32 e = 1; e < kPerVector; ++e) greatest = max_nan(greatest, FORMAT::decode(words, e));
      return greatest;
    }
  }

  // Makes the compiler read or decode the logits again. Keeping the decoded ones would cost registers.
  __device__ __forceinline__ void forget_decoded() {
    if constexpr (IN_PLACE) {
      keep_memory_opaque();
    } else {
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u)
#pragma unroll
        for (u32 w = 0; w < 4; ++w) keep_opaque(vectors[u].words[w]);
    }
  }
};

// The tiles of one row, as one warp requests and takes them. AHEAD is the number of requests before the first take:
//   2: requested tiles travel to the warp's two slots of shared memory, if the hardware copies in the background
//   1: the requested tile travels to registers
//   0: no requests; take() issues all loads of a tile before it uses the first
// IN_PLACE: requested tiles travel to AHEAD slots. A tile stays in its slot while the warp works on it: no registers.
template <class FORMAT, u32 VECTORS, bool ALIGNED, u32 AHEAD, bool IN_PLACE = false>
class TileStream {
 public:
  using Bits = typename FORMAT::Bits;
  static constexpr bool kInBackground = kHasAsyncCopy && (AHEAD == 2 || IN_PLACE);
  static constexpr bool kInPlace = kInBackground && IN_PLACE;
  static constexpr u32 kAhead = !kInBackground && (AHEAD == 2 || IN_PLACE) ? 0 : AHEAD;
  static constexpr bool kToRegisters = !kInBackground && kAhead == 1;
  using RowTile = Tile<FORMAT, VECTORS, kInPlace>;
  static_assert(!IN_PLACE || ALIGNED, "what straddles two vectors is put together in registers");
  // An unaligned row's vector straddles two vectors of memory.
  static constexpr u32 kSlotVectors = kWarpSize * VECTORS + (ALIGNED ? 0 : 1);
  // The distance of two slots. Copies to a multiple of 128 bytes are the quickest.
  static constexpr u32 kSlotStride = kWarpSize * VECTORS + (ALIGNED ? 0 : 8);
  // The vectors of shared memory that each warp needs.
  static constexpr u32 kWarpVectors = kInBackground ? kAhead * kSlotStride : 0;

  // row: [V]; slots: [kWarpVectors], the warp's own
  __device__ __forceinline__ TileStream(const Bits* row, u32 V, Vector* slots)
      : row_(row),
        V_(V),
        before_(ALIGNED ? 0 : u32(reinterpret_cast<u64>(row) % 16 / sizeof(Bits))),
        slots_(slots),
        slot_(0) {}

  __device__ __forceinline__ Bits raw_logit(u32 index) const { return __ldg(row_ + index); }

  // The address of token `first`. In an unaligned row, of the token `before_` tokens earlier: a multiple of 16 bytes.
  __device__ __forceinline__ const char* address(u32 first) const {
    return reinterpret_cast<const char*>(row_ - before_) + u64(first) * sizeof(Bits);
  }
  // The vector of tokens [first, first + kPerVector). `first` is a multiple of kPerVector.
  __device__ __forceinline__ Vector load(u32 first) const {
    if constexpr (ALIGNED) return is_whole(first) ? load_16_bytes(address(first)) : load_edge(first);
    // A straddling vector lies within the row if both vectors of memory do.
    if (!is_whole(first) || !is_whole(first + FORMAT::kPerVector)) return load_edge(first);
    return straddle(load_16_bytes(address(first)), load_16_bytes(address(first) + 16), before_ * sizeof(Bits));
  }

  // Starts to fetch a tile. All 32 lanes call it: at most kAhead times before the first take(), and once after each.
  // Copies overwrite a slot: the warp no longer needs the tile it took last.
  __device__ __forceinline__ void request(u32 tile) {
    if constexpr (kToRegisters) load_tile(tile, next_);
    if constexpr (kInBackground) {
      const char* const source = address(tile * RowTile::kElements + lane_id() * FORMAT::kPerVector);
      Vector* const slot = slots_ + slot_ + lane_id();
      // Waits until every lane is done with the slot.
      __syncwarp();
      if (is_inner(tile)) {
        // The logits are read once, so their lines leave the L2 cache first.
        const CachePolicy policy(true);
#pragma unroll
        for (u32 u = 0; u < VECTORS; ++u) copy_async(slot + u * kWarpSize, source + u * kWarpSize * 16, policy);
        if (!ALIGNED && lane_id() == 0) copy_async(slot + VECTORS * kWarpSize, source + VECTORS * kWarpSize * 16);
      } else if constexpr (kInPlace) {
        const u32 first = tile * RowTile::kElements + lane_id() * FORMAT::kPerVector;
#pragma unroll
        for (u32 u = 0; u < VECTORS; ++u) {
          if (is_whole(first + u * kWarpSize * FORMAT::kPerVector)) {
            copy_async(slot + u * kWarpSize, source + u * kWarpSize * 16);
          } else {
            slot[u * kWarpSize] = all_negative_infinity<FORMAT>();
          }
        }
        load_rest(first, [&](u32 u, const Vector& end) { slot[u * kWarpSize] = end; });
      } else {
#pragma unroll 1
        for (u32 i = lane_id(); i < kSlotVectors; i += kWarpSize) {
          const u32 first = tile * RowTile::kElements + i * FORMAT::kPerVector;
          if (is_whole(first)) {
            copy_async(slots_ + slot_ + i, address(first));
          } else if (is_outside(first)) {
            slots_[slot_ + i] = all_negative_infinity<FORMAT>();
          }
        }
        // After the copies, which need not wait for these loads.
        store_ends(tile);
      }
      commit_copies();
      to_next_slot();
    }
  }
  // Frees the slot of the tile taken last. request() does so too; call this one if no tile is left to request.
  __device__ __forceinline__ void to_next_slot() {
    if (kAhead == 2) slot_ = kSlotStride - slot_;
  }

  // Takes the oldest requested tile. is_last: no other tile is in flight.
  __device__ __forceinline__ void take(RowTile& tile, u32 number, bool is_last) const {
    tile.first = number * RowTile::kElements;
    if constexpr (kInBackground) {
      if (is_last || kAhead == 1) {
        wait_copies<0>();
      } else {
        wait_copies<1>();
      }
      // Waits for the other lanes' copies too.
      __syncwarp();
      Vector* const own = slots_ + slot_ + lane_id();
      if constexpr (kInPlace) {
        tile.place = own;
      } else {
        with_shift([&](auto shift) {
#pragma unroll
          for (u32 u = 0; u < VECTORS; ++u) tile.vectors[u] = straddle<shift.value>(own + u * kWarpSize);
        });
      }
    } else if constexpr (kToRegisters) {
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u) tile.vectors[u] = next_[u];
    } else {
      load_tile(number, tile.vectors);
    }
  }

  // Loads any tile now, without a request.
  __device__ __forceinline__ void load(RowTile& tile, u32 number) const {
    tile.first = number * RowTile::kElements;
    load_tile(number, tile.vectors);
  }

  // kInBackground: element `number` of a lane's elements in the current tile. Element e of vector u is number u * n + e.
  __device__ __forceinline__ Bits element_of_lane(u32 lane, u32 number) const {
    constexpr u32 n = FORMAT::kPerVector;
    return slot_elements()[(number / n * kWarpSize + lane) * n + number % n];
  }
  // Of the tile taken last: vector u of this lane, and the logit of token `index`.
  __device__ __forceinline__ Vector vector_again(const RowTile& tile, u32 u) const {
    return kInBackground ? vector_of_slot(u) : tile.vectors[u];
  }
  __device__ __forceinline__ Bits logit_again(u32 index, const RowTile& tile) const {
    if constexpr (!kInBackground) return raw_logit(index);
    return slot_elements()[index - tile.first];
  }

 private:
  template <u32 VALUE>
  struct Constant {
    static constexpr u32 value = VALUE;
  };

  // Calls use(Constant) with the row's distance in bytes from a multiple of 16. The compiler then knows which words of two
  // vectors make one.
  template <u32 LEAST = 0, u32 COUNT = ALIGNED ? 1 : FORMAT::kPerVector, class USE>
  __device__ __forceinline__ void with_shift(USE use) const {
    if constexpr (COUNT == 1) {
      use(Constant<LEAST * u32(sizeof(Bits))>());
    } else if (before_ < LEAST + COUNT / 2) {
      with_shift<LEAST, COUNT / 2>(use);
    } else {
      with_shift<LEAST + COUNT / 2, COUNT / 2>(use);
    }
  }

  // The elements of the tile taken last, from its first token on.
  __device__ __forceinline__ const Bits* slot_elements() const {
    return reinterpret_cast<const Bits*>(slots_ + slot_) + before_;
  }

  // Whether no element of a vector lies within the row. `first` counts from `address`, so it includes `before_`.
  __device__ __forceinline__ bool is_outside(u32 first) const { return first >= V_ + before_; }
  // Whether a vector lies within the row.
  __device__ __forceinline__ bool is_whole(u32 first) const {
    return first >= before_ && first < V_ + before_ && V_ + before_ - first >= FORMAT::kPerVector;
  }
  __device__ __forceinline__ bool is_inner(u32 tile) const {
    const u32 covered = kSlotVectors * FORMAT::kPerVector;
    return (ALIGNED || tile > 0) && tile * RowTile::kElements + covered <= V_ + before_;
  }

  __device__ __forceinline__ Vector vector_of_slot(u32 u) const {
    const Vector* const vector = slots_ + slot_ + u * kWarpSize + lane_id();
    if constexpr (ALIGNED) return vector[0];
    return straddle(vector[0], vector[1], before_ * sizeof(Bits));
  }

  __device__ __forceinline__ void load_tile(u32 tile, Vector (&vectors)[VECTORS]) const {
    const u32 own = tile * RowTile::kElements + lane_id() * FORMAT::kPerVector;
    const char* const source = address(own);
    if (is_inner(tile)) {
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u) {
        vectors[u] = load_16_bytes(source + u * kWarpSize * 16);
        if constexpr (!ALIGNED)
          vectors[u] = straddle(vectors[u], load_16_bytes(source + u * kWarpSize * 16 + 16), before_ * sizeof(Bits));
      }
    } else if constexpr (ALIGNED) {
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u) {
        vectors[u] = all_negative_infinity<FORMAT>();
        if (is_whole(own + u * kWarpSize * FORMAT::kPerVector)) vectors[u] = load_16_bytes(source + u * kWarpSize * 16);
      }
      load_rest(own, [&](u32 u, const Vector& end) { vectors[u] = end; });
    } else {
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u) vectors[u] = load_edge(own + u * kWarpSize * FORMAT::kPerVector);
    }
  }

  // An aligned row may end within a vector. Calls store(u, vector) in the lane that has this vector. `own`: the first
  // token of the lane's first vector.
  template <class STORE>
  __device__ __forceinline__ void load_rest(u32 own, STORE store) const {
    const u32 rest = V_ % FORMAT::kPerVector;
    if (rest == 0) return;
    const Vector end = load_edge(V_ - rest);
#pragma unroll
    for (u32 u = 0; u < VECTORS; ++u)
      if (own + u * kWarpSize * FORMAT::kPerVector == V_ - rest) store(u, end);
  }
  // Stores in the tile's slot the row's first vector and its last one, where they lie partly outside the row.
  __device__ __forceinline__ void store_ends(u32 tile) const {
    constexpr u32 n = FORMAT::kPerVector;
    const u32 end = V_ + before_;
    const bool is_end = lane_id() == 0 ? before_ != 0 : lane_id() == 1 && end % n != 0;
    const u32 number = lane_id() == 0 ? 0 : end / n;
    const u32 i = number - tile * (RowTile::kElements / n);
    if (is_end && i < kSlotVectors) slots_[slot_ + i] = load_edge(number * n - before_);
  }
  // Loads a vector element by element, with -inf outside the row. `first` may be negative, modulo 2^32.
  __device__ __forceinline__ Vector load_edge(u32 first) const {
    return vector_of<FORMAT>([&](u32 e) {
      const u32 token = first + e;
      return token < V_ ? __ldg(row_ + token) : FORMAT::kNegativeInfinity;
    });
  }

  const Bits* row_;  // [V]
  u32 V_;
  u32 before_;  // elements from the 16-byte boundary before the row to the row
  Vector* slots_;
  u32 slot_;              // the slot of the tile that take() gives next
  Vector next_[VECTORS];  // kToRegisters: the requested tile
};

}  // namespace fused_topk
