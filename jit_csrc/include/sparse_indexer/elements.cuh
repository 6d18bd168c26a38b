// SPDX-License-Identifier: Apache-2.0
// Elements of tensors, and a few neighbors of them at once, as floats.
#pragma once

#include "sparse_indexer/formats.cuh"
#include "sparse_indexer/order.cuh"

namespace sparse_indexer {

struct Float16 {  // storage only
  uint16_t bits;
};
struct E4m3 {  // storage only
  uint8_t bits;
};

// N neighbors as they are stored, two or four of the small ones in a word.
template <typename T, int N>
struct Packed {
  static constexpr int kBytes = N * sizeof(T);
  uint32_t words[kBytes < 4 ? 1 : kBytes / 4];

  // By accesses of up to 16 bytes; `at` is a multiple of their size.
  __device__ __forceinline__ void load(const T* at) {
    if constexpr (kBytes >= 16) {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) {
        const uint4 v = __ldg(reinterpret_cast<const uint4*>(at) + i);
        words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
      }
    } else if constexpr (kBytes == 8) {
      const uint2 v = __ldg(reinterpret_cast<const uint2*>(at));
      words[0] = v.x, words[1] = v.y;
    } else if constexpr (kBytes == 4) {
      words[0] = __ldg(reinterpret_cast<const uint32_t*>(at));
    } else if constexpr (kBytes == 2) {
      words[0] = __ldg(reinterpret_cast<const uint16_t*>(at));
    } else {
      words[0] = __ldg(reinterpret_cast<const uint8_t*>(at));
    }
  }
  // What is read once and then no more, 16 bytes.
  __device__ __forceinline__ void load_once(const T* at) {
    static_assert(kBytes == 16, "one access");
    const uint4 v = __ldcs(reinterpret_cast<const uint4*>(at));
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  }
  // To the L2, where the next kernel finds it.
  __device__ __forceinline__ void store(T* at) const {
    if constexpr (kBytes >= 16) {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) {
        __stcg(reinterpret_cast<uint4*>(at) + i,
               make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]));
      }
    } else if constexpr (kBytes == 8) {
      __stcg(reinterpret_cast<uint2*>(at), make_uint2(words[0], words[1]));
    } else if constexpr (kBytes == 4) {
      __stcg(reinterpret_cast<uint32_t*>(at), words[0]);
    } else {
      static_assert(kBytes == 2, "no byte is written");
      __stcg(reinterpret_cast<uint16_t*>(at), static_cast<uint16_t>(words[0]));
    }
  }
};

template <int N>
__device__ __forceinline__ void unpack(const Packed<float, N>& from, float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = __uint_as_float(from.words[i]);
}
template <int N>
__device__ __forceinline__ void unpack(const Packed<Float16, N>& from, float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = float_of_half(from.words[i / 2] >> i % 2 * 16 & 0xffff);
}
template <int N>
__device__ __forceinline__ void unpack(const Packed<BFloat16, N>& from, float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    to[i] = __uint_as_float(i % 2 ? from.words[i / 2] & 0xffff0000u : from.words[i / 2] << 16);
  }
}
template <int N>
__device__ __forceinline__ void unpack(const Packed<E4m3, N>& from, float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    // The two halves that hold codes 0 and 2, and 1 and 3, as 2^-8 times their values.
    const uint32_t codes = from.words[i / 4], odd = codes & 0xff00ff00u, even = codes << 8;
    uint32_t halves[2] = {(even & 0x7f007f00u) >> 1 | (even & 0x80008000u),
                          (odd & 0x7f007f00u) >> 1 | (odd & 0x80008000u)};
    if (((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) {  // a NaN, as in half2_of_e4m3
      const uint32_t low = half2_of_e4m3(codes), high = half2_of_e4m3(codes >> 16);
      halves[0] = __byte_perm(low, high, 0x5410), halves[1] = __byte_perm(low, high, 0x7632);
    }
#pragma unroll
    for (int j = 0; j < 4 && i + j < N; ++j) {
      to[i + j] = float_of_half(halves[j % 2] >> j / 2 * 16 & 0xffff) * 256.0f;
    }
  }
}

// Each rounded to nearest even; what float16 does not hold becomes infinite.
template <int N>
__device__ __forceinline__ void pack(const float (&from)[N], Packed<float, N>& to) {
#pragma unroll
  for (int i = 0; i < N; ++i) to.words[i] = __float_as_uint(from[i]);
}
template <int N>
__device__ __forceinline__ void pack(const float (&from)[N], Packed<Float16, N>& to) {
  if constexpr (N == 1) to.words[0] = half_bits(from[0]);
#pragma unroll
  for (int i = 0; i + 1 < N; i += 2) {
    to.words[i / 2] = half_bits(from[i]) | half_bits(from[i + 1]) << 16;
  }
}
template <int N>
__device__ __forceinline__ void pack(const float (&from)[N], Packed<BFloat16, N>& to) {
  if constexpr (N == 1) to.words[0] = bfloat16_bits(from[0]);
#pragma unroll
  for (int i = 0; i + 1 < N; i += 2) {
    to.words[i / 2] = bfloat16_bits(from[i]) | bfloat16_bits(from[i + 1]) << 16;
  }
}

}  // namespace sparse_indexer
