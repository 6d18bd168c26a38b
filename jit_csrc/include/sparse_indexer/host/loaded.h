// SPDX-License-Identifier: Apache-2.0
// What a host module holds on each device: its kernels, loaded once and never unloaded.
//
// SPARSE_INDEXER_MODULE() once in the .cc file exports `load`, which sparse_indexer.jit calls
// before the first launch on a device.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "sparse_indexer/host/driver.h"

namespace sparse_indexer {

struct Variant {
  std::string symbol;
  CudaKernel* kernel;
};

// Of one device. Never changed after it was published, never freed.
struct DeviceKernels {
  const Driver* driver = nullptr;
  std::string name;                // of the kernel
  int ordinal = 0;                 // torch's and the driver's number of the device
  int device = 0;                  // the driver's handle
  CudaContext* context = nullptr;  // the primary one
  int capability = 0;              // 10 * major + minor
  int sm_count = 0;
  int max_shared_bytes = 0;  // a CTA may have, static and dynamic together
  bool synchronize =
      false;  // SPARSE_INDEXER_SYNC=1: wait for each kernel, so that an error names it
  std::vector<Variant> variants;

  std::string at(std::string_view symbol) const {
    return name + ", variant " + std::string(symbol) + ", on cuda:" + std::to_string(ordinal);
  }
};

namespace detail {

constexpr int kMaxDevices = 64;

// One table a module, because modules are built with hidden visibility.
inline std::array<std::atomic<const DeviceKernels*>, kMaxDevices>& table() {
  static std::array<std::atomic<const DeviceKernels*>, kMaxDevices> kernels{};
  return kernels;
}

inline void expect(int status, const Driver& driver, const std::string& where, const char* call) {
  if (status != 0) {
    TVM_FFI_THROW(RuntimeError) << where << ": " << call << ": " << driver.describe(status);
  }
}

inline void load(tvm::ffi::String name, int64_t ordinal, tvm::ffi::Bytes cubin,
                 tvm::ffi::Array<tvm::ffi::String> symbols) {
  static std::mutex loading;
  std::lock_guard<std::mutex> lock(loading);
  std::string where = std::string(name) + " on cuda:" + std::to_string(ordinal);
  if (ordinal < 0 || ordinal >= kMaxDevices) {
    TVM_FFI_THROW(RuntimeError) << where << ": expected a device below " << kMaxDevices;
  }
  if (table()[ordinal].load(std::memory_order_acquire) != nullptr) return;

  const Driver& d = driver();
  auto loaded = std::make_unique<DeviceKernels>();
  loaded->driver = &d;
  loaded->name = name;
  loaded->ordinal = static_cast<int>(ordinal);
  expect(d.device_get(&loaded->device, loaded->ordinal), d, where, "cuDeviceGet");
  auto attribute = [&](CudaDeviceAttribute which) {
    int value = 0;
    expect(d.device_attribute(&value, which, loaded->device), d, where, "cuDeviceGetAttribute");
    return value;
  };
  loaded->capability = 10 * attribute(kCapabilityMajor) + attribute(kCapabilityMinor);
  loaded->sm_count = attribute(kSmCount);
  loaded->max_shared_bytes = attribute(kMaxSharedBytes);
  const char* sync = std::getenv("SPARSE_INDEXER_SYNC");
  loaded->synchronize = sync != nullptr && std::string_view(sync) == "1";

  // Loading needs a current context, and torch may not have made one yet.
  expect(d.primary_context_retain(&loaded->context, loaded->device), d, where,
         "cuDevicePrimaryCtxRetain");
  ContextGuard guard(d, loaded->context, loaded->device);
  expect(guard.status(), d, where, "cuCtxSetCurrent");
  CudaLibrary* library = nullptr;
  expect(d.library_load_data(&library, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0), d,
         where, "cuLibraryLoadData");
  for (const tvm::ffi::String& symbol : symbols) {
    CudaKernel* kernel = nullptr;
    std::string at = loaded->at(std::string_view(symbol.data(), symbol.size()));
    expect(d.library_get_kernel(&kernel, library, symbol.c_str()), d, at, "cuLibraryGetKernel");
    int fixed = 0;
    expect(d.kernel_get_attribute(&fixed, kStaticSharedBytes, kernel, loaded->device), d, at,
           "cuKernelGetAttribute");
    // All that the device has: what a launch really takes is what decides the occupancy.
    expect(d.kernel_set_attribute(kMaxDynamicSharedBytes, attribute(kMaxSharedBytes) - fixed,
                                  kernel, loaded->device),
           d, at, "cuKernelSetAttribute");
    // Now rather than at the first launch, which may be inside a graph capture.
    CudaFunction* function = nullptr;
    expect(d.kernel_get_function(&function, kernel), d, at, "cuKernelGetFunction");
    if (d.function_load != nullptr) expect(d.function_load(function), d, at, "cuFuncLoad");
    loaded->variants.push_back({symbol, kernel});
  }
  table()[ordinal].store(loaded.release(), std::memory_order_release);
}

}  // namespace detail

// What this module holds on a CUDA device; RuntimeError if it was not loaded there.
inline const DeviceKernels& on_device(int ordinal) {
  const DeviceKernels* kernels = ordinal >= 0 && ordinal < detail::kMaxDevices
                                     ? detail::table()[ordinal].load(std::memory_order_acquire)
                                     : nullptr;
  if (kernels == nullptr) {
    TVM_FFI_THROW(RuntimeError) << "kernels are not loaded on cuda:" << ordinal
                                << ": call through sparse_indexer.jit.load";
  }
  return *kernels;
}

}  // namespace sparse_indexer

// Once in a host module. `SPARSE_INDEXER_EXPORT(topk)` exports the host entry `topk`.
#define SPARSE_INDEXER_MODULE() TVM_FFI_DLL_EXPORT_TYPED_FUNC(load, sparse_indexer::detail::load)
#define SPARSE_INDEXER_EXPORT(function) TVM_FFI_DLL_EXPORT_TYPED_FUNC(function, function)
