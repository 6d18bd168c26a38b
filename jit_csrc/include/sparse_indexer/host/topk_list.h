// SPDX-License-Identifier: Apache-2.0
// The list of columns that a selection by threads of `topk` keeps in shared memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/topk.h"

namespace sparse_indexer {

// Of a histogram of 2^bin_bits bins and a list.
inline int64_t topk_shared_bytes(int64_t list, int bin_bits) {
  return (int64_t(4) << bin_bits) + 8 * list;
}

// How many columns reach the bound that the kernel takes from a sample, and 6 deviations more.
inline int64_t topk_list_length(int64_t width, int64_t k, int threads) {
  constexpr int64_t kShort = 2048;  // all of a row
  if (width <= kShort) return width;
  const int64_t groups = std::min<int64_t>(width / topk_config::kGroup, threads);
  const double of_sample = double(width) / double(groups * topk_config::kSamples);
  const double expected = double(k) / of_sample;
  const double rank = expected + 6 * std::sqrt(expected) + 3;
  return std::min<int64_t>(width, int64_t((rank + 6 * std::sqrt(rank)) * of_sample));
}

// The same if it fits within so many bytes beside the histogram, else 0: no list.
inline int64_t topk_list(int64_t width, int64_t k, int threads, int bin_bits, int64_t bytes) {
  const int64_t list = topk_list_length(width, k, threads);
  return topk_shared_bytes(list, bin_bits) <= bytes ? list : 0;
}

}  // namespace sparse_indexer
