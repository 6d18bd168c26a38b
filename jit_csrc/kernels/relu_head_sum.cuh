// SPDX-License-Identifier: Apache-2.0
// relu_head_sum: from the scores of a GEMM, one a head, to a logit a position, or at once to a key
// a block of 8 positions.
//
//   logit[r, n] = (sum over heads of weights[r, h] * relu(scores[r * heads + h, n])) *
//   key_scales[n]
//
// in fp32, heads ascending, one fused multiply-add each; relu keeps a NaN. A key is what
// `block_keys` makes of the logits: the largest, NaN ignored, +inf for the block of the row's last
// position, -inf past it. Blocks that a row does not see are not read, nor written as logits.
//
// Bound by memory: reads rows * heads * positions * 2 bytes and writes little.
#pragma once

#include "kernels/relu_head_sum.h"
#include "sparse_indexer/elements.cuh"

namespace sparse_indexer {

template <bool Keys>
struct ReluHeadSum {
  using Params = ReluHeadSumParams;
  static constexpr int kThreads = relu_head_sum_config::kThreads;
  static constexpr int kMinBlocks = 4;
  static constexpr int kBlock = relu_head_sum_config::kBlock;
  static constexpr int kHeads = relu_head_sum_config::kHeads;
  using Scores = Packed<Float16, kBlock>;

  static __device__ float infinity() { return __int_as_float(0x7f800000); }

  static __device__ void run(const Params& p) {
    const int64_t r = blockIdx.x / p.parts;
    const int block =
        static_cast<int>(blockIdx.x % p.parts) * kThreads + static_cast<int>(threadIdx.x);
    const int first = block * kBlock;
    const int count = min(p.positions - first, kBlock);
    if (count <= 0) return;

    // 1. The first heads, before the length is there that tells who wants them.
    const auto* scores = static_cast<const Float16*>(p.scores) + r * p.heads * p.stride + first;
    const float* weights = p.weights + r * p.weight_stride;
    const int groups = count == kBlock ? p.heads / kHeads : 0;
    Group one, other;
    if (groups > 0) one.load(scores, weights, p.stride, 0);

    // 2. Blocks whose key is known, or that nobody wants. A warp of them is done.
    const int end =
        p.lens != nullptr ? __ldg(p.lens + r) - p.start : p.positions;  // of what it sees
    float* out = p.out + r * p.out_stride;
    if (first >= end) {
      if (Keys) __stcs(out + block, -infinity());
      return;
    }
    if (Keys && first + kBlock >= end) {
      __stcs(out + block, infinity());
      return;
    }

    // 3. All heads.
    float sum[kBlock] = {};
#pragma unroll 1
    for (int g = 0; g < groups; g += 2) {  // one is under way while the other is added
      if (g + 1 < groups) other.load(scores, weights, p.stride, g + 1);
      one.add_to(sum);
      if (g + 1 == groups) break;
      if (g + 2 < groups) one.load(scores, weights, p.stride, g + 2);
      other.add_to(sum);
    }
    // The heads that are left, or all of a last block that is not whole.
#pragma unroll 1
    for (int h = groups * kHeads; h < p.heads; ++h) {
      Scores of_head = {};
#pragma unroll
      for (int j = 0; j < kBlock; ++j) {
        if (j < count)
          of_head.words[j / 2] |= uint32_t(scores[h * p.stride + j].bits) << j % 2 * 16;
      }
      add(of_head, __ldg(weights + h), sum);
    }

    // 4. Logits, or their largest.
    if (p.key_scales != nullptr) {
#pragma unroll
      for (int j = 0; j < kBlock; ++j) {
        if (j < count) sum[j] *= __ldg(p.key_scales + first + j);
      }
    }
    if constexpr (Keys) {
      float key = -infinity();
#pragma unroll
      for (int j = 0; j < kBlock; ++j) {
        if (j < count) key = fmaxf(key, sum[j]);
      }
      __stcs(out + block, key);
    } else if (p.out_vectors && count == kBlock) {
      Packed<float, kBlock> logits;
      pack(sum, logits);
      logits.store(out + first);
    } else {
#pragma unroll
      for (int j = 0; j < kBlock; ++j) {
        if (j < count) out[first + j] = sum[j];
      }
    }
  }

  // The scores of some heads, and their weights.
  struct Group {
    Scores scores[kHeads];
    float weights[kHeads];

    __device__ __forceinline__ void load(const Float16* from, const float* from_weights,
                                         int64_t stride, int group) {
      const int h = group * kHeads;
#pragma unroll
      for (int i = 0; i < kHeads; ++i) {
        scores[i].load_once(from + (h + i) * stride);
        weights[i] = __ldg(from_weights + h + i);
      }
    }
    __device__ __forceinline__ void add_to(float (&sum)[kBlock]) const {
#pragma unroll
      for (int i = 0; i < kHeads; ++i) add(scores[i], weights[i], sum);
    }
  };

  static __device__ __forceinline__ void add(Scores scores, float weight, float (&sum)[kBlock]) {
    float x[kBlock];
#if __CUDA_ARCH__ >= 800
#pragma unroll
    for (uint32_t& pair : scores.words) {
      asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(pair), "r"(0));
    }
    unpack(scores, x);
#else
    unpack(scores, x);
#pragma unroll
    for (float& value : x) value = value < 0.0f ? 0.0f : value;
#endif
#pragma unroll
    for (int j = 0; j < kBlock; ++j) sum[j] = __fmaf_rn(x[j], weight, sum[j]);
  }
};

}  // namespace sparse_indexer
