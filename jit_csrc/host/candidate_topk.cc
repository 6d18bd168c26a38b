// SPDX-License-Identifier: Apache-2.0
#include "kernels/candidate_topk.h"

#include "kernels/candidate_quads.h"

#include "sparse_indexer/host/check.h"
#include "sparse_indexer/host/launch.h"
#include "sparse_indexer/host/quad_operands.h"
#include "sparse_indexer/host/topk_list.h"

using namespace sparse_indexer;
namespace config = candidate_topk_config;
using tvm::ffi::Optional;
constexpr int kEvery = candidate_quads_config::kRankEvery;

namespace {

constexpr int64_t kMaxK = 1 << 20;

void candidate_topk(TensorView keys, TensorView queries, TensorView weights, TensorView entries,
                    TensorView ranks, TensorView counts, TensorView quad_first, TensorView lens,
                    TensorView rows, TensorView blocks, TensorView slots, TensorView counters,
                    TensorView out, Optional<TensorView> request_of_row,
                    Optional<TensorView> request_starts) {
  Size width("width"), columns("columns"), ctas("ctas"), num_blocks("columns / 8");
  Size num_rows("rows"), k("k"), requests("requests");
  Device device;
  QuadOperands operands;
  operands.check(keys, queries, weights, quad_first, device);
  if (operands.element != 0) bad_argument("keys", "uint8", "halves");
  Size& quads = operands.quads;
  const int heads = static_cast<int>(operands.heads);
  Match("entries").shape({quads, width}).dtype(int32).on(device).contiguous().check(entries);
  Match("ranks")
      .shape({quads, (width + kEvery - 1) / kEvery, 4})
      .dtype(int16)
      .on(device)
      .contiguous()
      .aligned(8)
      .check(ranks);
  Match("counts").shape({quads, 2}).dtype(int32).on(device).contiguous().check(counts);
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
  if (columns % 8 != 0 || columns > 8 * 0xffff) {
    bad_argument("slots", "columns of at most 65535 whole blocks", std::to_string(columns));
  }
  if (num_blocks * 8 < columns) {
    bad_argument("blocks", "at least columns / 8 = " + std::to_string(columns / 8) + " columns",
                 std::to_string(num_blocks));
  }
  expect_int("out k", k, 0, kMaxK);
  if (request_of_row.has_value() != request_starts.has_value()) {
    bad_argument("request_of_row", "a tensor with request_starts, else None",
                 request_of_row.has_value() ? "a tensor" : "None");
  }
  CandidateTopkParams params{};
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

  CandidateLogitsParams& logits = params.logits;
  logits.keys = data<const uint8_t>(keys);
  logits.queries = data<const uint8_t>(queries);
  logits.weights = data<const float>(weights);
  logits.entries = data<const uint32_t>(entries);
  logits.ranks = data<const uint16_t>(ranks);
  logits.ranks_stride = (width + kEvery - 1) / kEvery;
  logits.counts = data<const int32_t>(counts);
  logits.quad_first = data<const int32_t>(quad_first);
  logits.out = data<float>(slots);
  logits.entries_stride = width;
  logits.out_stride = columns;
  logits.quads = static_cast<int32_t>(quads);
  logits.out_blocks = static_cast<int32_t>(columns / 8);
  logits.num_blocks = static_cast<int32_t>(operands.blocks);
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
