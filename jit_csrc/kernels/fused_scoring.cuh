// SPDX-License-Identifier: Apache-2.0
// Scoring by mma.sync: what fused_logits, fused_block_keys and fused_candidate_logits have in
// common.
//
// A warp keeps the queries of 32 heads of one row in registers. Tiles of four blocks of keys,
// packed as index_k packs them, come through registers into one of two buffers in shared memory,
// e4m3 widened to halves on the way, so that all rows of a CTA share a load and a tile is scored
// while the next one is on its way. A warp adds up its heads; the sums of a row's warps, one or
// two, meet in shared memory in the order of heads, and are multiplied by the key's scale. A logit
// depends on its row and its position alone: it has the same bits in every kernel and any grid.
//
// Widened e4m3 are 2^-8 times their value, in queries as in keys; weights make up for it. With
// HalfScores each head's score is rounded to float16 as by a GEMM that writes float16: of e4m3 as
// it is, of halves 2^-8 of it, since index_k makes those of bfloat16 up to 2^7.
#pragma once

#include "kernels/fused_scoring.h"
#include "sparse_indexer/mma_sync.cuh"
#include "sparse_indexer/parts.cuh"

namespace sparse_indexer {

enum class StoredKeys { kE4m3, kF16 };

// Writers: warps of a row that write. Positions: neighbors that a lane of them writes. So many
// tiles as both say together are written at a time.
template <StoredKeys Keys, int Heads, int Rows, bool HalfScores, int Positions = 1, int Writers = 1>
struct FusedScoring {
  static constexpr int kThreads = fused_scoring::kThreads;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kTileBlocks = fused_scoring::kTileBlocks;
  static constexpr bool kWiden = Keys == StoredKeys::kE4m3;
  static constexpr int kKeyBytes = kWiden ? 128 : 256;
  static constexpr int kBlockBytes = packed_keys::block_bytes(kKeyBytes);
  static constexpr int kChunks = kTileBlocks * packed_keys::value_bytes(kKeyBytes) / 16 / kThreads;
  static constexpr int kChunksOfBlock = packed_keys::value_bytes(kKeyBytes) / 16;
  static constexpr int kWarpsOfRow = kWarps / Rows;
  static constexpr int kHeadGroups = Heads / 32;            // a warp each
  static constexpr int kSplit = kWarpsOfRow / kHeadGroups;  // ways to share a row's blocks
  static constexpr int kOwnBlocks = kTileBlocks / kSplit;   // of a tile, a warp's
  static constexpr int kHalfShift = kWiden ? 0 : 8;
  static constexpr int kBatch = Writers * Positions;  // tiles that are written at a time
  // Tiles whose sums are kept: a batch is written while the next one is scored.
  static constexpr int kSums = 2 * kBatch;
  // Of weights, which are halved.
  static constexpr float kFactor = 2.0f * (kWiden ? 65536 : HalfScores ? 1 << kHalfShift : 1);
  static_assert(kTileBlocks == 4, "a lane is one of a tile's 32 positions");
  static_assert(kChunks * kThreads * 16 == kTileBlocks * packed_keys::value_bytes(kKeyBytes),
                "every thread loads the same");
  static_assert(kOwnBlocks == 2 || kOwnBlocks == 4, "one score, or two");

  struct Shared {
    alignas(16) uint8_t keys[2][kTileBlocks * kHalfBlockBytes];
    // But for the key's scale, by position of a tile.
    alignas(16) float sums[kSums][Rows][kHeadGroups][32];
    Part part;
  };
  static_assert(sizeof(Shared) <= 32 * 1024, "two CTAs an SM on Turing");

  template <int N>
  struct alignas(4 * N) Floats {
    float at[N];

    static __device__ __forceinline__ Floats read(const float* from) {
      return *reinterpret_cast<const Floats*>(from);
    }
  };

  // This thread's warp.
  static __device__ __forceinline__ int row() { return threadIdx.x / 32 / kWarpsOfRow; }
  static __device__ __forceinline__ int place_in_row() { return threadIdx.x / 32 % kWarpsOfRow; }
  static __device__ __forceinline__ bool writes() { return place_in_row() < Writers; }

  using Loaded = uint4[kChunks];

  static __device__ __forceinline__ void store(uint8_t* tile, const Loaded& loaded) {
    if constexpr (kWiden) {
      static_assert(kChunks == 1, "16 dims become two chunks of 8");
      const int chunk = threadIdx.x % kChunksOfBlock / 8, position = threadIdx.x % 8;
      uint8_t* to = tile + threadIdx.x / kChunksOfBlock * kHalfBlockBytes +
                    chunk * 2 * kHalfChunkBytes + position * 16;
      const uint32_t codes[4] = {loaded[0].x, loaded[0].y, loaded[0].z, loaded[0].w};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<uint4*>(to + i * kHalfChunkBytes) =
            make_uint4(half2_of_e4m3(codes[2 * i]), half2_of_e4m3(codes[2 * i] >> 16),
                       half2_of_e4m3(codes[2 * i + 1]), half2_of_e4m3(codes[2 * i + 1] >> 16));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        reinterpret_cast<uint4*>(tile)[threadIdx.x + i * kThreads] = loaded[i];
      }
    }
  }

