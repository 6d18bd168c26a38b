// SPDX-License-Identifier: Apache-2.0
#include "kernels/fused_logits.h"

#include "sparse_indexer/host/fused_operands.h"

using namespace sparse_indexer;

namespace {

void fused_block_keys(TensorView keys, TensorView queries, TensorView weights, TensorView slot_lens,
                      TensorView quad_first, TensorView out, bool half_scores) {
  run_fused_logits("fused_block_keys", 8, keys, queries, weights, slot_lens, quad_first, out,
                   half_scores);
}

}  // namespace

SPARSE_INDEXER_MODULE();
SPARSE_INDEXER_EXPORT(fused_block_keys);
