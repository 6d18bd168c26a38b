// SPDX-License-Identifier: Apache-2.0
// What host and device share of `fused_logits` and `fused_block_keys`.
#pragma once

#include "kernels/fused_scoring.h"

namespace sparse_indexer {

struct FusedLogitsParams {
  const uint8_t* keys;        // packed blocks of all requests: 8 keys, then 8 scales, each
  const uint8_t* queries;     // packed [quads, 4 rows * heads, 128]
  const float* weights;       // [quads, 4, heads]: half the heads' weights
  const int32_t* slot_lens;   // [quads, 4]: positions the slot's row sees
  const int32_t* quad_first;  // [quads]: its request's first packed block
  float* out;                 // [quads, 4, width], row stride `out_stride`: of positions or blocks
  int64_t out_stride;         // elements
  int32_t groups;             // of rows_of_group(heads) slots of one request
  int32_t num_blocks;         // packed blocks that exist
  int32_t width;
};

}  // namespace sparse_indexer
