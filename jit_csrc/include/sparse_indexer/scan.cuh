// SPDX-License-Identifier: Apache-2.0
// Prefix sums over a CTA.
#pragma once

#include "sparse_indexer/cstdint.h"

namespace sparse_indexer {

// Sum of `value` over the threads before this one; every thread of a CTA of `Warps` warps calls it.
// `total`, if not null, gets the sum over all. Holds a barrier before it reads and one after, so
// two calls may follow each other.
template <int Warps, typename T>
__device__ T exclusive_scan(T value, T* total = nullptr) {
  static_assert(Warps <= 32, "one warp scans the warps' sums");
  __shared__ T sums[Warps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T inclusive = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T from = __shfl_up_sync(~0u, inclusive, step);
    if (lane >= step) inclusive += from;
  }
  if (lane == 31) sums[warp] = inclusive;
  __syncthreads();  // the warps' sums are complete
  T before = 0, all = 0;
#pragma unroll
  for (int w = 0; w < Warps; ++w) {
    const T sum = sums[w];
    if (w < warp) before += sum;
    all += sum;
  }
  if (total != nullptr) *total = all;
  __syncthreads();  // and have been read
  return before + inclusive - value;
}

}  // namespace sparse_indexer
