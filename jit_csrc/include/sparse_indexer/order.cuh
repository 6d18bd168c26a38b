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

// The largest float below an ordered integer's: one above -inf; below +0 it is not -0. Of the
// integer after +inf's it is +inf.
__device__ inline float float_below(uint32_t key) {
  constexpr uint32_t kZero = 0x80000000u;
  key -= key == kZero ? 2 : 1;
  return __uint_as_float(key ^ (~static_cast<int32_t>(key) >> 31 | kZero));
}

// How memory is read: by the read-only path what no one writes meanwhile, past the L1 what others
// wrote a moment ago.
struct ReadOnly {
  template <typename T>
  static __device__ __forceinline__ T load(const T* at) {
    return __ldg(at);
  }
};
struct PastL1 {
  template <typename T>
  static __device__ __forceinline__ T load(const T* at) {
    return __ldcg(at);
  }
};

// One element.
template <typename By>
__device__ __forceinline__ float load_float(const float* at) {
  return By::load(at);
}
template <typename By>
__device__ __forceinline__ float load_float(const BFloat16* at) {
  return __uint_as_float(uint32_t(By::load(reinterpret_cast<const uint16_t*>(at))) << 16);
}
template <typename By, typename Key>
__device__ __forceinline__ uint32_t load_ordered(const Key* at) {
  return ordered(load_float<By>(at));
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

template <typename By>
__device__ __forceinline__ Four<float> load_four(const float* at) {
  return {By::load(reinterpret_cast<const uint4*>(at))};
}
template <typename By>
__device__ __forceinline__ Four<BFloat16> load_four(const BFloat16* at) {
  return {By::load(reinterpret_cast<const uint2*>(at))};
}

__device__ __forceinline__ void floats(const Four<float>& v, float (&key)[4]) {
  key[0] = __uint_as_float(v.bits.x), key[1] = __uint_as_float(v.bits.y);
  key[2] = __uint_as_float(v.bits.z), key[3] = __uint_as_float(v.bits.w);
}
__device__ __forceinline__ void floats(const Four<BFloat16>& v, float (&key)[4]) {
  key[0] = __uint_as_float(v.bits.x << 16), key[1] = __uint_as_float(v.bits.x & 0xffff0000u);
  key[2] = __uint_as_float(v.bits.y << 16), key[3] = __uint_as_float(v.bits.y & 0xffff0000u);
}

template <typename Key>
__device__ __forceinline__ void ordered(const Four<Key>& v, uint32_t (&key)[4]) {
  float x[4];
  floats(v, x);
#pragma unroll
  for (int i = 0; i < 4; ++i) key[i] = ordered(x[i]);
}

}  // namespace sparse_indexer
