// SPDX-License-Identifier: Apache-2.0
// What host and device share of `candidate_logits`.
#pragma once

#include "kernels/packed_keys.h"

namespace sparse_indexer {

struct CandidateLogitsParams {
  const uint8_t* keys;        // packed blocks of all requests: 8 keys, then 8 scales, each
  const uint8_t* queries;     // packed [quads, 4 rows * heads, 128]
  const float* weights;       // [quads, 4, heads]: half the heads' weights
  const uint32_t* entries;    // [quads, entries_stride]: block id | rows that have it << 24
  const uint16_t* ranks;      // [quads, ranks_stride, 4]: of every 32nd entry, blocks before it
  const int32_t* counts;      // [quads, 2]: entries of each list; the second -1: there is one
  const int32_t* quad_first;  // [quads]: its request's first packed block
  float* out;                 // [quads, 4, out_blocks * 8], row stride `out_stride`
  int64_t entries_stride;     // elements, as all strides
  int64_t ranks_stride;
  int64_t out_stride;
  int32_t quads;
  int32_t out_blocks;  // a row's candidates past it are left out
  int32_t num_blocks;  // packed blocks that exist
};

namespace candidate_logits_config {

constexpr int kWarpgroups = 2;  // that score, half the blocks of a stage each
constexpr int kStageBlocks = 32;
constexpr int kUnitStages = 4;  // of a quad, scored between two drains of the MMAs

// Quads whose queries are in shared memory: the next one's come early, if there is room.
constexpr int buffers(int key_bytes, int heads) {
  return key_bytes * heads > 128 * 64 ? 1 : 2;
}
// Those queries, and their weights, whose rows are 16 bytes apart.
constexpr int query_bytes(int key_bytes, int heads) {
  return buffers(key_bytes, heads) * 4 * (heads * key_bytes + 4 * heads + 16);
}
// With the places of its logits and two barriers.
constexpr int stage_bytes(int key_bytes) {
  return kStageBlocks * (packed_keys::block_bytes(key_bytes) + 16) + 16;
}
constexpr int stages(int key_bytes, int heads) {
  return (225 * 1024 - query_bytes(key_bytes, heads)) / stage_bytes(key_bytes);
}
constexpr int shared_bytes(int key_bytes, int heads) {
  return query_bytes(key_bytes, heads) + stages(key_bytes, heads) * stage_bytes(key_bytes) + 256;
}

}  // namespace candidate_logits_config
}  // namespace sparse_indexer
