// SPDX-License-Identifier: Apache-2.0
#include "kernels/candidate_table.h"

#include "sparse_indexer/host/check.h"
#include "sparse_indexer/host/launch.h"

using namespace sparse_indexer;
using tvm::ffi::Optional;

namespace {

void candidate_table(TensorView selected, TensorView compressed_lens, Optional<TensorView> rows,
                     Optional<TensorView> request_of_row, Optional<TensorView> page_table,
                     int64_t page_size, TensorView out_blocks, Optional<TensorView> out_slots,
                     TensorView out_lens) {
  Size source("source rows"), kept("out rows"), n("n"), requests("requests"),
      max_pages("max_pages");
  Device device;
  Match("selected")
      .shape({source, n})
      .dtype(int32)
      .on(device)
      .last_dim_contiguous()
      .check(selected);
  Match("compressed_lens")
      .shape({source})
      .dtype(int32)
      .on(device)
      .contiguous()
      .check(compressed_lens);
  CandidateTableParams params{};
  if (rows.has_value()) {
    Match("rows").shape({kept}).dtype(int64).on(device).contiguous().check(*rows);
    params.rows = data<const int64_t>(*rows);
    Match("out_blocks").shape({kept, n}).dtype(int32).on(device).contiguous().check(out_blocks);
  } else {
    Match("out_blocks").shape({source, n}).dtype(int32).on(device).contiguous().check(out_blocks);
  }
  const int64_t out_rows = out_blocks.shape()[0];
  Match("out_lens").shape({out_rows}).dtype(int32).on(device).contiguous().check(out_lens);
  if (page_table.has_value() != out_slots.has_value() ||
      page_table.has_value() != request_of_row.has_value()) {
    bad_argument("page_table, request_of_row, out_slots", "all three or none", "some of them");
  }
  params.blocks_per_page = 1;
  if (page_table.has_value()) {
    Match("page_table")
        .shape({requests, max_pages})
        .dtype(int32)
        .on(device)
        .last_dim_contiguous()
        .check(*page_table);
    Match("request_of_row")
        .shape({source})
        .dtype(int32)
        .on(device)
        .contiguous()
        .check(*request_of_row);
    Match("out_slots").shape({out_rows, n}).dtype(int32).on(device).contiguous().check(*out_slots);
    expect_int("page_size", page_size, 8, INT32_MAX);
    if (page_size % 8 != 0) bad_argument("page_size", "a multiple of 8", std::to_string(page_size));
    params.page_table = data<const int32_t>(*page_table);
    params.table_stride = page_table.value().stride(0);
    params.request_of_row = data<const int32_t>(*request_of_row);
    params.out_slots = data<int32_t>(*out_slots);
    params.blocks_per_page = static_cast<int32_t>(page_size / 8);
  }
  params.selected = data<const int32_t>(selected);
  params.compressed_lens = data<const int32_t>(compressed_lens);
  params.out_blocks = data<int32_t>(out_blocks);
  params.out_lens = data<int32_t>(out_lens);
  params.selected_stride = selected.stride(0);
  params.n = static_cast<int32_t>(expect_int("n", n, 0, 1 << 24));
  Launch("candidate_table", device)
      .grid(out_rows)
      .block(candidate_table_config::kThreads)
      .pdl()
      .run(params);
}

}  // namespace

SPARSE_INDEXER_MODULE();
SPARSE_INDEXER_EXPORT(candidate_table);
