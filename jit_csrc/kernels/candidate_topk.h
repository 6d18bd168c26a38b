// SPDX-License-Identifier: Apache-2.0
// What host and device share of `candidate_topk`.
#pragma once

#include "kernels/candidate_logits.h"
#include "kernels/topk.h"

namespace sparse_indexer {

struct CandidateTopkParams {
  CandidateLogitsParams logits;  // out: [CTAs, 3 slots, 4, width], row stride `out_stride`
  TopkParams topk;               // keys are in slots; row 4 * q + r is row r of quad q
  int32_t* counters;             // [1 + CTAs], zeros: CTAs that began; units written to slot 2
};

namespace candidate_topk_config {

constexpr int kSelectors = 128;  // threads of a CTA that select
constexpr int kThreads = 128 * (1 + candidate_logits_config::kWarpgroups) + kSelectors;
constexpr int kSlots = 3;  // of a CTA: two for its own quads, one for a quad of several CTAs
// Shared memory kept for the selection: k 2048 of 16,384 columns.
constexpr int kSelectBytes = 44 * 1024;

constexpr int stages(int heads) {
  return (225 * 1024 - kSelectBytes - candidate_logits_config::query_bytes(128, heads)) /
         candidate_logits_config::stage_bytes(128);
}
// Before the histogram and the list: a multiple of 16.
constexpr int scoring_bytes(int heads) {
  return candidate_logits_config::query_bytes(128, heads) +
         stages(heads) * candidate_logits_config::stage_bytes(128) + 256;
}

}  // namespace candidate_topk_config
}  // namespace sparse_indexer
