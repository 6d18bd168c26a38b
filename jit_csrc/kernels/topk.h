// SPDX-License-Identifier: Apache-2.0
// What host and device share of `topk`.
#pragma once

#include "sparse_indexer/cstdint.h"

namespace sparse_indexer {

struct TopkParams {
  const void* keys;       // [key rows, width] float or bfloat16, row stride `stride`
  const int32_t* rows;    // [key rows]: the row of out that is its, -1: none; null: the same
  const int32_t* lens;    // [key rows]: positions the row sees; columns = ceil(lens / per_column)
  int32_t* out;           // [rows, k], row stride `out_stride`
  const int32_t* blocks;  // [key rows, width / 8], row stride `blocks_stride`, or null
  const int32_t* request_of_row;  // [rows], or null
  const int32_t* request_starts;  // [requests], or null
  const int32_t* page_table;      // [requests, max_pages], row stride `table_stride`, or null
  int64_t stride;                 // elements, as all strides
  int64_t out_stride;
  int64_t blocks_stride;
  int64_t table_stride;
  int32_t width;
  int32_t k;
  int32_t unused;      // written past a row's count
  int32_t per_column;  // 1, or 8: a column is a block
  int32_t page_size;
  int32_t force_last;  // 1: the last column that counts is selected whatever it holds
  int32_t list;        // columns that the list takes; 0: no list
};

namespace topk_config {

constexpr int kBinBits = 11;
constexpr int kGroup = 64;                    // columns, of which
constexpr int kSamples = 8;                   // are a sample
constexpr int kThreads[] = {256, 512, 1024};  // of a row: short, long, alone on an SM
constexpr int kStaticBytes = 1024;            // at least what a kernel has beside its list

}  // namespace topk_config
}  // namespace sparse_indexer
