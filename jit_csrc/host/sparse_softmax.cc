// SPDX-License-Identifier: Apache-2.0
#include "kernels/sparse_softmax.h"

#include <algorithm>
#include <cmath>

#include "sparse_indexer/host/check.h"
#include "sparse_indexer/host/launch.h"

using namespace sparse_indexer;
using tvm::ffi::Optional;

namespace {

// Whether rows may be read or written `kVector` elements at a time.
bool aligned(const TensorView& rows) {
  return rows_aligned(rows, sparse_softmax_config::kVector * rows.dtype().bits / 8);
}

// By the dtype of the output, fp16, bf16, fp32, and by how many entries a row and head has.
constexpr const char* kVariants[3][3] = {
    {"sparse_softmax_fp16_warp", "sparse_softmax_fp16_cta", "sparse_softmax_fp16_long"},
    {"sparse_softmax_bf16_warp", "sparse_softmax_bf16_cta", "sparse_softmax_bf16_long"},
    {"sparse_softmax_fp32_warp", "sparse_softmax_fp32_cta", "sparse_softmax_fp32_long"},
};

void sparse_softmax(TensorView logits, TensorView positions, int64_t num_slots, double scale,
                    Optional<TensorView> sink, TensorView out) {
  Size rows("rows"), heads("heads"), k("k");
  Device device;
  Match("logits")
      .shape({rows, heads, k})
      .dtype(float32)
      .on(device)
      .last_dim_contiguous()
      .check(logits);
  Match("positions")
      .shape({rows, k})
      .dtype(int32)
      .on(device)
      .last_dim_contiguous()
      .check(positions);
  Match("out")
      .shape({rows, heads, k})
      .dtype(float16, bfloat16, float32)
      .on(device)
      .last_dim_contiguous()
      .check(out);
  expect_int("num_slots", num_slots, 0, INT64_MAX);
  expect_int("logits heads", heads, 0, INT32_MAX);
  expect_int("logits k", k, 0, 1 << 30);
  if (!std::isfinite(static_cast<float>(scale))) {
    bad_argument("scale", "a finite float32", std::to_string(scale));
  }
  SparseSoftmaxParams params{};
  if (sink.has_value()) {
    Match("sink").shape({heads}).dtype(float32).on(device).contiguous().check(*sink);
    params.sink = data<const float>(*sink);
  }
  params.logits = data<const float>(logits);
  params.positions = data<const int32_t>(positions);
  params.out = data<void>(out);
  params.row_stride = logits.stride(0);
  params.head_stride = logits.stride(1);
  params.position_stride = positions.stride(0);
  params.out_row_stride = out.stride(0);
  params.out_head_stride = out.stride(1);
  params.heads = static_cast<int32_t>(heads);
  params.k = static_cast<int32_t>(k);
  params.slots = static_cast<int32_t>(std::min<int64_t>(num_slots, INT32_MAX));
  params.scale = static_cast<float>(scale);
  params.vectors = k % sparse_softmax_config::kVector == 0 && aligned(logits) &&
                   aligned(positions) && aligned(out);
  if (rows == 0 || heads == 0 || k == 0) return;

  using namespace sparse_softmax_config;
  const int size = !params.vectors ? 2 : k <= kOfWarp ? 0 : k <= kOfCta ? 1 : 2;
  // Several heads a team read the positions once, but not where that leaves SMs idle.
  const int64_t teams = size == 0 ? kWarps : 1;
  const int64_t ctas = 8 * on_device(device).sm_count;
  const int64_t turns = std::clamp<int64_t>(rows * heads / (teams * ctas), 1, 8);
  params.heads_a_cta = static_cast<int32_t>(teams * turns);
  params.parts = static_cast<int32_t>((heads + params.heads_a_cta - 1) / params.heads_a_cta);
  const DLDataType to = out.dtype();
  Launch(kVariants[same(to, float16)    ? 0
                   : same(to, bfloat16) ? 1
                                        : 2][size],
         device)
      .grid(rows * params.parts)
      .block(kThreads)
      .pdl()
      .run(params);
}

}  // namespace

SPARSE_INDEXER_MODULE();
SPARSE_INDEXER_EXPORT(sparse_softmax);
