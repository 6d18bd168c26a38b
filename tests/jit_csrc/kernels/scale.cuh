// SPDX-License-Identifier: Apache-2.0
// out[r, c] = Power of (x[r, c] * factor[r]): a kernel to test the build with. One CTA a row.
#pragma once

#include "kernels/scale.h"

template <int Power>
struct Scale {
  static constexpr int kThreads = kScaleThreads;
  static constexpr int kMinBlocks = 1;
  using Params = ScaleParams;

  static __device__ void run(const Params& p) {
    extern __shared__ float staged[];  // [columns]: so that a launch needs dynamic shared memory
    const int64_t row = blockIdx.x;
    for (int c = threadIdx.x; c < p.columns; c += kThreads) {
      staged[c] = p.x[row * p.x_stride + c] * p.factor[row];
    }
    for (int c = threadIdx.x; c < p.columns; c += kThreads) {
      float result = 1.0f;
#pragma unroll
      for (int i = 0; i < Power; ++i) result *= staged[c];
      p.out[row * p.out_stride + c] = result;
    }
  }
};
