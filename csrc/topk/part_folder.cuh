// SPDX-License-Identifier: Apache-2.0
// The folder of a scan: tiles into the (m, d) of a part. In the loop of Algorithm 4 it is:
//
//     m' = max(m, tile)     d' = d e^((m - m')/T) + sum e^((x - m')/T)
//
// d is rescaled once a tile, never element by element.
#pragma once

#include "tile_reader.cuh"

namespace fused_topk {

// FORGETS_MASK: makes the compiler apply the mask again. Keeping the masked elements would take too many registers.
template <class READER, bool FORGETS_MASK = false>
class PartFolder {
  static constexpr u32 VECTORS = READER::kVectors;
  static constexpr u32 kPerVector = READER::kPerVector;

 public:
  __device__ __forceinline__ void set_scale(Scale of_row) { scale_ = of_row; }
  __device__ __forceinline__ Scale scale() const { return scale_; }

  // lane_state: what the part begins with; m is the same in every lane, and d the lane's share
  __device__ __forceinline__ void begin_part(Normalizer lane_state = {}) { part_ = lane_state; }

  // Folds the reader's tile into the part. m is the same in every lane of the warp, so the lanes' sums can be added without
  // exponentials.
  __device__ __forceinline__ void fold(READER& x) {
    float tile_max = x.lane_max();
    if constexpr (READER::kMask == kMaskChoice) {
      tile_max = -FUSED_TOPK_INFINITY;
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u) tile_max = max_nan(tile_max, x.tile().maximum(u));
    }
    const float m = max_nan(part_.m, warp_max(tile_max));
    const float base = reference_point(m);
    const OffsetScale relative(scale_, base);
    x.forget_decoded();
    if constexpr (FORGETS_MASK) x.forget_allowed();
    // Four independent chains of additions.
    float d[4];
    if (relative.is_correctable()) {
#pragma unroll
      for (u32 u = 0; u < VECTORS; ++u)
#pragma unroll
        for (u32 e = 0; e < kPerVector; ++e) {
          const float summand = relative.weight(x.normalized(u, e));
          d[e % 4] = u == 0 && e < 4 ? summand : d[e % 4] + summand;
        }
      d[0] = ((d[0] + d[1]) + (d[2] + d[3])) * relative.regained();
    } else {
      // This is rare: the code is short rather than quick.
      d[0] = 0.0f;
#pragma unroll 1
      for (u32 bit = 0; bit < READER::RowTile::kPerLane; ++bit)
        if (const u32 index = x.tile().index(bit / kPerVector, bit % kPerVector); index < x.V())
          d[0] += scale_.weight(x.normalized_again(index, bit), base);
    }
    part_ = {m, part_.d * scale_.weight(part_.m, base) + d[0]};
    x.forget_decoded();
  }

  // m: of the part; d: the lane's share of it.
  __device__ __forceinline__ Normalizer lane_state() const { return part_; }
  // (m, d) of the part, the same in every lane. All 32 lanes call it.
  __device__ __forceinline__ Normalizer end_part() const { return {part_.m, warp_sum(part_.d)}; }

 private:
  Scale scale_;
  Normalizer part_;
};

}  // namespace fused_topk
