// SPDX-License-Identifier: Apache-2.0
// The PTX instructions of csrc/, one function each. translate.py makes a call of every instruction of an asm statement:
// `ex2.approx.ftz.f32 %0, %1;` becomes simt::ptx::ex2_approx_ftz_f32(operand 0, operand 1), results first.
#pragma once

#include "cuda.h"

namespace simt::ptx {

inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

// The hardware's result may be off by 2^-22; this one is rounded.
inline void ex2_approx_ftz_f32(float& y, float x) { y = flushed(std::exp2(flushed(x))); }

// Rounded too, where the hardware's may be off by an ulp.
inline void rcp_approx_ftz_f32(float& y, float x) { y = flushed(1.0f / flushed(x)); }
inline void rsqrt_approx_ftz_f32(float& y, float x) { y = flushed(float(1.0 / std::sqrt(double(flushed(x))))); }

// Every NaN that the hardware's arithmetic gives has the same bits.
inline void add_rn_f32(float& y, float a, float b) {
  y = a + b;
  if (y != y) y = __uint_as_float(0x7FFFFFFFu);
}

// Subtractions of more than a word. The borrow is a register of the hardware, so accesses to it are not instrumented.
#define SIMT_UNSEEN __attribute__((no_sanitize("thread"), noinline))
inline bool borrow = false;
SIMT_UNSEEN inline void sub_cc_u32(u32& y, u32 a, u32 b) {
  borrow = a < b;
  y = a - b;
}
SIMT_UNSEEN inline void subc_u32(u32& y, u32 a, u32 b) { y = a - b - borrow; }
SIMT_UNSEEN inline void subc_cc_u32(u32& y, u32 a, u32 b) {
  const bool before = borrow;
  borrow = a < b || (a == b && before);
  y = a - b - before;
}
#undef SIMT_UNSEEN

inline void max_NaN_f32(float& y, float a, float b) {
  y = a != a || b != b ? __uint_as_float(0x7FFFFFFFu) : a == b ? (std::signbit(a) ? b : a) : a > b ? a : b;
}

inline void cvt_f32_f16(float& y, u16 bits) {
  const u32 sign = u32(bits & 0x8000) << 16;
  const u32 exponent = bits >> 10 & 31;
  const u32 fraction = bits & 0x3FF;
  if (exponent == 0) {
    y = copysignf(float(fraction) * 0x1p-24f, __uint_as_float(sign | 0x3F800000u));
  } else {
    y = __uint_as_float(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13);
  }
}

// Both halves of a word.
template <class DECODE>
u32 max_nan_pair(u32 a, u32 b, DECODE decode, u16 nan) {
  auto larger = [&](u16 x, u16 y) -> u16 {
    const float of_x = decode(x), of_y = decode(y);
    if (of_x != of_x || of_y != of_y) return nan;
    return of_x == of_y ? x & y : of_x > of_y ? x : y;
  };
  return u32(larger(a >> 16, b >> 16)) << 16 | larger(a, b);
}
inline void max_NaN_bf16x2(u32& y, u32 a, u32 b) {
  y = max_nan_pair(a, b, [](u16 bits) { return __uint_as_float(u32(bits) << 16); }, 0x7FFF);
}
inline void max_NaN_f16x2(u32& y, u32 a, u32 b) {
  y = max_nan_pair(
      a, b,
      [](u16 bits) {
        float x;
        cvt_f32_f16(x, bits);
        return x;
      },
      0x7FFF);
}

// Bytes of the two words, a then b; with bit 3 of a selector, its sign in all bits.
inline void prmt_b32(u32& y, u32 a, u32 b, u32 selector) {
  const u64 bytes = u64(b) << 32 | a;
  y = 0;
  for (u32 i = 0; i < 4; ++i) {
    const u32 byte = bytes >> (selector >> 4 * i & 7) * 8 & 0xFF;
    y |= (selector >> 4 * i & 8 ? (byte & 0x80 ? 0xFF : 0) : byte) << 8 * i;
  }
}

// Rounded to nearest even.
inline u32 rounded_to_half(float x) {
  const u32 sign = __float_as_uint(x) >> 16 & 0x8000;
  const float magnitude = fabsf(x);
  if (x != x) return 0x7FFF;
  if (magnitude >= 65520.0f) return sign | 0x7C00;
  // Its last bit; below 2^-14 the steps grow no smaller.
  const float unit = magnitude < 0x1p-14f ? 0x1p-24f : std::ldexp(1.0f, std::ilogb(magnitude) - 10);
  const float rounded = std::nearbyint(magnitude / unit) * unit;
  if (rounded < 0x1p-14f) return sign | u32(rounded * 0x1p24f);
  return sign | ((__float_as_uint(rounded) >> 13) - (112 << 10));
}
inline u32 rounded_to_bfloat16(float x) {
  const u32 bits = __float_as_uint(x);
  return x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline void cvt_rn_f16_f32(u16& y, float x) { y = rounded_to_half(x); }
inline void cvt_rn_f16x2_f32(u32& y, float high, float low) { y = rounded_to_half(high) << 16 | rounded_to_half(low); }
inline void cvt_rn_bf16x2_f32(u32& y, float high, float low) {
  y = rounded_to_bfloat16(high) << 16 | rounded_to_bfloat16(low);
}
// The sum is rounded to float32 first. The kernels only compute a * 1 + 0, whose result that does not change.
inline void fma_rn_bf16x2(u32& y, u32 a, u32 b, u32 c) {
  auto half = [&](u32 shift) {
    auto of = [&](u32 word) { return __uint_as_float(word >> shift << 16); };
    return rounded_to_bfloat16(fmaf(of(a), of(b), of(c)));
  };
  y = half(16) << 16 | half(0);
}
inline void fma_rn_f16x2(u32& y, u32 a, u32 b, u32 c) {
  auto half = [&](u32 shift) {
    auto of = [&](u32 word) {
      float x;
      cvt_f32_f16(x, u16(word >> shift));
      return x;
    };
    return rounded_to_half(fmaf(of(a), of(b), of(c)));
  };
  y = half(16) << 16 | half(0);
}

// Products on tensor cores: rows g and g + 8, columns 2c and 2c + 1 of C [16, 8] += A [16, 16] B [16, 8] in lane 4g + c. The sum
// is rounded after each product, where the hardware's order and rounding are its own.
template <class DECODE>
void add_product(float& c0, float& c1, float& c2, float& c3, const u32 (&a)[4], const u32 (&b)[2], DECODE decode) {
  const int lane = simt_lane();
  float sums[4] = {c0, c1, c2, c3};
  for (int pair = 0; pair < 8; ++pair) {  // columns 2 pair and 2 pair + 1 of A
    const int quarter = pair % 4, later = pair / 4;
    u32 of_row[2], of_column[2];
    for (int i = 0; i < 2; ++i) {
      of_row[i] = __shfl_sync(~0u, a[2 * later + i], lane / 4 * 4 + quarter);
      of_column[i] = __shfl_sync(~0u, b[later], (2 * (lane % 4) + i) * 4 + quarter);
    }
    for (int i = 0; i < 4; ++i)
      for (int half = 0; half < 2; ++half)
        sums[i] += decode(u16(of_row[i / 2] >> 16 * half)) * decode(u16(of_column[i % 2] >> 16 * half));
  }
  c0 = sums[0], c1 = sums[1], c2 = sums[2], c3 = sums[3];
}
#define SIMT_PRODUCT(format, decode)                                                                                  \
  inline void mma_sync_aligned_m16n8k16_row_col_f32_##format##_##format##_f32(                                        \
      float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float c0, float c1, \
      float c2, float c3) {                                                                                           \
    d0 = c0, d1 = c1, d2 = c2, d3 = c3;                                                                               \
    add_product(d0, d1, d2, d3, {a0, a1, a2, a3}, {b0, b1}, decode);                                                  \
  }
inline float of_bfloat16(u16 bits) { return __uint_as_float(u32(bits) << 16); }
inline float of_half(u16 bits) {
  float x;
  cvt_f32_f16(x, bits);
  return x;
}
SIMT_PRODUCT(bf16, of_bfloat16)
SIMT_PRODUCT(f16, of_half)
#undef SIMT_PRODUCT

// Four matrices of 8 x 8 numbers of 16 bits, transposed: lane l gives the address of row l % 8 of matrix l / 8.
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(u32& d0, u32& d1, u32& d2, u32& d3, u32 address) {
  const int lane = simt_lane();
  u32* const words[4] = {&d0, &d1, &d2, &d3};
  for (int matrix = 0; matrix < 4; ++matrix) {
    u32 halves[2];
    for (int i = 0; i < 2; ++i) {
      const u32 row = __shfl_sync(~0u, address, 8 * matrix + 2 * (lane % 4) + i);
      halves[i] = static_cast<const u16*>(simt::shared_pointer(row))[lane / 4];
    }
    *words[matrix] = halves[1] << 16 | halves[0];
  }
}

// Atomics. Those without an order are relaxed, as CUDA's functions are.
#define SIMT_ATOM(order, acquires, releases)                                             \
  inline void atom_##order##_gpu_global_inc_u32(u32& old, u32* word, u32 value) {        \
    simt::before_atomic(word, sizeof(u32), simt::Atomic::kExchange, acquires, releases); \
    old = simt_atomicInc(word, value);                                                   \
  }
