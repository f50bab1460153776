// SPDX-License-Identifier: Apache-2.0
// The best k of what a group has seen: a buffer of candidates in shared memory and a threshold that all of it passed.
//
// Algorithm 4 of the paper keeps a sorted list of k in each thread and inserts into it element by element. Here one list
// serves the whole group, unsorted, and almost every element fails one comparison with a shared threshold:
//   - the threshold is a proven lower bound of the k-th best (raise), so a candidate at or below it can be dropped;
//   - what passes is appended (offer); when the buffer fills up, it is cut back to the best k (trim), and the k-th
//     becomes the new threshold.
// The answer is exact whatever the bound: a loose one costs trims, never a candidate.
// Comes after order.h, group.cuh, row.cuh.
#pragma once

#include "group.cuh"
#include "row.cuh"

namespace fused_topk {

// A lower bound of the `wanted`-th largest of 32 x N keys (one warp's): at least `wanted` of them are >= the result.
// Bisects from the highest bit in which the keys differ, until the bound is exact or kBoundBits deep: one a little too
// low admits few more candidates. All 32 lanes call it; every lane has the result.
template <u32 N>
__device__ __forceinline__ u32 warp_lower_bound(const u32 (&keys)[N], u32 wanted) {
  constexpr u32 kBoundBits = 16;
  u32 least = keys[0];
  u32 greatest = keys[0];
#pragma unroll
  for (u32 i = 1; i < N; ++i) {
    least = min(least, keys[i]);
    greatest = max(greatest, keys[i]);
  }
  least = warp_min(least);
  greatest = warp_max(greatest);
  if (least == greatest) return least;
  // All keys share the bits above this one; with none of the others set, the bound is at most the least key.
  u32 bit = 1u << (31 - __clz(least ^ greatest));
  u32 bound = greatest & ~(2 * bit - 1);
#pragma unroll 1
  for (u32 step = 0; step < kBoundBits && bit != 0; ++step, bit >>= 1) {
    u32 count = 0;
#pragma unroll
    for (u32 i = 0; i < N; ++i) count += __popc(__ballot_sync(kAllLanes, keys[i] >= (bound | bit)));
    if (count >= wanted) bound |= bit;
    if (count == wanted) break;
  }
  return bound;
}

// The part of a Candidates object that lives in shared memory. A group that is one warp uses none of it.
template <u32 WARPS>
struct CandidatesShared {
  u32 count;          // slots reserved so far; may run past the capacity
  u32 limit;          // the first reservation that did not fit: all slots below min(count, limit) are filled
  u32 bounds[WARPS];  // each warp's bound in raise()
};

template <class GROUP>
class Candidates {
 public:
  using Shared = CandidatesShared<GROUP::kWarps>;

  // slots: [capacity], shared memory; capacity is a power of two, k < trim_at <= capacity - 32.
  __device__ __forceinline__ Candidates(u64* slots, u32 capacity, u32 trim_at, Shared& shared)
      : slots_(slots), capacity_(capacity), trim_at_(trim_at), shared_(shared) {}

  // Forgets everything; from now on the best `k` are kept. All threads of the group call it, after a barrier that
  // follows the last use; another barrier must follow before the first offer.
  __device__ __forceinline__ void restart(u32 k) {
    k_ = k;
    threshold_ = kNoCandidate;
    last_slot_ = 0;
    if constexpr (!GROUP::kIsWarp)
      if (GROUP::thread() == 0) reset(0);
  }

  // Only a candidate greater than this can be among the best k. The same in every thread of the group.
  __device__ __forceinline__ u64 threshold() const { return threshold_; }
  // After trim(): the best k, best first.
  __device__ __forceinline__ const u64* sorted() const { return slots_; }

  // Appends one candidate for each lane that has one (0 or below the threshold: none). All lanes of a warp call it.
  // False: it did not fit, nothing was written, call again after a trim.
  __device__ __forceinline__ bool offer(u64 candidate) {
    const bool is_wanted = candidate > threshold_;
    const u32 lanes = __ballot_sync(kAllLanes, is_wanted);
    if (lanes == 0) return true;
    const u32 slot = reserve(__popc(lanes));
    if (slot == kNoSlot) return false;
    if (is_wanted) slots_[slot + __popc(lanes & ((1u << lane_id()) - 1))] = candidate;
    return true;
  }

  // Whether the buffer is full enough for a trim to pay. May differ between warps: decide with GROUP::any.
  __device__ __forceinline__ bool is_crowded() const { return last_slot_ >= trim_at_; }

  // Raises the threshold so that only keys >= bound pass.
  __device__ __forceinline__ void raise(u32 bound) { raise_candidate(u64(bound) << 32); }

  // Raises the threshold so that only candidates >= least pass.
  __device__ __forceinline__ void raise_candidate(u64 least) {
    if (least > kNoCandidate) threshold_ = max(threshold_, least - 1);
  }

