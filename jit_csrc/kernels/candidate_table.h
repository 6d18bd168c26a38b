// SPDX-License-Identifier: Apache-2.0
// What host and device share of `candidate_table`.
#pragma once

#include "sparse_indexer/cstdint.h"

namespace sparse_indexer {

struct CandidateTableParams {
  const int32_t* selected;         // [source rows, n], row stride `selected_stride`: ascending
  const int32_t* compressed_lens;  // [source rows]
  const int64_t* rows;             // [out rows]: source row of each, or null: all
  const int32_t* request_of_row;   // [source rows], or null
  const int32_t* page_table;       // [requests, max_pages], row stride `table_stride`, or null
  int32_t* out_blocks;             // [out rows, n], contiguous, as all outputs
  int32_t* out_slots;              // [out rows, n], or null
  int32_t* out_lens;               // [out rows]
  int64_t selected_stride;
  int64_t table_stride;
  int32_t n;  // a multiple of 4 takes vectors
  int32_t blocks_per_page;
};

namespace candidate_table_config {

constexpr int kThreads = 256;

}  // namespace candidate_table_config
}  // namespace sparse_indexer
