// SPDX-License-Identifier: Apache-2.0
// Sums and extremes over a warp, prefix sums over a warp and threads that work together.
#pragma once

#include "sparse_indexer/threads.cuh"

namespace sparse_indexer {

// Sum over the lanes up to this one.
template <int Lanes = 32, typename T>
__device__ __forceinline__ T inclusive_scan_of_warp(T value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < Lanes; step *= 2) {
    const T from = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += from;
  }
  return value;
}

__device__ __forceinline__ uint32_t max_of_warp(uint32_t value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(~0u, value);
#else
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = max(value, __shfl_xor_sync(~0u, value, step));
  return value;
#endif
}

__device__ __forceinline__ uint32_t sum_of_warp(uint32_t value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(~0u, value);
#else
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
#endif
}

__device__ __forceinline__ uint32_t min_of_warp(uint32_t value) {
  return ~max_of_warp(~value);
}

// Sum of `value` over the threads before this one; every thread of a group (`Cta`, `PartOfCta`)
// calls it. `total`, if not null, gets the sum over all. Holds a barrier before it reads and one
// after, so two calls may follow each other.
template <typename Group, typename T>
__device__ __forceinline__ T exclusive_scan(const Group& group, T value, T* total = nullptr) {
  constexpr int kWarps = Group::kThreads / 32;
  static_assert(kWarps <= 32, "a warp scans the warps' sums");
  __shared__ T sums_of_groups[Group::kGroups][kWarps];
  T(&sums)[kWarps] = sums_of_groups[group.group()];
  const int lane = group.thread() % 32, warp = group.thread() / 32;
  const T inclusive = inclusive_scan_of_warp(value);
  if (lane == 31) sums[warp] = inclusive;
  group.sync();  // the warps' sums are complete
  const T of_warps = inclusive_scan_of_warp<kWarps>(lane < kWarps ? sums[lane] : T(0));
  const T before = __shfl_sync(~0u, of_warps, (warp + 31) % 32);
  if (total != nullptr) *total = __shfl_sync(~0u, of_warps, kWarps - 1);
  group.sync();  // and have been read
  return (warp > 0 ? before : T(0)) + inclusive - value;
}

}  // namespace sparse_indexer
