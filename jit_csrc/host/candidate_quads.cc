// SPDX-License-Identifier: Apache-2.0
#include "kernels/candidate_quads.h"

#include "sparse_indexer/host/check.h"
#include "sparse_indexer/host/launch.h"

using namespace sparse_indexer;

namespace {

void candidate_quads(TensorView blocks, int64_t max_blocks, bool pairs, TensorView out_entries,
                     TensorView out_ranks, TensorView out_counts) {
  Size n("n"), quads("quads"), width("width");
  Device device;
  Match("blocks").shape({quads, 4, n}).dtype(int32).on(device).contiguous().check(blocks);
  Match("out_entries")
      .shape({quads, width})
      .dtype(int32)
      .on(device)
      .contiguous()
      .check(out_entries);
  constexpr int kEvery = candidate_quads_config::kRankEvery;
  Match("out_ranks")
      .shape({quads, (width + kEvery - 1) / kEvery, 4})
      .dtype(int16)
      .on(device)
      .contiguous()
      .aligned(8)
      .check(out_ranks);
  Match("out_counts").shape({quads, 2}).dtype(int32).on(device).contiguous().check(out_counts);
  expect_int("max_blocks", max_blocks, 0, 1 << candidate_quads_config::kIdBits);
  expect_int("blocks n", n, 0, 0xffff);  // a rank is 16 bits
  CandidateQuadsParams params{};
  params.blocks = data<const int32_t>(blocks);
  params.out_entries = data<uint32_t>(out_entries);
  params.out_ranks = data<uint16_t>(out_ranks);
  params.out_counts = data<int32_t>(out_counts);
  params.n = static_cast<int32_t>(n);
  params.width = static_cast<int32_t>(expect_int("out_entries width", width, 0, 1 << 26));
  params.pairs = pairs;
  params.max_blocks = static_cast<int32_t>(max_blocks);
  Launch("candidate_quads", device)
      .grid(quads)
      .block(candidate_quads_config::kThreads)
      .pdl()
      .run(params);
}

}  // namespace

SPARSE_INDEXER_MODULE();
SPARSE_INDEXER_EXPORT(candidate_quads);
