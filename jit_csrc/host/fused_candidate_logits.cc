// SPDX-License-Identifier: Apache-2.0
#include "kernels/fused_candidate_logits.h"

#include "kernels/candidate_quads.h"

#include "sparse_indexer/host/fused_operands.h"

using namespace sparse_indexer;
constexpr int kEvery = candidate_quads_config::kRankEvery;

namespace {

void fused_candidate_logits(TensorView keys, TensorView queries, TensorView weights,
                            TensorView entries, TensorView ranks, TensorView counts,
                            TensorView quad_first, TensorView out, bool half_scores) {
  Size width("width"), columns("columns");
  Device device;
  FusedOperands operands;
  operands.check(keys, queries, weights, quad_first, device);
  Size& quads = operands.quads;
  Match("entries").shape({quads, width}).dtype(int32).on(device).contiguous().check(entries);
  Match("ranks")
      .shape({quads, (width + kEvery - 1) / kEvery, 4})
      .dtype(int16)
      .on(device)
      .contiguous()
      .check(ranks);
  Match("counts").shape({quads, 2}).dtype(int32).on(device).contiguous().check(counts);
  Match("out")
      .shape({4 * quads, columns})
      .dtype(float32)
      .on(device)
      .last_dim_contiguous()
      .check(out);
  if (columns % 8 != 0 || columns > 8 * 0xffff) {
    bad_argument("out", "columns of at most 65535 whole blocks", std::to_string(columns));
  }
  if (quads == 0 || columns == 0 || width == 0 || operands.blocks == 0) return;

  FusedCandidateLogitsParams params{};
  params.keys = data<const uint8_t>(keys);
  params.queries = data<const uint8_t>(queries);
  params.weights = data<const float>(weights);
  params.entries = data<const uint32_t>(entries);
  params.ranks = data<const uint16_t>(ranks);
  params.counts = data<const int32_t>(counts);
  params.quad_first = data<const int32_t>(quad_first);
  params.out = data<float>(out);
  params.entries_stride = width;
  params.ranks_stride = (width + kEvery - 1) / kEvery;
  params.out_stride = out.stride(0);
  params.quads = static_cast<int32_t>(quads);
  params.out_blocks = static_cast<int32_t>(columns / 8);
  params.num_blocks = static_cast<int32_t>(operands.blocks);
  operands.run("fused_candidate_logits", half_scores, device, params);
}

}  // namespace

SPARSE_INDEXER_MODULE();
SPARSE_INDEXER_EXPORT(fused_candidate_logits);
