// SPDX-License-Identifier: Apache-2.0
// What the kernels that score the candidates of quads have in common: the operands of quads, and
// the lists of blocks that candidate_quads writes.
#pragma once

#include <string>

#include "kernels/candidate_logits.h"
#include "kernels/candidate_quads.h"
#include "sparse_indexer/host/check.h"

namespace sparse_indexer {

// Operands: QuadOperands or FusedOperands.
template <typename Operands>
struct CandidateOperands {
  const TensorView &keys, &queries, &weights, &entries, &ranks, &counts, &quad_first;
  Operands operands;
  Device device;
  Size width{"width"};

  // `ranks_alignment`: bytes.
  void check(int ranks_alignment) {
    operands.check(keys, queries, weights, quad_first, device);
    Size& quads = operands.quads;
    Match("entries").shape({quads, width}).dtype(int32).on(device).contiguous().check(entries);
    Match("ranks")
        .shape({quads, every_rank(), 4})
        .dtype(int16)
        .on(device)
        .contiguous()
        .aligned(ranks_alignment)
        .check(ranks);
    Match("counts").shape({quads, 2}).dtype(int32).on(device).contiguous().check(counts);
  }

  // Logits of rows of `columns`, checked here and called `name`.
  CandidateLogitsParams params(const char* name, float* out, int64_t out_stride, int64_t columns) {
    if (columns % 8 != 0 || columns > 8 * 0xffff) {
      bad_argument(name, "columns of at most 65535 whole blocks", std::to_string(columns));
    }
    CandidateLogitsParams params{};
    params.keys = data<const uint8_t>(keys);
    params.queries = data<const uint8_t>(queries);
    params.weights = data<const float>(weights);
    params.entries = data<const uint32_t>(entries);
    params.ranks = data<const uint16_t>(ranks);
    params.counts = data<const int32_t>(counts);
    params.quad_first = data<const int32_t>(quad_first);
    params.out = out;
    params.entries_stride = width;
    params.ranks_stride = every_rank();
    params.out_stride = out_stride;
    params.quads = static_cast<int32_t>(operands.quads);
    params.out_blocks = static_cast<int32_t>(columns / 8);
    params.num_blocks = static_cast<int32_t>(operands.blocks);
    return params;
  }

 private:
  int64_t every_rank() const {
    constexpr int kEvery = candidate_quads_config::kRankEvery;
    return (int64_t(width) + kEvery - 1) / kEvery;
  }
};

}  // namespace sparse_indexer
