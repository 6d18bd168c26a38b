// SPDX-License-Identifier: Apache-2.0
// Threads that work together: all of a CTA, or some whole warps of it.
#pragma once

#include "sparse_indexer/cstdint.h"

namespace sparse_indexer {

template <int Threads>
struct Cta {
  static constexpr int kThreads = Threads;
  static constexpr int kGroups = 1;  // that do the same, each with shared memory of its own
  static __device__ __forceinline__ int group() { return 0; }
  static __device__ __forceinline__ unsigned thread() { return threadIdx.x; }
  static __device__ __forceinline__ void sync() { __syncthreads(); }
};

// From thread `First` on, `Groups` times so many, with barriers of their own: of 1 to 15, from
// `Barrier` on. An object's numbers are not computed again, nor is what follows from them kept from
// one object to the next.
template <int Threads, int First, int Groups, int Barrier>
struct PartOfCta {
  static constexpr int kThreads = Threads;
  static constexpr int kGroups = Groups;
  static_assert(Threads % 32 == 0 && First % 32 == 0, "whole warps");
  static_assert(Groups <= 2 && Barrier > 0 && Barrier + Groups <= 16, "0 is the CTA's");
  unsigned all = threadIdx.x - First;

  __device__ __forceinline__ PartOfCta() { asm volatile("" : "+r"(all)); }
  __device__ __forceinline__ unsigned thread() const { return Groups == 1 ? all : all % Threads; }
  __device__ __forceinline__ int group() const {
    return Groups == 1 ? 0 : static_cast<int>(all / Threads);
  }
  __device__ __forceinline__ void sync() const {
    if (group() == 0) {
      sync_threads<Barrier>();
    } else {
      sync_threads<Barrier + Groups - 1>();
    }
  }

 private:
  template <int Number>
  static __device__ __forceinline__ void sync_threads() {
    asm volatile("bar.sync %0, %1;" ::"n"(Number), "n"(Threads) : "memory");
  }
};

}  // namespace sparse_indexer
