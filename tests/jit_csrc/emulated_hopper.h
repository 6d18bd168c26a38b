// SPDX-License-Identifier: Apache-2.0
// What Hopper adds (hopper.cuh): warpgroup MMA, barriers in shared memory, bulk copies.
//
// Copies and MMAs are done early or late as chance has it, and until a copy is done its target
// holds NaN: who reads or overwrites too early is found out.
#pragma once

#include <deque>
#include <random>

#include "emulated_gpu.h"

namespace emulated {

inline std::minstd_rand chance;

// Barriers in shared memory -----------------------------------------------------------------------

struct MBarrier {
  int16_t phase, arrivals, pending;
  int16_t chunks;  // of 16 bytes that copies still bring in this phase
};
static_assert(sizeof(MBarrier) == 8, "as in hardware");

inline MBarrier& barrier_at(uint32_t address) {
  return *reinterpret_cast<MBarrier*>(of_address(address));
}
inline void settle(MBarrier& barrier) {
  if (barrier.pending != 0 || barrier.chunks != 0) return;
  barrier.phase ^= 1, barrier.pending = barrier.arrivals;
  progress = true;
}

// Copies ------------------------------------------------------------------------------------------

struct Copy {
  uint32_t to;
  const void* from;
  int bytes;
  uint32_t barrier;
};
inline std::deque<Copy> copies;

inline void do_some_copies() {
  for (size_t left = copies.size(); left > 0; --left) {
    const Copy copy = copies.front();
    copies.pop_front();
    if (chance() % 4 == 0) {
      std::memcpy(of_address(copy.to), copy.from, copy.bytes);
      barrier_at(copy.barrier).chunks -= copy.bytes / 16;
      settle(barrier_at(copy.barrier));
      progress = true;
    } else {
      copies.push_back(copy);
    }
  }
  if (!copies.empty()) progress = true;  // they will come
}

// Warpgroup MMA -----------------------------------------------------------------------------------

inline float float_of_e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return NAN;
  const float x = exponent == 0 ? std::ldexp(float(mantissa), -9)
                                : std::ldexp(float(8 + mantissa), exponent - 10);
  return code & 0x80 ? -x : x;
}

// 32 bytes of K of one row of an operand without swizzle.
template <int Element>
void load_k(uint32_t descriptor, int stride, int row, float (&out)[32]) {
  static const auto codes = [] {
    std::vector<float> of(256);
    for (int i = 0; i < 256; ++i) of[i] = float_of_e4m3(static_cast<uint8_t>(i));
    return of;
  }();
  const auto* base = static_cast<const uint8_t*>(dynamic_shared) + ((descriptor & 0x3fff) << 4);
  for (int k = 0; k < 32; ++k) {
    const uint8_t* at = base + row / 8 * stride + k / 16 * 128 + row % 8 * 16 + k % 16;
    if (Element == 0) {
      out[k] = codes[*at];
    } else if (k % 2 == 0) {
      uint16_t half;
      std::memcpy(&half, at, 2);
      out[k / 2] = Element == 1 ? float_of_half(half) : unpack<float>(uint64_t(half) << 16);
    }
  }
}

using Mma = std::function<void()>;
inline std::vector<std::deque<std::vector<Mma>>> mmas;  // of each thread: groups, the last is open

inline std::deque<std::vector<Mma>>& own_mmas() {
  if (mmas.size() <= threadIdx.x) mmas.resize(threadIdx.x + 1);
  if (mmas[threadIdx.x].empty()) mmas[threadIdx.x].emplace_back();
  return mmas[threadIdx.x];
}

// A thread's own elements, see hopper.cuh.
template <int Element, int N>
void wgmma(float (&d)[N / 2], uint32_t a, int stride_a, uint32_t b, int stride_b, int accumulate) {
  const unsigned warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  auto compute = [=, &d] {
    constexpr int kK = Element == 0 ? 32 : 16;
    float rows[2][32], column[32];
    for (int r = 0; r < 2; ++r) load_k<Element>(a, stride_a, 16 * warp + 8 * r + lane / 4, rows[r]);
    for (int i = 0; i < N / 8; ++i) {
      for (int c = 0; c < 2; ++c) {
        load_k<Element>(b, stride_b, 8 * i + 2 * (lane % 4) + c, column);
        for (int r = 0; r < 2; ++r) {
          float& sum = d[4 * i + 2 * r + c];
          double x = accumulate != 0 ? sum : 0.0f;
          for (int k = 0; k < kK; ++k) x += double(rows[r][k]) * column[k];
          sum = positive_nan(static_cast<float>(x));
        }
      }
    }
  };
  auto& groups = own_mmas();
  groups.back().push_back(compute);
}

