// SPDX-License-Identifier: Apache-2.0
// What host and device share of `dense_block_keys`.
#pragma once

#include "kernels/packed_keys.h"

namespace sparse_indexer {

struct DenseBlockKeysParams {
  const uint8_t* keys;        // packed blocks of all requests: 8 keys, then 8 scales, each
  const uint8_t* queries;     // packed [quads, 4 rows * heads, 128]
  const float* weights;       // [quads, 4, heads]: half the heads' weights
  const int32_t* quad_lens;   // [quads]: most positions a row of the quad sees
  const int32_t* quad_first;  // [quads]: its request's first packed block
  float* out;                 // [quads, 4, width], row stride `out_stride`: the keys
  int64_t out_stride;         // elements
  int32_t groups;             // of quads_of_group(heads) quads of one request
  int32_t num_blocks;         // packed blocks that exist, at least kUnitBlocks
  int32_t width;              // a multiple of kUnitBlocks
};

namespace dense_block_keys_config {

constexpr int kWarpgroups = 2;   // that score; each keeps 256 query heads in shared memory
constexpr int kUnitBlocks = 64;  // scored between two loads of nothing: 1.02x 32, 1.02x 128 (H200)

constexpr int quads_of_group(int heads) {
  return kWarpgroups * 64 / heads;
}
constexpr int stages(int key_bytes) {  // of 64 positions, as many as shared memory holds
  return key_bytes == 128 ? 16 : 5;
}
// Queries, keys, barriers and the CTA's part.
constexpr int shared_bytes(int key_bytes) {
  return kWarpgroups * 256 * key_bytes +
         stages(key_bytes) * 8 * packed_keys::block_bytes(key_bytes) + 512;
}

}  // namespace dense_block_keys_config
}  // namespace sparse_indexer
