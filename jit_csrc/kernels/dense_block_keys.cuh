// SPDX-License-Identifier: Apache-2.0
// dense_block_keys: the key of every block that a row sees, the whole context scored by Hopper's
// tensor cores; a logit never leaves its registers.
//
// A CTA keeps the queries of a group of rows of one request in shared memory and runs along the
// keys, 64 positions at a time: one producer thread copies, each consumer warpgroup scores them for
// its own rows. Positions are rows of the MMA, so a block is one 8-row core matrix whose max is a
// reduction over lane / 4. A warpgroup's queries are two MMAs: while one is on the tensor cores,
// the accumulators of the other are summed. That ends every unit of blocks, since the compiler does
// not let accumulators be in flight from one turn of a loop to the next. The work, units of all
// groups, is cut into equal parts, one a CTA.
//
// The newest block of a row may hold positions that the row does not see; whoever reads the keys
// selects that block whatever its key. Keys of blocks past the row's are of no meaning.
#pragma once

#include "kernels/dense_block_keys.h"
#include "sparse_indexer/head_sum.cuh"
#include "sparse_indexer/hopper.cuh"
#include "sparse_indexer/parts.cuh"

namespace sparse_indexer {

template <Element E, int Heads>
struct DenseBlockKeys {
  using Params = DenseBlockKeysParams;
  static constexpr int kWarpgroups = dense_block_keys_config::kWarpgroups;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  static constexpr int kMinBlocks = 1;
  using Sum = HeadSum<Heads>;
  static constexpr int kQuads = 64 / Heads;                 // of a warpgroup
  static constexpr int kGroupQuads = kQuads * kWarpgroups;  // of a CTA at a time
  static constexpr int kN = 128;                            // columns of an MMA: half a warpgroup's
  static constexpr int kKeyBytes = E == Element::kE4m3 ? 128 : 256;
  static constexpr int kBlockBytes = packed_keys::block_bytes(kKeyBytes);
  static constexpr int kQueryBytes = 2 * kN * kWarpgroups * kKeyBytes;
  static constexpr int kStages = dense_block_keys_config::stages(kKeyBytes);
  static constexpr int kStageBytes = 8 * kBlockBytes;  // the positions of an MMA
  // Of halves half as many: half the code to compile.
  static constexpr int kUnitBlocks =
      dense_block_keys_config::kUnitBlocks / (E == Element::kE4m3 ? 1 : 2);
  static constexpr int kUnitStages = kUnitBlocks / 8;
  static_assert(kGroupQuads == dense_block_keys_config::quads_of_group(Heads),
                "as the host has it");
  static_assert(kBlockBytes % 16 == 0, "bulk copies");

  struct Shared {
    alignas(128) uint8_t queries[kQueryBytes];
    alignas(128) uint8_t keys[kStages][kStageBytes];
    uint64_t full[kStages], empty[kStages], queries_full, queries_empty;
    Part part;
  };

  static_assert(sizeof(Shared) <= dense_block_keys_config::shared_bytes(kKeyBytes), "the launch's");

  struct UnitsOf {
    const Params& p;
    __device__ int operator()(int group) const {
      int len = 0;
#pragma unroll
      for (int q = 0; q < kGroupQuads; ++q) len = max(len, p.quad_lens[group * kGroupQuads + q]);
      return min((len - 1) / (8 * kUnitBlocks) + (len > 0), p.width / kUnitBlocks);
    }
  };

