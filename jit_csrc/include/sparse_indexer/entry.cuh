// SPDX-License-Identifier: Apache-2.0
// One line of a generated unit: kernel `symbol` runs a Config.
//
// A Config is a struct, often an instance of a template, with
//   kThreads     threads of a CTA, the most a launch may have
//   kMinBlocks   CTAs that must fit on an SM: bounds the registers; 1 where that does not matter
//   Params       what the host passes: trivially copyable, plain C++17, at most 4 KB
//   run(params)  static __device__, the kernel's body
//
// A kernel first waits for what is ahead of it in the stream, and lets the next one be launched:
// one that was launched by `pdl()` then finds its CTAs in place when its turn comes.
#pragma once

namespace sparse_indexer {

__device__ __forceinline__ void begin_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace sparse_indexer

// The Config is the rest of the line because its template arguments may hold commas.
#define SPARSE_INDEXER_ENTRY(symbol, ...)                                                          \
  extern "C" __global__ void __launch_bounds__((__VA_ARGS__::kThreads), (__VA_ARGS__::kMinBlocks)) \
      symbol(const __grid_constant__ typename __VA_ARGS__::Params params) {                        \
    static_assert(sizeof(typename __VA_ARGS__::Params) <= 4096, #symbol ": Params exceed 4 KB");   \
    sparse_indexer::begin_kernel();                                                                \
    __VA_ARGS__::run(params);                                                                      \
  }