SIMT_ATOM(acquire, true, false)
SIMT_ATOM(release, false, true)
SIMT_ATOM(acq_rel, true, true)
#undef SIMT_ATOM

inline void atom_shared_add_u32(u32& old, u32 address, u32 value) {
  old = atomicAdd(static_cast<u32*>(simt::shared_pointer(address)), value);
}

inline void atom_shared_exch_b32(u32& old, u32 address, u32 value) {
  old = atomicExch(static_cast<u32*>(simt::shared_pointer(address)), value);
}

inline void atom_shared_max_u64(u64& old, u32 address, u64 value) {
  old = atomicMax(static_cast<u64*>(simt::shared_pointer(address)), value);
}

// Loads and stores between blocks.
inline u32 load_between_blocks(const u32* word, bool acquires) {
  simt::before_atomic(word, sizeof(u32), simt::Atomic::kLoad, acquires, false);
  u32 value;
  simt::copy_unseen(&value, word, sizeof(u32));
  return value;
}
inline void ld_relaxed_gpu_global_u32(u32& value, const u32* word) { value = load_between_blocks(word, false); }
inline void ld_acquire_gpu_global_u32(u32& value, const u32* word) { value = load_between_blocks(word, true); }
inline void store_between_blocks(u32* word, u32 value, bool releases) {
  simt::before_atomic(word, sizeof(u32), simt::Atomic::kStore, false, releases);
  simt::copy_unseen(word, &value, sizeof(u32));
}
inline void st_relaxed_gpu_global_u32(u32* word, u32 value) { store_between_blocks(word, value, false); }
inline void st_release_gpu_global_u32(u32* word, u32 value) { store_between_blocks(word, value, true); }

// What stays in which cache changes no result.
inline void createpolicy_fractional_L2__evict_first_b64(u64& policy) { policy = 1; }
inline void createpolicy_fractional_L2__evict_normal_b64(u64& policy) { policy = 2; }
inline void ld_global_nc_L2__cache_hint_v4_u32(u32& x, u32& y, u32& z, u32& w, const void* from, u64) {
  const uint4 v = __ldg(static_cast<const uint4*>(from));
  x = v.x, y = v.y, z = v.z, w = v.w;
}

// Asynchronous copies.
inline void cp_async_cg_shared_global(u32 to, const void* from, u32 size) {
  simt::copy_later(simt::shared_pointer(to), from, size, size);
}
inline void cp_async_cg_shared_global(u32 to, const void* from, u32 size, u32 read) {
  simt::copy_later(simt::shared_pointer(to), from, size, read);
}
inline void cp_async_cg_shared_global_L2__cache_hint(u32 to, const void* from, u32 size, u64) {
  cp_async_cg_shared_global(to, from, size);
}
inline void cp_async_commit_group() { simt::commit_copies(); }
inline void cp_async_wait_group(u32 under_way) { simt::wait_for_copies(under_way); }

}  // namespace simt::ptx
