// SPDX-License-Identifier: Apache-2.0
// A libcuda.so.1 that runs nothing and remembers what it was asked, so that loading and launching
// can be tested without a GPU. Two devices, of capability 9.0 and 8.0; FAKE_CUDA_FAIL=name makes
// that function return CUDA_ERROR_INVALID_VALUE.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>

namespace {

std::string calls;
uintptr_t current = 0;  // context: 100 + device, 0 for none

int done(const char* name, const std::string& detail = "") {
  calls += name + (detail.empty() ? "" : " " + detail) + "\n";
  const char* fail = std::getenv("FAKE_CUDA_FAIL");
  return fail != nullptr && std::strcmp(fail, name) == 0 ? 1 : 0;
}

struct Attribute {
  int id;
  alignas(8) unsigned value[16];
};
struct Config {
  unsigned grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  unsigned num_attributes;
};

}  // namespace

extern "C" {

const char* fake_calls() {
  return calls.c_str();
}
void fake_forget() {
  calls.clear();
}
void fake_set_current(uintptr_t context) {
  current = context;
}
uintptr_t fake_current() {
  return current;
}

int cuInit(unsigned) {
  return done("cuInit");
}
int cuGetErrorName(int, const char** out) {
  return *out = "CUDA_ERROR_INVALID_VALUE", 0;
}
int cuGetErrorString(int, const char** out) {
  return *out = "invalid argument", 0;
}
int cuDeviceGet(int* out, int ordinal) {
  *out = ordinal;
  return ordinal < 2 ? done("cuDeviceGet") : 101;
}
int cuDeviceGetAttribute(int* out, int which, int device) {
  *out = which == 16 ? 132 : which == 75 ? 9 - device : which == 97 ? 232448 : 0;
  return 0;
}
int cuDevicePrimaryCtxRetain(uintptr_t* out, int device) {
  *out = 100 + device;
  return done("cuDevicePrimaryCtxRetain");
}
int cuCtxGetCurrent(uintptr_t* out) {
  return *out = current, 0;
}
int cuCtxSetCurrent(uintptr_t context) {
  current = context;
  return done("cuCtxSetCurrent", std::to_string(context));
}
int cuCtxGetDevice(int* out) {
  return *out = static_cast<int>(current % 100), 0;
}
int cuLibraryLoadData(uintptr_t* out, const void* code, int*, void**, unsigned, int*, void**,
                      unsigned) {
  *out = 7;
  return done("cuLibraryLoadData", current ? std::string(static_cast<const char*>(code), 4) : "?");
}
int cuLibraryGetKernel(uintptr_t* out, uintptr_t, const char* name) {
  *out = reinterpret_cast<uintptr_t>(strdup(name));
  return done("cuLibraryGetKernel", name);
}
int cuKernelGetFunction(uintptr_t* out, uintptr_t kernel) {
  *out = kernel;
  return done("cuKernelGetFunction");
}
int cuFuncLoad(uintptr_t) {
  return done("cuFuncLoad");
}
int cuKernelGetAttribute(int* out, int, uintptr_t, int) {
  return *out = 1024, 0;
}
int cuKernelSetAttribute(int which, int value, uintptr_t, int) {
  return done("cuKernelSetAttribute", std::to_string(which) + " " + std::to_string(value));
}
int cuLaunchKernelEx(const Config* config, uintptr_t kernel, void** params, void**) {
  std::ostringstream text;
  text << reinterpret_cast<const char*>(kernel) << " context " << current << " stream "
       << config->stream << " grid " << config->grid[0] << " " << config->grid[1] << " "
       << config->grid[2] << " block " << config->block[0] << " " << config->block[1] << " "
       << config->block[2] << " shared " << config->shared;
  for (unsigned i = 0; i < config->num_attributes; ++i) {
    text << " attribute " << config->attributes[i].id << "=" << config->attributes[i].value[0];
  }
  text << " first " << *static_cast<void**>(params[0]);
  return done("cuLaunchKernelEx", text.str());
}
int cuStreamIsCapturing(void*, int* out) {
  return *out = 0, done("cuStreamIsCapturing");
}
int cuStreamSynchronize(void*) {
  return done("cuStreamSynchronize");
}

}  // extern "C"
