// SPDX-License-Identifier: Apache-2.0
// Lets one GPU pass for two, by LD_PRELOAD: cuda:1 is a second context on the GPU of cuda:0. A
// launch that is given memory of another context than its own, which on two GPUs is an illegal
// access, is written to the file that ONE_GPU_AS_TWO names, and so is how much was looked at:
// launches by cuLaunchKernel and cuLaunchKernelEx, not copies, nor those of a graph.
//
// torch calls CUDA's runtime through the linker, so its functions are replaced by those of the same
// name below; the runtime asks cuGetProcAddress for the driver's, our host modules ask dlsym.
#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

namespace {

void* first = nullptr;   // the contexts
void* second = nullptr;  // null until it is asked for
std::atomic<long> launches{0}, pointers{0};

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "one_gpu_as_two: %s\n", what);
  std::abort();
}

using Dlsym = void* (*)(void*, const char*) noexcept;

// The C library's.
Dlsym real_dlsym() noexcept {
  static const Dlsym found = [] {
    void* function = nullptr;
    for (const char* version : {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"}) {
      if (function == nullptr) function = dlvsym(RTLD_NEXT, "dlsym", version);
    }
    if (function == nullptr) fail("dlsym");
    return reinterpret_cast<Dlsym>(function);
  }();
  return found;
}

void* find(void* library, const char* name) {
  void* function = library == nullptr ? nullptr : real_dlsym()(library, name);
  if (function == nullptr) fail(name);
  return function;
}

void* driver_library() {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  return library;
}

template <typename... Arguments>
int driver(const char* name, Arguments... arguments) {
  return reinterpret_cast<int (*)(Arguments...)>(find(driver_library(), name))(arguments...);
}

template <typename... Arguments>
int runtime(const char* name, Arguments... arguments) {
  static void* const library = [] {
    void* newer = dlopen("libcudart.so.13", RTLD_NOW | RTLD_NOLOAD);
    return newer ? newer : dlopen("libcudart.so.12", RTLD_NOW | RTLD_NOLOAD);
  }();
  return reinterpret_cast<int (*)(Arguments...)>(find(library, name))(arguments...);
}

void* current() {
  void* context = nullptr;
  driver("cuCtxGetCurrent", &context);
  return context;
}

bool on_second() {
  return second != nullptr && current() == second;
}

void* second_context() {
  static std::once_flag once;
  std::call_once(once, [] {
    driver("cuInit", 0u);
    void* before = current();
    if (driver("cuDevicePrimaryCtxRetain", &first, 0) != 0) fail("cuDevicePrimaryCtxRetain");
    if (driver("cuCtxCreate_v2", &second, 0u, 0) != 0) fail("cuCtxCreate");
    driver("cuCtxSetCurrent", before);
  });
  return second;
}

int actual(int device) {
  return device == 1 ? 0 : device;
}

void report(const std::string& line) {
  const char* path = std::getenv("ONE_GPU_AS_TWO");
  std::FILE* file = path == nullptr ? nullptr : std::fopen(path, "a");
  if (file == nullptr) fail("ONE_GPU_AS_TWO: no file");
  std::fprintf(file, "%s\n", line.c_str());
  std::fclose(file);
}

// Of the memory that a launch is given.
struct Given {
  long own = 0, others = 0;
};

// Looks at each word of an argument that is an address of device memory.
void look(const char* argument, size_t size, void* context, Given& given) {
  using Ask = int (*)(void*, int, unsigned long long);
  static const auto ask = reinterpret_cast<Ask>(find(driver_library(), "cuPointerGetAttribute"));
  constexpr int kContext = 1, kMemoryType = 2;
  constexpr unsigned kDeviceMemory = 2;
  for (size_t i = 0; i + 8 <= size; i += 8) {
    unsigned long long word;
    std::memcpy(&word, argument + i, 8);
    if (word >> 32 == 0 || word >> 48 != 0) continue;
    unsigned type = 0;
    void* owner = nullptr;
    if (ask(&type, kMemoryType, word) != 0 || type != kDeviceMemory) continue;
    if (ask(&owner, kContext, word) != 0 || owner == nullptr) continue;
    if (owner == context) {
      ++given.own;
    } else if ((word & 0xffffffff) >= 1024) {  // else padding beside a number
      ++given.others;
    }
  }
}

// Fields of torch's arguments that it never sets hold what the stack held: then a launch is wrong
// if nothing that it is given is of its own context. What we pass is `set_in_full`.
void look(void* kernel, void** arguments, bool set_in_full) {
  using Ask = int (*)(void*, size_t, size_t*, size_t*);
  static const auto of_function =
      reinterpret_cast<Ask>(find(driver_library(), "cuFuncGetParamInfo"));
  static const auto of_kernel =
      reinterpret_cast<Ask>(find(driver_library(), "cuKernelGetParamInfo"));
  if (second == nullptr || arguments == nullptr) return;
  void* context = current();
  Given given;
  for (size_t i = 0, offset = 0, size = 0;; ++i) {
    if (of_function(kernel, i, &offset, &size) != 0 && of_kernel(kernel, i, &offset, &size) != 0) {
      break;
    }
    look(static_cast<const char*>(arguments[i]), size, context, given);
  }
  ++launches;
  pointers += given.own + given.others;
  if (given.others == 0 || (given.own != 0 && !set_in_full)) return;
  const char* name = "";
  if (driver("cuFuncGetName", &name, kernel) != 0) driver("cuKernelGetName", &name, kernel);
  const char* where = context == second ? "cuda:0 on cuda:1" : "cuda:1 on cuda:0";
  report(std::string("wrong: memory of ") + where + ": " + name);
}

struct AtExit {
  ~AtExit() {
    if (second == nullptr) return;
    report(std::to_string(launches) + " launches, " + std::to_string(pointers) + " pointers");
  }
} at_exit;

// What stands for functions of the driver.

int device_get(int* device, int ordinal) {
  if (ordinal != 1) return driver("cuDeviceGet", device, ordinal);
  *device = 1;
  return 0;
}

int device_attribute(int* value, int attribute, int device) {
  return driver("cuDeviceGetAttribute", value, attribute, actual(device));
}

int primary_context_retain(void** context, int device) {
  if (device != 1) return driver("cuDevicePrimaryCtxRetain", context, device);
  *context = second_context();
  return 0;
}

int primary_context_state(int device, unsigned* flags, int* active) {
  if (device != 1) return driver("cuDevicePrimaryCtxGetState", device, flags, active);
  *flags = 0;
  *active = second != nullptr;
  return 0;
}

int context_get_device(int* device) {
  int status = driver("cuCtxGetDevice", device);
  if (on_second()) *device = 1;
  return status;
}

int kernel_get_attribute(int* value, int attribute, void* kernel, int device) {
  return driver("cuKernelGetAttribute", value, attribute, kernel, actual(device));
}

int kernel_set_attribute(int attribute, int value, void* kernel, int device) {
  return driver("cuKernelSetAttribute", attribute, value, kernel, actual(device));
}

template <bool kSetInFull>
int launch(void* kernel, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
           unsigned block_z, unsigned shared, void* stream, void** arguments, void** extra) {
  look(kernel, arguments, kSetInFull);
  return driver("cuLaunchKernel", kernel, x, y, z, block_x, block_y, block_z, shared, stream,
                arguments, extra);
}

template <bool kSetInFull>
int launch_ex(const void* config, void* kernel, void** arguments, void** extra) {
  look(kernel, arguments, kSetInFull);
  return driver("cuLaunchKernelEx", config, kernel, arguments, extra);
}

int get_proc_address_11(const char* name, void** function, int version, uint64_t flags);

// The runtime asks it for itself, and then for all else.
int get_proc_address(const char* name, void** function, int version, uint64_t flags, void* status) {
  constexpr uint64_t kPerThreadDefaultStream = 2;
  constexpr int kWithStatus = 12000;
  int result = driver("cuGetProcAddress_v2", name, function, version, flags, status);
  if (result != 0 || *function == nullptr || (flags & kPerThreadDefaultStream) != 0) return result;
  std::string asked = name;
  if (asked == "cuGetProcAddress" && version >= kWithStatus) {
    *function = reinterpret_cast<void*>(get_proc_address);
  } else if (asked == "cuGetProcAddress") {
    *function = reinterpret_cast<void*>(get_proc_address_11);
  } else if (asked == "cuLaunchKernel") {
    *function = reinterpret_cast<void*>(launch<false>);
  } else if (asked == "cuLaunchKernelEx") {
    *function = reinterpret_cast<void*>(launch_ex<false>);
  }
  return result;
}

// As CUDA 11 has it.
int get_proc_address_11(const char* name, void** function, int version, uint64_t flags) {
  return get_proc_address(name, function, version, flags, nullptr);
}

// Not inlined, so that `dlsym` has no frame when it jumps.
[[gnu::noinline]] void* replaced(const char* name) noexcept {
  const struct {
    const char* name;
    void* function;
  } table[] = {
      {"cuDeviceGet", reinterpret_cast<void*>(device_get)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(device_attribute)},
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(primary_context_retain)},
      {"cuDevicePrimaryCtxGetState", reinterpret_cast<void*>(primary_context_state)},
      {"cuCtxGetDevice", reinterpret_cast<void*>(context_get_device)},
      {"cuKernelGetAttribute", reinterpret_cast<void*>(kernel_get_attribute)},
      {"cuKernelSetAttribute", reinterpret_cast<void*>(kernel_set_attribute)},
      {"cuLaunchKernel", reinterpret_cast<void*>(launch<true>)},
      {"cuLaunchKernelEx", reinterpret_cast<void*>(launch_ex<true>)},
      {"cuGetProcAddress", reinterpret_cast<void*>(get_proc_address_11)},
      {"cuGetProcAddress_v2", reinterpret_cast<void*>(get_proc_address)},
  };
  for (const auto& entry : table) {
    if (std::strcmp(entry.name, name) == 0) return entry.function;
  }
  return nullptr;
}

}  // namespace