  // raise() with each warp's own bound, of which the smallest counts: if each of the warps that took part holds
  // ceil(k / warps) keys >= its bound, then k keys are >= the smallest. A warp that took no part passes ~0.
  // All threads call it; contains a barrier, and needs one before it is called again.
  __device__ __forceinline__ void raise_together(u32 bound) {
    if constexpr (GROUP::kIsWarp) {
      raise(bound);
    } else {
      if (lane_id() == 0) shared_.bounds[GROUP::warp()] = bound;
      GROUP::sync();
      raise(warp_min(shared_.bounds[lane_id() % GROUP::kWarps]));
    }
  }

  // Cuts the buffer back to the best k, sorted, best first, and makes the k-th the threshold. All threads call it, after
  // a barrier that follows the last offer; ends with a barrier. With k or fewer there is nothing to cut: they are only
  // sorted, and only if `must_sort`.
  __device__ __forceinline__ void trim(bool must_sort = false) {
    u32 count;
    if constexpr (GROUP::kIsWarp) {
      count = last_slot_;
    } else {
      count = min(shared_.count, shared_.limit);
      // Everyone must have read the count before it is reset below.
      GROUP::sync();
    }
    const u32 kept = min(count, k_);
    const bool is_sorting = must_sort || count > k_;
    if (is_sorting) {
      if (count <= min(GROUP::kThreads, kCountingMax)) {
        sort_by_counting<1>(count);
      } else if constexpr (GROUP::kIsWarp) {
        sort_by_counting<4>(count);
      } else {
        sort_by_exchanges(count);
      }
    }
    if constexpr (!GROUP::kIsWarp)
      if (GROUP::thread() == 0) reset(kept);
    GROUP::sync();
    last_slot_ = kept;
    if (is_sorting && kept == k_) threshold_ = max(threshold_, slots_[k_ - 1]);
  }

 private:
  static constexpr u32 kNoSlot = ~0u;
  // Sorting by counting compares all pairs: no barriers, but quadratic. A warp of its own has no more than 128 slots.
  static constexpr u32 kCountingMax = 256;

  __device__ __forceinline__ void reset(u32 count) {
    shared_.count = count;
    shared_.limit = capacity_;
  }

  // `amount` adjoining slots for the calling warp, or kNoSlot. All 32 lanes call it.
  __device__ __forceinline__ u32 reserve(u32 amount) {
    u32 slot;
    if constexpr (GROUP::kIsWarp) {
      slot = last_slot_;
      if (slot + amount > capacity_) return kNoSlot;
    } else {
      if (lane_id() == 0) {
        slot = atomicAdd(&shared_.count, amount);
        if (slot + amount > capacity_) {
          atomicMin(&shared_.limit, slot);
          slot = kNoSlot;
        }
      }
      slot = __shfl_sync(kAllLanes, slot, 0);
      if (slot == kNoSlot) {
        last_slot_ = capacity_;
        return kNoSlot;
      }
    }
    last_slot_ = slot + amount;
    return slot;
  }

  // A candidate's place is the number of candidates that rank before it.
  template <u32 OWN>
  __device__ __forceinline__ void sort_by_counting(u32 count) {
    u64 own[OWN];
    u32 place[OWN];
#pragma unroll
    for (u32 c = 0; c < OWN; ++c) {
      const u32 i = c * GROUP::kThreads + GROUP::thread();
      own[c] = i < count ? slots_[i] : kNoCandidate;
      place[c] = 0;
    }
#pragma unroll 4
    for (u32 j = 0; j < count; ++j) {
      const u64 other = slots_[j];
#pragma unroll
      for (u32 c = 0; c < OWN; ++c) place[c] += other > own[c];
    }
    // Everyone must have compared before the slots are overwritten.
    GROUP::sync();
#pragma unroll
    for (u32 c = 0; c < OWN; ++c) {
      const u32 i = c * GROUP::kThreads + GROUP::thread();
      if (i < count && place[c] < k_) slots_[place[c]] = own[c];
    }
  }

  // Bitonic sort, descending, of the next power of two of `count` slots (the capacity is one).
  __device__ __forceinline__ void sort_by_exchanges(u32 count) {
    const u32 size = 1u << (32 - __clz(count - 1));
    for (u32 i = count + GROUP::thread(); i < size; i += GROUP::kThreads) slots_[i] = kNoCandidate;
    GROUP::sync();
    for (u32 run = 2; run <= size; run *= 2) {
      for (u32 stride = run / 2; stride > 0; stride /= 2) {
        for (u32 pair = GROUP::thread(); pair < size / 2; pair += GROUP::kThreads) {
          const u32 i = 2 * pair - (pair & (stride - 1));
          const bool is_descending = (i & run) == 0;
          const u64 a = slots_[i];
          const u64 b = slots_[i + stride];
          if ((a < b) == is_descending) {
            slots_[i] = b;
            slots_[i + stride] = a;
          }
        }
        // Below a stride of 32 a warp exchanges within the 64 slots that are its own.
        if (stride > kWarpSize) {
          GROUP::sync();
        } else if (stride == 1 && run >= 2 * kWarpSize) {
          GROUP::sync();
        } else {
          __syncwarp();
        }
      }
    }
    GROUP::sync();
  }

  u64* slots_;
  u32 capacity_;
  u32 trim_at_;
  Shared& shared_;
  u32 k_;
  u64 threshold_;
  u32 last_slot_;  // one past the last slot that this warp knows to be taken
};

}  // namespace fused_topk
