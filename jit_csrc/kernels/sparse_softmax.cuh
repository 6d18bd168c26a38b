// SPDX-License-Identifier: Apache-2.0
// sparse_softmax: of each row and head, the softmax of its used entries and of the sink.
//
//   y[j] = scale * logits[j], rounded     p[j] = exp(y[j] - top) * (1 / total)
//   top = max of y and the sink           total = sum of exp(y[j] - top) and exp(sink - top)
//
// all in fp32, p rounded once to the output. What lies in unused entries takes no part and their p
// is 0; NaN and infinities of used ones give what the formula gives. A thread's entries, and so the
// order of a sum, follow from k alone.
//
// Bound by memory: reads rows * heads * k * 4 bytes, twice only beyond 2560 entries, and writes as
// many elements; the positions of a row are read once for several heads.
#pragma once

#include "kernels/sparse_softmax.h"
#include "sparse_indexer/elements.cuh"

namespace sparse_indexer {

// What both kernels share. A team of Warps warps has a row and head.
template <int Warps>
struct SoftmaxTeam {
  static constexpr int kThreads = Warps * 32;

  static __device__ float infinity() { return __int_as_float(0x7f800000); }
  // The lowest finite float: entries of -inf differ from it by -inf, and not by NaN.
  static __device__ float lowest() { return __int_as_float(0xff7fffff); }

  // Columns c ... c + N - 1 of k, by one access; the last ones past the row's end, which costs
  // nothing, where a condition costs registers. Not by the read-only path: they may be overwritten.
  template <typename T, int N>
  static __device__ __forceinline__ void load(const T* row, int c, int k, T (&to)[N]) {
    static_assert(sizeof(T) == 4 && (N == 1 || N == 4), "4 or 16 bytes");
    const T* at = row + min(c, k - N);
    if constexpr (N == 1) {
      to[0] = __ldcs(at);
    } else if constexpr (T(0.5f) == 0) {
      const int4 v = __ldcs(reinterpret_cast<const int4*>(at));
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else {
      const float4 v = __ldcs(reinterpret_cast<const float4*>(at));
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }
  }

  // Bit j: entry j exists and is used.
  template <int N>
  static __device__ __forceinline__ uint32_t used_bits(const int32_t (&positions)[N], bool exist,
                                                       int32_t slots) {
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const bool used = exist && positions[j] >= 0 && positions[j] < slots;
      bits |= static_cast<uint32_t>(used) << j;
    }
    return bits;
  }

  template <typename Out, int N>
  static __device__ __forceinline__ void store(Out* at, bool exists, const float (&x)[N]) {
    Packed<Out, N> packed;
    pack(x, packed);
    if (exists) packed.store(at);
  }

  // Over the team, the same bits in all its threads. All have then read what they reduce.
  template <typename Op>
  static __device__ __forceinline__ float reduce(float x, Op op) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = op(x, __shfl_xor_sync(~0u, x, step));
    if constexpr (Warps > 1) {
      __shared__ float of_warps[Warps];
      if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
      __syncthreads();  // the warps' results are complete
      x = of_warps[0];
#pragma unroll
      for (int warp = 1; warp < Warps; ++warp) x = op(x, of_warps[warp]);
      __syncthreads();  // and have been read
    }
    return x;
  }
  static __device__ __forceinline__ float max_of_team(float x) {
    return reduce(x, [](float a, float b) { return fmaxf(a, b); });
  }
  static __device__ __forceinline__ float sum_of_team(float x) {
    return reduce(x, [](float a, float b) { return a + b; });
  }
};

// In registers, kVectors times four entries a thread; everything is aligned.
template <typename Out, int Warps>
struct SparseSoftmax {
  using Params = SparseSoftmaxParams;
  using Team = SoftmaxTeam<Warps>;
  static constexpr int kThreads = sparse_softmax_config::kThreads;
  static constexpr int kMinBlocks = 5;  // what is in flight pays
  static constexpr int kVector = sparse_softmax_config::kVector;
  static constexpr int kVectors = sparse_softmax_config::kVectors;
  static constexpr int kTeams = kThreads / Team::kThreads;
  static constexpr int kStep = Team::kThreads * kVector;
  static_assert(kVector * kVectors <= 32, "a bit for each entry of a thread");

