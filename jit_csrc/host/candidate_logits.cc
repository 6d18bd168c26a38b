// SPDX-License-Identifier: Apache-2.0
#include "kernels/candidate_logits.h"

#include "sparse_indexer/host/candidate_operands.h"
#include "sparse_indexer/host/launch.h"
#include "sparse_indexer/host/quad_operands.h"

using namespace sparse_indexer;
namespace config = candidate_logits_config;

namespace {

constexpr const char* kSymbols[3][2] = {
    {"candidate_logits_e4m3_32", "candidate_logits_e4m3_64"},
    {"candidate_logits_f16_32", "candidate_logits_f16_64"},
    {"candidate_logits_bf16_32", "candidate_logits_bf16_64"},
};

void candidate_logits(TensorView keys, TensorView queries, TensorView weights, TensorView entries,
                      TensorView ranks, TensorView counts, TensorView quad_first, TensorView out) {
  CandidateOperands<QuadOperands> its{keys, queries, weights, entries, ranks, counts, quad_first};
  its.check(8);
  const QuadOperands& operands = its.operands;
  Size columns("columns");
  Match("out")
      .shape({4 * operands.quads, columns})
      .dtype(float32)
      .on(its.device)
      .last_dim_contiguous()
      .check(out);
  const CandidateLogitsParams params = its.params("out", data<float>(out), out.stride(0), columns);
  if (operands.quads == 0 || columns == 0 || its.width == 0) return;
  expect_int("keys blocks", operands.blocks, 1, INT32_MAX);
  expect_int("quads", operands.quads, 0, INT32_MAX / 4);
  const int heads = static_cast<int>(operands.heads);
  Launch(operands.variant(kSymbols), its.device)
      .grid(on_device(its.device).sm_count)
      .block(128 * (1 + config::kWarpgroups))
      .shared(config::shared_bytes(operands.key_bytes, heads))
      .pdl()
      .run(params);
}

}  // namespace

SPARSE_INDEXER_MODULE();
SPARSE_INDEXER_EXPORT(candidate_logits);
