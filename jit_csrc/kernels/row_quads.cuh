// SPDX-License-Identifier: Apache-2.0
// row_quads: rows by request, in row order, four of one request at a time: those that are scored
// together.
//   out_rows           the row of each slot, four slots a quad; -1 where the request has no more
//   out_slots          the slot of each row
//   out_slot_lens      positions the row of a slot sees, at most those its packed keys hold
//   out_lens           the most of a quad's
//   out_first          the first packed block of the request's keys
//   out_request_lens   most positions a row of the request sees
//   out_request_first  its first packed block
// Requests' numbers come as parameters, so that a captured graph holds them. One CTA a request: it
// reads all rows' requests and keeps its own.
#pragma once

#include "kernels/row_quads.h"
#include "sparse_indexer/scan.cuh"

namespace sparse_indexer {

struct RowQuads {
  using Params = RowQuadsParams;
  static constexpr int kThreads = row_quads_config::kThreads;
  static constexpr int kMinBlocks = 1;
  static constexpr int kPer = row_quads_config::kPer;

  static __device__ void run(const Params& p) {
    const int request = p.first_request + static_cast<int>(blockIdx.x);
    const RowQuadsRequest its = p.requests[blockIdx.x];
    int32_t* rows = p.out_rows + int64_t(its.first_quad) * 4;
    const int slots = its.quads * 4;
    int found = 0;
    for (int base = 0; base < p.rows; base += kThreads * kPer) {
      const int first = base + static_cast<int>(threadIdx.x) * kPer;
      uint32_t mine = 0;
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        mine |= uint32_t(first + j < p.rows && p.request_of_row[first + j] == request) << j;
      }
      int total;
      int slot = found + exclusive_scan(Cta<kThreads>{}, __popc(mine), &total);
      found += total;
      for (; mine != 0; mine &= mine - 1, ++slot) {
        const int row = first + __ffs(mine) - 1;
        if (slot >= slots) continue;
        rows[slot] = row;
        p.out_slots[row] = its.first_quad * 4 + slot;
      }
    }
    for (int slot = min(found, slots) + static_cast<int>(threadIdx.x); slot < slots;
         slot += kThreads) {
      rows[slot] = -1;
    }
    __syncthreads();  // the request's rows are written, by this CTA
    __shared__ int longest;
    if (threadIdx.x == 0) longest = 0;
    __syncthreads();  // it is initialized
    for (int quad = threadIdx.x; quad < its.quads; quad += kThreads) {
      int len = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = rows[quad * 4 + j];
        const int own = row >= 0 ? min(max(p.lens[row], 0), its.max_len) : 0;
        p.out_slot_lens[int64_t(its.first_quad + quad) * 4 + j] = own;
        len = max(len, own);
      }
      p.out_lens[its.first_quad + quad] = len;
      p.out_first[its.first_quad + quad] = its.first_block;
      atomicMax(&longest, len);
    }
    __syncthreads();  // it is complete
    if (threadIdx.x == 0) {
      p.out_request_lens[request] = longest;
      p.out_request_first[request] = its.first_block;
    }
  }
};

}  // namespace sparse_indexer
