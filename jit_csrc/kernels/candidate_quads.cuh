// SPDX-License-Identifier: Apache-2.0
// candidate_quads: the blocks that any row of a quad has as candidates, ascending, each once, with
// the rows that have it: block id | 1 << (24 + row within the quad) | ... And, of every 32nd entry,
// how many blocks before it each row has: the rank of the entry's block in the row's own list.
//
// One CTA a quad. A slab of block ids at a time, a bit a block and row in shared memory, then each
// thread writes the entries of its words behind all before them.
#pragma once

#include "kernels/candidate_quads.h"
#include "sparse_indexer/scan.cuh"

namespace sparse_indexer {

struct CandidateQuads {
  using Params = CandidateQuadsParams;
  static constexpr int kThreads = candidate_quads_config::kThreads;
  static constexpr int kMinBlocks = 1;
  static constexpr int kSlabWords = candidate_quads_config::kSlabWords;
  static constexpr int kPer = kSlabWords / kThreads;  // neighboring words of a thread
  static constexpr int kRankEvery = candidate_quads_config::kRankEvery;
  static constexpr int kIdBits = candidate_quads_config::kIdBits;
  static_assert(kSlabWords % kThreads == 0, "all threads have the same number of words");

  static __device__ void run(const Params& p) {
    __shared__ uint32_t bits[4][kSlabWords];
    const int64_t quad = blockIdx.x;
    uint32_t* out = p.out_entries + quad * p.width;
    const int ranks = (p.width + kRankEvery - 1) / kRankEvery;
    auto* out_ranks = reinterpret_cast<uint64_t*>(p.out_ranks) + quad * ranks;
    uint32_t written = 0;
    uint64_t of_rows = 0;  // blocks before the slab that each row has, 16 bits a row
    for (int slab = 0; slab < p.max_blocks; slab += kSlabWords * 32) {
      for (int i = threadIdx.x; i < 4 * kSlabWords; i += kThreads) bits[0][i] = 0;
      __syncthreads();  // before bits are set
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        for (int i = threadIdx.x; i < p.n; i += kThreads) {
          const int block = p.blocks[(quad * 4 + r) * p.n + i];
          const uint32_t at = static_cast<uint32_t>(block - slab);
          if (at < kSlabWords * 32 && block < p.max_blocks) {
            atomicOr(&bits[r][at / 32], 1u << at % 32);
          }
        }
      }
      __syncthreads();  // all bits are set
      uint32_t any[kPer], mine = 0;
      uint64_t mine_of_rows = 0;
      const int word = threadIdx.x * kPer;
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        any[j] = bits[0][word + j] | bits[1][word + j] | bits[2][word + j] | bits[3][word + j];
        mine += __popc(any[j]);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          mine_of_rows += uint64_t(__popc(bits[r][word + j])) << 16 * r;
        }
      }
      uint32_t total;
      uint64_t total_of_rows;
      uint32_t at = written + exclusive_scan<kThreads / 32, uint32_t>(mine, &total);
      written += total;
      uint64_t rank =
          of_rows + exclusive_scan<kThreads / 32, uint64_t>(mine_of_rows, &total_of_rows);
      of_rows += total_of_rows;
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        for (uint32_t left = any[j]; left != 0; left &= left - 1, ++at) {
          const int bit = __ffs(left) - 1;
          uint32_t rows = 0;
          uint64_t one_more = 0;
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const uint32_t has = bits[r][word + j] >> bit & 1;
            rows |= has << r;
            one_more |= uint64_t(has) << 16 * r;
          }
          if (at < static_cast<uint32_t>(p.width)) {
            out[at] = (slab + (word + j) * 32 + bit) | rows << kIdBits;
            if (at % kRankEvery == 0) out_ranks[at / kRankEvery] = rank;
          }
          rank += one_more;
        }
      }
      __syncthreads();  // the bits have been read
    }
    if (threadIdx.x == 0) p.out_counts[quad] = min(static_cast<int>(written), p.width);
  }
};

}  // namespace sparse_indexer
