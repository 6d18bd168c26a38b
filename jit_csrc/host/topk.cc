// SPDX-License-Identifier: Apache-2.0
#include "kernels/topk.h"

#include "sparse_indexer/host/check.h"
#include "sparse_indexer/host/launch.h"

using namespace sparse_indexer;
using tvm::ffi::Optional;

namespace {

constexpr int64_t kMaxK = 1 << 20;

// Dynamic shared memory: the histogram, then the upper halves of a row's keys if they are kept.
int64_t shared_bytes(int64_t width, bool kept) {
  const int64_t tiles = (width + topk_config::kTile - 1) / topk_config::kTile;
  return topk_config::kBins * 4 + (kept ? tiles * topk_config::kTile * 2 : 0);
}

// Keys -> columns. `blocks` maps a column of candidate logits to a position, `request_starts` or
// `page_table` (pages of `page_size` positions) a position to where it goes.
void topk(TensorView keys, TensorView lens, TensorView out, int64_t per_column, bool force_last,
          Optional<TensorView> blocks, Optional<TensorView> request_of_row,
          Optional<TensorView> request_starts, Optional<TensorView> page_table, int64_t page_size) {
  Size rows("rows"), width("width"), k("k"), requests("requests"), max_pages("max_pages");
  Device device;
  Match("keys").shape({rows, width}).dtype(float32, bfloat16).on(device).last_dim_contiguous().check(
      keys);
  Match("lens").shape({rows}).dtype(int32).on(device).contiguous().check(lens);
  Match("out").shape({rows, k}).dtype(int32).on(device).last_dim_contiguous().check(out);
  expect_int("keys width", width, 0, INT32_MAX - topk_config::kTile * 4);
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
  params.page_size = 1;
  if (blocks.has_value()) {
    Size columns("width / 8");
    Match("blocks").shape({rows, columns}).dtype(int32).on(device).last_dim_contiguous().check(*blocks);
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
    Match("request_of_row").shape({rows}).dtype(int32).on(device).contiguous().check(*request_of_row);
    params.request_of_row = data<const int32_t>(*request_of_row);
  }
  if (request_starts.has_value()) {
    Match("request_starts").shape({requests}).dtype(int32).on(device).contiguous().check(*request_starts);
    params.request_starts = data<const int32_t>(*request_starts);
  }
  if (page_table.has_value()) {
    Match("page_table").shape({requests, max_pages}).dtype(int32).on(device).last_dim_contiguous().check(
        *page_table);
    params.page_table = data<const int32_t>(*page_table);
    params.table_stride = page_table.value().stride(0);
    params.page_size = static_cast<int32_t>(expect_int("page_size", page_size, 8, INT32_MAX));
  }
  if (rows == 0 || k == 0) return;
  const int64_t room = on_device(device).max_shared_bytes - 2048;
  const bool kept = shared_bytes(width, true) <= room;
  const bool whole = same(keys.dtype(), float32);
  Launch(whole ? (kept ? "topk_f32_kept" : "topk_f32") : (kept ? "topk_bf16_kept" : "topk_bf16"),
         device)
      .grid(rows)
      .block(topk_config::kThreads)
      .shared(shared_bytes(width, kept))
      .run(params);
}

}  // namespace

SPARSE_INDEXER_MODULE();
SPARSE_INDEXER_EXPORT(topk);
