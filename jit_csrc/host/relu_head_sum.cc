// SPDX-License-Identifier: Apache-2.0
#include "kernels/relu_head_sum.h"

#include "sparse_indexer/host/check.h"
#include "sparse_indexer/host/launch.h"

using namespace sparse_indexer;
using tvm::ffi::Optional;

namespace {

void relu_head_sum(TensorView scores, TensorView weights, Optional<TensorView> key_scales,
                   Optional<TensorView> lens, int64_t start, Optional<TensorView> out_logits,
                   Optional<TensorView> out_keys) {
  using namespace relu_head_sum_config;
  Size rows("rows"), heads("heads"), positions("positions");
  Device device;
  Match("weights")
      .shape({rows, heads})
      .dtype(float32)
      .on(device)
      .last_dim_contiguous()
      .check(weights);
  expect_int("weights heads", heads, 1, 1 << 16);
  Match("scores")
      .shape({rows * heads, positions})
      .dtype(float16)
      .on(device)
      .last_dim_contiguous()
      .aligned(16)
      .check(scores);
  expect_int("scores positions", positions, 0, INT32_MAX - kPart);
  expect_int("start", start, 0, INT32_MAX);
  if (start % kBlock != 0) {
    bad_argument("start", "a multiple of " + std::to_string(kBlock), std::to_string(start));
  }
  ReluHeadSumParams params{};
  if (key_scales.has_value()) {
    Match("key_scales")
        .shape({positions})
        .dtype(float32)
        .on(device)
        .contiguous()
        .check(*key_scales);
    params.key_scales = data<const float>(*key_scales);
  }
  if (lens.has_value()) {
    Match("lens").shape({rows}).dtype(int32).on(device).contiguous().check(*lens);
    params.lens = data<const int32_t>(*lens);
  }
  if (out_logits.has_value() == out_keys.has_value()) {
    bad_argument("out_logits, out_keys", "one of the two", out_keys.has_value() ? "both" : "None");
  }
  if (out_keys.has_value() && !lens.has_value()) {
    bad_argument("lens", "a tensor with out_keys", "None");
  }
  const TensorView& out = out_keys.has_value() ? *out_keys : *out_logits;
  const int64_t columns =
      out_keys.has_value() ? (positions + kBlock - 1) / kBlock : int64_t(positions);
  Match(out_keys.has_value() ? "out_keys" : "out_logits")
      .shape({rows, columns})
      .dtype(float32)
      .on(device)
      .last_dim_contiguous()
      .check(out);
  params.scores = data<const void>(scores);
  params.weights = data<const float>(weights);
  params.out = data<float>(out);
  params.stride = scores.stride(0);
  params.weight_stride = weights.stride(0);
  params.out_stride = out.stride(0);
  params.heads = static_cast<int32_t>(heads);
  params.positions = static_cast<int32_t>(positions);
  params.start = static_cast<int32_t>(start);
  params.parts = static_cast<int32_t>((positions + kPart - 1) / kPart);
  params.out_vectors = rows_aligned(out, 16);
  Launch(out_keys.has_value() ? "relu_head_sum_keys" : "relu_head_sum_logits", device)
      .grid(rows * params.parts)
      .block(kThreads)
      .pdl()
      .run(params);
}

}  // namespace

SPARSE_INDEXER_MODULE();
SPARSE_INDEXER_EXPORT(relu_head_sum);
