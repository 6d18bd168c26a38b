// SPDX-License-Identifier: Apache-2.0
// What host and device share of `index_k`.
#pragma once

#include "kernels/packed_keys.h"

namespace sparse_indexer {

struct IndexKParams {
  const uint8_t* values;      // stored values of page 0 (of column 0, flat)
  const uint8_t* scales;      // stored scales of page 0 (of column 0), or null
  const int32_t* page_table;  // [requests, max_pages], row stride `table_stride`; null: flat
  const int32_t* key_starts;  // [requests]: first column of each request, flat
  const int32_t* lens;        // [requests]: positions to convert
  const int32_t* out_starts;  // [requests]: first row (packed: block) of each in the outputs
  void* out_values;           // [out rows, 128], contiguous; packed: the blocks
  float* out_scales;          // [out rows]; null: packed
  int64_t page_stride;        // bytes
  int64_t table_stride;       // elements
  int64_t slots;              // pages, or columns, that exist
  int32_t value_step;         // bytes from one position's values to the next
  int32_t scale_step;
  int32_t page_size;
  int32_t parts;  // CTAs a request
  int32_t max_pages;
  int32_t vectors;  // 1: values are aligned for the widest load
};

namespace index_k_config {

constexpr int kThreads = 256;
constexpr int kLanes = 8;  // threads of a position, 16 dims each
constexpr int kPasses = 4;
constexpr int kPart = kThreads / kLanes * kPasses;  // positions of a CTA
constexpr int kBlock = 8;                           // positions of a packed block

}  // namespace index_k_config
}  // namespace sparse_indexer
