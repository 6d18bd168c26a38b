// SPDX-License-Identifier: Apache-2.0
// candidate_quads: the blocks that any row of a quad has as candidates, ascending, each once, with
// the rows that have it: block id | 1 << (24 + row within the quad) | ... And, of every 32nd entry,
// how many blocks before it each row has: the rank of the entry's block in the row's own list.
//
// Rows that have little in common are better scored two by two: then the quad gets two lists, of
// rows 0 and 1 and, from the next multiple of 32 on, of rows 2 and 3. counts is the length of the
// first list and that of the second; -1: there is one list for all four.
//
// One CTA a quad. A slab of block ids at a time, a bit a block and row in shared memory; the lists
// are counted first, then each thread writes the entries of its words behind all before them.
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

  using Bits = uint32_t[4][kSlabWords];

  const Params& p;
  Bits& bits;
  int64_t quad;

  static __device__ void run(const Params& p) {
    __shared__ Bits bits;
    const CandidateQuads self{p, bits, blockIdx.x};
    int all = 0, first = 0, second = 0;  // entries: of all four rows, of either pair
    self.for_each_slab(true, [&](int) {
      uint64_t mine = 0;  // those three, 16 bits each: a slab has 2^15 blocks
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        const int word = threadIdx.x * kPer + j;
        const uint32_t a = bits[0][word] | bits[1][word], b = bits[2][word] | bits[3][word];
        mine += __popc(a | b) | __popc(a) << 16 | uint64_t(__popc(b)) << 32;
      }
      uint64_t total;
      exclusive_scan(Cta<kThreads>{}, mine, &total);
      all += total & 0xffff, first += total >> 16 & 0xffff, second += total >> 32;
    });
    const int after = (first + kRankEvery - 1) / kRankEvery * kRankEvery;
    const bool pairs = p.pairs != 0 && after + second <= p.width &&
                       int64_t(first + second) * candidate_quads_config::kPairCost < all * 100ll;
    const bool again = p.max_blocks > kSlabWords * 32;  // else the bits are still there
    if (pairs) {
      self.write_list<0, 2>(0, again);
      self.write_list<2, 4>(after, again);
    } else {
      self.write_list<0, 4>(0, again);
    }
    if (threadIdx.x == 0) {
      p.out_counts[2 * self.quad] = pairs ? first : min(all, p.width);
      p.out_counts[2 * self.quad + 1] = pairs ? second : -1;
    }
  }

  // Calls visit(first block) for each slab; sets its bits, or they are there from before.
  template <typename Visit>
  __device__ __forceinline__ void for_each_slab(bool set, Visit visit) const {
    for (int slab = 0; slab < p.max_blocks; slab += kSlabWords * 32) {
      if (set) {
        __syncthreads();  // the bits of the slab before have been read
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
      }
      visit(slab);
    }
  }

  // Writes the list of rows First ... Stop - 1 from entry `start` on.
  template <int First, int Stop>
  __device__ __forceinline__ void write_list(int start, bool set) const {
    uint32_t* out = p.out_entries + quad * p.width;
    const int num_ranks = (p.width + kRankEvery - 1) / kRankEvery;
    auto* out_ranks = reinterpret_cast<uint64_t*>(p.out_ranks) + quad * num_ranks;
    uint32_t written = start;
    uint64_t of_rows = 0;  // blocks before the slab that each row has, 16 bits a row
    for_each_slab(set, [&](int slab) {
      uint32_t any[kPer], mine = 0;
      uint64_t mine_of_rows = 0;
      const int word = threadIdx.x * kPer;
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        any[j] = 0;
#pragma unroll
        for (int r = First; r < Stop; ++r) {
          any[j] |= bits[r][word + j];
          mine_of_rows += uint64_t(__popc(bits[r][word + j])) << 16 * r;
        }
        mine += __popc(any[j]);
      }
      uint32_t total;
      uint64_t total_of_rows;
      uint32_t at = written + exclusive_scan(Cta<kThreads>{}, mine, &total);
      written += total;
      uint64_t rank = of_rows + exclusive_scan(Cta<kThreads>{}, mine_of_rows, &total_of_rows);
      of_rows += total_of_rows;
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        for (uint32_t left = any[j]; left != 0; left &= left - 1, ++at) {
          const int bit = __ffs(left) - 1;
          uint32_t rows = 0;
          uint64_t one_more = 0;
#pragma unroll
          for (int r = First; r < Stop; ++r) {
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
    });
  }
};

}  // namespace sparse_indexer
