// SPDX-License-Identifier: Apache-2.0
// A histogram in shared memory.
#pragma once

#include "sparse_indexer/scan.cuh"

namespace sparse_indexer {

// The bin that holds the element asked for, counted from the top bin; elements still to take from
// this bin; elements in it.
struct Found {
  int bin;
  int need;
  int count;
};

// Of a group of threads: `Cta`, `PartOfCta`.
template <typename Group>
struct Histogram {
  static constexpr int kThreads = Group::kThreads;

  uint32_t* bins;    // shared, 16-byte aligned
  uint32_t address;  // the same, as the shared-memory instructions take it
  Group group;

  __device__ Histogram(uint32_t* shared, const Group& group)
      : bins(shared),
        address(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
        group(group) {}

  template <int Bins>
  __device__ __forceinline__ void clear() const {
    static_assert(Bins % 4 == 0, "cleared by vectors");
    for (int b = group.thread(); b < Bins / 4; b += kThreads) {
      reinterpret_cast<uint4*>(bins)[b] = make_uint4(0, 0, 0, 0);
    }
    group.sync();  // before anyone counts
  }

  __device__ __forceinline__ void count(uint32_t bin) const {
    asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(address + bin * 4) : "memory");
  }

  __device__ __forceinline__ void count_if(bool counts, uint32_t bin) const {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; @p red.shared.add.u32 [%0], 1; }" ::"r"(
                     address + bin * 4),
                 "r"(uint32_t(counts))
                 : "memory");
  }

  // Finds the need-th element from the top; `need` is at most the number of elements.
  template <int Bins>
  __device__ __forceinline__ Found find(int need) const {
    constexpr int kPer = Bins / kThreads, kWarps = kThreads / 32;  // a thread's bins, neighbors
    static_assert(Bins % kThreads == 0, "all threads have bins");
    __shared__ uint32_t warps_of_groups[Group::kGroups][kWarps];
    __shared__ Found found_of_groups[Group::kGroups];
    uint32_t (&of_warps)[kWarps] = warps_of_groups[group.group()];
    Found& found = found_of_groups[group.group()];
    group.sync();  // all have counted
    const int lane = group.thread() % 32, warp = group.thread() / 32;
    const int first = Bins - (static_cast<int>(group.thread()) + 1) * kPer;
    uint32_t counts[kPer];
    load(first, counts);
    uint32_t sum = 0;
#pragma unroll
    for (uint32_t count : counts) sum += count;
    const uint32_t of_warp = sum_of_warp(sum);
    if (lane == 0) of_warps[warp] = of_warp;
    group.sync();  // the warps' sums are complete
    const int of_lane = lane < kWarps ? static_cast<int>(of_warps[lane]) : 0;
    const int up_to = inclusive_scan_of_warp<kWarps>(of_lane);
    const int there = __ffs(__ballot_sync(~0u, up_to >= need)) - 1;
    if (warp == there) {
      int left = need - __shfl_sync(~0u, up_to - of_lane, there);
      left -= static_cast<int>(inclusive_scan_of_warp(sum) - sum);
      if (left > 0 && left <= static_cast<int>(sum)) {  // one thread
#pragma unroll
        for (int j = kPer - 1; j >= 0; --j) {
          const int here = static_cast<int>(counts[j]);
          if (left > 0 && left <= here) found = {first + j, left, here};
          left -= here;
        }
      }
    }
    group.sync();  // `found` is written, the bins have been read
    return found;
  }

 private:
  template <int Count>
  __device__ __forceinline__ void load(int first, uint32_t (&counts)[Count]) const {
    constexpr int kVector = Count % 4 == 0 ? 4 : Count % 2 == 0 ? 2 : 1;
    struct alignas(4 * kVector) Vector {
      uint32_t word[kVector];
    };
#pragma unroll
    for (int j = 0; j < Count; j += kVector) {
      const Vector v = *reinterpret_cast<const Vector*>(bins + first + j);
#pragma unroll
      for (int i = 0; i < kVector; ++i) counts[j + i] = v.word[i];
    }
  }
};

}  // namespace sparse_indexer