  static __device__ void run(const Params& p) {
    extern __shared__ __align__(128) uint8_t raw[];
    Shared& s = *reinterpret_cast<Shared*>(raw);
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        barrier_init(&s.full[i], 1);
        barrier_init(&s.empty[i], 4 * kWarpgroups * kWarpArrivals);
      }
      barrier_init(&s.queries_full, 1);
      barrier_init(&s.queries_empty, 4 * kWarpgroups * kWarpArrivals);
      barrier_init_fence();
    }
    find_part<kThreads>(p.groups, UnitsOf{p}, s.part);
    __syncthreads();  // barriers and part are there
    if (threadIdx.x < 128) {
      fewer_registers<24>();
      if (threadIdx.x == 0) produce(p, s, s.part);
    } else {
      more_registers<240>();
      consume(p, s, s.part);
    }
  }

  static __device__ void produce(const Params& p, Shared& s, const Part& part) {
    uint32_t n = 0;  // stages so far
    int groups = 0;
    for_each_group(part, UnitsOf{p}, [&](int group, int first, int stop) {
      if (groups > 0) barrier_wait(&s.queries_empty, (groups - 1) & 1);
      barrier_expect(&s.queries_full, kQueryBytes);
      bulk_copy(s.queries, p.queries + int64_t(group) * kQueryBytes, kQueryBytes, &s.queries_full);
      ++groups;
      const int from = p.quad_first[group * kGroupQuads];
      for (int i = first * kUnitStages; i < stop * kUnitStages; ++i) {
        const uint32_t at = n % kStages;
        barrier_wait(&s.empty[at], n / kStages & 1 ^ 1);
        // Past the last key anything will do.
        const int block = min(from + i * 8, p.num_blocks - 1);
        const int bytes = min(p.num_blocks - block, 8) * kBlockBytes;
        barrier_expect(&s.full[at], bytes);
        bulk_copy(s.keys[at], p.keys + int64_t(block) * kBlockBytes, bytes, &s.full[at]);
        ++n;
      }
    });
  }

  static __device__ void consume(const Params& p, Shared& s, const Part& part) {
    // The compiler knows a shuffled value is the same in all lanes: it keeps it in uniform
    // registers.
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4;
    const uint32_t queries = shared_address(s.queries) + warpgroup * 2 * kN * kKeyBytes;
    const uint32_t lower_queries = operand(queries);
    const uint32_t upper_queries = lower_queries + kN * kKeyBytes / 16;
    const int scales = warp * 2 * kBlockBytes + 8 * kKeyBytes + g * 4;
    uint32_t n = 0;  // stages so far
    int groups = 0;
    for_each_group(part, UnitsOf{p}, [&](int group, int first, int stop) {
      const int quad = group * kGroupQuads + warpgroup * kQuads;
      Sum sums[kQuads];
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        sums[q].load(p.weights + int64_t(quad + q) * Sum::kRows * Heads);
      }
      float* out = out_of_lane(p, quad) + int64_t(first) * kUnitBlocks;
      barrier_wait(&s.queries_full, groups & 1);
      ++groups;
#pragma unroll 1
      for (int i = first; i < stop; ++i) {
        barrier_wait(&s.full[n % kStages], n / kStages & 1);
        const uint8_t* keys = s.keys[n % kStages];
        float lower[kN / 2], upper[kN / 2];
        score(p, lower, keys, lower_queries);
        score(p, upper, keys, upper_queries);
#pragma unroll
        for (int stage = 0; stage < kUnitStages; ++stage) {
          const bool more = stage + 1 < kUnitStages;
          const float low_scale = *reinterpret_cast<const float*>(keys + scales);
          const float high_scale = *reinterpret_cast<const float*>(keys + scales + kBlockBytes);
          typename Sum::Chains chains;
          float v[kQuads][2];  // logits of position g and g + 8
          wgmma_wait<1>();
          wgmma_use(lower);
          sums[0].template add<0>(lower, chains);
          uint64_t* const empty = &s.empty[n % kStages];
          ++n;
          if (more) {
            barrier_wait(&s.full[n % kStages], n / kStages & 1);
            keys = s.keys[n % kStages];
            score(p, lower, keys, lower_queries);
            wgmma_wait<1>();
          } else {
            wgmma_wait<0>();
          }
          if constexpr (kQuads == 2) {
            v[0][0] = Sum::finish(chains, 0) * low_scale;
            v[0][1] = Sum::finish(chains, 1) * high_scale;
          }
          wgmma_use(upper);
          warp_arrive(empty, lane);  // the scales have been read
          sums[kQuads - 1].template add<kQuads == 2 ? 0 : Sum::kTiles / 2>(upper, chains);
          if (more) score(p, upper, keys, upper_queries);
          v[kQuads - 1][0] = Sum::finish(chains, 0) * low_scale;
          v[kQuads - 1][1] = Sum::finish(chains, 1) * high_scale;
          const float key = max_of_blocks(v);
          if (g < 2 * kQuads) out[stage * 8] = key;
        }
        out += kUnitBlocks;
      }
      warp_arrive(&s.queries_empty, lane);
    });
  }

  // Issues the MMA of 64 positions and half the queries of a warpgroup.
  static __device__ __forceinline__ void score(const Params& p, float (&d)[kN / 2],
                                               const uint8_t* keys, uint32_t queries) {
    const uint32_t a = operand(shared_address(keys));
    // 0, but the compiler cannot tell, and keeps the accumulators where they are: no spills.
    const int zero = p.groups >> 31;
    wgmma_use(d);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeyBytes / 32; ++k) {
      Wgmma<E, kN, kBlockBytes, 8 * kKeyBytes>::issue(d, a + k * 16, queries + k * 16,
                                                      k > 0 ? 1 : zero);
    }
    wgmma_commit();
  }

  // Where this lane's keys go (see max_of_blocks), at the first block of the warp's tile.
  static __device__ __forceinline__ float* out_of_lane(const Params& p, int quad) {
    const int lane = threadIdx.x % 32, g = lane / 4, warp = threadIdx.x / 32 % 4;
    const int own = quad + (kQuads == 2 ? g / 2 % 2 : 0);
    return p.out + (int64_t(own) * Sum::kRows + lane % 4) * p.out_stride + warp * 2 + g % 2;
  }

  // Max over the 8 lanes that hold a block; lane 4 g + t gets block g % 2, row t of quad g / 2 % 2.
  static __device__ __forceinline__ float max_of_blocks(const float (&v)[kQuads][2]) {
    const bool odd = threadIdx.x & 4, second = threadIdx.x & 8;
    float x[kQuads];
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      x[q] = fmaxf(odd ? v[q][1] : v[q][0], __shfl_xor_sync(~0u, odd ? v[q][0] : v[q][1], 4));
    }
    const float own = second ? x[kQuads - 1] : x[0], other = second ? x[0] : x[kQuads - 1];
    const float y = fmaxf(own, __shfl_xor_sync(~0u, other, 8));
    return fmaxf(y, __shfl_xor_sync(~0u, y, 16));
  }
};

}  // namespace sparse_indexer
