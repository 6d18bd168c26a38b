// SPDX-License-Identifier: Apache-2.0
// Floats as unsigned integers of the same order.
#pragma once

#include "sparse_indexer/cstdint.h"

namespace sparse_indexer {

struct BFloat16 {  // storage only
  uint16_t bits;
};

// A float to an integer of the same order: -0 as +0, NaN as -inf. Never 0, which is therefore free
// to mean "nothing".
__device__ inline uint32_t ordered(float x) {
  // fmaxf drops a NaN, the addition a sign of zero.
  const uint32_t bits = __float_as_uint(fmaxf(x, __int_as_float(0xff800000)) + 0.0f);
  return bits ^ (static_cast<int32_t>(bits) >> 31 | 0x80000000u);
}
__device__ inline uint32_t ordered(uint32_t bits) {
  return ordered(__uint_as_float(bits));
}

// One element, by the read-only path.
__device__ inline uint32_t load_ordered(const float* at) {
  return ordered(__ldg(reinterpret_cast<const uint32_t*>(at)));
}
__device__ inline uint32_t load_ordered(const BFloat16* at) {
  return ordered(uint32_t(__ldg(reinterpret_cast<const uint16_t*>(at))) << 16);
}

// Four elements; `at` is a multiple of their bytes.
__device__ inline void load_ordered(const float* at, uint32_t (&key)[4]) {
  const uint4 v = __ldg(reinterpret_cast<const uint4*>(at));
  key[0] = ordered(v.x), key[1] = ordered(v.y), key[2] = ordered(v.z), key[3] = ordered(v.w);
}
__device__ inline void load_ordered(const BFloat16* at, uint32_t (&key)[4]) {
  const uint2 v = __ldg(reinterpret_cast<const uint2*>(at));
  key[0] = ordered(v.x << 16), key[1] = ordered(v.x & 0xffff0000u);
  key[2] = ordered(v.y << 16), key[3] = ordered(v.y & 0xffff0000u);
}

}  // namespace sparse_indexer