extern "C" {

// The last call is a jump, so that the C library sees who asks for RTLD_NEXT.
void* dlsym(void* library, const char* name) noexcept {
  void* ours = std::strncmp(name, "cu", 2) == 0 ? replaced(name) : nullptr;
  return ours != nullptr ? ours : real_dlsym()(library, name);
}

int cudaGetDeviceCount(int* count) {
  int status = runtime("cudaGetDeviceCount", count);
  if (status == 0) *count = 2;
  return status;
}

int cudaGetDevice(int* device) {
  if (!on_second()) return runtime("cudaGetDevice", device);
  *device = 1;
  return 0;
}

int cudaSetDevice(int device) {
  if (device == 1) return driver("cuCtxSetCurrent", second_context());
  if (on_second()) driver("cuCtxSetCurrent", first);
  return runtime("cudaSetDevice", device);
}

int cudaGetDeviceProperties(void* properties, int device) {
  return runtime("cudaGetDeviceProperties", properties, actual(device));
}

int cudaGetDeviceProperties_v2(void* properties, int device) {  // as CUDA 12 names it
  return runtime("cudaGetDeviceProperties_v2", properties, actual(device));
}

int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  return runtime("cudaDeviceGetAttribute", value, attribute, actual(device));
}

int cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return 0;
}
}
