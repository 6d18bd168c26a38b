// SPDX-License-Identifier: Apache-2.0
#include "kernels/block_keys.h"

#include "sparse_indexer/host/check.h"
#include "sparse_indexer/host/launch.h"

using namespace sparse_indexer;

namespace {

void block_keys(TensorView logits, TensorView lens, TensorView out, int64_t skip_blocks) {
  Size rows("rows"), width("width");
  Device device;
  Match("logits")
      .shape({rows, width})
      .dtype(float32, bfloat16)
      .on(device)
      .last_dim_contiguous()
      .aligned(16)
      .check(logits);
  Match("lens").shape({rows}).dtype(int32).on(device).contiguous().check(lens);
  const int64_t blocks = (width + block_keys_config::kBlock - 1) / block_keys_config::kBlock;
  Match("out").shape({rows, blocks}).dtype(float32).on(device).last_dim_contiguous().check(out);
  expect_int("logits width", width, 0, INT32_MAX - block_keys_config::kPart * 8);
  expect_int("skip_blocks", skip_blocks, -1, INT32_MAX);

  BlockKeysParams params;
  params.logits = data<const void>(logits);
  params.lens = data<const int32_t>(lens);
  params.out = data<float>(out);
  params.stride = logits.stride(0);
  params.out_stride = out.stride(0);
  params.width = static_cast<int32_t>(width);
  params.blocks = static_cast<int32_t>(blocks);
  params.skip_blocks = static_cast<int32_t>(skip_blocks);
  params.parts =
      static_cast<int32_t>((blocks + block_keys_config::kPart - 1) / block_keys_config::kPart);
  Launch(same(logits.dtype(), float32) ? "block_keys_f32" : "block_keys_bf16", device)
      .grid(rows * params.parts)
      .block(block_keys_config::kThreads)
      .pdl()
      .run(params);
}

}  // namespace

SPARSE_INDEXER_MODULE();
SPARSE_INDEXER_EXPORT(block_keys);
