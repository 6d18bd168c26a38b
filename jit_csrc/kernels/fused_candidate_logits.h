// SPDX-License-Identifier: Apache-2.0
// What host and device share of `fused_candidate_logits`.
#pragma once

#include "kernels/fused_scoring.h"

namespace sparse_indexer {

struct FusedCandidateLogitsParams {
  const uint8_t* keys;        // packed blocks of all requests: 8 keys, then 8 scales, each
  const uint8_t* queries;     // packed [quads, 4 rows * heads, 128]
  const float* weights;       // [quads, 4, heads]: half the heads' weights
  const uint32_t* entries;    // [quads, entries_stride]: block id | rows that have it << 24
  const uint16_t* ranks;      // [quads, ranks_stride, 4]: of every 32nd entry, blocks before it
  const int32_t* counts;      // [quads, 2]: entries, and -1
  const int32_t* quad_first;  // [quads]: its request's first packed block
  float* out;                 // [quads, 4, out_blocks * 8], row stride `out_stride`
  int64_t entries_stride;     // elements, as all strides
  int64_t ranks_stride;
  int64_t out_stride;
  int32_t quads;
  int32_t out_blocks;  // a row's candidates past it are left out
  int32_t num_blocks;  // packed blocks that exist
};

}  // namespace sparse_indexer
