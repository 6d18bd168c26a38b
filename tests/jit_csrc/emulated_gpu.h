// SPDX-License-Identifier: Apache-2.0
// Kernels on a CPU, thread by thread: the CUDA they use in plain C++, mma.sync by its definition.
//
// The threads of a CTA are fibers of one thread that take turns; CTAs run one after the other. A
// thread runs until it waits for its warp or its CTA. PTX has become calls: emulation.py turns
// `asm("op.a.b ..." : outs : ins)` into `ptx_op_a_b(outs, ins)`.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)

struct Index {
  unsigned x, y, z;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) {
  return {x, y};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}

// Threads that take turns ------------------------------------------------------------------------

namespace emulated {

struct Warp {
  int waiting = 0, phase = 0;
  uint64_t in[32][8], out[32][8];
};

struct Fiber {
  ucontext_t begin;
  jmp_buf at;  // where it goes on; a jump asks nothing of the kernel, as swapcontext does
  bool started = false, done = false;
};

constexpr size_t kStack = 128 * 1024;
inline std::vector<std::unique_ptr<char[]>> stacks;  // of any CTA
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline jmp_buf scheduler;
inline std::function<void()> body;
inline int waiting, phase, running;  // of the CTA; threads that are not done
inline bool progress;

inline void yield() {
  const unsigned own = threadIdx.x;
  if (_setjmp(fibers[own].at) == 0) _longjmp(scheduler, 1);
  threadIdx.x = own;
}

inline void start() {
  body();
  fibers[threadIdx.x].done = progress = true;
  --running;
  _longjmp(scheduler, 1);
}

// Lets a thread run until it waits.
__attribute__((noinline)) inline void resume(unsigned thread) {
  Fiber& fiber = fibers[thread];
  threadIdx = {thread, 0, 0};
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.at, 1);
  fiber.started = true;
  setcontext(&fiber.begin);
}

inline void barrier() {
  const int own = phase;
  progress = true;
  if (++waiting == running) waiting = 0, ++phase;
  while (phase == own) yield();
}

// The last lane of a warp to come computes for all: from `in` to `out`.
inline uint64_t* with_warp(std::function<void(Warp&)> compute) {
  Warp& warp = warps[threadIdx.x / 32];
  const int own = warp.phase;
  progress = true;
  if (++warp.waiting == 32) {
    compute(warp);
    warp.waiting = 0, ++warp.phase;
  }
  while (warp.phase == own) yield();
  return warp.out[threadIdx.x % 32];
}
inline uint64_t (&own_input())[8] {
  return warps[threadIdx.x / 32].in[threadIdx.x % 32];
}

inline void* dynamic_shared;
inline unsigned dynamic_bytes;

inline std::function<void()> begin_cta = [] {},
                             between = [] {};  // hooks: a CTA, all threads' turns

inline void run(unsigned grid, unsigned threads, unsigned shared, std::function<void()> kernel) {
  body = std::move(kernel);
  std::vector<uint4> memory(shared / 16 + 1);
  dynamic_shared = memory.data(), dynamic_bytes = shared;
  gridDim = {grid, 1, 1}, blockDim = {threads, 1, 1};
  for (unsigned cta = 0; cta < grid; ++cta) {
    blockIdx = {cta, 0, 0};
    fibers.clear(), fibers.resize(threads);
    warps.clear(), warps.resize((threads + 31) / 32);
    waiting = phase = 0, running = static_cast<int>(threads);
    begin_cta();
    while (stacks.size() < threads) stacks.emplace_back(new char[kStack]);
    for (unsigned i = 0; i < threads; ++i) {
      ucontext_t& context = fibers[i].begin;
      getcontext(&context);
      context.uc_stack.ss_sp = stacks[i].get();
      context.uc_stack.ss_size = kStack;
      makecontext(&context, start, 0);
    }
    while (running > 0) {
      progress = false;
      for (unsigned i = 0; i < threads; ++i) {
        if (!fibers[i].done) resume(i);
      }
      between();
      if (!progress) {
        std::fprintf(stderr, "deadlock in CTA %u\n", cta);
        std::abort();
      }
    }
  }
}

