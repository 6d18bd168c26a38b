// SPDX-License-Identifier: Apache-2.0
// kv_gather: the KV rows that query rows name, dequantized, one behind the other.
//
// An e4m3 value times its scale is rounded to fp32; what the output does not hold is rounded once
// more. An entry of `positions` that is no slot of the pool gives zeros, and no address is made of
// it. Each element is computed from its own alone, so the grid changes no bit.
//
// Bound by memory: reads and writes rows * k rows, and random rows of the pool at that.
#pragma once

#include "kernels/kv_gather.h"
#include "sparse_indexer/elements.cuh"

namespace sparse_indexer {

template <typename From, typename To>
struct KvGather {
  using Params = KvGatherParams;
  static constexpr int kThreads = kv_gather_config::kThreads;
  static constexpr int kMinBlocks = 16;  // 1024 threads an SM: what is in flight pays
  static constexpr int kPasses = kv_gather_config::kPasses;
  static constexpr bool kScaled = sizeof(From) == 1;  // values with scales, the rest bfloat16

  // N neighbors of one KV row, as they are stored.
  template <int N>
  struct Item {
    Packed<From, N> values;
    Packed<BFloat16, kScaled ? N : 1> rest;
    float scale;
    bool scaled;
  };

  static __device__ void run(const Params& p) {
    if (p.vectors) {
      gather<kv_gather_config::kVector, kv_gather_config::kLanes>(p);
    } else {
      gather<1, 32>(p);
    }
  }

  // So many lanes write a KV row, N neighboring elements each at a time.
  template <int N, int Lanes>
  static __device__ __forceinline__ void gather(const Params& p) {
    const uint32_t n = blockIdx.x * (kThreads / Lanes) + threadIdx.x / Lanes, k = p.k;
    if (n >= static_cast<uint32_t>(p.count)) return;
    const uint32_t r = n / k, j = n % k;
    const int64_t slot = __ldg(p.positions + r * p.position_stride + j);
    const bool used = slot >= 0 && slot < p.slots;
    To* out = static_cast<To*>(p.out) + r * p.out_row_stride + j * p.out_stride;
    const Row row{static_cast<const From*>(p.values) + slot * p.value_stride,
                  p.scales + slot * p.scale_stride,
                  static_cast<const BFloat16*>(p.rest) + slot * p.rest_stride - p.value_dim};

    for (int first = threadIdx.x % Lanes * N; first < p.dim; first += Lanes * N * kPasses) {
      // 1. All loads.
      Item<N> item[kPasses];
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int d = first + pass * Lanes * N;
        item[pass] = {};
        if (used && d < p.dim) load(p, row, d, item[pass]);
      }
      // 2. All results.
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int d = first + pass * Lanes * N;
        if (d < p.dim) write(item[pass], out + d);
      }
    }
  }

  // Of a slot, followed only if it is used; `rest` counts from the row's first element on.
  struct Row {
    const From* values;
    const float* scales;
    const BFloat16* rest;
  };

  template <int N>
  static __device__ __forceinline__ void load(const Params& p, const Row& row, int d,
                                              Item<N>& item) {
    if constexpr (!kScaled) {
      item.values.load(row.values + d);
    } else if (d < p.value_dim) {
      item.values.load(row.values + d);
      item.scale = __ldg(row.scales + d / kv_gather_config::kGroup);
      item.scaled = true;
    } else {
      item.rest.load(row.rest + d);
    }
  }

  template <int N>
  static __device__ __forceinline__ void write(const Item<N>& item, To* out) {
    float x[N];
    unpack(item.values, x);
    if constexpr (kScaled) {
      float rest[N];
      unpack(item.rest, rest);
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = item.scaled ? x[i] * item.scale : rest[i];
    }
    Packed<To, N> packed;
    pack(x, packed);
    packed.store(out);
  }
};

}  // namespace sparse_indexer
