// SPDX-License-Identifier: Apache-2.0
// candidate_table: from each row's selected blocks what a consumer reads.
//
// A row that sees b = ceil(len / 8) blocks has c = min(b, n) candidates: blocks 0 ... b - 1 if
// b <= n (`selected` is not read), else its n selected ones, ascending.
//   out_blocks  the candidates, then INT32_MAX
//   out_slots   their slots in the pool in units of blocks: page * blocks_per_page + block within
//               the page; then 0, a slot that exists
//   out_lens    columns of the row's candidate logits that count: 8 a candidate, less what the
//               newest block, always the last one, lacks of 8
// One CTA a row; bound by memory: 4 bytes read and 8 written an entry.
#pragma once

#include "kernels/candidate_table.h"

namespace sparse_indexer {

struct CandidateTable {
  using Params = CandidateTableParams;
  static constexpr int kThreads = candidate_table_config::kThreads;
  static constexpr int kMinBlocks = 1;

  static __device__ void run(const Params& p) {
    const int64_t out_row = blockIdx.x;
    const int64_t row = p.rows != nullptr ? p.rows[out_row] : out_row;
    const int64_t len = max(p.compressed_lens[row], 0);
    const int64_t seen = (len + 7) / 8;
    const int count = seen < p.n ? static_cast<int>(seen) : p.n;
    const bool all = seen <= p.n;
    const int32_t* selected = p.selected + row * p.selected_stride;
    int32_t* blocks = p.out_blocks + out_row * p.n;
    int32_t* slots = p.out_slots + out_row * p.n;
    const int32_t* pages =
        p.page_table != nullptr ? p.page_table + p.request_of_row[row] * p.table_stride : nullptr;
    for (int i = threadIdx.x; i < p.n; i += kThreads) {
      const int block = i >= count ? 0x7fffffff : all ? i : selected[i];
      blocks[i] = block;
      if (pages == nullptr) continue;
      const int page = block / p.blocks_per_page;
      slots[i] =
          i < count ? pages[page] * p.blocks_per_page + (block - page * p.blocks_per_page) : 0;
    }
    if (threadIdx.x == 0) p.out_lens[out_row] = count > 0 ? count * 8 - int((8 - len % 8) % 8) : 0;
  }
};

}  // namespace sparse_indexer
