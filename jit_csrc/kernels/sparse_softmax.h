// SPDX-License-Identifier: Apache-2.0
// What host and device share of `sparse_softmax`.
#pragma once

#include "sparse_indexer/cstdint.h"

namespace sparse_indexer {

struct SparseSoftmaxParams {
  const float* logits;       // [rows, heads, k]
  const int32_t* positions;  // [rows, k]: slots
  const float* sink;         // [heads], contiguous; null: none
  void* out;                 // [rows, heads, k]; may begin where each row of logits begins
  int64_t row_stride;        // of logits; elements, as all strides
  int64_t head_stride;
  int64_t position_stride;
  int64_t out_row_stride;
  int64_t out_head_stride;
  int32_t heads;
  int32_t k;
  int32_t slots;        // positions below 0 or from here on are unused
  float scale;          // of the logits
  int32_t heads_a_cta;  // of one row
  int32_t parts;        // CTAs a row
  int32_t vectors;      // 1: everything is aligned for accesses of kVector elements
};

namespace sparse_softmax_config {

constexpr int kThreads = 128;
constexpr int kVector = 4;  // neighbors that a thread has
// The logits of a row and head are in the registers of a warp or of a CTA, so many times kVector a
// thread; longer ones are read twice.
constexpr int kVectors = 5;
constexpr int kWarps = kThreads / 32;
constexpr int kOfWarp = 32 * kVector * kVectors;       // 640
constexpr int kOfCta = kThreads * kVector * kVectors;  // 2560

}  // namespace sparse_softmax_config
}  // namespace sparse_indexer
