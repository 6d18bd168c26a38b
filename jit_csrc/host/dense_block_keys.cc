// SPDX-License-Identifier: Apache-2.0
#include "kernels/dense_block_keys.h"

#include "sparse_indexer/host/check.h"
#include "sparse_indexer/host/launch.h"

using namespace sparse_indexer;
namespace config = dense_block_keys_config;

namespace {

void dense_block_keys(TensorView keys, TensorView queries, TensorView weights, TensorView quad_lens,
                      TensorView quad_first, TensorView out) {
  Size blocks("blocks"), quads("quads"), heads("heads"), columns("columns"), slots("4 * quads"),
      width("width");
  Device device;
  const bool e4m3 = same(keys.dtype(), uint8);
  const int key_bytes = e4m3 ? 128 : 256;
  Match("keys")
      .shape({blocks, packed_keys::block_bytes(key_bytes) / (e4m3 ? 1 : 2)})
      .dtype(uint8, float16, bfloat16)
      .on(device)
      .contiguous()
      .aligned(16)
      .check(keys);
  Match("weights")
      .shape({quads, 4, heads})
      .dtype(float32)
      .on(device)
      .contiguous()
      .aligned(16)
      .check(weights);
  if (heads != 32 && heads != 64) bad_argument("weights", "32 or 64 heads", std::to_string(heads));
  Match("queries")
      .shape({quads, 4 * heads, 128})
      .dtype(keys.dtype())
      .on(device)
      .contiguous()
      .aligned(16)
      .check(queries);
  Match("quad_lens").shape({quads}).dtype(int32).on(device).contiguous().check(quad_lens);
  Match("quad_first").shape({quads}).dtype(int32).on(device).contiguous().check(quad_first);
  Match("out").shape({4 * quads, width}).dtype(float32).on(device).last_dim_contiguous().check(out);
  if (quads == 0) return;
  const int of_group = config::quads_of_group(static_cast<int>(heads));
  if (quads % of_group != 0) {
    bad_argument("quads", "a multiple of " + std::to_string(of_group), std::to_string(quads));
  }
  if (width % config::kUnitBlocks != 0) {
    bad_argument("out", "a width that is a multiple of " + std::to_string(config::kUnitBlocks),
                 std::to_string(width));
  }
  expect_int("keys blocks", blocks, config::kUnitBlocks, INT32_MAX - 8 * config::kUnitBlocks);
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
  params.num_blocks = static_cast<int32_t>(blocks);
  params.width = static_cast<int32_t>(width);
  const char* symbol =
      e4m3 ? (heads == 32 ? "dense_block_keys_e4m3_32" : "dense_block_keys_e4m3_64")
      : same(keys.dtype(), float16)
          ? (heads == 32 ? "dense_block_keys_f16_32" : "dense_block_keys_f16_64")
          : (heads == 32 ? "dense_block_keys_bf16_32" : "dense_block_keys_bf16_64");
  Launch(symbol, device)
      .grid(on_device(device).sm_count)
      .block(128 * (1 + config::kWarpgroups))
      .shared(config::shared_bytes(key_bytes))
      .run(params);
}

}  // namespace

SPARSE_INDEXER_MODULE();
SPARSE_INDEXER_EXPORT(dense_block_keys);
