// SPDX-License-Identifier: Apache-2.0
#include "kernels/dense_block_keys.h"

#include "sparse_indexer/host/check.h"
#include "sparse_indexer/host/launch.h"
#include "sparse_indexer/host/quad_operands.h"

using namespace sparse_indexer;
namespace config = dense_block_keys_config;

namespace {

constexpr const char* kSymbols[3][2] = {
    {"dense_block_keys_e4m3_32", "dense_block_keys_e4m3_64"},
    {"dense_block_keys_f16_32", "dense_block_keys_f16_64"},
    {"dense_block_keys_bf16_32", "dense_block_keys_bf16_64"},
};

void dense_block_keys(TensorView keys, TensorView queries, TensorView weights, TensorView quad_lens,
                      TensorView quad_first, TensorView out) {
  Size width("width");
  Device device;
  QuadOperands operands;
  operands.check(keys, queries, weights, quad_first, device);
  Size& quads = operands.quads;
  const int heads = static_cast<int>(operands.heads);
  Match("quad_lens").shape({quads}).dtype(int32).on(device).contiguous().check(quad_lens);
  Match("out").shape({4 * quads, width}).dtype(float32).on(device).last_dim_contiguous().check(out);
  if (quads == 0) return;
  const int of_group = config::quads_of_group(heads);
  if (quads % of_group != 0) {
    bad_argument("quads", "a multiple of " + std::to_string(of_group), std::to_string(quads));
  }
  if (width % config::kUnitBlocks != 0) {
    bad_argument("out", "a width that is a multiple of " + std::to_string(config::kUnitBlocks),
                 std::to_string(width));
  }
  expect_int("keys blocks", operands.blocks, 0, INT32_MAX - 8 * config::kUnitBlocks);
  expect_int("out width", width, 0, INT32_MAX - config::kUnitBlocks);

  DenseBlockKeysParams params{};
  params.keys = data<const uint8_t>(keys);
  params.queries = data<const uint8_t>(queries);
  params.weights = data<const float>(weights);
  params.quad_lens = data<const int32_t>(quad_lens);
  params.quad_first = data<const int32_t>(quad_first);
  params.out = data<float>(out);
  params.out_stride = out.stride(0);
  params.groups = static_cast<int32_t>(quads / of_group);
  params.num_blocks = static_cast<int32_t>(operands.blocks);
  params.width = static_cast<int32_t>(width);
  if (operands.blocks == 0) return;  // nothing is seen
  Launch(operands.variant(kSymbols), device)
      .grid(on_device(device).sm_count)
      .block(128 * (1 + config::kWarpgroups))
      .shared(config::shared_bytes(operands.key_bytes))
      .pdl()
      .run(params);
}

}  // namespace

SPARSE_INDEXER_MODULE();
SPARSE_INDEXER_EXPORT(dense_block_keys);
