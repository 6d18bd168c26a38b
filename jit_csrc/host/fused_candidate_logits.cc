// SPDX-License-Identifier: Apache-2.0
#include "sparse_indexer/host/candidate_operands.h"
#include "sparse_indexer/host/fused_operands.h"

using namespace sparse_indexer;

namespace {

void fused_candidate_logits(TensorView keys, TensorView queries, TensorView weights,
                            TensorView entries, TensorView ranks, TensorView counts,
                            TensorView quad_first, TensorView out, bool half_scores) {
  CandidateOperands<FusedOperands> its{keys, queries, weights, entries, ranks, counts, quad_first};
  its.check(2);
  const FusedOperands& operands = its.operands;
  Size columns("columns");
  Match("out")
      .shape({4 * operands.quads, columns})
      .dtype(float32)
      .on(its.device)
      .last_dim_contiguous()
      .check(out);
  const CandidateLogitsParams params = its.params("out", data<float>(out), out.stride(0), columns);
  if (operands.quads == 0 || columns == 0 || its.width == 0 || operands.blocks == 0) return;
  operands.run("fused_candidate_logits", half_scores, its.device, params);
}

}  // namespace

SPARSE_INDEXER_MODULE();
SPARSE_INDEXER_EXPORT(fused_candidate_logits);
