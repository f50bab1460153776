// SPDX-License-Identifier: Apache-2.0
// The algebra of csrc/ behind a C interface, for tests/test_algebra.py, which compiles it and calls it through ctypes.
#include "../../csrc/algebra/order.h"

#include <cmath>

#include "../../csrc/algebra/moments.h"
#include "../../csrc/algebra/normalizer.h"

using namespace fused_topk;

extern "C" {

u32 algebra_order_key(u32 bits) { return order_key(bits); }
u32 algebra_bits_of_key(u32 key) { return bits_of_key(key); }
u64 algebra_make_candidate(u32 key, u32 index) { return make_candidate(key, index); }
u32 algebra_key_of(u64 candidate) { return key_of(candidate); }
u32 algebra_index_of(u64 candidate) { return index_of(candidate); }

// The named keys, in the order of their declaration.
void algebra_named_keys(u32* keys) {
  const u32 named[] = {kNanKey, kPositiveInfinityKey, kZeroKey, kNegativeInfinityKey, kNoKey};
  for (int i = 0; i < 5; ++i) keys[i] = named[i];
}

void algebra_identity(float* m, float* d) {
  const Normalizer identity;
  *m = identity.m;
  *d = identity.d;
}

void algebra_merge(float a_m, float a_d, float b_m, float b_d, float scale, float* m, float* d) {
  const Normalizer merged = merge({a_m, a_d}, {b_m, b_d}, scale, [](float x) { return std::exp2(x); });
  *m = merged.m;
  *d = merged.d;
}

// a, b, result: [3], m, d and s
void algebra_merge_moments(const float* a, const float* b, float scale, float* result) {
  const auto exp2 = [](float x) { return std::exp2(x); };
  const auto merged = merge_moments(Moments<float>{a[0], a[1], a[2]}, Moments<float>{b[0], b[1], b[2]}, scale, exp2);
  result[0] = merged.m;
  result[1] = merged.d;
  result[2] = merged.s;
}
}