template <typename T>
uint64_t pack(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <typename T>
T unpack(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T, typename From>
T shuffle(T value, From from) {
  own_input()[0] = pack(value);
  return unpack<T>(with_warp([&](Warp& warp) {
    for (int lane = 0; lane < 32; ++lane) warp.out[lane][0] = warp.in[from(lane)][0];
  })[0]);
}

// Addresses of shared memory have 32 bits; the highest says that it is dynamic.
constexpr uint32_t kDynamic = 1u << 31;
inline char anchor[1];
inline uint32_t address_of(const void* at) {
  const auto* byte = static_cast<const char*>(at);
  const auto offset = byte - static_cast<char*>(dynamic_shared);
  if (offset >= 0 && offset < int(dynamic_bytes)) return static_cast<uint32_t>(offset) | kDynamic;
  return static_cast<uint32_t>(byte - anchor) & ~kDynamic;
}
inline char* of_address(uint32_t address) {
  if (address & kDynamic) return static_cast<char*>(dynamic_shared) + (address & ~kDynamic);
  return anchor + (static_cast<int32_t>(address << 1) >> 1);
}

// float16 <-> float, to nearest even.
inline float float_of_half(uint16_t half) {
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  float x = exponent == 0    ? std::ldexp(float(mantissa), -24)
            : exponent == 31 ? (mantissa != 0 ? NAN : INFINITY)
                             : std::ldexp(float(1024 + mantissa), exponent - 25);
  return half & 0x8000 ? -x : x;
}
inline uint16_t half_of_float(float x) {
  if (std::isnan(x)) return 0x7fff;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  x = std::fabs(x);
  if (x >= 65520.0f) return sign | 0x7c00;
  if (x < 0x1p-14f) return sign | static_cast<uint16_t>(std::nearbyint(x * 0x1p24f));
  int exponent;
  const float mantissa = std::frexp(x, &exponent);                        // in [0.5, 1)
  const int rounded = static_cast<int>(std::nearbyint(mantissa * 2048));  // 1024 to 2048
  return sign | static_cast<uint16_t>(((exponent + 13) << 10) + rounded);
}
inline float positive_nan(float x) {  // as all arithmetic of a GPU gives it
  return std::isnan(x) ? unpack<float>(uint64_t(0x7fffffff)) : x;
}

}  // namespace emulated

// CUDA -------------------------------------------------------------------------------------------

inline void __syncthreads() {
  emulated::barrier();
}
inline void __syncwarp() {
  emulated::with_warp([](emulated::Warp&) {});
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulated::shuffle(value, [=](int lane) { return lane ^ mask; });
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int step) {
  return emulated::shuffle(value, [=](int lane) { return lane < step ? lane : lane - step; });
}
template <typename T>
T __shfl_sync(unsigned, T value, int from) {
  emulated::own_input()[1] = static_cast<uint64_t>(from & 31);
  emulated::own_input()[0] = emulated::pack(value);
  return emulated::unpack<T>(emulated::with_warp([](emulated::Warp& warp) {
    for (auto lane = 0; lane < 32; ++lane) warp.out[lane][0] = warp.in[warp.in[lane][1]][0];
  })[0]);
}
inline unsigned __ballot_sync(unsigned, bool value) {
  emulated::own_input()[0] = value;
  return static_cast<unsigned>(emulated::with_warp([](emulated::Warp& warp) {
    uint64_t bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= warp.in[lane][0] << lane;
    for (auto& out : warp.out) out[0] = bits;
  })[0]);
}

template <typename T>
T __ldg(const T* at) {
  return *at;
}
template <typename T>
T __ldcs(const T* at) {
  return *at;
}
template <typename T>
void __stcg(T* at, T value) {
  *at = value;
}
template <typename T>
void __stcs(T* at, T value) {
  *at = value;
}
template <typename T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at = before + value;
  return before;
}
template <typename T>
T atomicMax(T* at, T value) {
  const T before = *at;
  if (value > before) *at = value;
  return before;
}
template <typename T>
T atomicMin(T* at, T value) {
  const T before = *at;
  if (value < before) *at = value;
  return before;
}
template <typename T>
T atomicOr(T* at, T value) {
  const T before = *at;
  *at |= value;
  return before;
}
inline size_t __cvta_generic_to_shared(const void* at) {
  return emulated::address_of(at);
}

