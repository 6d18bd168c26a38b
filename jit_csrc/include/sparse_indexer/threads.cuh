// SPDX-License-Identifier: Apache-2.0
// Threads that work together: all of a CTA, or some whole warps of it.
#pragma once

#include "sparse_indexer/cstdint.h"

namespace sparse_indexer {

template <int Threads>
struct Cta {
  static constexpr int kThreads = Threads;
  static __device__ __forceinline__ unsigned thread() { return threadIdx.x; }
  static __device__ __forceinline__ void sync() { __syncthreads(); }
};

// From thread `First` on, with a barrier of their own: one of 1 to 15. An object's thread number is
// not computed again, nor is what follows from it kept from one object to the next.
template <int Threads, int First, int Barrier>
struct PartOfCta {
  static constexpr int kThreads = Threads;
  static_assert(Threads % 32 == 0 && First % 32 == 0, "whole warps");
  static_assert(Barrier > 0 && Barrier < 16, "0 is the CTA's");
  unsigned own = threadIdx.x - First;

  __device__ __forceinline__ PartOfCta() { asm volatile("" : "+r"(own)); }
  __device__ __forceinline__ unsigned thread() const { return own; }
  static __device__ __forceinline__ void sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(Barrier), "n"(Threads) : "memory");
  }
};

}  // namespace sparse_indexer
