// SPDX-License-Identifier: Apache-2.0
// What host and device share of `candidate_quads`.
#pragma once

#include "sparse_indexer/cstdint.h"

namespace sparse_indexer {

struct CandidateQuadsParams {
  const int32_t* blocks;  // [quads, 4, n], contiguous: ascending, then INT32_MAX
  uint32_t* out_entries;  // [quads, width], contiguous
  uint16_t* out_ranks;    // [quads, ceil(width / kRankEvery), 4], contiguous
  int32_t* out_counts;    // [quads, 2]
  int32_t n;
  int32_t width;
  int32_t max_blocks;  // no block is at or past it
  int32_t pairs;       // 1: a quad may have two lists
};

namespace candidate_quads_config {

constexpr int kThreads = 256;
constexpr int kSlabWords = 1024;  // blocks / 32 that are merged at a time
constexpr int kRankEvery = 32;    // entries from one written rank to the next
// Scoring a block for a pair of rows costs that much of what it costs for a quad, in percent (H200,
// 32 heads).
constexpr int kPairCost = 58;
constexpr int kIdBits = 24;  // of an entry, below its rows' bits

}  // namespace candidate_quads_config
}  // namespace sparse_indexer
