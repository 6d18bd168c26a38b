// SPDX-License-Identifier: Apache-2.0
// What host and device share of `topk`.
#pragma once

#include "sparse_indexer/cstdint.h"

namespace sparse_indexer {

struct TopkParams {
  const void* keys;               // [rows, width] float or bfloat16, row stride `stride`
  const int32_t* lens;            // [rows]: positions the row sees; columns = ceil(lens / per_column)
  int32_t* out;                   // [rows, k], row stride `out_stride`
  const int32_t* blocks;          // [rows, width / 8], row stride `blocks_stride`, or null
  const int32_t* request_of_row;  // [rows], or null
  const int32_t* request_starts;  // [requests], or null
  const int32_t* page_table;      // [requests, max_pages], row stride `table_stride`, or null
  int64_t stride;                 // elements, as all strides
  int64_t out_stride;
  int64_t blocks_stride;
  int64_t table_stride;
  int32_t width;
  int32_t k;
  int32_t per_column;  // 1, or 8: a column is a block
  int32_t page_size;
  int32_t force_last;  // 1: the last column that counts is selected whatever it holds
};

namespace topk_config {

constexpr int kThreads = 512;
constexpr int kVector = 4;  // columns a thread takes at once
constexpr int kTile = kThreads * kVector;
constexpr int kWarps = kThreads / 32;
constexpr int kCoarseBits = 11;  // of the upper 16 bits of a key, and again of the lower 16
constexpr int kFineBits = 5;
constexpr int kBins = 1 << kCoarseBits;
// Tiles whose per-warp counts (8 bytes each) take the histogram's place at a time.
constexpr int kCountedTiles = kBins * 4 / (kWarps * 8);

}  // namespace topk_config
}  // namespace sparse_indexer
