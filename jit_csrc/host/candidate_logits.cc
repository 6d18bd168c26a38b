// SPDX-License-Identifier: Apache-2.0
#include "kernels/candidate_logits.h"

#include "kernels/candidate_quads.h"

#include "sparse_indexer/host/check.h"
#include "sparse_indexer/host/launch.h"
#include "sparse_indexer/host/quad_operands.h"

using namespace sparse_indexer;
namespace config = candidate_logits_config;
constexpr int kEvery = candidate_quads_config::kRankEvery;

namespace {

constexpr const char* kSymbols[3][2] = {
    {"candidate_logits_e4m3_32", "candidate_logits_e4m3_64"},
    {"candidate_logits_f16_32", "candidate_logits_f16_64"},
    {"candidate_logits_bf16_32", "candidate_logits_bf16_64"},
};

void candidate_logits(TensorView keys, TensorView queries, TensorView weights, TensorView entries,
                      TensorView ranks, TensorView counts, TensorView quad_first, TensorView out) {
  Size width("width"), columns("columns");
  Device device;
  QuadOperands operands;
  operands.check(keys, queries, weights, quad_first, device);
  Size& quads = operands.quads;
  const int heads = static_cast<int>(operands.heads);
  Match("entries").shape({quads, width}).dtype(int32).on(device).contiguous().check(entries);
  Match("ranks")
      .shape({quads, (width + kEvery - 1) / kEvery, 4})
      .dtype(int16)
      .on(device)
      .contiguous()
      .aligned(8)
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
  if (quads == 0 || columns == 0 || width == 0) return;
  expect_int("keys blocks", operands.blocks, 1, INT32_MAX);
  expect_int("quads", quads, 0, INT32_MAX / 4);

  CandidateLogitsParams params{};
  params.keys = data<const uint8_t>(keys);
  params.queries = data<const uint8_t>(queries);
  params.weights = data<const float>(weights);
  params.entries = data<const uint32_t>(entries);
  params.ranks = data<const uint16_t>(ranks);
  params.ranks_stride = (width + kEvery - 1) / kEvery;
  params.counts = data<const int32_t>(counts);
  params.quad_first = data<const int32_t>(quad_first);
  params.out = data<float>(out);
  params.entries_stride = width;
  params.out_stride = out.stride(0);
  params.quads = static_cast<int32_t>(quads);
  params.out_blocks = static_cast<int32_t>(columns / 8);
  params.num_blocks = static_cast<int32_t>(operands.blocks);
  Launch(operands.variant(kSymbols), device)
      .grid(on_device(device).sm_count)
      .block(128 * (1 + config::kWarpgroups))
      .shared(config::shared_bytes(operands.key_bytes, heads))
      .pdl()
      .run(params);
}

}  // namespace

SPARSE_INDEXER_MODULE();
SPARSE_INDEXER_EXPORT(candidate_logits);
