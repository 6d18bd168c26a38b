// SPDX-License-Identifier: Apache-2.0
// What host and device share of `relu_head_sum`.
#pragma once

#include "sparse_indexer/cstdint.h"

namespace sparse_indexer {

struct ReluHeadSumParams {
  const void* scores;       // [rows * heads, positions] float16, row stride `stride`
  const float* weights;     // [rows, heads], row stride `weight_stride`
  const float* key_scales;  // [positions], contiguous; null: 1
  const int32_t* lens;      // [rows]: positions the row sees; null: all
  float* out;               // [rows, positions] logits or [rows, blocks] keys
  int64_t stride;           // elements, as all strides
  int64_t weight_stride;
  int64_t out_stride;
  int32_t heads;
  int32_t positions;
  int32_t start;        // what `lens` calls the first position
  int32_t parts;        // CTAs a row
  int32_t out_vectors;  // 1: logits are aligned for 16-byte stores
};

namespace relu_head_sum_config {

constexpr int kThreads = 128;
constexpr int kBlock = 8;  // positions of a thread: a 16-byte load of each head, and a block
constexpr int kHeads = 8;  // loads of a thread at once, of two in flight
constexpr int kPart = kThreads * kBlock;  // positions of a CTA

}  // namespace relu_head_sum_config
}  // namespace sparse_indexer
