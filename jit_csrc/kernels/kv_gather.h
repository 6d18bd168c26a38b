// SPDX-License-Identifier: Apache-2.0
// What host and device share of `kv_gather`.
#pragma once

#include "sparse_indexer/cstdint.h"

namespace sparse_indexer {

struct KvGatherParams {
  const void* values;        // [slots, value_dim] e4m3; of a plain pool [slots, dim]
  const float* scales;       // [slots, value_dim / 128]; plain: null
  const void* rest;          // [slots, dim - value_dim] bfloat16; plain: null
  const int32_t* positions;  // [rows, k]: slots
  void* out;                 // [rows, k, dim]
  int64_t value_stride;      // elements from one slot to the next, as all strides
  int64_t scale_stride;
  int64_t rest_stride;
  int64_t position_stride;  // from one row to the next
  int64_t out_row_stride;
  int64_t out_stride;
  int32_t slots;      // of the pool
  int32_t value_dim;  // elements that have scales; plain: dim
  int32_t dim;
  int32_t k;
  int32_t count;    // rows * k: KV rows to write
  int32_t vectors;  // 1: everything is aligned for accesses of kVector elements
};

namespace kv_gather_config {

constexpr int kThreads = 64;  // few: the KV rows of one query row fill a card
constexpr int kVector = 8;    // elements of a thread at a time: a 16-byte store of halves
constexpr int kLanes = 8;     // threads of a KV row
constexpr int kPasses = 5;    // of a thread, all their loads in flight; a row of 576 takes 9
constexpr int kGroup = 128;   // elements that share a scale

}  // namespace kv_gather_config
}  // namespace sparse_indexer
