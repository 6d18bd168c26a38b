// SPDX-License-Identifier: Apache-2.0
// Floats as unsigned integers of the same order.
#pragma once

#include "sparse_indexer/cstdint.h"

namespace sparse_indexer {

struct BFloat16 {  // storage only
  uint16_t bits;
};

// float32 bits to an integer of the same order: -0 as +0, NaN as -inf. Never 0, which is therefore
// free to mean "nothing".
__device__ inline uint32_t ordered(uint32_t bits) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0xff800000u;
  if (bits == 0x80000000u) bits = 0;
  return bits ^ (static_cast<int32_t>(bits) < 0 ? 0xffffffffu : 0x80000000u);
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
