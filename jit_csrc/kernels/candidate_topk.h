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

constexpr int kSelectors = 128;  // threads that select a row
// Of 32 heads a quad is scored in half the time, so two of its rows are selected at a time.
constexpr int groups(int heads) {
  return heads == 32 ? 2 : 1;
}
constexpr int threads(int heads) {
  return 128 * (1 + candidate_logits_config::kWarpgroups) + kSelectors * groups(heads);
}
constexpr int kSlots = 3;  // of a CTA: two for its own quads, one for a quad of several CTAs
// Shared memory of the selection: k 2048 of 16,384 columns at a time, or twice k 640.
constexpr int kSelectBytes = 44 * 1024;
constexpr int kBinBits = 10;  // of its histogram

constexpr int stages(int heads) {
  return (225 * 1024 - kSelectBytes - candidate_logits_config::query_bytes(128, heads)) /
         candidate_logits_config::stage_bytes(128);
}
// Before the histograms and the lists: a multiple of 16.
constexpr int scoring_bytes(int heads) {
  return candidate_logits_config::query_bytes(128, heads) +
         stages(heads) * candidate_logits_config::stage_bytes(128) + 256;
}

}  // namespace candidate_topk_config
}  // namespace sparse_indexer
