# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled at their first call: four files an op, and how to write them.

In the library the first three are in `jit_csrc/` and the last in `src/sparse_indexer/ops/`. In a
project of yours they may be anywhere; here `double_rows.py` is beside `kernels/` and `host/`.

`kernels/double_rows.h`: what host and device share, in C++17 without CUDA types. Functions that
both call are `constexpr`.

    #pragma once
    #include "sparse_indexer/cstdint.h"
    struct DoubleRowsParams {
      const float* x;    // [rows, columns], row stride x_stride
      float* out;        // [rows, columns], contiguous
      int64_t x_stride;  // elements
      int32_t columns;
    };
    constexpr int kDoubleRowsThreads = 128;

`kernels/double_rows.cuh`: contract, Config, kernel. Compiles under NVRTC and nvcc, so it includes
neither the host's headers nor <cuda_runtime.h>.

    #include "kernels/double_rows.h"
    template <int Times>
    struct DoubleRows {  // a Config: what entry.cuh asks for
      static constexpr int kThreads = kDoubleRowsThreads;
      static constexpr int kMinBlocks = 1;  // CTAs that must fit on an SM
      using Params = DoubleRowsParams;
      static __device__ void run(const Params& p) {
        for (int c = threadIdx.x; c < p.columns; c += kThreads) {
          p.out[int64_t(blockIdx.x) * p.columns + c] = Times * p.x[blockIdx.x * p.x_stride + c];
        }
      }
    };

`host/double_rows.cc`: match shapes, check, launch, without CUDA's headers.

    #include "kernels/double_rows.h"

    #include "sparse_indexer/host/check.h"
    #include "sparse_indexer/host/launch.h"

    using namespace sparse_indexer;

    void double_rows(TensorView x, int64_t times, TensorView out) {
      Size rows("rows"), columns("columns");
      Device device;
      Match("x").shape({rows, columns}).dtype(float32).on(device).last_dim_contiguous().check(x);
      Match("out").shape({rows, columns}).dtype(float32).on(device).contiguous().check(out);
      expect_int("columns", columns, 0, INT32_MAX);
      if (times != 2 && times != 4) bad_argument("times", "2 or 4", std::to_string(times));
      DoubleRowsParams params{data<const float>(x), data<float>(out), x.stride(0),
                              static_cast<int32_t>(columns)};
      Launch(times == 2 ? "double_rows_2" : "double_rows_4", device)
          .grid(rows).block(kDoubleRowsThreads).run(params);
    }

    SPARSE_INDEXER_MODULE();              // once a file
    SPARSE_INDEXER_EXPORT(double_rows);   // once an entry

`double_rows.py`: one function.

    from __future__ import annotations

    from pathlib import Path

    import torch

    from sparse_indexer.errors import blame_argument
    from sparse_indexer.jit import Kernel, load

    KERNEL = Kernel(
        "double_rows",
        {"double_rows_2": "DoubleRows<2>", "double_rows_4": "DoubleRows<4>"},
        root=Path(__file__).parent,  # holds kernels/ and host/; leave it out in the library
    )

    def double_rows(x: torch.Tensor, *, times: int, out: torch.Tensor) -> None:
        # `times` times `x`, for 2 and 4.
        try:
            load(KERNEL, x.device).double_rows(x, times, out)
        except Exception as error:  # names what the host entry never saw: None, a list, 1.5
            blame_argument(error, double_rows, locals())
            raise

Good to know:

- The stream is torch's current one for the device of the first CUDA tensor of the call. A launch
  with a zero in its grid is none. `on_device(device)` has `capability`, `sm_count` and the like.
  Dynamic shared memory may be as large as the device has, without further ado. `Launch(...).pdl()`
  and `.cluster(2)` are for capability 9.0 and up; pdl is ignored below.
- Tensors come as DLPack; None is `tvm::ffi::Optional<TensorView>`, a list of ints
  `tvm::ffi::Array<int64_t>`. Pass float8 tensors as `x.view(torch.uint8)`: not every torch that is
  supported can name them in DLPack.
- All that a source includes counts, of any name and in any folder: a change is compiled at the next
  start, and nothing needs to be cleared. `"x"` is looked for beside the file that includes it, then
  `"x"` and `<x>` in `root`, `root/include`, `jit_csrc` and `jit_csrc/include`, and never in the
  current folder. What is in none of them is the compiler's, CUDA's or tvm-ffi's (or in a folder
  that CXX, CPATH or NVCC_PREPEND_FLAGS adds): there the version counts, not the text.
  `#include MACRO` is refused.
- A host entry is linked to tvm-ffi and the C++ library alone: a function that is nowhere is an
  error when it is compiled.
- `SPARSE_INDEXER_SYNC=1` waits after each launch, so that an error names the kernel that caused it;
  `SPARSE_INDEXER_LINEINFO=1` is for profilers; `SPARSE_INDEXER_COMPILER=nvcc` takes the other
  compiler, which every kernel must pass, too.
- `python -m sparse_indexer compile --arch 7.0,9.0a --kernels double_rows` needs no GPU, and shows
  registers and spills. It knows the kernels at the level of a module of `sparse_indexer.ops` and no
  others, and so does `warmup(device)`. For yours there are `warmup(device, [KERNEL])` and, in
  `sparse_indexer.jit.commands`, `compile_kernels("7.0,9.0a", [KERNEL])`.
- `Kernel(..., capabilities=(90, 90))` limits a kernel to some GPUs.
- Checks can be tested without a GPU: for the CPU `load` gives the entries, which refuse CPU tensors
  by name. `PretendCuda` of `tests/jit_support.py` gets past the first tensor.
"""

from sparse_indexer.jit.kernel import Kernel
from sparse_indexer.jit.loading import load, warmup

__all__ = ["Kernel", "load", "warmup"]
