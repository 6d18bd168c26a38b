// SPDX-License-Identifier: Apache-2.0
// What host and device share of `candidate_logits`.
#pragma once

#include "sparse_indexer/cstdint.h"

namespace sparse_indexer {

struct CandidateLogitsParams {
  const uint8_t* keys;        // packed blocks of all requests: 8 keys, then 8 scales, each
  const uint8_t* queries;     // packed [quads, 4 rows * heads, 128]
  const float* weights;       // [quads, 4, heads]: half the heads' weights
  const uint32_t* entries;    // [quads, entries_stride]: block id | rows that have it << 24
  const int32_t* counts;      // [quads]: entries of each
  const int32_t* quad_first;  // [quads]: its request's first packed block
  const int32_t* blocks;      // [quads, 4, n]: a row's candidate blocks, ascending
  float* out;                 // [quads, 4, out_blocks * 8], row stride `out_stride`
  int64_t entries_stride;     // elements, as all strides
  int64_t out_stride;
  int32_t quads;
  int32_t n;
  int32_t out_blocks;         // a row's candidates past it are left out
  int32_t num_blocks;         // packed blocks that exist
};

namespace candidate_logits_config {

constexpr int warpgroups(int heads) {  // that score: what registers allow
  return heads == 32 ? 3 : 2;
}
constexpr int block_bytes(int key_bytes) {
  return 8 * key_bytes + 32;
}
// With a stage's ranks, two barriers each, and the CTA's part.
constexpr int query_bytes(int key_bytes, int heads) {
  return 2 * 4 * heads * key_bytes;
}
constexpr int stage_bytes(int key_bytes, int heads) {
  return 8 * warpgroups(heads) * (block_bytes(key_bytes) + 8) + 16;
}
constexpr int stages(int key_bytes, int heads) {
  return (224 * 1024 - query_bytes(key_bytes, heads)) / stage_bytes(key_bytes, heads);
}
constexpr int shared_bytes(int key_bytes, int heads) {
  return query_bytes(key_bytes, heads) +
         stages(key_bytes, heads) * stage_bytes(key_bytes, heads) + 64;
}

}  // namespace candidate_logits_config
}  // namespace sparse_indexer
