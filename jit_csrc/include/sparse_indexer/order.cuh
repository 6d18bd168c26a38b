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

// Four elements as they are stored; `at` is a multiple of their bytes.
template <typename Key>
struct Four;
template <>
struct Four<float> {
  uint4 bits;
};
template <>
struct Four<BFloat16> {
  uint2 bits;
};

__device__ __forceinline__ Four<float> load_four(const float* at) {
  return {__ldg(reinterpret_cast<const uint4*>(at))};
}
__device__ __forceinline__ Four<BFloat16> load_four(const BFloat16* at) {
  return {__ldg(reinterpret_cast<const uint2*>(at))};
}

__device__ __forceinline__ void ordered(const Four<float>& v, uint32_t (&key)[4]) {
  key[0] = ordered(v.bits.x), key[1] = ordered(v.bits.y);
  key[2] = ordered(v.bits.z), key[3] = ordered(v.bits.w);
}
__device__ __forceinline__ void ordered(const Four<BFloat16>& v, uint32_t (&key)[4]) {
  key[0] = ordered(v.bits.x << 16), key[1] = ordered(v.bits.x & 0xffff0000u);
  key[2] = ordered(v.bits.y << 16), key[3] = ordered(v.bits.y & 0xffff0000u);
}

}  // namespace sparse_indexer
