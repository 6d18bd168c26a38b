// SPDX-License-Identifier: Apache-2.0
#include "kernels/index_q.h"

#include "sparse_indexer/host/check.h"
#include "sparse_indexer/host/conversions.h"
#include "sparse_indexer/host/launch.h"

using namespace sparse_indexer;
using tvm::ffi::Optional;

namespace {

struct Format {
  DLDataType values;
  int width;  // of a query
  Conversions conversions;
};

// By its place, as in host/index_k.cc.
constexpr Format kFormats[] = {
    {uint8, 64, {"fp4", "index_q_fp4_fp8", "index_q_fp4_fp16", "index_q_fp4_bf16"}},
    {uint8, 128, {"fp8", "index_q_fp8_fp8", "index_q_fp8_fp16", "index_q_fp8_bf16"}},
    {float16, 128, {"fp16", nullptr, "index_q_fp16_fp16", nullptr}},
    {bfloat16, 128, {"bf16", nullptr, "index_q_bf16_fp16", "index_q_bf16_bf16"}},
};

void index_q(TensorView values, Optional<TensorView> scales, int64_t format,
             TensorView head_weights, TensorView rows, Optional<TensorView> counts,
             TensorView out_values, TensorView out_weights) {
  const Format& from = kFormats[expect_int("format", format, 0, 3)];
  Size num_rows("rows"), heads("heads"), quads("quads"), out_heads("out heads");
  Device device;
  Match("queries values")
      .shape({num_rows, heads, from.width})
      .dtype(from.values)
      .on(device)
      .contiguous()
      .aligned(16)
      .check(values);
  Match("head_weights")
      .shape({num_rows, heads})
      .dtype(float32, bfloat16)
      .on(device)
      .contiguous()
      .check(head_weights);
  Match("rows").shape({quads, 4}).dtype(int32).on(device).contiguous().check(rows);
  Match("out_weights")
      .shape({quads, 4, out_heads})
      .dtype(float32)
      .on(device)
      .contiguous()
      .check(out_weights);
  if ((out_heads != 32 && out_heads != 64) || heads > out_heads) {
    bad_argument("out_weights", "32 or 64 heads, at least " + std::to_string(heads),
                 std::to_string(out_heads));
  }
  Match("out_values")
      .shape({quads, 4 * out_heads, 128})
      .dtype(uint8, float16, bfloat16)
      .on(device)
      .contiguous()
      .aligned(16)
      .check(out_values);
  IndexQParams params{};
  if (counts.has_value()) {
    Match("counts").shape({quads, 2}).dtype(int32).on(device).contiguous().check(*counts);
    params.counts = data<const int32_t>(*counts);
  }
  if (scales.has_value()) {
    Match("queries scales")
        .shape({num_rows, heads})
        .dtype(from.width == 64 ? int32 : float32)
        .on(device)
        .contiguous()
        .check(*scales);
    params.scales = data<const uint32_t>(*scales);
  } else if (from.width == 64) {
    bad_argument("queries scales", "a tensor with fp4", "None");
  }
  params.values = data<const uint8_t>(values);
  params.head_weights = data<const void>(head_weights);
  params.rows = data<const int32_t>(rows);
  params.out_values = data<uint8_t>(out_values);
  params.out_weights = data<float>(out_weights);
  params.heads = static_cast<int32_t>(heads);
  params.out_heads = static_cast<int32_t>(out_heads);
  params.bf16_weights = same(head_weights.dtype(), bfloat16);
  params.parts = static_cast<int32_t>(4 * out_heads / index_q_config::kQueries);
  Launch(from.conversions.to(out_values.dtype()), device)
      .grid(quads * params.parts)
      .block(index_q_config::kThreads)
      .pdl()
      .run(params);
}

}  // namespace

SPARSE_INDEXER_MODULE();
SPARSE_INDEXER_EXPORT(index_q);
