// SPDX-License-Identifier: Apache-2.0
#include "kernels/kv_gather.h"

#include <algorithm>

#include "sparse_indexer/host/check.h"
#include "sparse_indexer/host/launch.h"

using namespace sparse_indexer;

namespace {

// By the dtype of the output: fp16, bf16, fp32.
using Variants = const char* [3];

// Whether rows may be read or written `kVector` elements at a time.
bool aligned(const TensorView& rows) {
  return rows_aligned(rows,
                      std::min<int64_t>(kv_gather_config::kVector * rows.dtype().bits / 8, 16));
}

// What both kinds of pool have in common; `params` holds the pool.
void gather(KvGatherParams& params, int64_t slots, int64_t dim, bool vectors,
            const Variants& variants, const TensorView& positions, const TensorView& out,
            Device& device) {
  Size rows("rows"), k("k");
  Match("out")
      .shape({rows, k, dim})
      .dtype(float16, bfloat16, float32)
      .on(device)
      .last_dim_contiguous()
      .check(out);
  Match("positions")
      .shape({rows, k})
      .dtype(int32)
      .on(device)
      .last_dim_contiguous()
      .check(positions);
  expect_int("kv_pool dim", dim, 0, 1 << 16);
  expect_int("positions rows * k", rows * k, 0, INT32_MAX - kv_gather_config::kThreads);
  params.positions = data<const int32_t>(positions);
  params.position_stride = positions.stride(0);
  params.out = data<void>(out);
  params.out_row_stride = out.stride(0);
  params.out_stride = out.stride(1);
  params.slots = static_cast<int32_t>(std::min<int64_t>(slots, INT32_MAX));
  params.dim = static_cast<int32_t>(dim);
  params.k = static_cast<int32_t>(k);
  params.count = static_cast<int32_t>(rows * k);
  params.vectors = vectors && dim % kv_gather_config::kVector == 0 && aligned(out);
  if (params.count == 0 || dim == 0) return;

  const int64_t of_cta =
      kv_gather_config::kThreads / (params.vectors ? kv_gather_config::kLanes : 32);
  const DLDataType to = out.dtype();
  Launch(variants[same(to, float16)    ? 0
                  : same(to, bfloat16) ? 1
                                       : 2],
         device)
      .grid((params.count + of_cta - 1) / of_cta)
      .block(kv_gather_config::kThreads)
      .pdl()
      .run(params);
}

void kv_gather_fp8(TensorView values, TensorView scales, TensorView rope, TensorView positions,
                   TensorView out) {
  Size slots("slots"), fp8_dim("fp8_dim"), rope_dim("rope_dim");
  Device device;
  Match("kv_pool values")
      .shape({slots, fp8_dim})
      .dtype(uint8)
      .on(device)
      .last_dim_contiguous()
      .check(values);
  if (fp8_dim % kv_gather_config::kGroup != 0) {
    bad_argument("kv_pool values",
                 "a multiple of " + std::to_string(kv_gather_config::kGroup) + " columns",
                 std::to_string(fp8_dim));
  }
  Match("kv_pool scales")
      .shape({slots, fp8_dim / kv_gather_config::kGroup})
      .dtype(float32)
      .on(device)
      .last_dim_contiguous()
      .check(scales);
  Match("kv_pool rope")
      .shape({slots, rope_dim})
      .dtype(bfloat16)
      .on(device)
      .last_dim_contiguous()
      .check(rope);
  KvGatherParams params{};
  params.values = data<const void>(values);
  params.scales = data<const float>(scales);
  params.rest = data<const void>(rope);
  params.value_stride = values.stride(0);
  params.scale_stride = scales.stride(0);
  params.rest_stride = rope.stride(0);
  params.value_dim = static_cast<int32_t>(fp8_dim);
  static constexpr Variants kVariants = {"kv_gather_fp8_fp16", "kv_gather_fp8_bf16",
                                         "kv_gather_fp8_fp32"};
  gather(params, slots, fp8_dim + rope_dim, aligned(values) && aligned(rope), kVariants, positions,
         out, device);
}

void kv_gather_plain(TensorView pool, TensorView positions, TensorView out) {
  Size slots("slots"), dim("dim");
  Device device;
  Match("kv_pool")
      .shape({slots, dim})
      .dtype(float16, bfloat16, float32)
      .on(device)
      .last_dim_contiguous()
      .check(pool);
  KvGatherParams params{};
  params.values = data<const void>(pool);
  params.value_stride = pool.stride(0);
  params.value_dim = static_cast<int32_t>(dim);
  static constexpr Variants kVariants[3] = {
      {"kv_gather_fp16_fp16", "kv_gather_fp16_bf16", "kv_gather_fp16_fp32"},
      {"kv_gather_bf16_fp16", "kv_gather_bf16_bf16", "kv_gather_bf16_fp32"},
      {"kv_gather_fp32_fp16", "kv_gather_fp32_bf16", "kv_gather_fp32_fp32"},
  };
  const DLDataType from = pool.dtype();
  gather(params, slots, dim, aligned(pool),
         kVariants[same(from, float16)    ? 0
                   : same(from, bfloat16) ? 1
                                          : 2],
         positions, out, device);
}

}  // namespace

SPARSE_INDEXER_MODULE();
SPARSE_INDEXER_EXPORT(kv_gather_fp8);
SPARSE_INDEXER_EXPORT(kv_gather_plain);
