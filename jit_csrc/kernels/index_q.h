// SPDX-License-Identifier: Apache-2.0
// What host and device share of `index_q`.
#pragma once

#include "sparse_indexer/cstdint.h"

namespace sparse_indexer {

struct IndexQParams {
  const uint8_t* values;     // [rows, heads, stored bytes], contiguous
  const uint32_t* scales;    // [rows, heads]: fp32, or four ue8m0 codes; or null
  const void* head_weights;  // [rows, heads] float or bfloat16, contiguous
  const int32_t* rows;       // [quads, 4]: row of each slot, -1: none
  const int32_t* counts;     // [quads, 2]: the second is not negative: packed by pairs; or null
  uint8_t* out_values;       // [quads, 4 rows * out_heads, 128]
  float* out_weights;        // [quads, 4, out_heads]
  int32_t heads;
  int32_t out_heads;     // 32 or 64
  int32_t bf16_weights;  // 1: head_weights are bfloat16
  int32_t parts;         // CTAs a quad
};

namespace index_q_config {

constexpr int kThreads = 256;
constexpr int kLanes = 8;                    // threads of a query, 16 dims each
constexpr int kQueries = kThreads / kLanes;  // of a CTA

}  // namespace index_q_config
}  // namespace sparse_indexer
