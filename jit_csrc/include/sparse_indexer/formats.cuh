// SPDX-License-Identifier: Apache-2.0
// Stored formats and the exact conversions between them, 16 elements at a time.
#pragma once

#include "sparse_indexer/cstdint.h"

namespace sparse_indexer {

// 2^e, for -149 <= e <= 127.
__device__ inline float exp2_of(int e) {
  return e >= -126 ? __int_as_float((e + 127) << 23) : __int_as_float(1 << (e + 149));
}

__device__ inline float quiet_nan() {
  return __int_as_float(0x7fc00000);
}

// float16 bits of a float, rounded to nearest even, and back.
__device__ inline uint32_t half_bits(float x) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
__device__ inline float float_of_half(uint32_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<uint16_t>(bits)));
  return x;
}

// bfloat16 bits of a float, rounded to nearest even; the instruction is there from sm_80 on only.
__device__ inline uint32_t bfloat16_bits(float x) {
  const uint32_t bits = __float_as_uint(x);
  return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff;
}

// Two e4m3 codes (bits 0-7 and 8-15) to two float16 that are 2^-8 times their value; NaN stays NaN.
__device__ inline uint32_t half2_of_e4m3(uint32_t codes) {
  const uint32_t spread = __byte_perm(codes, 0, 0x1404);  // into the upper byte of each half
  const uint32_t magnitudes = spread >> 1 & 0x3f803f80u;
  // The largest is NaN's: one more of its last bit is the bit that its exponent lacks.
  const uint32_t nan = (magnitudes + 0x00800080u) & 0x40004000u;
  return magnitudes | nan | (spread & 0x80008000u);
}

// Value of an e2m1 code: as float16 bits its exponent and mantissa read as 2^-14 times that.
__device__ inline float float_of_e2m1(uint32_t code) {
  return float_of_half((code & 7) << 9 | (code & 8) << 12) * 16384.0f;
}

// e4m3 codes of the e2m1 magnitudes 0, 0.5, 1, 1.5 (x) and 2, 3, 4, 6 (y) times 2^(6 - d), d >= 0.
// Exact for d <= 14; below that rounded to nearest even.
__device__ inline uint2 e4m3_of_e2m1_table(int d) {
  if (d <= 11) return make_uint2(0x6c686000u - d * 0x08080800u, 0x7c787470u - d * 0x08080808u);
  // In units of 2^-9, the spacing of the subnormals and of the first normals, where a code is its
  // value in units: 0.5 * 2^(6 - d) = 2^(14 - d).
  const int halves[8] = {0, 1, 2, 3, 4, 6, 8, 12};  // in units of the smallest magnitude
  uint32_t codes[2] = {0, 0};
#pragma unroll
  for (int i = 1; i < 8; ++i) {
    int code;
    if (d <= 14) {
      const int units = halves[i] << (14 - d);
      // Above 16 units the spacing doubles: 16 to 30 are 8 codes from 16 on, 32 to 60 the next 8.
      code = units < 16 ? units : units < 32 ? 16 + (units - 16) / 2 : 24 + (units - 32) / 4;
    } else {
      const int shift = d - 14 < 8 ? d - 14 : 8;
      const int down = halves[i] >> shift, rest = halves[i] & ((1 << shift) - 1),
                tie = 1 << (shift - 1);
      code = down + (rest > tie || (rest == tie && (down & 1)));
    }
    codes[i / 4] |= static_cast<uint32_t>(code) << (i % 4 * 8);
  }
  return make_uint2(codes[0], codes[1]);
}

// Four e2m1 codes (16 bits) to four e4m3 codes through a table of magnitudes.
__device__ inline uint32_t e4m3_of_e2m1(uint32_t nibbles, uint2 table) {
  const uint32_t magnitude = __byte_perm(table.x, table.y, nibbles & 0x7777);
  const uint32_t sign = __byte_perm(0x00008000u, 0, nibbles >> 3 & 0x1111);
  // -0 does no harm: the product with it is a zero.
  return magnitude | sign;
}

}  // namespace sparse_indexer
