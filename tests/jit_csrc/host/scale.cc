// SPDX-License-Identifier: Apache-2.0
#include "kernels/scale.h"

#include "sparse_indexer/host/check.h"
#include "sparse_indexer/host/launch.h"

using namespace sparse_indexer;

// out = (x * factor[:, None]) ** power, power 1 or 2.
void scale(TensorView x, TensorView factor, int64_t power, bool pdl, TensorView out) {
  Size rows("rows"), columns("columns");
  Device device;
  Match("x").shape({rows, columns}).dtype(float32).on(device).last_dim_contiguous().check(x);
  Match("factor").shape({rows}).dtype(float32).on(device).contiguous().check(factor);
  Match("out").shape({rows, columns}).dtype(float32).on(device).last_dim_contiguous().check(out);
  expect_int("power", power, 1, 2);

  ScaleParams params{data<const float>(x), data<const float>(factor),
                     data<float>(out),     x.stride(0),
                     out.stride(0),        static_cast<int32_t>(columns)};
  Launch launch(power == 1 ? "scale_1" : "scale_2", device);
  if (pdl) launch.pdl();
  launch.grid(rows).block(kScaleThreads).shared(columns * sizeof(float)).run(params);
}

// Launches scale_1 in a shape of the test's choice, with clusters if they are not 0.
void grid(int64_t device, int64_t x, int64_t y, int64_t cluster) {
  Launch launch("scale_1", static_cast<int>(device));
  if (cluster > 0) launch.cluster(static_cast<unsigned>(cluster));
  launch.grid(x, y).block(kScaleThreads).run(ScaleParams{});
}

void wrong(int64_t device) {
  Launch("wrong", static_cast<int>(device)).grid(1).run(ScaleParams{});
}

// [capability, SM count]
tvm::ffi::Array<int64_t> info(int64_t device) {
  const DeviceKernels& kernels = on_device(static_cast<int>(device));
  return {kernels.capability, kernels.sm_count};
}

SPARSE_INDEXER_MODULE();
SPARSE_INDEXER_EXPORT(scale);
SPARSE_INDEXER_EXPORT(grid);
SPARSE_INDEXER_EXPORT(wrong);
SPARSE_INDEXER_EXPORT(info);
