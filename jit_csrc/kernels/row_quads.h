// SPDX-License-Identifier: Apache-2.0
// What host and device share of `row_quads`.
#pragma once

#include "sparse_indexer/cstdint.h"

namespace sparse_indexer {

struct RowQuadsRequest {
  int32_t first_quad;
  int32_t quads;
  int32_t first_block;  // of its packed keys
  int32_t max_len;      // positions that its packed keys hold, at most
};

namespace row_quads_config {

constexpr int kThreads = 1024;
constexpr int kPer = 4;         // neighboring rows of a thread
constexpr int kRequests = 240;  // of a launch: what its parameters hold

}  // namespace row_quads_config

struct RowQuadsParams {
  const int32_t* request_of_row;  // [rows]
  const int32_t* lens;            // [rows]: positions a row sees
  int32_t* out_rows;              // [quads, 4]
  int32_t* out_slots;             // [rows]
  int32_t* out_slot_lens;         // [quads, 4]
  int32_t* out_lens;              // [quads]
  int32_t* out_first;             // [quads]
  int32_t* out_request_lens;      // [requests]
  int32_t* out_request_first;     // [requests]
  int32_t rows;
  int32_t first_request;  // of this launch
  RowQuadsRequest requests[row_quads_config::kRequests];
};

}  // namespace sparse_indexer
