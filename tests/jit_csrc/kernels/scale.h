// SPDX-License-Identifier: Apache-2.0
// What the host and the device of `scale` share.
#pragma once

#include "sparse_indexer/cstdint.h"

struct ScaleParams {
  const float* x;       // [rows, columns], row stride x_stride
  const float* factor;  // [rows]
  float* out;           // [rows, columns], row stride out_stride
  int64_t x_stride;     // elements
  int64_t out_stride;   // elements
  int32_t columns;
};

constexpr int kScaleThreads = 128;