  static __device__ void run(const Params& p) {
    const int64_t r = blockIdx.x / p.parts;
    const int begin = static_cast<int>(blockIdx.x % p.parts) * p.heads_a_cta;
    const int end = min(begin + p.heads_a_cta, p.heads);
    const int first = static_cast<int>(threadIdx.x) % Team::kThreads * kVector;

    // 1. Which of this thread's entries are used: the same for all heads.
    uint32_t used = 0;
    {
      int32_t positions[kVectors][kVector];
      const int32_t* row = p.positions + r * p.position_stride;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        Team::load(row, first + i * kStep, p.k, positions[i]);
      }
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const bool exist = first + i * kStep < p.k;
        used |= Team::used_bits(positions[i], exist, p.slots) << i * kVector;
      }
    }
    for (int h = begin + static_cast<int>(threadIdx.x) / Team::kThreads; h < end; h += kTeams) {
      asm volatile("" : "+r"(used));  // or each of its bits is kept in a register of its own
      // 2. All logits, scaled, -inf if unused, and their largest.
      float x[kVectors][kVector];
      const float* row = p.logits + r * p.row_stride + h * p.head_stride;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        Team::load(row, first + i * kStep, p.k, x[i]);
      }
      const float sink = p.sink != nullptr ? p.sink[h] : -Team::infinity();
      float top = fmaxf(sink, Team::lowest());
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          x[i][j] = used >> (i * kVector + j) & 1 ? __fmul_rn(x[i][j], p.scale) : -Team::infinity();
          top = fmaxf(top, x[i][j]);
        }
      }
      top = Team::max_of_team(top);
      // 3. Exponentials, 0 of unused entries, and their sum.
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) total += x[i][j] = expf(x[i][j] - top);
      }
      total = Team::sum_of_team(total) + expf(sink - top);
      // 4. Probabilities. Where those of used entries are NaN, unused ones get 0 all the same.
      const float inverse = 1.0f / total;
      const bool finite = inverse <= 1.0f;
      Out* out = static_cast<Out*>(p.out) + r * p.out_row_stride + h * p.out_head_stride;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          x[i][j] = finite || (used >> (i * kVector + j) & 1) ? x[i][j] * inverse : 0.0f;
        }
        const int c = first + i * kStep;
        Team::store(out + c, c < p.k, x[i]);
      }
    }
  }
};

// Any k and alignment: a CTA reads the logits of a row and head twice, slab by slab.
template <typename Out>
struct LongSparseSoftmax {
  using Params = SparseSoftmaxParams;
  using Team = SoftmaxTeam<sparse_softmax_config::kWarps>;
  static constexpr int kThreads = sparse_softmax_config::kThreads;
  static constexpr int kMinBlocks = 8;
  static constexpr int kPasses = 4;  // of a thread and slab

  static __device__ void run(const Params& p) {
    const int64_t r = blockIdx.x / p.parts;
    const int begin = static_cast<int>(blockIdx.x % p.parts) * p.heads_a_cta;
    const int end = min(begin + p.heads_a_cta, p.heads);
    for (int h = begin; h < end; ++h) {
      if (p.vectors) {
        run<sparse_softmax_config::kVector>(p, r, h);
      } else {
        run<1>(p, r, h);
      }
    }
  }

  template <int N>
  using Slab = float[kPasses][N];

  template <int N>
  static __device__ __forceinline__ void run(const Params& p, int64_t r, int h) {
    constexpr int kSlab = kPasses * kThreads * N;
    const float* row = p.logits + r * p.row_stride + h * p.head_stride;
    const int32_t* positions = p.positions + r * p.position_stride;
    Slab<N> x;

    // 1. Each thread's largest entry, and its sum relative to that.
    const float sink = p.sink != nullptr ? p.sink[h] : -Team::infinity();
    float largest = fmaxf(sink, Team::lowest()), total = 0.0f;
    for (int slab = 0; slab < p.k; slab += kSlab) {
      load(p, row, positions, slab, x);
      const float before = largest;
#pragma unroll
      for (int i = 0; i < kPasses * N; ++i) largest = fmaxf(largest, x[i / N][i % N]);
      total *= expf(before - largest);
#pragma unroll
      for (int i = 0; i < kPasses * N; ++i) total += expf(x[i / N][i % N] - largest);
    }
    const float top = Team::max_of_team(largest);
    total = Team::sum_of_team(total * expf(largest - top)) + expf(sink - top);
    const float inverse = 1.0f / total;

    // 2. Probabilities. In place, a slab lands on itself or on what has been read before.
    Out* out = static_cast<Out*>(p.out) + r * p.out_row_stride + h * p.out_head_stride;
    for (int slab = 0; slab < p.k; slab += kSlab) {
      const uint32_t used = load(p, row, positions, slab, x);
      __syncthreads();  // all of the slab has been read
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
          x[i][j] = used >> (i * N + j) & 1 ? expf(x[i][j] - top) * inverse : 0.0f;
        }
        const int c = column<N>(slab, i);
        Team::store(out + c, c < p.k, x[i]);
      }
    }
  }

  template <int N>
  static __device__ __forceinline__ int column(int slab, int pass) {
    return slab + (pass * kThreads + static_cast<int>(threadIdx.x)) * N;
  }

  // This thread's entries of a slab, scaled, -inf if unused; the bits of those that are used.
  template <int N>
  static __device__ __forceinline__ uint32_t load(const Params& p, const float* row,
                                                  const int32_t* positions, int slab, Slab<N>& x) {
    int32_t slots[kPasses][N];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      Team::load(positions, column<N>(slab, i), p.k, slots[i]);
      Team::load(row, column<N>(slab, i), p.k, x[i]);
    }
    uint32_t used = 0;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      used |= Team::used_bits(slots[i], column<N>(slab, i) < p.k, p.slots) << i * N;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        x[i][j] = used >> (i * N + j) & 1 ? __fmul_rn(x[i][j], p.scale) : -Team::infinity();
      }
    }
    return used;
  }
};

}  // namespace sparse_indexer
