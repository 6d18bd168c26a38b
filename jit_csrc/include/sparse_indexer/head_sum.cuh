// SPDX-License-Identifier: Apache-2.0
// From an MMA's accumulators to logits: sum over heads of weight * relu(q . k), in fp32.
//
// Positions are rows of the MMA, queries its columns. Heads 0, 1, 4, 5, ... and 2, 3, 6, 7, ... are
// summed apart, ascending, and added at the end: the logit of a row and a position has the same
// bits in every kernel, whichever of the two sums below it uses.
#pragma once

#include "sparse_indexer/cstdint.h"

namespace sparse_indexer {

// 2 relu(x), NaN kept; fmaxf has half the rate.
__device__ __forceinline__ float twice_relu(float x) {
  return x + fabsf(x);
}

// Floats from a row of weights in shared memory to the next: lanes read four rows at once, each in
// banks of its own.
constexpr int shared_weights(int heads) {
  return heads + 4;
}

__device__ __forceinline__ float4 shared_float4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Four query rows: 8 neighboring columns are two heads of each, in the order (row, head), so that a
// thread holds all heads of one row at two positions.
//
// Weights of the first `Kept` heads stay in registers, the others are read from shared memory by
// each sum: where registers are short.
template <int Heads, int Kept = Heads>
struct HeadSum {
  static constexpr int kRows = 4;           // query rows of an MMA, thread l has row l % 4
  static constexpr int kN = Heads * kRows;  // its columns
  static constexpr int kTiles = kN / 8;     // columns by 8
  using Chains = float[2][2];
  static_assert(Kept % 4 == 0 && Kept <= Heads, "read by vectors");

  float weights[Kept];
  uint32_t own;  // shared address of this thread's row of weights

  // `rows` [kRows, Heads]: half the heads' weights, 16-byte aligned.
  __device__ __forceinline__ void load(const float* rows) {
    static_assert(Kept == Heads, "nothing is in shared memory");
    const float* row = rows + threadIdx.x % 4 * Heads;
#pragma unroll
    for (int i = 0; i < Heads; i += 4) {
      const float4 w = __ldg(reinterpret_cast<const float4*>(row + i));
      weights[i] = w.x, weights[i + 1] = w.y, weights[i + 2] = w.z, weights[i + 3] = w.w;
    }
  }

  // The same at a shared address, rows shared_weights(Heads) floats apart.
  __device__ __forceinline__ void load_shared(uint32_t rows) {
    own = rows + threadIdx.x % 4 * shared_weights(Heads) * 4;
#pragma unroll
    for (int i = 0; i < Kept; i += 4) {
      const float4 w = shared_float4(own + i * 4);
      weights[i] = w.x, weights[i + 1] = w.y, weights[i + 2] = w.z, weights[i + 3] = w.w;
    }
    asm volatile("" : "+r"(own));  // kept, not computed again for each sum
  }

  // Adds columns 8 First and on of the MMA, as many as d holds (as in Wgmma), to the chains;
  // columns come in order. chains[.][r] is of position l / 4 + 8 r of the warp's 16.
  template <int First, int Registers>
  __device__ __forceinline__ void add(const float (&d)[Registers], Chains& chains) const {
    static_assert(First % 2 == 0, "two tiles have the weights of a vector");
    float four[4];
#pragma unroll
    for (int i = First; i < First + Registers / 4; ++i) {
      if (i % 2 == 0) four_weights(2 * i, four);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float twice = twice_relu(d[4 * (i - First) + 2 * r + c]);
          float& sum = chains[i % 2][r];
          const float weight = four[i % 2 * 2 + c];
          sum = i < 2 && c == 0 ? __fmul_rn(twice, weight) : __fmaf_rn(twice, weight, sum);
        }
      }
    }
  }

  // The logit but for the key's scale, of position l / 4 + 8 r.
  static __device__ __forceinline__ float finish(const Chains& chains, int r) {
    return __fadd_rn(chains[0][r], chains[1][r]);
  }

 private:
  __device__ __forceinline__ void four_weights(int head, float (&four)[4]) const {
    if (head < Kept) {
#pragma unroll
      for (int j = 0; j < 4; ++j) four[j] = weights[head + j];
    } else {
      const float4 w = shared_float4(own + head * 4);
      four[0] = w.x, four[1] = w.y, four[2] = w.z, four[3] = w.w;
    }
  }
};

// Two query rows: 8 neighboring columns are four heads of each, so that a thread holds one of the
// two sums of a row, and lane ^ 1 the other.
template <int Heads>
struct PairSum {
  static constexpr int kRows = 2;           // query rows of an MMA, thread l has row l % 4 / 2
  static constexpr int kN = Heads * kRows;  // its columns
  using Chains = float[2];

  float weights[Heads / 2];

  // As HeadSum::load.
  __device__ __forceinline__ void load(const float* rows) {
    const float* own = rows + threadIdx.x % 4 / 2 * Heads + threadIdx.x % 2 * 2;
#pragma unroll
    for (int i = 0; i < Heads / 4; ++i) {
      const float2 w = __ldg(reinterpret_cast<const float2*>(own + 4 * i));
      weights[2 * i] = w.x, weights[2 * i + 1] = w.y;
    }
  }

  // As HeadSum::load_shared.
  __device__ __forceinline__ void load_shared(uint32_t rows) {
    const uint32_t own = rows + threadIdx.x % 4 / 2 * shared_weights(Heads) * 4;
    const bool odd = threadIdx.x & 1;
#pragma unroll
    for (int i = 0; i < Heads / 4; ++i) {
      const float4 w = shared_float4(own + i * 16);
      weights[2 * i] = odd ? w.z : w.x, weights[2 * i + 1] = odd ? w.w : w.y;
    }
  }

  // All columns of the MMA. chains[r] is of position l / 4 + 8 r of the warp's 16.
  template <int First, int Registers>
  __device__ __forceinline__ void add(const float (&d)[Registers], Chains& chains) const {
    static_assert(First == 0 && Registers == kN / 2, "all at once");
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float twice = twice_relu(d[4 * i + 2 * r + c]);
          chains[r] = i == 0 && c == 0 ? __fmul_rn(twice, weights[0])
                                       : __fmaf_rn(twice, weights[2 * i + c], chains[r]);
        }
      }
    }
  }

  // As HeadSum::finish, in all lanes.
  static __device__ __forceinline__ float finish(const Chains& chains, int r) {
    return __fadd_rn(chains[r], __shfl_xor_sync(~0u, chains[r], 1));
  }
};

}  // namespace sparse_indexer
