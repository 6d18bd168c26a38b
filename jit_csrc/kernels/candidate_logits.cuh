// SPDX-License-Identifier: Apache-2.0
// candidate_logits: the logits of each row at its candidate blocks, in the order of its list.
//
// Neighboring rows want nearly the same blocks. A quad of rows gathers each block that any of
// them wants once, by a copy of 1 KB to shared memory, scores it for all four on Hopper's tensor
// cores, and writes a row's 8 logits at the rank that the block has in the row's own list. Four
// producer warps walk the quad's list and count the ranks, a stage of blocks at a time; each
// consumer warpgroup scores 8 blocks of a stage. The stages of all quads are cut into equal parts,
// one a CTA. A logit has the same bits as in dense_block_keys: the same MMA, the same head sum.
#pragma once

#include "kernels/candidate_logits.h"
#include "sparse_indexer/head_sum.cuh"
#include "sparse_indexer/hopper.cuh"
#include "sparse_indexer/parts.cuh"

namespace sparse_indexer {

template <Element E, int Heads>
struct CandidateLogits {
  using Params = CandidateLogitsParams;
  using Sum = HeadSum<Heads>;
  static constexpr int kRows = Sum::kRows;
  static constexpr int kWarpgroups = candidate_logits_config::warpgroups(Heads);
  static constexpr int kRegisters = Heads == 32 ? 152 : 216;
  static constexpr int kProducerRegisters = Heads == 32 ? 56 : 72;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  static constexpr int kMinBlocks = 1;
  static constexpr int kKeyBytes = E == Element::kE4m3 ? 128 : 256;
  static constexpr int kBlockBytes = candidate_logits_config::block_bytes(kKeyBytes);
  static constexpr int kStageBlocks = 8 * kWarpgroups;
  static constexpr int kStageBytes = kStageBlocks * kBlockBytes;
  static constexpr int kQueryBytes = Sum::kN * kKeyBytes;
  static constexpr int kStages = candidate_logits_config::stages(kKeyBytes, Heads);
  static constexpr int kProducers = 4;  // warps; a copy takes one of them some 70 clocks to issue
  static constexpr int kNone = 0xffff;
  static_assert(kStages >= 2, "loads overlap with scoring");
  static_assert(kRows == 4 && kBlockBytes % 16 == 0, "an entry's ranks are one load; bulk copies");

  struct Shared {
    alignas(16) uint8_t queries[2][kQueryBytes];
    alignas(16) uint8_t keys[kStages][kStageBytes];
    uint16_t ranks[kStages][kStageBlocks][kRows];  // of a block in each row's list, or kNone
    uint64_t full[kStages], empty[kStages], queries_full[2], queries_empty[2];
    Part part;
  };
  static_assert(sizeof(Shared) <= candidate_logits_config::shared_bytes(kKeyBytes, Heads),
                "the launch's");

  struct StagesOf {
    const Params& p;
    __device__ int operator()(int quad) const {
      return (p.counts[quad] + kStageBlocks - 1) / kStageBlocks;
    }
  };