template <typename T>
T min(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
T max(T a, T b) {
  return a > b ? a : b;
}
inline float larger(float x, float y) {  // drops a NaN, a signaling one, too
  return std::isnan(x) || y > x ? y : x;
}
#define fmaxf larger
inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __clz(unsigned x) {
  return x != 0 ? __builtin_clz(x) : 32;
}
inline int __ffs(unsigned x) {
  return __builtin_ffs(static_cast<int>(x));
}
inline float __int_as_float(int x) {
  return emulated::unpack<float>(emulated::pack(x));
}
inline float __uint_as_float(unsigned x) {
  return emulated::unpack<float>(emulated::pack(x));
}
inline int __float_as_int(float x) {
  return emulated::unpack<int>(emulated::pack(x));
}
inline unsigned __float_as_uint(float x) {
  return emulated::unpack<unsigned>(emulated::pack(x));
}
inline float __fadd_rn(float x, float y) {
  return emulated::positive_nan(x + y);
}
inline float __fsub_rn(float x, float y) {
  return emulated::positive_nan(x - y);
}
inline float __fmul_rn(float x, float y) {
  return emulated::positive_nan(x * y);
}
inline float __fmaf_rn(float x, float y, float z) {
  return emulated::positive_nan(std::fma(x, y, z));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return (uint64_t(high) << 32 | low) << (shift & 31) >> 32;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = x | uint64_t(y) << 32;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned which = selector >> 4 * i & 15;
    unsigned byte = bytes >> 8 * (which & 7) & 255;
    if (which & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * i;
  }
  return result;
}

// PTX --------------------------------------------------------------------------------------------

inline void ptx_cvt_rn_f16_f32(uint16_t& half, float x) {
  half = emulated::half_of_float(x);
}
inline void ptx_cvt_f32_f16(float& x, uint16_t half) {
  x = emulated::positive_nan(emulated::float_of_half(half));
}

inline void ptx_red_shared_add_u32(uint32_t address) {
  ++*reinterpret_cast<uint32_t*>(emulated::of_address(address));
}
inline void ptx_setp_ne_u32(uint32_t address, uint32_t counts) {  // predicates the same
  if (counts != 0) ptx_red_shared_add_u32(address);
}
inline void ptx_ld_shared_v4_u32(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d,
                                 uint32_t address) {
  uint32_t words[4];
  std::memcpy(words, emulated::of_address(address), 16);
  a = words[0], b = words[1], c = words[2], d = words[3];
}

// Lane l names row l % 8 of matrix l / 8 and gets elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4
// of each.
inline void ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t& a, uint32_t& b, uint32_t& c,
                                                         uint32_t& d, uint32_t address) {
  emulated::own_input()[0] = address;
  const uint64_t* out = emulated::with_warp([](emulated::Warp& warp) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        const auto row = static_cast<uint32_t>(warp.in[matrix * 8 + lane / 4][0]);
        uint32_t pair;
        std::memcpy(&pair, emulated::of_address(row) + lane % 4 * 4, 4);
        warp.out[lane][matrix] = pair;
      }
    }
  });
  a = static_cast<uint32_t>(out[0]), b = static_cast<uint32_t>(out[1]);
  c = static_cast<uint32_t>(out[2]), d = static_cast<uint32_t>(out[3]);
}

namespace emulated {

inline float half_of_pair(uint64_t pair, int which) {
  return float_of_half(static_cast<uint16_t>(pair >> 16 * which));
}

}  // namespace emulated

