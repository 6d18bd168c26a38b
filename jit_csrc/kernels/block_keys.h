// SPDX-License-Identifier: Apache-2.0
// What host and device share of `block_keys`.
#pragma once

#include "sparse_indexer/cstdint.h"

namespace sparse_indexer {

struct BlockKeysParams {
  const void* logits;   // [rows, width] float or bfloat16, row stride `stride`
  const int32_t* lens;  // [rows]: columns the row sees
  float* out;           // [rows, blocks], row stride `out_stride`
  int64_t stride;       // elements, as all strides
  int64_t out_stride;
  int32_t width;
  int32_t blocks;       // ceil(width / 8)
  int32_t skip_blocks;  // rows with at most so many blocks are left alone
  int32_t parts;        // CTAs a row
};

namespace block_keys_config {

constexpr int kThreads = 256;
constexpr int kBlock = 8;      // positions of a block
constexpr int kPerThread = 4;  // blocks a thread takes, all their loads in flight
constexpr int kPart = kThreads * kPerThread;

}  // namespace block_keys_config
}  // namespace sparse_indexer
