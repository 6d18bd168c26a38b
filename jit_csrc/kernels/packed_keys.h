// SPDX-License-Identifier: Apache-2.0
// The packed form of index keys that scorers read: what `index_k` writes without scales of its own,
// `dense_block_keys`, `candidate_logits` and, by mma.sync, the `fused_...` kernels copy.
#pragma once

#include "sparse_indexer/cstdint.h"

namespace sparse_indexer {
namespace packed_keys {

// Bytes of the values of a block of 8 positions; `key_bytes` is 128 (e4m3) or 256 (halves). Chunks
// of 16 bytes of each position, chunk after chunk, within a chunk the 8 positions: core matrices.
constexpr int value_bytes(int key_bytes) {
  return 8 * key_bytes;
}
// With the 8 fp32 scales behind them, and the rest of their line: a copy whose ends are not at
// multiples of 128 bytes is several times slower (H200).
constexpr int block_bytes(int key_bytes) {
  return value_bytes(key_bytes) + 128;
}
// Of these, what means something.
constexpr int used_bytes(int key_bytes) {
  return value_bytes(key_bytes) + 32;
}

}  // namespace packed_keys
}  // namespace sparse_indexer
