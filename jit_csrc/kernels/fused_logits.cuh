// SPDX-License-Identifier: Apache-2.0
// fused_logits: the logits of all positions that rows see, scored by mma.sync (fused_scoring.cuh);
// and, as FusedBlockKeys, only the largest of each block.
//
// A CTA scores a group of rows of one request: 8 of 32 heads, 4 of 64. The tiles of all groups, of
// each up to its longest row, are cut into equal parts, one a CTA; a row's own warps skip what it
// does not see. What a row does not see is not written.
#pragma once

#include "kernels/fused_logits.h"
#include "kernels/fused_scoring.cuh"

namespace sparse_indexer {

template <StoredKeys Keys, int Heads, bool HalfScores, bool BlockKeys = false>
struct FusedLogits {
  using Params = FusedLogitsParams;
  static constexpr int kRows = fused_scoring::rows_of_group(Heads);
  // All warps of a row write; a lane half or a quarter of a block, so that a batch is four tiles.
  static constexpr int kWriters = Heads / 32;
  static constexpr int kPositions = BlockKeys ? 4 / kWriters : 1;
  using Scoring = FusedScoring<Keys, Heads, kRows, HalfScores, kPositions, kWriters>;
  static constexpr int kThreads = Scoring::kThreads;
  static constexpr int kMinBlocks = MmaSync::kMinBlocks;
  static constexpr int kTileBlocks = Scoring::kTileBlocks;
  static constexpr int kTile = kTileBlocks * 8;

  // Positions of the row that are written.
  static __device__ __forceinline__ int written(const Params& p, int64_t slot) {
    const int len = __ldg(p.slot_lens + slot);
    return BlockKeys ? min(len, p.width * 8) : min(len, p.width);
  }

  struct TilesOf {
    const Params& p;
    __device__ int operator()(int group) const {
      int len = 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) len = max(len, written(p, int64_t(group) * kRows + r));
      return (len + kTile - 1) / kTile;
    }
  };

  struct Tiles {
    // What a row sees begins with the first block. Rounded scores take registers: by pairs.
    static constexpr int kTogether = HalfScores ? 2 : kTileBlocks;
    const Params& p;
    float* out;  // this warp's row
    int len;     // positions of it that are written
    int first;   // packed block of the request
    int newest;  // block that holds the last position that the row sees

    __device__ __forceinline__ void enter(int) const {}
    __device__ __forceinline__ int block(int tile, int j) const {
      return min(first + tile * kTileBlocks + j, p.num_blocks - 1);  // past the keys: anything
    }
    __device__ __forceinline__ bool wants(int tile, int j) const {
      return (tile * kTileBlocks + j) * 8 < len;
    }
    __device__ __forceinline__ void write(int tile, int mine,
                                          const float (&logits)[kPositions]) const {
      const int position = tile * kTile + mine;
      if constexpr (!BlockKeys) {
        if (position < len) __stcs(out + position, logits[0]);
      } else {
        // NaN is ignored. Of blocks that are written only the newest has positions the row does not
        // see, and its key is known.
        float key = __int_as_float(0xff800000);
#pragma unroll
        for (int i = 0; i < kPositions; ++i) key = fmaxf(key, logits[i]);
#pragma unroll
        for (int step = 1; step < 8 / kPositions; step *= 2) {
          key = fmaxf(key, __shfl_xor_sync(~0u, key, step));
        }
        const int block = position / 8;
        if (mine % 8 == 0 && position < len) {
          out[block] = newest == block ? __int_as_float(0x7f800000) : key;
        }
      }
    }
  };

  static __device__ void run(const Params& p) {
    __shared__ typename Scoring::Shared s;
    find_part<kThreads>(p.groups, TilesOf{p}, s.part);
    __syncthreads();  // the part is there
    for_each_group(s.part, TilesOf{p}, [&](int group, int first, int stop) {
      const int64_t slot = int64_t(group) * kRows + Scoring::row();
      const Tiles tiles{p, p.out + slot * p.out_stride, written(p, slot),
                        __ldg(p.quad_first + slot / 4), (__ldg(p.slot_lens + slot) - 1) >> 3};
      Scoring::score(p, s, slot, tiles, first, stop);
    });
  }
};

}  // namespace sparse_indexer
