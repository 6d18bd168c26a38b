// SPDX-License-Identifier: Apache-2.0
// block_keys (amax8): one key per block of 8 columns, the max of those that the row sees.
//
// NaN is ignored (a block of NaN has -inf), the block of the row's last column gets +inf, blocks
// past it -inf. Columns past the row's length are not read.
//
// Bound by memory: reads rows * lens * sizeof(Logit), writes rows * blocks * 4 bytes.
#pragma once

#include "kernels/block_keys.h"
#include "sparse_indexer/order.cuh"

namespace sparse_indexer {

template <typename Logit>
struct BlockKeys {
  using Params = BlockKeysParams;
  static constexpr int kThreads = block_keys_config::kThreads;
  static constexpr int kMinBlocks = 1;
  static constexpr int kPerThread = block_keys_config::kPerThread;
  static constexpr int kBlock = block_keys_config::kBlock;
  static constexpr int kVectors = kBlock * sizeof(Logit) / 16;  // 16-byte loads of a block

  static __device__ float infinity() { return __int_as_float(0x7f800000); }

  static __device__ float max_of(float best, const uint4& v, float) {
    best = fmaxf(fmaxf(best, __uint_as_float(v.x)), __uint_as_float(v.y));
    return fmaxf(fmaxf(best, __uint_as_float(v.z)), __uint_as_float(v.w));
  }
  static __device__ float max_of(float best, const uint4& v, BFloat16) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (uint32_t w : words) {
      best = fmaxf(fmaxf(best, __uint_as_float(w << 16)), __uint_as_float(w & 0xffff0000u));
    }
    return best;
  }

  static __device__ void run(const Params& p) {
    const int64_t r = blockIdx.x / p.parts;
    const int first =
        static_cast<int>(blockIdx.x % p.parts) * block_keys_config::kPart + threadIdx.x;
    const int len = min(max(p.lens[r], 0), p.width);
    const int seen = (len + kBlock - 1) / kBlock;
    if (seen <= p.skip_blocks) return;
    const Logit* row = static_cast<const Logit*>(p.logits) + r * p.stride;
    float* out = p.out + r * p.out_stride;

    // 1. All loads. A block that the row sees in part only is its newest, whose key is known.
    uint4 v[kPerThread][kVectors];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int block = first + i * kThreads;
      if (block >= seen - 1) continue;
      const auto* at = reinterpret_cast<const uint4*>(row + int64_t(block) * kBlock);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) v[i][j] = __ldcs(at + j);
    }
    // 2. All keys.
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int block = first + i * kThreads;
      if (block >= p.blocks) continue;
      float key = -infinity();
      if (block < seen - 1) {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) key = max_of(key, v[i][j], Logit{});
      } else if (block == seen - 1) {
        key = infinity();
      }
      __stcs(out + block, key);
    }
  }
};

}  // namespace sparse_indexer
