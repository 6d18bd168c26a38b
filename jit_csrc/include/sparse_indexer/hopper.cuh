// SPDX-License-Identifier: Apache-2.0
// Hopper's asynchronous machinery: warpgroup MMA, barriers in shared memory, bulk copies.
//
// Operands of an MMA are K-major in shared memory without swizzle: a core matrix is 8 rows of 16
// bytes, 128 contiguous bytes. Compiled for sm_90a only; PTX ISA 8.0, "Asynchronous Warpgroup Level
// Matrix Multiply-Accumulate Instructions" and "mbarrier".
#pragma once

#include "sparse_indexer/cstdint.h"

namespace sparse_indexer {

enum class Element { kE4m3, kF16, kBf16 };

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Lower half of the descriptor of an operand at this shared address: the address, and 128 bytes
// from 16 bytes of K to the next 16, both in units of 16. The upper half is the bytes from 8 rows
// to the next 8: a constant of the instruction, since uniform registers are few.
__device__ __forceinline__ uint32_t operand(uint32_t address) {
  return (address & 0x3ffff) >> 4 | (128 >> 4) << 16;
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most `Pending` committed groups of this warpgroup are unfinished.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// Keeps the compiler from moving uses of accumulators across.
template <int Registers>
__device__ __forceinline__ void wgmma_use(float (&d)[Registers]) {
#pragma unroll
  for (int i = 0; i < Registers; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d[M 64, N] (+)= a[64, 32 bytes of K] . b[N, 32 bytes of K]^T, fp32; a and b as of operand().
// Thread (warp w, lane l) holds d[4 i + 2 r + c] = D[16 w + 8 r + l / 4, 8 i + 2 (l % 4) + c].
template <Element E, int N, int StrideA, int StrideB>
struct Wgmma;

#define SPARSE_INDEXER_WGMMA_D64                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SPARSE_INDEXER_WGMMA_R64                                                                  \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
      "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),    \
      "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),  \
      "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),  \
      "+f"(d[29]), "+f"(d[30]), "+f"(d[31])

#define SPARSE_INDEXER_WGMMA_D128                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SPARSE_INDEXER_WGMMA_R128                                                                 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
      "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),    \
      "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),  \
      "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),  \
      "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),  \
      "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),  \
      "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),  \
      "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),  \
      "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

#define SPARSE_INDEXER_WGMMA(ELEMENT, N, K, TYPES, TRANSPOSE, A, B, C, D, P)                 \
  template <int StrideA, int StrideB>                                                        \
  struct Wgmma<Element::ELEMENT, N, StrideA, StrideB> {                                      \
    static __device__ __forceinline__ void issue(float (&d)[N / 2], uint32_t a, uint32_t b,  \
                                                 int accumulate) {                           \
      asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %" P                   \
                   ", 0;\n"                                                                  \
                   "mov.b64 a, {%" A ", %" B "};\nmov.b64 b, {%" C ", %" D                   \
                   "};\n"                                                                    \
                   "wgmma.mma_async.sync.aligned.m64n" #N K ".f32." TYPES                    \
                   " {" SPARSE_INDEXER_WGMMA_D##N "}, a, b, p, 1, 1" TRANSPOSE ";\n}\n"      \
                   : SPARSE_INDEXER_WGMMA_R##N                                               \
                   : "r"(a), "n"(StrideA >> 4), "r"(b), "n"(StrideB >> 4), "r"(accumulate)); \
    }                                                                                        \
  };

SPARSE_INDEXER_WGMMA(kE4m3, 64, "k32", "e4m3.e4m3", "", "32", "33", "34", "35", "36")
SPARSE_INDEXER_WGMMA(kF16, 64, "k16", "f16.f16", ", 0, 0", "32", "33", "34", "35", "36")
SPARSE_INDEXER_WGMMA(kBf16, 64, "k16", "bf16.bf16", ", 0, 0", "32", "33", "34", "35", "36")
SPARSE_INDEXER_WGMMA(kE4m3, 128, "k32", "e4m3.e4m3", "", "64", "65", "66", "67", "68")
SPARSE_INDEXER_WGMMA(kF16, 128, "k16", "f16.f16", ", 0, 0", "64", "65", "66", "67", "68")
SPARSE_INDEXER_WGMMA(kBf16, 128, "k16", "bf16.bf16", ", 0, 0", "64", "65", "66", "67", "68")

#undef SPARSE_INDEXER_WGMMA

// Barriers ----------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals));
}
// Makes initialized barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
// How often a warp arrives. What one lane's arrival says of its warp, racecheck does not know: for
// it each lane arrives.
#ifdef SPARSE_INDEXER_RACECHECK
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif
// By all lanes of a warp: what each has done is done before.
__device__ __forceinline__ void warp_arrive(uint64_t* barrier, int lane) {
  __syncwarp();
  if (kWarpArrivals > 1 || lane == 0) barrier_arrive(barrier);
}
// Arrives, and expects so many bytes of bulk copies in this phase.
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
// Waits for the end of the phase of this parity.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "wait:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// True in one lane of a converged warp. The compiler then issues what only that lane does, such as
// bulk copies, without a loop over lanes.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(elected));
  return elected != 0;
}

// Copies a multiple of 16 bytes from global to shared memory, both multiples of 16; the barrier
// counts them.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, int bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Registers a thread of this warpgroup may have from here on: a multiple of 8.
template <int Registers>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

}  // namespace sparse_indexer
