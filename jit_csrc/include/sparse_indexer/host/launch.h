// SPDX-License-Identifier: Apache-2.0
// A launch of one of the module's kernels, by name, on torch's current stream of the device:
//
//   Launch("topk_512", device).grid(rows).block(kThreads).shared(kSharedBytes).pdl().run(params);
//
// Every host entry ends in one such line.
#pragma once

#include <tvm/ffi/extra/c_env_api.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "sparse_indexer/host/driver.h"
#include "sparse_indexer/host/loaded.h"

namespace sparse_indexer {

class Launch {
 public:
  Launch(std::string_view symbol, int ordinal) : symbol_(symbol), on_(on_device(ordinal)) {}

  // CTAs. With a zero the kernel is not launched at all, which is right for an empty batch.
  Launch& grid(int64_t x, int64_t y = 1, int64_t z = 1) {
    const int64_t sizes[3] = {x, y, z};
    for (int i = 0; i < 3; ++i) {
      const int64_t most = i == 0 ? 0x7fffffff : 65535;
      if (sizes[i] < 0 || sizes[i] > most) {
        TVM_FFI_THROW(ValueError) << on_.at(symbol_) << ": expected a grid of at most " << most
                                  << " CTAs along " << "xyz"[i] << ", got " << sizes[i];
      }
      config_.grid[i] = static_cast<unsigned>(sizes[i]);
    }
    return *this;
  }
  // Threads of a CTA.
  Launch& block(int x, int y = 1, int z = 1) {
    config_.block[0] = x, config_.block[1] = y, config_.block[2] = z;
    return *this;
  }
  // Dynamic shared memory of a CTA.
  Launch& shared(int64_t bytes) {
    config_.shared_bytes = static_cast<unsigned>(bytes);
    return *this;
  }
  // CTAs of a cluster; RuntimeError where capability < 9.0.
  Launch& cluster(unsigned x, unsigned y = 1, unsigned z = 1) {
    if (on_.capability < 90) {
      TVM_FFI_THROW(RuntimeError) << on_.at(symbol_) << ": clusters need compute capability 9.0";
    }
    cluster_[0] = x, cluster_[1] = y, cluster_[2] = z;
    return *this;
  }
  // Its CTAs may be put in place before the kernel ahead of it in the stream ends, whose results
  // SPARSE_INDEXER_ENTRY has it wait for. Without effect where capability < 9.0.
  Launch& pdl() {
    pdl_ = on_.capability >= 90;
    return *this;
  }

  // Launches on the current stream of torch for this device.
  template <typename Params>
  void run(const Params& params) {
    static_assert(std::is_trivially_copyable<Params>::value, "Params are copied byte by byte");
    static_assert(sizeof(Params) <= 4096, "what a launch can pass on every GPU");
    if (config_.grid[0] == 0 || config_.grid[1] == 0 || config_.grid[2] == 0) return;
    void* arguments[] = {const_cast<Params*>(&params)};
    run(arguments);
  }

 private:
  void run(void** arguments) {
    const Driver& d = *on_.driver;
    const Variant* variant = nullptr;
    for (const Variant& v : on_.variants) {
      if (v.symbol == symbol_) variant = &v;
    }
    if (variant == nullptr) {
      TVM_FFI_THROW(RuntimeError) << on_.at(symbol_) << ": no such variant";
    }
    CudaLaunchAttribute attributes[2]{};
    config_.attributes = attributes;
    if (pdl_) {
      CudaLaunchAttribute& attribute = attributes[config_.num_attributes++];
      attribute.id = kProgrammaticSerialization;
      attribute.value.allowed = 1;
    }
    if (cluster_[0] != 0) {
      CudaLaunchAttribute& attribute = attributes[config_.num_attributes++];
      attribute.id = kClusterDimension;
      for (int i = 0; i < 3; ++i) attribute.value.cluster[i] = cluster_[i];
    }
    config_.stream = static_cast<CudaStream*>(TVMFFIEnvGetStream(kDLCUDA, on_.ordinal));
    ContextGuard guard(d, on_.context, on_.device);
    if (guard.status() != 0) fail(guard.status(), "cuCtxSetCurrent");
    if (int status = d.launch_kernel(&config_, variant->kernel, arguments, nullptr)) {
      fail(status, "cuLaunchKernelEx");
    }
    if (on_.synchronize) synchronize();
  }

  void synchronize() {
    int capturing = 0;
    on_.driver->stream_is_capturing(config_.stream, &capturing);
    if (capturing != 0) return;
    if (int status = on_.driver->stream_synchronize(config_.stream)) {
      fail(status, "cuStreamSynchronize");
    }
  }

  [[noreturn]] void fail(int status, const char* call) const {
    auto sizes = [](const unsigned* s) {
      return "[" + std::to_string(s[0]) + ", " + std::to_string(s[1]) + ", " +
             std::to_string(s[2]) + "]";
    };
    TVM_FFI_THROW(RuntimeError) << on_.at(symbol_) << ": " << call << ": "
                                << on_.driver->describe(status) << "; grid " << sizes(config_.grid)
                                << ", block " << sizes(config_.block) << ", "
                                << config_.shared_bytes << " bytes of shared memory";
    TVM_FFI_UNREACHABLE();
  }

  std::string_view symbol_;
  const DeviceKernels& on_;
  CudaLaunchConfig config_{{1, 1, 1}, {1, 1, 1}, 0, nullptr, nullptr, 0};
  unsigned cluster_[3] = {0, 0, 0};
  bool pdl_ = false;
};

}  // namespace sparse_indexer