// PTX ISA 9.0, "Matrix Fragments for mma.m16n8k8", float16 with float sums: with g = lane / 4 and
// t = lane % 4, register i of A holds row g + 8 i, columns 2t and 2t + 1; B rows 2t and 2t + 1,
// column g; element i of C row g + 8 (i / 2), column 2t + i % 2.
inline void ptx_mma_sync_aligned_m16n8k8_row_col_f32_f16_f16_f32(float& d0, float& d1, float& d2,
                                                                 float& d3, uint32_t a0,
                                                                 uint32_t a1, uint32_t b) {
  using emulated::pack;
  uint64_t (&in)[8] = emulated::own_input();
  const uint64_t own[7] = {pack(d0), pack(d1), pack(d2), pack(d3), a0, a1, b};
  std::memcpy(in, own, sizeof own);
  const uint64_t* out = emulated::with_warp([](emulated::Warp& warp) {
    float a[16][8], b[8][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int k = 0; k < 2; ++k) {
        for (int i = 0; i < 2; ++i) {
          a[g + 8 * i][2 * t + k] = emulated::half_of_pair(warp.in[lane][4 + i], k);
        }
        b[2 * t + k][g] = emulated::half_of_pair(warp.in[lane][6], k);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        double sum = emulated::unpack<float>(warp.in[lane][i]);
        for (int k = 0; k < 8; ++k) sum += double(a[row][k]) * b[k][column];
        warp.out[lane][i] = pack(emulated::positive_nan(static_cast<float>(sum)));
      }
    }
  });
  float* const d[4] = {&d0, &d1, &d2, &d3};
  for (int i = 0; i < 4; ++i) *d[i] = emulated::unpack<float>(out[i]);
}

// PTX ISA 9.0, "Matrix Fragments for mma.m8n8k4", float16 with float sums: lanes l and l + 16 of
// each four neighbors do one product. With r = lane % 4 + 4 (lane / 16), A row-major holds row r,
// columns 0 to 3; B column-major column r, rows 0 to 3; element i of C row
// lane % 2 + i / 2 % 2 * 2 + 4 (lane / 16), column i / 4 * 4 + lane / 2 % 2 * 2 + i % 2.
inline void ptx_mma_sync_aligned_m8n8k4_row_col_f32_f16_f16_f32(float& d0, float& d1, float& d2,
                                                                float& d3, float& d4, float& d5,
                                                                float& d6, float& d7, uint32_t a0,
                                                                uint32_t a1, uint32_t b0,
                                                                uint32_t b1) {
  using emulated::pack;
  float* const d[8] = {&d0, &d1, &d2, &d3, &d4, &d5, &d6, &d7};
  uint64_t (&in)[8] = emulated::own_input();
  for (int i = 0; i < 4; ++i) in[i] = pack(*d[2 * i]) | pack(*d[2 * i + 1]) << 32;
  in[4] = a0 | uint64_t(a1) << 32, in[5] = b0 | uint64_t(b1) << 32;
  const uint64_t* out = emulated::with_warp([](emulated::Warp& warp) {
    for (int quad_pair = 0; quad_pair < 4; ++quad_pair) {
      float a[8][4], b[4][8];
      for (int r = 0; r < 8; ++r) {
        const int lane = quad_pair * 4 + r % 4 + r / 4 * 16;
        for (int k = 0; k < 4; ++k) {
          a[r][k] = emulated::half_of_pair(warp.in[lane][4], k);
          b[k][r] = emulated::half_of_pair(warp.in[lane][5], k);
        }
      }
      for (int r = 0; r < 8; ++r) {
        const int lane = quad_pair * 4 + r % 4 + r / 4 * 16;
        for (int i = 0; i < 8; ++i) {
          const int row = lane % 2 + i / 2 % 2 * 2 + lane / 16 * 4;
          const int column = i / 4 * 4 + lane / 2 % 2 * 2 + i % 2;
          double sum = emulated::unpack<float>(warp.in[lane][i / 2] >> i % 2 * 32);
          for (int k = 0; k < 4; ++k) sum += double(a[row][k]) * b[k][column];
          warp.out[lane][i] = pack(emulated::positive_nan(static_cast<float>(sum)));
        }
      }
    }
  });
  for (int i = 0; i < 8; ++i) *d[i] = emulated::unpack<float>(out[i]);
}
