// SPDX-License-Identifier: Apache-2.0
// What host and device share of the kernels that score by mma.sync.
#pragma once

#include "kernels/packed_keys.h"

namespace sparse_indexer {
namespace fused_scoring {

constexpr int kThreads = 256;
constexpr int kTileBlocks = 4;  // scored between two barriers
constexpr int kCtasOfSm = 2;    // launched; each does its part, on the SM at the same time or not

// Rows of a group, which a CTA scores densely at the same time: each warp keeps 32 heads.
constexpr int rows_of_group(int heads) {
  return kThreads / 32 * 32 / heads;
}

}  // namespace fused_scoring
}  // namespace sparse_indexer
