// SPDX-License-Identifier: Apache-2.0
#include "kernels/candidate_topk.h"

#include "sparse_indexer/host/candidate_operands.h"
#include "sparse_indexer/host/launch.h"
#include "sparse_indexer/host/quad_operands.h"
#include "sparse_indexer/host/topk_list.h"

using namespace sparse_indexer;
namespace config = candidate_topk_config;
using tvm::ffi::Optional;

namespace {

constexpr int64_t kMaxK = 1 << 20;

void candidate_topk(TensorView keys, TensorView queries, TensorView weights, TensorView entries,
                    TensorView ranks, TensorView counts, TensorView quad_first, TensorView lens,
                    TensorView rows, TensorView blocks, TensorView slots, TensorView counters,
                    TensorView out, Optional<TensorView> request_of_row,
                    Optional<TensorView> request_starts) {
  CandidateOperands<QuadOperands> its{keys, queries, weights, entries, ranks, counts, quad_first};
  its.check(8);
  const QuadOperands& operands = its.operands;
  if (operands.element != 0) bad_argument("keys", "uint8", "halves");
  const int64_t quads = operands.quads;
  const int heads = static_cast<int>(operands.heads);
  Device& device = its.device;
  Size columns("columns"), ctas("ctas"), num_blocks("columns / 8");
  Size num_rows("rows"), k("k"), requests("requests");
  Match("lens").shape({4 * quads}).dtype(int32).on(device).contiguous().check(lens);
  Match("rows").shape({4 * quads}).dtype(int32).on(device).contiguous().check(rows);
  Match("slots")
      .shape({ctas, config::kSlots, 4, columns})
      .dtype(float32)
      .on(device)
      .contiguous()
      .check(slots);
  Match("blocks")
      .shape({4 * quads, num_blocks})
      .dtype(int32)
      .on(device)
      .last_dim_contiguous()
      .check(blocks);
  Match("counters").shape({ctas + 1}).dtype(int32).on(device).contiguous().check(counters);
  Match("out").shape({num_rows, k}).dtype(int32).on(device).last_dim_contiguous().check(out);
  CandidateTopkParams params{};
  params.logits = its.params("slots", data<float>(slots), columns, columns);
  if (num_blocks * 8 < columns) {
    bad_argument("blocks", "at least columns / 8 = " + std::to_string(columns / 8) + " columns",
                 std::to_string(num_blocks));
  }
  expect_int("out k", k, 0, kMaxK);
  if (request_of_row.has_value() != request_starts.has_value()) {
    bad_argument("request_of_row", "a tensor with request_starts, else None",
                 request_of_row.has_value() ? "a tensor" : "None");
  }
  if (request_of_row.has_value()) {
    Match("request_of_row")
        .shape({num_rows})
        .dtype(int32)
        .on(device)
        .contiguous()
        .check(*request_of_row);
    Match("request_starts")
        .shape({requests})
        .dtype(int32)
        .on(device)
        .contiguous()
        .check(*request_starts);
    params.topk.request_of_row = data<const int32_t>(*request_of_row);
    params.topk.request_starts = data<const int32_t>(*request_starts);
  }
  if (quads == 0 || num_rows == 0 || k == 0) return;
  expect_int("keys blocks", operands.blocks, 1, INT32_MAX);
  expect_int("quads", quads, 0, INT32_MAX / 4);
  expect_int("slots ctas", ctas, 1, 1 << 16);

  TopkParams& topk = params.topk;
  topk.rows = data<const int32_t>(rows);
  topk.lens = data<const int32_t>(lens);
  topk.out = data<int32_t>(out);
  topk.out_stride = out.stride(0);
  topk.blocks = data<const int32_t>(blocks);
  topk.blocks_stride = blocks.stride(0);
  topk.width = static_cast<int32_t>(columns);
  topk.k = static_cast<int32_t>(k);
  topk.unused = -1;
  topk.per_column = 1;
  topk.page_size = 1;
  const int64_t scoring = config::scoring_bytes(heads);
  topk.list = static_cast<int32_t>(topk_list(columns, k, config::kSelectors, config::kBinBits,
                                             config::kSelectBytes / config::groups(heads)));
  params.counters = data<int32_t>(counters);
  Launch(heads == 32 ? "candidate_topk_32" : "candidate_topk_64", device)
      .grid(ctas)
      .block(config::threads(heads))
      .shared(scoring + config::kSelectBytes)
      .pdl()
      .run(params);
}

}  // namespace

SPARSE_INDEXER_MODULE();
SPARSE_INDEXER_EXPORT(candidate_topk);
