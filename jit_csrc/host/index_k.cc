// SPDX-License-Identifier: Apache-2.0
#include "kernels/index_k.h"

#include "sparse_indexer/host/check.h"
#include "sparse_indexer/host/conversions.h"
#include "sparse_indexer/host/launch.h"

using namespace sparse_indexer;
using tvm::ffi::Optional;

namespace {

struct Format {
  int value_bytes;
  int scale_bytes;
  DLDataType pages;
  Conversions conversions;
};

constexpr Format kFormats[] = {
    {64, 4, uint8, {"fp4", "index_k_fp4_fp8", "index_k_fp4_fp16", "index_k_fp4_bf16"}},
    {128, 4, uint8, {"fp8", "index_k_fp8_fp8", "index_k_fp8_fp16", "index_k_fp8_bf16"}},
    {256, 0, float16, {"fp16", nullptr, "index_k_fp16_fp16", nullptr}},
    {256, 0, bfloat16, {"bf16", nullptr, "index_k_bf16_fp16", "index_k_bf16_bf16"}},
};

// By its place in that table: a number costs a call less than a string.
const Format& format_of(int64_t number) {
  return kFormats[expect_int("format", number, 0, 3)];
}

struct Work {
  TensorView lens;
  TensorView out_starts;
  int64_t max_len;
  TensorView out_values;
  Optional<TensorView> out_scales;  // none: the values are packed blocks with scales of their own
};

void convert(IndexKParams& params, const Format& from, const Work& work, Size& requests,
             Device& device) {
  Size out_rows("out rows"), out_blocks("out blocks");
  const DLDataType to = work.out_values.dtype();
  Match("lens").shape({requests}).dtype(int32).on(device).contiguous().check(work.lens);
  Match("out_starts").shape({requests}).dtype(int32).on(device).contiguous().check(work.out_starts);
  Match out_values("out_values");
  if (work.out_scales.has_value()) {
    out_values.shape({out_rows, 128}).dtype(uint8, float16, bfloat16);
  } else if (same(to, uint8)) {
    out_values.shape({out_blocks, packed_keys::block_bytes(128)}).dtype(uint8);
  } else {
    out_values.shape({out_blocks, packed_keys::block_bytes(256) / 2}).dtype(float16, bfloat16);
  }
  out_values.on(device).contiguous().aligned(16).check(work.out_values);
  if (work.out_scales.has_value()) {
    Match("out_scales")
        .shape({out_rows})
        .dtype(float32)
        .on(device)
        .contiguous()
        .check(*work.out_scales);
    params.out_scales = data<float>(*work.out_scales);
  }
  expect_int("max_len", work.max_len, 0, INT32_MAX - index_k_config::kPart);
  params.lens = data<const int32_t>(work.lens);
  params.out_starts = data<const int32_t>(work.out_starts);
  params.out_values = data<void>(work.out_values);
  params.parts =
      static_cast<int32_t>((work.max_len + index_k_config::kPart - 1) / index_k_config::kPart);
  params.vectors = reinterpret_cast<uintptr_t>(params.values) % 16 == 0 &&
                   params.page_stride % 16 == 0 && params.value_step % 16 == 0;
  Launch(from.conversions.to(to), device)
      .grid(requests * params.parts)
      .block(index_k_config::kThreads)
      .pdl()
      .run(params);
}

void index_k_paged(TensorView pages, int64_t format, bool interleaved, int64_t page_size,
                   TensorView page_table, TensorView lens, TensorView out_starts, int64_t max_len,
                   TensorView out_values, Optional<TensorView> out_scales) {
  const Format& from = format_of(format);
  const int bytes = from.value_bytes + from.scale_bytes;
  expect_int("keys page_size", page_size, 8, INT32_MAX / bytes);
  Size num_pages("num_pages"), requests("requests"), max_pages("max_pages");
  Device device;
  const int64_t elements = page_size * bytes * 8 / from.pages.bits;
  Match("keys pages")
      .shape({num_pages, elements})
      .dtype(from.pages)
      .on(device)
      .last_dim_contiguous()
      .aligned(4)
      .check(pages);
  Match("where")
      .shape({requests, max_pages})
      .dtype(int32)
      .on(device)
      .last_dim_contiguous()
      .check(page_table);

  IndexKParams params{};
  params.values = data<const uint8_t>(pages);
  params.value_step = interleaved ? bytes : from.value_bytes;
  params.scale_step = interleaved ? bytes : from.scale_bytes;
  const int64_t scales = interleaved ? from.value_bytes : page_size * from.value_bytes;
  params.scales = from.scale_bytes != 0 ? params.values + scales : nullptr;
  params.page_table = data<const int32_t>(page_table);
  params.page_stride = pages.stride(0) * from.pages.bits / 8;
  params.table_stride = page_table.stride(0);
  params.slots = num_pages;
  params.page_size = static_cast<int32_t>(page_size);
  params.max_pages = static_cast<int32_t>(max_pages);
  convert(params, from, {lens, out_starts, max_len, out_values, out_scales}, requests, device);
}

void index_k_flat(TensorView values, Optional<TensorView> scales, int64_t format,
                  TensorView key_starts, TensorView lens, TensorView out_starts, int64_t max_len,
                  TensorView out_values, Optional<TensorView> out_scales) {
  const Format& from = format_of(format);
  Size columns("columns"), requests("requests");
  Device device;
  const int width = from.value_bytes * 8 / from.pages.bits;
  Match("keys values")
      .shape({columns, width})
      .dtype(from.pages)
      .on(device)
      .last_dim_contiguous()
      .aligned(4)
      .check(values);
  Match("where").shape({requests}).dtype(int32).on(device).contiguous().check(key_starts);
  IndexKParams params{};
  params.values = data<const uint8_t>(values);
  params.value_step = static_cast<int32_t>(values.stride(0) * from.pages.bits / 8);
  if (scales.has_value() != (from.scale_bytes != 0)) {
    bad_argument("keys scales", from.scale_bytes != 0 ? "a tensor" : "None",
                 scales.has_value() ? "a tensor" : "None");
  }
  if (scales.has_value()) {
    Match("keys scales")
        .shape({columns})
        .dtype(from.value_bytes == 64 ? int32 : float32)
        .on(device)
        .contiguous()
        .check(*scales);
    params.scales = data<const uint8_t>(*scales);
  }
  params.scale_step = from.scale_bytes;
  params.key_starts = data<const int32_t>(key_starts);
  params.slots = columns;
  params.page_size = 1;
  convert(params, from, {lens, out_starts, max_len, out_values, out_scales}, requests, device);
}

}  // namespace

SPARSE_INDEXER_MODULE();
SPARSE_INDEXER_EXPORT(index_k_paged);
SPARSE_INDEXER_EXPORT(index_k_flat);
