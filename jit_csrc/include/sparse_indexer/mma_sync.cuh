// SPDX-License-Identifier: Apache-2.0
// mma.sync of Turing (m16n8k8) and Volta (m8n8k4): products of halves, sums in fp32. Queries of 32
// heads of one row stay in a warp's registers; what comes out is the sum over these heads of
// weight * relu(q . k), of two blocks of 8 positions at a time.
//
// Keys are blocks of 8 positions of 128 halves in shared memory: chunks of 8 dims of each position,
// 16 bytes, chunk after chunk, within a chunk the 8 positions. PTX ISA 9.0, "Matrix Fragments for
// mma.m16n8k8", "... mma.m8n8k4".
//
// Each of the two is a struct with
//   kMinBlocks       CTAs of 256 threads an SM should have registers for
//   load(pair, of_heads, factor)  queries: pair(head, dim) are two dims of one in halves;
//                    `of_heads`: a weight for each of the 32 heads
//   score(keys)      of the two blocks at this shared address, half of a lane's sum: lane ^ kLast
//                    has the other half
//   position()       of that sum, of the 16
#pragma once

#include "sparse_indexer/formats.cuh"

namespace sparse_indexer {

// Bytes of a block of keys in halves, and of its chunk of 8 dims.
constexpr int kHalfBlockBytes = 2048;
constexpr int kHalfChunkBytes = 128;

// relu(x). NaN is kept: what an MMA or a conversion writes is the positive one, an integer above
// those of all numbers.
__device__ __forceinline__ float relu(float x) {
  return __int_as_float(max(__float_as_int(x), 0));
}

// relu of a head's score, or of 2^-Shift times the score rounded to float16.
template <bool HalfScores, int Shift>
__device__ __forceinline__ float relu_of_score(float score) {
  if constexpr (!HalfScores) return relu(score);
  return relu(float_of_half(half_bits(score * (1.0f / (1 << Shift)))));
}

__device__ __forceinline__ float sum_with_lane(float x, int mask) {
  return __fadd_rn(x, __shfl_xor_sync(~0u, x, mask));
}
// x or y, the one that this lane keeps, plus the same of the lane whose number differs by `mask`.
__device__ __forceinline__ float keep_one(float x, float y, int mask) {
  const bool second = threadIdx.x & mask;
  return __fadd_rn(second ? y : x, __shfl_xor_sync(~0u, second ? x : y, mask));
}

// Turing. g = lane / 4, t = lane % 4. Keys are the M operand: position g of either block, dims 2t
// and 2t + 1. Queries: head g, the same dims. Sums: position g of either block, heads 2t and 2t
// + 1.
struct M16n8k8 {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  static constexpr int kMinBlocks = 1;  // there some would be spilled
#else
  static constexpr int kMinBlocks = 2;
#endif
  static constexpr int kLast = 2;
  uint32_t queries[4][16];  // heads by 8, dims by 8
  float weights[4][2];

  template <typename Pair>
  __device__ __forceinline__ void load(Pair pair, const float* of_heads, float factor) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int k = 0; k < 16; ++k) queries[n][k] = pair(n * 8 + g, k * 8 + t * 2);
#pragma unroll
      for (int c = 0; c < 2; ++c) weights[n][c] = of_heads[n * 8 + t * 2 + c] * factor;
    }
  }

  static __device__ __forceinline__ int position() {
    return threadIdx.x % 2 * 8 + threadIdx.x % 32 / 4;
  }

  template <bool HalfScores, int Shift>
  __device__ __forceinline__ float score(uint32_t keys) const {
    const int lane = threadIdx.x % 32;
    keys += lane / 8 % 2 * kHalfBlockBytes + lane / 16 * kHalfChunkBytes + lane % 8 * 16;
    float d[4][4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t a[2][2];  // chunks, blocks
      load_chunks(a, keys + i * 2 * kHalfChunkBytes);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int n = 0; n < 4; ++n) multiply(d[n], a[k], queries[n][i * 2 + k]);
      }
    }
    float sums[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float score = relu_of_score<HalfScores, Shift>(d[n][r * 2 + c]);
          sums[r] = n + c == 0 ? __fmul_rn(score, weights[n][c])
                               : __fmaf_rn(score, weights[n][c], sums[r]);
        }
      }
    }
    return keep_one(sums[0], sums[1], 1);
  }

  // Two chunks of both blocks, each as the M operand of an MMA.
  static __device__ __forceinline__ void load_chunks(uint32_t (&a)[2][2], uint32_t keys) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0][0]), "=r"(a[0][1]), "=r"(a[1][0]), "=r"(a[1][1])
                 : "r"(keys)
                 : "memory");
  }
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[2],
                                                  uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
  }
};

