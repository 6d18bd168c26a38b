// SPDX-License-Identifier: Apache-2.0
// The few functions of the CUDA driver that loading and launching take, from libcuda.so.1 by
// dlopen: a module needs neither CUDA's headers to be built nor a driver to be loaded.
#pragma once

#include <dlfcn.h>
#include <tvm/ffi/error.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace sparse_indexer {

// Types and values of cuda.h, which keeps them for good.
struct CudaContext;
struct CudaFunction;
struct CudaKernel;
struct CudaLibrary;
struct CudaStream;

enum CudaFunctionAttribute : int { kStaticSharedBytes = 1, kMaxDynamicSharedBytes = 8 };
enum CudaDeviceAttribute : int {
  kSmCount = 16,
  kCapabilityMajor = 75,
  kCapabilityMinor = 76,
  kMaxSharedBytes = 97,
};
enum CudaLaunchAttributeId : int { kClusterDimension = 4, kProgrammaticSerialization = 6 };

struct CudaLaunchAttribute {
  CudaLaunchAttributeId id;
  alignas(8) union {
    char padding[64];
    unsigned cluster[3];
    int allowed;
  } value;
};

struct CudaLaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  CudaStream* stream;
  CudaLaunchAttribute* attributes;
  unsigned num_attributes;
};

struct Driver {
  int (*init)(unsigned flags);
  int (*error_name)(int status, const char** out);
  int (*error_string)(int status, const char** out);
  int (*device_get)(int* out, int ordinal);
  int (*device_attribute)(int* out, CudaDeviceAttribute, int device);
  int (*primary_context_retain)(CudaContext** out, int device);
  int (*context_get_current)(CudaContext** out);
  int (*context_set_current)(CudaContext*);
  int (*context_get_device)(int* out);
  int (*library_load_data)(CudaLibrary** out, const void* code, int* jit_options, void** jit_values,
                           unsigned num_jit, int* options, void** values, unsigned num_options);
  int (*library_get_kernel)(CudaKernel** out, CudaLibrary*, const char* name);
  int (*kernel_get_function)(CudaFunction** out, CudaKernel*);
  int (*function_load)(CudaFunction*);  // null before CUDA 12.4
  int (*kernel_get_attribute)(int* out, CudaFunctionAttribute, CudaKernel*, int device);
  int (*kernel_set_attribute)(CudaFunctionAttribute, int value, CudaKernel*, int device);
  int (*launch_kernel)(const CudaLaunchConfig*, CudaKernel*, void** params, void** extra);
  int (*stream_is_capturing)(CudaStream*, int* out);
  int (*stream_synchronize)(CudaStream*);

  std::string describe(int status) const {
    const char* name = nullptr;
    const char* text = nullptr;
    if (error_name(status, &name) != 0 || error_string(status, &text) != 0) {
      return "CUDA error " + std::to_string(status);
    }
    return std::string(name) + " (" + text + ")";
  }
};

namespace detail {

template <typename Function>
void find(void* library, const char* symbol, Function*& out) {
  out = reinterpret_cast<Function*>(dlsym(library, symbol));
  if (out == nullptr) {
    TVM_FFI_THROW(RuntimeError) << "libcuda.so.1 has no " << symbol
                                << ": this NVIDIA driver is older than CUDA 12.0, update it";
  }
}

inline Driver open_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    TVM_FFI_THROW(RuntimeError) << "cannot load the NVIDIA driver: " << dlerror();
  }
  Driver d;
  find(library, "cuInit", d.init);
  find(library, "cuGetErrorName", d.error_name);
  find(library, "cuGetErrorString", d.error_string);
  find(library, "cuDeviceGet", d.device_get);
  find(library, "cuDeviceGetAttribute", d.device_attribute);
  find(library, "cuDevicePrimaryCtxRetain", d.primary_context_retain);
  find(library, "cuCtxGetCurrent", d.context_get_current);
  find(library, "cuCtxSetCurrent", d.context_set_current);
  find(library, "cuCtxGetDevice", d.context_get_device);
  find(library, "cuLibraryLoadData", d.library_load_data);
  find(library, "cuLibraryGetKernel", d.library_get_kernel);
  find(library, "cuKernelGetFunction", d.kernel_get_function);
  d.function_load = reinterpret_cast<int (*)(CudaFunction*)>(dlsym(library, "cuFuncLoad"));
  find(library, "cuKernelGetAttribute", d.kernel_get_attribute);
  find(library, "cuKernelSetAttribute", d.kernel_set_attribute);
  find(library, "cuLaunchKernelEx", d.launch_kernel);
  find(library, "cuStreamIsCapturing", d.stream_is_capturing);
  find(library, "cuStreamSynchronize", d.stream_synchronize);
  if (int status = d.init(0)) {
    TVM_FFI_THROW(RuntimeError) << "cuInit: " << d.describe(status);
  }
  return d;
}

}  // namespace detail

// The process's driver, opened and initialized at the first call; RuntimeError if there is none.
inline const Driver& driver() {
  static const Driver instance = detail::open_driver();
  return instance;
}

// Makes a device's primary context current and puts back, at the end of the scope, what was current
// before. A context of the same device that is not its primary one is left alone: the streams
// handed in belong to it.
class ContextGuard {
 public:
  ContextGuard(const Driver& driver, CudaContext* primary, int device) : driver_(driver) {
    driver.context_get_current(&before_);
    int current = -1;
    if (before_ == primary ||
        (before_ != nullptr && driver.context_get_device(&current) == 0 && current == device)) {
      return;
    }
    status_ = driver.context_set_current(primary);
    changed_ = status_ == 0;
  }
  ~ContextGuard() {
    if (changed_) driver_.context_set_current(before_);
  }
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

  int status() const { return status_; }

 private:
  const Driver& driver_;
  CudaContext* before_ = nullptr;
  int status_ = 0;
  bool changed_ = false;
};

}  // namespace sparse_indexer
