// SPDX-License-Identifier: Apache-2.0
// fused_block_keys: fused_logits of which only the largest of each block is written, the block's
// key, as block_keys would write it: NaN is ignored, a block of NaN has -inf, the block that holds
// the row's last position has +inf. Blocks past that one are not written.
#pragma once

#include "kernels/fused_logits.cuh"

namespace sparse_indexer {

template <StoredKeys Keys, int Heads, bool HalfScores>
using FusedBlockKeys = FusedLogits<Keys, Heads, HalfScores, true>;

}  // namespace sparse_indexer