// Volta. Each quad pair, lanes 4 q to 4 q + 3 and those 16 further, multiplies 8 heads with 8
// positions: heads by 8 are q % 2, blocks q / 2, so that 16 heads meet 16 positions. With
// i = lane % 4 + lane / 16 * 4, queries: head i, 4 dims. Keys: position i, the same dims. Sums,
// d[j] of 8: head lane % 2 + j / 2 % 2 * 2 + lane / 16 * 4, position j / 4 * 4 + lane / 2 % 2 * 2 +
// j % 2.
struct M8n8k4 {
  static constexpr int kMinBlocks = 1;
  static constexpr int kLast = 16;
  uint32_t queries[2][32][2];  // heads by 16, dims by 4
  float weights[2][2];

  template <typename Pair>
  __device__ __forceinline__ void load(Pair pair, const float* of_heads, float factor) {
    const int lane = threadIdx.x % 32, upper = lane / 16 * 4, of_quad_pair = lane / 4 % 2 * 8;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int head = m * 16 + of_quad_pair + upper;
#pragma unroll
      for (int k = 0; k < 32; ++k) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          queries[m][k][c] = pair(head + lane % 4, k * 4 + c * 2);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) weights[m][r] = of_heads[head + lane % 2 + r * 2] * factor;
    }
  }

  static __device__ __forceinline__ int position() { return threadIdx.x % 16; }

  template <bool HalfScores, int Shift>
  __device__ __forceinline__ float score(uint32_t keys) const {
    const int lane = threadIdx.x % 32;
    const int i = lane % 4 + lane / 16 * 4;
    keys += lane / 8 % 2 * kHalfBlockBytes + i * 16;
    float d[2][8] = {};
#pragma unroll
    for (int chunk = 0; chunk < 16; ++chunk) {
      uint32_t b[4];
      load_dims(b, keys + chunk * kHalfChunkBytes);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply(d[m], queries[m][chunk * 2 + k], b[2 * k], b[2 * k + 1]);
        }
      }
    }
    float sums[2][2];  // of positions by 4 and by 1
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int j = c / 2 * 4 + c % 2;
      float& sum = sums[c / 2][c % 2];
      sum = __fmul_rn(relu_of_score<HalfScores, Shift>(d[0][j]), weights[0][0]);
      sum = __fmaf_rn(relu_of_score<HalfScores, Shift>(d[0][j + 2]), weights[0][1], sum);
      sum = __fmaf_rn(relu_of_score<HalfScores, Shift>(d[1][j]), weights[1][0], sum);
      sum = __fmaf_rn(relu_of_score<HalfScores, Shift>(d[1][j + 2]), weights[1][1], sum);
    }
    const float low = keep_one(sums[0][0], sums[0][1], 1);
    const float high = keep_one(sums[1][0], sums[1][1], 1);
    return keep_one(low, high, 4);
  }

  // 8 dims: the N operands of two MMAs.
  static __device__ __forceinline__ void load_dims(uint32_t (&b)[4], uint32_t keys) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(keys)
                 : "memory");
  }
  static __device__ __forceinline__ void multiply(float (&d)[8], const uint32_t (&a)[2],
                                                  uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11}, {%0, %1, %2, %3, %4, %5, %6, %7};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(b0), "r"(b1));
  }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 750
using MmaSync = M8n8k4;
#else
using MmaSync = M16n8k8;
#endif

}  // namespace sparse_indexer
