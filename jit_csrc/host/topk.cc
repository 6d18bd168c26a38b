// SPDX-License-Identifier: Apache-2.0
#include "kernels/topk.h"

#include <string>

#include "sparse_indexer/host/check.h"
#include "sparse_indexer/host/launch.h"
#include "sparse_indexer/host/topk_list.h"

using namespace sparse_indexer;
using tvm::ffi::Optional;

namespace {

constexpr int64_t kMaxK = 1 << 20;
// What a CTA may have on every GPU; before 8.0 not much more, and other CTAs want some.
constexpr int64_t kLeastSharedBytes = 48 * 1024;

// Keys -> columns. `rows` says where the row of a row of keys goes, `blocks` maps a column of
// candidate logits to a position, `request_starts` or `page_table` (pages of `page_size` positions)
// a position to where it goes.
void topk(TensorView keys, TensorView lens, TensorView out, Optional<TensorView> rows,
          int64_t per_column, bool force_last, int64_t unused, Optional<TensorView> blocks,
          Optional<TensorView> request_of_row, Optional<TensorView> request_starts,
          Optional<TensorView> page_table, int64_t page_size) {
  Size num_rows("rows"), num_key_rows("key rows");
  Size width("width"), k("k"), requests("requests"), max_pages("max_pages");
  Size& key_rows = rows.has_value() ? num_key_rows : num_rows;
  Device device;
  Match("keys")
      .shape({key_rows, width})
      .dtype(float32, bfloat16)
      .on(device)
      .last_dim_contiguous()
      .check(keys);
  Match("lens").shape({key_rows}).dtype(int32).on(device).contiguous().check(lens);
  Match("out").shape({num_rows, k}).dtype(int32).on(device).last_dim_contiguous().check(out);
  expect_int("keys width", width, 0, 1 << 30);
  expect_int("out k", k, 0, kMaxK);
  expect_int("per_column", per_column, 1, 8);
  TopkParams params{};
  params.keys = data<const void>(keys);
  params.lens = data<const int32_t>(lens);
  params.out = data<int32_t>(out);
  params.stride = keys.stride(0);
  params.out_stride = out.stride(0);
  params.width = static_cast<int32_t>(width);
  params.k = static_cast<int32_t>(k);
  params.per_column = static_cast<int32_t>(per_column);
  params.force_last = force_last;
  params.unused = static_cast<int32_t>(expect_int("unused", unused, INT32_MIN, INT32_MAX));
  params.page_size = 1;
  if (rows.has_value()) {
    Match("rows").shape({key_rows}).dtype(int32).on(device).contiguous().check(*rows);
    params.rows = data<const int32_t>(*rows);
  }
  if (blocks.has_value()) {
    if (per_column != 1) bad_argument("per_column", "1 with blocks", std::to_string(per_column));
    Size columns("width / 8");
    Match("blocks")
        .shape({key_rows, columns})
        .dtype(int32)
        .on(device)
        .last_dim_contiguous()
        .check(*blocks);
    if (columns * 8 < width) {
      bad_argument("blocks", "at least width / 8 = " + std::to_string((width + 7) / 8) + " columns",
                   std::to_string(columns));
    }
    params.blocks = data<const int32_t>(*blocks);
    params.blocks_stride = blocks.value().stride(0);
  }
  if (request_starts.has_value() == page_table.has_value() && request_starts.has_value()) {
    bad_argument("request_starts, page_table", "at most one of the two", "both");
  }
  if (request_of_row.has_value() != (request_starts.has_value() || page_table.has_value())) {
    bad_argument("request_of_row", "a tensor with request_starts or page_table, else None",
                 request_of_row.has_value() ? "a tensor" : "None");
  }
  if (request_of_row.has_value()) {
    Match("request_of_row")
        .shape({num_rows})
        .dtype(int32)
        .on(device)
        .contiguous()
        .check(*request_of_row);
    params.request_of_row = data<const int32_t>(*request_of_row);
  }
  if (request_starts.has_value()) {
    Match("request_starts")
        .shape({requests})
        .dtype(int32)
        .on(device)
        .contiguous()
        .check(*request_starts);
    params.request_starts = data<const int32_t>(*request_starts);
  }
  if (page_table.has_value()) {
    Match("page_table")
        .shape({requests, max_pages})
        .dtype(int32)
        .on(device)
        .last_dim_contiguous()
        .check(*page_table);
    params.page_table = data<const int32_t>(*page_table);
    params.table_stride = page_table.value().stride(0);
    params.page_size = static_cast<int32_t>(expect_int("page_size", page_size, 8, INT32_MAX));
  }
  if (key_rows == 0 || num_rows == 0 || k == 0) return;
  // A row alone on an SM is done sooner by more threads; many rows share an SM better by fewer.
  const DeviceKernels& gpu = on_device(device);
  const bool alone = key_rows <= gpu.sm_count && width > 8192;
  const int threads = topk_config::kThreads[alone ? 2 : width > 16384 ? 1 : 0];
  const int64_t most = gpu.capability < 80 ? kLeastSharedBytes : gpu.max_shared_bytes;
  params.list = static_cast<int32_t>(
      topk_list(width, k, threads, topk_config::kBinBits, most - topk_config::kStaticBytes));
  const std::string symbol =
      (same(keys.dtype(), float32) ? "topk_f32_" : "topk_bf16_") + std::to_string(threads);
  Launch(symbol, device)
      .grid(key_rows)
      .block(threads)
      .shared(topk_shared_bytes(params.list, topk_config::kBinBits))
      .pdl()
      .run(params);
}

}  // namespace

SPARSE_INDEXER_MODULE();
SPARSE_INDEXER_EXPORT(topk);
