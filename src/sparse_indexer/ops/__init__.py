# SPDX-License-Identifier: Apache-2.0
"""The ops that kernels do: one function a file, compiled for the GPU at hand at the first call.

All outputs are the caller's. Nothing synchronizes, nothing is allocated; lengths are read on the
device, so a captured graph may be replayed with others. `ValueError` for an argument of a wrong
type, shape, dtype, device or stride; `JitError` if the kernel cannot be built.
"""
