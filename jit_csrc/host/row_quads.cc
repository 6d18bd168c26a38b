// SPDX-License-Identifier: Apache-2.0
#include "kernels/row_quads.h"

#include <tvm/ffi/string.h>

#include <algorithm>

#include "sparse_indexer/host/check.h"
#include "sparse_indexer/host/launch.h"

using namespace sparse_indexer;

namespace {

void row_quads(TensorView request_of_row, TensorView lens, tvm::ffi::Bytes requests,
               TensorView out_rows, TensorView out_slots, TensorView out_slot_lens,
               TensorView out_lens, TensorView out_first, TensorView out_request_lens,
               TensorView out_request_first) {
  Size rows("rows"), quads("quads");
  const auto count = static_cast<int64_t>(requests.size() / sizeof(RowQuadsRequest));
  Device device;
  Match("request_of_row").shape({rows}).dtype(int32).on(device).contiguous().check(request_of_row);
  Match("lens").shape({rows}).dtype(int32).on(device).contiguous().check(lens);
  Match("out_rows").shape({quads, 4}).dtype(int32).on(device).contiguous().check(out_rows);
  Match("out_slots").shape({rows}).dtype(int32).on(device).contiguous().check(out_slots);
  Match("out_slot_lens")
      .shape({quads, 4})
      .dtype(int32)
      .on(device)
      .contiguous()
      .check(out_slot_lens);
  Match("out_lens").shape({quads}).dtype(int32).on(device).contiguous().check(out_lens);
  Match("out_first").shape({quads}).dtype(int32).on(device).contiguous().check(out_first);
  Match("out_request_lens")
      .shape({count})
      .dtype(int32)
      .on(device)
      .contiguous()
      .check(out_request_lens);
  Match("out_request_first")
      .shape({count})
      .dtype(int32)
      .on(device)
      .contiguous()
      .check(out_request_first);
  expect_int("rows", rows, 0, INT32_MAX - row_quads_config::kThreads * row_quads_config::kPer);

  RowQuadsParams params{};
  params.request_of_row = data<const int32_t>(request_of_row);
  params.lens = data<const int32_t>(lens);
  params.out_rows = data<int32_t>(out_rows);
  params.out_slots = data<int32_t>(out_slots);
  params.out_slot_lens = data<int32_t>(out_slot_lens);
  params.out_lens = data<int32_t>(out_lens);
  params.out_first = data<int32_t>(out_first);
  params.out_request_lens = data<int32_t>(out_request_lens);
  params.out_request_first = data<int32_t>(out_request_first);
  params.rows = static_cast<int32_t>(rows);
  const auto* all = reinterpret_cast<const RowQuadsRequest*>(requests.data());
  for (int64_t i = 0; i < count; ++i) {
    if (all[i].quads < 0 || all[i].first_quad < 0 || all[i].first_quad > quads - all[i].quads) {
      bad_argument("requests[" + std::to_string(i) + "]",
                   "quads within the " + std::to_string(quads) + " of out_rows",
                   std::to_string(all[i].first_quad) + " and " + std::to_string(all[i].quads) +
                       " from there");
    }
  }
  for (int64_t first = 0; first < count; first += row_quads_config::kRequests) {
    const int64_t here = std::min<int64_t>(count - first, row_quads_config::kRequests);
    params.first_request = static_cast<int32_t>(first);
    std::copy(all + first, all + first + here, params.requests);
    Launch("row_quads", device).grid(here).block(row_quads_config::kThreads).pdl().run(params);
  }
}

}  // namespace

SPARSE_INDEXER_MODULE();
SPARSE_INDEXER_EXPORT(row_quads);
