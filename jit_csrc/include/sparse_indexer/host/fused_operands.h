// SPDX-License-Identifier: Apache-2.0
// What the kernels that score by mma.sync have in common: operands of quads, e4m3 or float16, and a
// variant for each of the two, each number of heads and each way to round scores.
#pragma once

#include <string>

#include "kernels/fused_logits.h"
#include "sparse_indexer/host/launch.h"
#include "sparse_indexer/host/quad_operands.h"

namespace sparse_indexer {

struct FusedOperands : QuadOperands {
  void check(const TensorView& keys, const TensorView& queries, const TensorView& weights,
             const TensorView& quad_first, Device& device) {
    if (same(keys.dtype(), bfloat16)) bad_argument("keys", "uint8 or float16", "bfloat16");
    QuadOperands::check(keys, queries, weights, quad_first, device);
    expect_int("keys blocks", blocks, 0, INT32_MAX / 8);
    expect_int("quads", quads, 0, INT32_MAX / 8);
  }

  // Launches `kernel` on all of the GPU.
  template <typename Params>
  void run(const char* kernel, bool half_scores, int device, const Params& params) const {
    const std::string symbol = std::string(kernel) + (element == 0 ? "_e4m3_" : "_f16_") +
                               (heads == 32 ? "32" : "64") + (half_scores ? "_half" : "");
    Launch(symbol, device)
        .grid(fused_scoring::kCtasOfSm * on_device(device).sm_count)
        .block(fused_scoring::kThreads)
        .run(params);
  }
};

// The call of fused_logits, whose columns are positions, or of fused_block_keys, where 8 positions
// are a column.
inline void run_fused_logits(const char* kernel, int positions_of_column, const TensorView& keys,
                             const TensorView& queries, const TensorView& weights,
                             const TensorView& slot_lens, const TensorView& quad_first,
                             const TensorView& out, bool half_scores) {
  Size width("width");
  Device device;
  FusedOperands operands;
  operands.check(keys, queries, weights, quad_first, device);
  const int64_t quads = operands.quads;
  Match("slot_lens").shape({quads, 4}).dtype(int32).on(device).contiguous().check(slot_lens);
  Match("out").shape({4 * quads, width}).dtype(float32).on(device).last_dim_contiguous().check(out);
  expect_int("out width", width, 0, (INT32_MAX - 64) / positions_of_column);
  const int group = fused_scoring::rows_of_group(static_cast<int>(operands.heads));
  if (quads * 4 % group != 0) {
    bad_argument("quads", "a multiple of " + std::to_string(group / 4), std::to_string(quads));
  }
  if (quads == 0 || width == 0 || operands.blocks == 0) return;

  FusedLogitsParams params{};
  params.keys = data<const uint8_t>(keys);
  params.queries = data<const uint8_t>(queries);
  params.weights = data<const float>(weights);
  params.slot_lens = data<const int32_t>(slot_lens);
  params.quad_first = data<const int32_t>(quad_first);
  params.out = data<float>(out);
  params.out_stride = out.stride(0);
  params.groups = static_cast<int32_t>(quads * 4 / group);
  params.num_blocks = static_cast<int32_t>(operands.blocks);
  params.width = static_cast<int32_t>(width);
  operands.run(kernel, half_scores, device, params);
}

}  // namespace sparse_indexer