  // A query of slot `r` of a quad whose packed queries (index_q) begin at `quad`.
  struct Queries {
    const uint8_t* quad;
    int r;
    __device__ __forceinline__ uint32_t operator()(int head, int dim) const {
      const uint8_t* at =
          quad + head / 2 * packed_keys::value_bytes(kKeyBytes) + (2 * r + head % 2) * 16;
      if constexpr (kWiden) {
        return half2_of_e4m3(
            __ldg(reinterpret_cast<const uint16_t*>(at + dim / 16 * 128 + dim % 16)));
      } else {
        return __ldg(reinterpret_cast<const uint32_t*>(at + dim / 8 * 128 + dim % 8 * 2));
      }
    }
  };

  // Scores tiles first ... stop - 1 for the rows of a CTA; this warp's is `slot`, four slots a
  // quad. `tiles` knows them.
  //
  //   enter(tile)                called before a tile is scored, tile after tile
  //
  //   block(tile, j)             packed block j of the first tile, the one entered last, the next,
  //                              or one that is still to be written
  //
  //   wants(tile, j)             whether this warp's row needs it, or one of the kTogether from it
  //                              on; the same in all lanes
  //
  //   write(tile, mine, logits)  called by a row's first warps: this lane has the positions of the
  //                              tile, one that was entered, from `mine` on
  template <typename P, typename Tiles>
  static __device__ __forceinline__ void score(const P& p, Shared& s, int64_t slot, Tiles& tiles,
                                               int first, int stop) {
    const int lane = threadIdx.x % 32;
    // What this lane writes of a batch: from which position on, of which tile.
    const int in_batch = (place_in_row() * 32 + lane) * Positions;
    const int mine = in_batch % 32, of_tile = in_batch / 32;
    const int group = place_in_row() % kHeadGroups;
    const int own = place_in_row() / kHeadGroups * kOwnBlocks;
    MmaSync mma;
    mma.load(
        [&](int head, int dim) {
          const Queries queries{p.queries + slot / 4 * (4 * Heads * kKeyBytes),
                                static_cast<int>(slot % 4)};
          return queries(group * 32 + head, dim);
        },
        p.weights + slot * Heads + group * 32, kFactor);

    // Where this lane's sum of the first tile goes, if the lane has one of its own.
    const bool second = lane & MmaSync::kLast;
    float* const sums =
        s.sums[0][row()][group] + (own + (second ? 2 : 0)) * 8 + MmaSync::position();
    constexpr int kTileSums = Rows * kHeadGroups * 32;

    Loaded loaded;
    auto load_tile = [&](int tile) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int block = tiles.block(tile, (threadIdx.x + i * kThreads) / kChunksOfBlock);
        const uint8_t* from = p.keys + int64_t(block) * kBlockBytes;
        loaded[i] = __ldg(reinterpret_cast<const uint4*>(from) + threadIdx.x % kChunksOfBlock);
      }
    };
    load_tile(first);
    store(s.keys[0], loaded);
    __syncthreads();  // the first tile is there, sums of a group before have been read
#pragma unroll 1
    for (int tile = first; tile < stop; ++tile) {
      const int buffer = (tile - first) & 1;
      const bool more = tile + 1 < stop;
      tiles.enter(tile);
      if (more) load_tile(tile + 1);
      // This tile's place in its batch, and the tile that this lane writes: this one again where a
      // last batch has not so many.
      const int last = static_cast<int>(uint32_t(tile - first) % kBatch);
      const int written = tile - max(last - of_tile, 0);
      const bool writes_now = writes() && (last == kBatch - 1 || !more);
      Floats<Positions> scales;
      if (kBatch == 1 || writes_now) {
        const uint8_t* block = p.keys + int64_t(tiles.block(written, mine / 8)) * kBlockBytes;
        scales = Floats<Positions>::read(
            reinterpret_cast<const float*>(block + packed_keys::value_bytes(kKeyBytes)) + mine % 8);
      }
      const uint32_t keys = static_cast<uint32_t>(__cvta_generic_to_shared(s.keys[buffer]));
      float halves[kOwnBlocks / 2] = {};
      constexpr int kTogether = Tiles::kTogether < kOwnBlocks ? Tiles::kTogether : kOwnBlocks;
#pragma unroll
      for (int j = 0; j < kOwnBlocks; j += kTogether) {
        if (!tiles.wants(tile, own + j)) continue;
#pragma unroll
        for (int i = j; i < j + kTogether; i += 2) {
          halves[i / 2] =
              mma.template score<HalfScores, kHalfShift>(keys + (own + i) * kHalfBlockBytes);
        }
      }
      const float sum = kOwnBlocks == 4
                            ? keep_one(halves[0], halves[kOwnBlocks / 2 - 1], MmaSync::kLast)
                            : sum_with_lane(halves[0], MmaSync::kLast);
      if (kOwnBlocks == 4 || !second) {
        sums[uint32_t(tile - first) % kSums * kTileSums] = sum;
      }
      if (more) store(s.keys[buffer ^ 1], loaded);
      __syncthreads();  // sums and the next tile are there, this tile and sums before it are read
      if (writes_now) {
        const float* from = s.sums[uint32_t(written - first) % kSums][row()][0] + mine;
        const auto sums = Floats<Positions>::read(from);
        const auto more_sums = Floats<Positions>::read(from + (kHeadGroups - 1) * 32);
        float logits[Positions];
#pragma unroll
        for (int i = 0; i < Positions; ++i) {
          const float sum = kHeadGroups == 2 ? __fadd_rn(sums.at[i], more_sums.at[i]) : sums.at[i];
          logits[i] = __fmul_rn(sum, scales.at[i]);
        }
        tiles.write(written, mine, logits);
      }
    }
  }
};

}  // namespace sparse_indexer
