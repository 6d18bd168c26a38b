// SPDX-License-Identifier: Apache-2.0
// index_q: queries of quads of rows, converted as index_k converts keys, in the order in which
// Hopper's MMA reads them; and half the head weights, a query's scale folded in (2 relu(x) costs
// less than relu(x)).
//
// Of a quad, column 8 i + 2 r + c is head 2 i + c of row r; packed by pairs, of each pair of rows,
// one after the other, column 8 i + 4 r + c is head 4 i + c of row r. Eight columns are a core
// matrix: chunks of 16 bytes, chunk after chunk, within a chunk the 8 columns. Heads past the given
// ones, and slots without a row, are zeros with zero weights.
#pragma once

#include "kernels/index_k.cuh"
#include "kernels/index_q.h"

namespace sparse_indexer {

template <KeyFormat From, KeyFormat To>
struct IndexQ {
  using Params = IndexQParams;
  using Convert = IndexK<From, To>;
  static constexpr int kThreads = index_q_config::kThreads;
  static constexpr int kMinBlocks = 1;
  static constexpr int kLanes = index_q_config::kLanes;
  static constexpr int kBytes = Convert::kBytes * kLanes;  // stored, of a query
  static constexpr int kOutBytes = Convert::kOutWords * 4 * kLanes;
  static constexpr int kChunks = Convert::kOutWords / 4;  // of 16 bytes, of a thread
  static_assert(kLanes == Convert::kLanes, "it converts by so many lanes");

  static __device__ void run(const Params& p) {
    const int64_t quad = blockIdx.x / p.parts;
    const int query = blockIdx.x % p.parts * index_q_config::kQueries + threadIdx.x / kLanes;
    const int r = query / p.out_heads, head = query % p.out_heads, lane = threadIdx.x % kLanes;
    const int row = p.rows[quad * 4 + r];
    const bool there = row >= 0 && head < p.heads;
    const int64_t at = int64_t(row) * p.heads + head;

    uint32_t in[Convert::kWords] = {};
    uint32_t stored_scale = From == KeyFormat::kFp4 ? 0x7f7f7f7fu : __float_as_uint(1.0f);
    if (there) {
      load(p.values + at * kBytes + lane * Convert::kBytes, in);
      if (p.scales != nullptr) stored_scale = p.scales[at];
    }
    uint32_t out[Convert::kOutWords];
    const float scale = Convert::convert(in, stored_scale, lane, out);  // all lanes: it shuffles

    const bool pairs = p.counts != nullptr && p.counts[2 * quad + 1] >= 0;
    const int column = pairs ? r / 2 * 2 * p.out_heads + head / 4 * 8 + r % 2 * 4 + head % 4
                             : head / 2 * 8 + r * 2 + head % 2;
    uint8_t* to =
        p.out_values + (quad * 4 * p.out_heads + column / 8 * 8) * kOutBytes + column % 8 * 16;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      *reinterpret_cast<uint4*>(to + (lane * kChunks + j) * 128) =
          make_uint4(out[4 * j], out[4 * j + 1], out[4 * j + 2], out[4 * j + 3]);
    }
    if (lane == 0) {
      float weight = 0.0f;
      if (there) {
        weight =
            p.bf16_weights != 0
                ? __uint_as_float(uint32_t(static_cast<const uint16_t*>(p.head_weights)[at]) << 16)
                : static_cast<const float*>(p.head_weights)[at];
        weight = weight * scale * 0.5f;
      }
      p.out_weights[(quad * 4 + r) * p.out_heads + head] = weight;
    }
  }

  static __device__ __forceinline__ void load(const uint8_t* from,
                                              uint32_t (&in)[Convert::kWords]) {
    if constexpr (Convert::kWords == 2) {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      in[0] = v.x, in[1] = v.y;
    } else {
#pragma unroll
      for (int j = 0; j < Convert::kWords / 4; ++j) {
        const uint4 v = reinterpret_cast<const uint4*>(from)[j];
        in[4 * j] = v.x, in[4 * j + 1] = v.y, in[4 * j + 2] = v.z, in[4 * j + 3] = v.w;
      }
    }
  }
};

}  // namespace sparse_indexer
