// SPDX-License-Identifier: Apache-2.0
// fused_candidate_logits: the logits of each row at its candidate blocks, in the order of its list,
// scored by mma.sync (fused_scoring.cuh).
//
// A CTA scores a quad of rows: it loads each block that any of them has once, and a row's two
// warps, which share its blocks or its heads, skip those that it has not. A row's 8 logits of a
// block go to the rank that the block has in the row's own list. Units of 32 entries of all quads'
// lists are cut into equal parts, one a CTA.
#pragma once

#include "kernels/candidate_logits.h"
#include "kernels/candidate_quads.h"
#include "kernels/fused_scoring.cuh"

namespace sparse_indexer {

template <StoredKeys Keys, int Heads, bool HalfScores>
struct FusedCandidateLogits {
  using Params = CandidateLogitsParams;
  using Scoring = FusedScoring<Keys, Heads, 4, HalfScores>;
  static constexpr int kThreads = Scoring::kThreads;
  static constexpr int kMinBlocks = MmaSync::kMinBlocks;
  static constexpr int kTileBlocks = Scoring::kTileBlocks;
  static constexpr int kUnit = candidate_quads_config::kRankEvery;
  static constexpr int kUnitTiles = kUnit / kTileBlocks;
  static constexpr int kIdBits = candidate_quads_config::kIdBits;
  static_assert(kUnit == 32, "an entry a lane, a bit an entry");

  struct UnitsOf {
    const Params& p;
    __device__ int operator()(int quad) const {
      return static_cast<int>((p.counts[2 * quad] + int64_t(kUnit) - 1) / kUnit);
    }
  };

  struct Tiles {
    static constexpr int kTogether = 2;
    const Params& p;
    int quad;
    int count;            // entries of the quad
    int first;            // packed block of the request
    int unit;             // of the tile entered last
    uint32_t entry;       // this lane's of that unit
    uint32_t next_entry;  // and of the one after it
    uint32_t mine;        // which of the unit's entries this warp's row has
    int rank;             // blocks that the row has before them

    __device__ __forceinline__ Tiles(const Params& p, int quad, int first_unit)
        : p(p),
          quad(quad),
          count(p.counts[2 * quad]),
          first(p.quad_first[quad]),
          unit(first_unit - 1),
          entry(0),
          next_entry(entry_of(first_unit)),
          mine(0),
          rank(0) {}

    // This lane's entry of a unit; 0, no row's, past the list's end.
    __device__ __forceinline__ uint32_t entry_of(int unit) const {
      const int index = unit * kUnit + static_cast<int>(threadIdx.x % 32);
      return index < count ? __ldg(p.entries + quad * p.entries_stride + index) : 0;
    }
    __device__ __forceinline__ void enter(int tile) {
      if (tile % kUnitTiles != 0) return;
      const int row = Scoring::row();
      unit = tile / kUnitTiles;
      entry = next_entry;
      next_entry = entry_of(unit + 1);
      mine = __ballot_sync(~0u, entry >> (kIdBits + row) & 1);
      rank = __ldg(p.ranks + (quad * p.ranks_stride + unit) * 4 + row);
    }
    __device__ __forceinline__ int block(int tile, int j) const {
      const uint32_t own = tile / kUnitTiles == unit ? entry : next_entry;
      const uint32_t its = __shfl_sync(~0u, own, tile % kUnitTiles * kTileBlocks + j);
      return min(first + static_cast<int>(its & ((1u << kIdBits) - 1)), p.num_blocks - 1);
    }
    __device__ __forceinline__ bool wants(int tile, int j) const {
      return (mine >> (tile % kUnitTiles * kTileBlocks + j) & 3) != 0;
    }
    __device__ __forceinline__ void write(int tile, int, const float (&logits)[1]) const {
      const int lane = threadIdx.x % 32, at = tile % kUnitTiles * kTileBlocks + lane / 8;
      const int its_rank = rank + __popc(mine & ((1u << at) - 1));
      if ((mine >> at & 1) == 0 || its_rank >= p.out_blocks) return;
      float* out = p.out + (int64_t(quad) * 4 + Scoring::row()) * p.out_stride;
      __stcs(out + its_rank * 8 + lane % 8, logits[0]);
    }
  };

  static __device__ void run(const Params& p) {
    __shared__ typename Scoring::Shared s;
    find_part<kThreads>(p.quads, UnitsOf{p}, s.part);
    __syncthreads();  // the part is there
    for_each_group(s.part, UnitsOf{p}, [&](int quad, int first, int stop) {
      Tiles tiles(p, quad, first);
      const int last = min(stop * kUnitTiles, (tiles.count + kTileBlocks - 1) / kTileBlocks);
      Scoring::score(p, s, int64_t(quad) * 4 + Scoring::row(), tiles, first * kUnitTiles, last);
    });
  }
};

}  // namespace sparse_indexer
