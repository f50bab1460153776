// SPDX-License-Identifier: Apache-2.0
// Counter-based random numbers, each a function of its key and its counters alone: Philox4x32-10 (Salmon, Moraes, Dror &
// Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011). Shared by GPU and CPU; fused_topk/backends/philox.py
// computes the same bits with torch operations.
#pragma once

#include "../algebra/order.h"

namespace fused_topk {

struct RandomWords {
  u32 w[4];
};

FUSED_TOPK_FN RandomWords philox(u64 key, u64 counter, u32 sample, u32 stream) {
  u32 c0 = u32(counter), c1 = u32(counter >> 32), c2 = sample, c3 = stream;
  u32 k0 = u32(key), k1 = u32(key >> 32);
  for (u32 round = 0; round < 10; ++round) {
    const u64 a = u64(c0) * 0xD2511F53u, b = u64(c2) * 0xCD9E8D57u;
    c0 = u32(b >> 32) ^ c1 ^ k0;
    c1 = u32(b);
    c2 = u32(a >> 32) ^ c3 ^ k1;
    c3 = u32(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// (floor(w / 2^12) + 1/2) / 2^52, where w is the first two words as one 64-bit number. The result is from 2^-53 to
// 1 - 2^-53, never 0 and never 1.
FUSED_TOPK_FN double uniform_number(u64 seed, u64 counter, u32 sample, u32 stream) {
  const RandomWords words = philox(seed, counter, sample, stream);
  const u64 bits = (u64(words.w[1]) << 32 | words.w[0]) >> 12;
  return (double(bits) + 0.5) * 0x1p-52;
}

}  // namespace fused_topk