inline void finish(size_t pending) {
  auto& groups = own_mmas();
  while (groups.size() > pending + 1) {
    for (const Mma& mma : groups.front()) mma();
    groups.pop_front();
  }
}

// Parts of a CTA ----------------------------------------------------------------------------------

struct NamedBarrier {
  unsigned waiting = 0, phase = 0;
};
inline NamedBarrier named[16];

inline const bool hooked = [] {
  begin_cta = [] {
    copies.clear(), mmas.clear();
    for (NamedBarrier& barrier : named) barrier = {};
  };
  between = do_some_copies;
  return true;
}();

}  // namespace emulated

struct int4 {
  int x, y, z, w;
};
inline int4 make_int4(int x, int y, int z, int w) {
  return {x, y, z, w};
}
template <typename T>
T __ldcg(const T* at) {
  return *at;
}
inline void __threadfence() {}
inline void __nanosleep(unsigned) {
  emulated::yield();
}
inline void* __cvta_generic_to_global(const void* at) {
  return const_cast<void*>(at);
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  emulated::own_input()[0] = value;
  return static_cast<unsigned>(emulated::with_warp([](emulated::Warp& warp) {
    uint64_t most = 0;
    for (auto& in : warp.in) most = std::max(most, in[0]);
    for (auto& out : warp.out) out[0] = most;
  })[0]);
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  emulated::own_input()[0] = value;
  return static_cast<unsigned>(emulated::with_warp([](emulated::Warp& warp) {
    uint64_t sum = 0;
    for (auto& in : warp.in) sum += in[0];
    for (auto& out : warp.out) out[0] = sum;
  })[0]);
}

template <typename... T>
void ptx_(T&&...) {}

inline void ptx_bar_sync(int which, int threads) {
  emulated::NamedBarrier& barrier = emulated::named[which];
  const unsigned own = barrier.phase;
  emulated::progress = true;
  if (++barrier.waiting == static_cast<unsigned>(threads)) barrier.waiting = 0, ++barrier.phase;
  while (barrier.phase == own) emulated::yield();
}

inline void ptx_mbarrier_init_shared(uint32_t address, int arrivals) {
  const auto count = static_cast<int16_t>(arrivals);
  emulated::barrier_at(address) = {0, count, count, 0};
}
inline void ptx_fence_mbarrier_init_release_cluster() {}
inline void ptx_mbarrier_arrive_shared(uint32_t address) {
  emulated::MBarrier& barrier = emulated::barrier_at(address);
  if (barrier.pending-- <= 0) std::fprintf(stderr, "an arrival too many\n"), std::abort();
  emulated::settle(barrier);
}
inline void ptx_mbarrier_arrive_expect_tx_shared(uint32_t address, int bytes) {
  emulated::barrier_at(address).chunks += bytes / 16;
  ptx_mbarrier_arrive_shared(address);
}
inline void ptx_wait(uint32_t address, uint32_t parity) {
  while (emulated::barrier_at(address).phase == static_cast<int>(parity)) emulated::yield();
}
inline void ptx_elect_sync(uint32_t& elected) {
  __syncwarp();
  elected = threadIdx.x % 32 == 0;
}
inline void ptx_cp_async_bulk_shared(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  std::memset(emulated::of_address(to), 0x7f, bytes);
  emulated::copies.push_back({to, from, bytes, barrier});
}
inline void ptx_setmaxnreg_inc_sync_aligned_u32(int) {}
inline void ptx_setmaxnreg_dec_sync_aligned_u32(int) {}

inline void ptx_wgmma_fence_sync_aligned() {}
inline void ptx_wgmma_commit_group_sync_aligned() {
  auto& groups = emulated::own_mmas();
  if (emulated::chance() % 2 == 0 && groups.size() == 1) {  // done at once
    for (const emulated::Mma& mma : groups.back()) mma();
    groups.back().clear();
  }
  groups.emplace_back();
}
inline void ptx_wgmma_wait_group_sync_aligned(int pending) {
  emulated::finish(static_cast<size_t>(pending));
}

inline void ptx_ld_shared_s32(int& value, uint32_t address) {
  std::memcpy(&value, emulated::of_address(address), 4);
}
inline void ptx_ld_shared_v4_f32(float& x, float& y, float& z, float& w, uint32_t address) {
  float v[4];
  std::memcpy(v, emulated::of_address(address), 16);
  x = v[0], y = v[1], z = v[2], w = v[3];
}
inline void ptx_st_global_f32(void* at, float value) {
  *static_cast<float*>(at) = value;
}
inline void ptx_ld_acquire_gpu_global_s32(int& value, const void* at) {
  value = *static_cast<const int*>(at);
}