  static __device__ void run(const Params& p) {
    extern __shared__ uint4 raw[];
    Shared& s = *reinterpret_cast<Shared*>(raw);
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        barrier_init(&s.full[i], kProducers), barrier_init(&s.empty[i], 4 * kWarpgroups);
      }
      for (int i = 0; i < 2; ++i) {
        barrier_init(&s.queries_full[i], 1), barrier_init(&s.queries_empty[i], 4 * kWarpgroups);
      }
      barrier_init_fence();
    }
    find_part<kThreads>(p.quads, StagesOf{p}, s.part);
    __syncthreads();  // barriers and part are there
    if (threadIdx.x < 128) {
      fewer_registers<kProducerRegisters>();
      produce(p, s, s.part);
    } else {
      more_registers<kRegisters>();
      consume(p, s, s.part);
    }
  }

  static __device__ void produce(const Params& p, Shared& s, const Part& part) {
    const int producer = threadIdx.x / 32, lane = threadIdx.x % 32;
    int at = 0, phase = 0, quads = 0;
    for_each_group(part, StagesOf{p}, [&](int quad, int first, int stop) {
      if (threadIdx.x == 0) {
        const int buffer = quads % 2;
        if (quads >= 2) barrier_wait(&s.queries_empty[buffer], (quads / 2 - 1) & 1);
        barrier_expect(&s.queries_full[buffer], kQueryBytes);
        bulk_copy(s.queries[buffer], p.queries + int64_t(quad) * kQueryBytes, kQueryBytes,
                  &s.queries_full[buffer]);
      }
      ++quads;
      const uint32_t* entries = p.entries + quad * p.entries_stride;
      const int count = p.counts[quad];
      const int keys = p.quad_first[quad];
      // Blocks of each row before this lane's entry; lane r of a row finds how many precede `first`.
      int before = 0;
      if (first > 0) before = rank_of(p, quad, entries[first * kStageBlocks] & 0xffffff);
      int index = first * kStageBlocks + lane;
      uint32_t entry = lane < kStageBlocks && index < count ? entries[index] : 0;
      for (int i = first; i < stop; ++i) {
        const uint32_t now = entry;
        const bool there = lane < kStageBlocks && index < count;
        index += kStageBlocks;
        entry = lane < kStageBlocks && index < count ? entries[index] : 0;  // the next, meanwhile
        barrier_wait(&s.empty[at], phase ^ 1);
        uint32_t ranks[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const bool wanted = there && (now >> (24 + r) & 1);
          const uint32_t rows = __ballot_sync(~0u, wanted);
          const int rank = __shfl_sync(~0u, before, r) + __popc(rows & ((1u << lane) - 1));
          ranks[r] = wanted && rank < p.out_blocks ? rank : kNone;
          if (lane == r) before += __popc(rows);
        }
        if (producer == 0 && lane < kStageBlocks) {
          *reinterpret_cast<uint2*>(s.ranks[at][lane]) =
              make_uint2(ranks[0] | ranks[1] << 16, ranks[2] | ranks[3] << 16);
        }
        const bool copies = there && lane % kProducers == producer;
        const int bytes = __popc(__ballot_sync(~0u, copies)) * kBlockBytes;
        __syncwarp();  // the ranks are written before the barrier says so
        if (lane == 0) barrier_expect(&s.full[at], bytes);
        __syncwarp();  // and the bytes are expected before they come
        if (copies) {
          const int block = min(keys + static_cast<int>(now & 0xffffff), p.num_blocks - 1);
          bulk_copy(s.keys[at] + lane * kBlockBytes, p.keys + int64_t(block) * kBlockBytes,
                    kBlockBytes, &s.full[at]);
        }
        if (++at == kStages) at = 0, phase ^= 1;
      }
    });
  }

  // Candidates of row `lane` of the quad below this block; 0 for lanes past the rows.
  static __device__ int rank_of(const Params& p, int quad, uint32_t block) {
    const int lane = threadIdx.x % 32;
    if (lane >= kRows) return 0;
    const int32_t* blocks = p.blocks + (int64_t(quad) * kRows + lane) * p.n;
    int low = 0, high = p.n;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (static_cast<uint32_t>(blocks[middle]) < block) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  static __device__ void consume(const Params& p, Shared& s, const Part& part) {
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int block = warpgroup * 8 + warp * 2;  // of the stage: this warp's first of two
    int at = 0, phase = 0, quads = 0;
    for_each_group(part, StagesOf{p}, [&](int quad, int first, int stop) {
      const int buffer = quads & 1;
      Sum head;
      head.load(p.weights + int64_t(quad) * kRows * Heads);
      float* out = p.out + (int64_t(quad) * kRows + t) * p.out_stride + g;
      barrier_wait(&s.queries_full[buffer], quads / 2 & 1);
      ++quads;
      const uint32_t queries = operand(shared_address(s.queries[buffer]));
      const int count = p.counts[quad];
#pragma unroll 1
      for (int i = first; i < stop; ++i) {
        barrier_wait(&s.full[at], phase);
        if (i * kStageBlocks + warpgroup * 8 < count) {
          float d[Sum::kN / 2];
          const uint32_t keys = operand(shared_address(s.keys[at]) + warpgroup * 8 * kBlockBytes);
          wgmma_use(d);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < kKeyBytes / 32; ++k) {
            Wgmma<E, Sum::kN, kBlockBytes, 8 * kKeyBytes>::issue(d, keys + k * 16, queries + k * 16, k > 0);
          }
          wgmma_commit();
          const uint8_t* scales = s.keys[at] + block * kBlockBytes + 8 * kKeyBytes + g * 4;
          const float scale[2] = {*reinterpret_cast<const float*>(scales),
                                  *reinterpret_cast<const float*>(scales + kBlockBytes)};
          const int rank[2] = {s.ranks[at][block][t], s.ranks[at][block + 1][t]};
          wgmma_wait<0>();
          wgmma_use(d);
          __syncwarp();  // all lanes have read the scales and ranks
          if (lane == 0) barrier_arrive(&s.empty[at]);
          typename Sum::Chains chains;
          head.template add<0>(d, chains);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            if (rank[r] != kNone) out[rank[r] * 8] = Sum::finish(chains, r) * scale[r];
          }
        } else if (lane == 0) {
          barrier_arrive(&s.empty[at]);
        }
        if (++at == kStages) at = 0, phase ^= 1;
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&s.queries_empty[buffer]);
    });
  }
};

}  // namespace sparse_indexer
