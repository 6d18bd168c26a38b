// SPDX-License-Identifier: Apache-2.0
// A libcuda.so.1 with one device, of 3 SMs, whose kernels are functions: a launch runs one before
// it returns. EMULATED_CAPABILITY is 10 * major + minor; a CTA has 48 KB of shared memory, 227 KB
// from 9.0 on.
#include "emulated_gpu.h"
#include "emulated_hopper.h"

#include <cstdlib>
#include <cstring>

#include "emulated_kernels.h"

namespace {

constexpr int kMaxShared = (EMULATED_CAPABILITY < 90 ? 48 : 227) * 1024;

struct Config {
  unsigned grid[3], block[3], shared;
};

}  // namespace

extern "C" {

int cuInit(unsigned) {
  return 0;
}
int cuGetErrorName(int, const char** out) {
  return *out = "CUDA_ERROR_NOT_FOUND", 0;
}
int cuGetErrorString(int, const char** out) {
  return *out = "not emulated", 0;
}
int cuDeviceGet(int* out, int ordinal) {
  return *out = ordinal, ordinal == 0 ? 0 : 101;
}
int cuDeviceGetAttribute(int* out, int which, int) {
  *out = which == 16   ? 3
         : which == 75 ? EMULATED_CAPABILITY / 10
         : which == 76 ? EMULATED_CAPABILITY % 10
         : which == 97 ? kMaxShared
                       : 0;
  return 0;
}
int cuDevicePrimaryCtxRetain(uintptr_t* out, int) {
  return *out = 1, 0;
}
int cuCtxGetCurrent(uintptr_t* out) {
  return *out = 1, 0;
}
int cuCtxSetCurrent(uintptr_t) {
  return 0;
}
int cuCtxGetDevice(int* out) {
  return *out = 0, 0;
}
int cuLibraryLoadData(uintptr_t* out, const void*, int*, void**, unsigned, int*, void**, unsigned) {
  return *out = 1, 0;
}
int cuLibraryGetKernel(uintptr_t* out, uintptr_t, const char* name) {
  for (const EmulatedKernel& kernel : kEmulatedKernels) {
    if (std::strcmp(kernel.name, name) == 0) return *out = reinterpret_cast<uintptr_t>(&kernel), 0;
  }
  return 500;
}
int cuKernelGetFunction(uintptr_t* out, uintptr_t kernel) {
  return *out = kernel, 0;
}
int cuFuncLoad(uintptr_t) {
  return 0;
}
int cuKernelGetAttribute(int* out, int, uintptr_t, int) {
  return *out = 0, 0;
}
int cuKernelSetAttribute(int, int, uintptr_t, int) {
  return 0;
}
int cuLaunchKernelEx(const Config* config, uintptr_t handle, void** params, void**) {
  const auto& kernel = *reinterpret_cast<const EmulatedKernel*>(handle);
  if (config->block[0] != kernel.threads || config->shared > kMaxShared) return 1;
  emulated::run(config->grid[0], kernel.threads, config->shared, [&] { kernel.run(params[0]); });
  return 0;
}
int cuStreamIsCapturing(void*, int* out) {
  return *out = 0, 0;
}
int cuStreamSynchronize(void*) {
  return 0;
}

}  // extern "C"
