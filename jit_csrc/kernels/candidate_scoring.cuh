// SPDX-License-Identifier: Apache-2.0
// What `candidate_logits` and `candidate_topk` have in common: the logits of each row at its
// candidate blocks, in the order of its list.
//
// Neighboring rows want nearly the same blocks. A quad of rows gathers each block that any of them
// wants once, by a copy of 1 KB to shared memory, scores it for all four on Hopper's tensor cores,
// and writes a row's 8 logits at the rank that the block has in the row's own list. A quad with two
// lists (candidate_quads) is scored as two pairs of rows, with an MMA of half the columns. Producer
// warps walk the lists, a stage of blocks at a time; each consumer warpgroup scores half
// of it, two tiles of 8 blocks, with two MMAs under way as in dense_block_keys, and the same sums:
// a logit has the same bits. With 32 heads the two are of two tiles, with 64 the two halves of the
// heads. The units, some stages each, of all lists are cut into equal parts, one a CTA; of a list's
// last stage what is past its end is scored, too, but not written.
#pragma once

#include "kernels/candidate_logits.h"
#include "kernels/candidate_quads.h"
#include "sparse_indexer/head_sum.cuh"
#include "sparse_indexer/hopper.cuh"
#include "sparse_indexer/parts.cuh"

namespace sparse_indexer {

// Threads 0 to 127 produce, the next kConsumers consume. `Stages` are as many as shared memory
// holds; weights of `Kept` heads are in registers; a quad has at least `LeastUnits` units.
template <Element E, int Heads, int Stages, int Kept, int LeastUnits>
struct CandidateScoring {
  using Params = CandidateLogitsParams;
  using Sum = HeadSum<Heads, Kept>;
  static constexpr int kRows = Sum::kRows;
  static constexpr int kWarpgroups = candidate_logits_config::kWarpgroups;
  static constexpr int kConsumers = 128 * kWarpgroups;
  static constexpr int kKeyBytes = E == Element::kE4m3 ? 128 : 256;
  static constexpr int kBlockBytes = packed_keys::block_bytes(kKeyBytes);
  static constexpr int kStageBlocks = candidate_logits_config::kStageBlocks;
  static constexpr int kTiles = kStageBlocks / 8 / kWarpgroups;  // of a stage, for a warpgroup
  // Of halves half as many: half the code to compile.
  static constexpr int kUnitStages =
      candidate_logits_config::kUnitStages / (E == Element::kE4m3 ? 1 : 2);
  static constexpr int kCopyBytes = packed_keys::used_bytes(kKeyBytes);
  static constexpr int kStageBytes = kStageBlocks * kBlockBytes;
  static constexpr int kQueryBytes = Sum::kN * kKeyBytes;
  static constexpr int kBuffers = candidate_logits_config::buffers(kKeyBytes, Heads);
  static constexpr int kStages = Stages;
  // Warps that copy. Not more than stages: each has then seen the stage before the last one in its
  // place freed, and the parity it waits for means one phase. A power of two: stages are counted
  // modulo 2^32.
  static constexpr int kProducers = kStages < 4 ? 2 : 4;
  static constexpr int kIdBits = candidate_quads_config::kIdBits;
  static constexpr uint32_t kIdMask = (1u << kIdBits) - 1;
  static_assert(kStageBlocks == candidate_quads_config::kRankEvery, "a stage's ranks are written");
  static constexpr int kNone = -1;
  static_assert(kStages >= 2, "a stage is scored while the next is loaded");
  static_assert(kTiles == 2, "with 32 heads two MMAs are of the two tiles");
  static_assert(kRows == 4 && kBlockBytes % 16 == 0, "an entry's ranks are one load; bulk copies");

  struct Shared {
    alignas(128) uint8_t queries[kBuffers][kQueryBytes];
    alignas(128) uint8_t keys[kStages][kStageBytes];
    alignas(16) float weights[kBuffers][kRows][shared_weights(Heads)];
    alignas(16) int32_t at_bytes[kStages][kStageBlocks][kRows];  // of a block's logits in each row
    uint64_t full[kStages], empty[kStages], queries_full[kBuffers], queries_empty[kBuffers];
    Part part;
  };
  static __device__ int units(int entries) {
    constexpr int kUnitBlocks = kUnitStages * kStageBlocks;
    return (entries + kUnitBlocks - 1) / kUnitBlocks;
  }

  struct UnitsOf {
    const Params& p;
    __device__ int operator()(int quad) const {
      const int n = units(p.counts[2 * quad]) + units(max(p.counts[2 * quad + 1], 0));
      return max(n, LeastUnits);
    }
  };

  // By one thread, before a barrier of the CTA.
  static __device__ void init_barriers(Shared& s) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.full[i], kWarpArrivals);
      barrier_init(&s.empty[i], 4 * kWarpgroups * kWarpArrivals);
    }
    for (int i = 0; i < kBuffers; ++i) {
      barrier_init(&s.queries_full[i], 1);
      barrier_init(&s.queries_empty[i], 4 * kWarpgroups * kWarpArrivals);
    }
    barrier_init_fence();
  }

  // Stages of a list, from `begin` on: those that a CTA scores.
  struct StagesOf {
    int begin, count;
  };
  // Of a list with so many entries, that lies `before` units after the quad's first unit: those in
  // units first ... stop - 1.
  static __device__ __forceinline__ StagesOf stages_of(int entries, int before, int first,
                                                       int stop) {
    const int begin = max(first - before, 0) * kUnitStages;
    const int end = min((stop - before) * kUnitStages, (entries + kStageBlocks - 1) / kStageBlocks);
    return {begin, max(end - begin, 0)};
  }

  // Threads 0 to 127. Each warp fills every kProducers-th stage.
  static __device__ __forceinline__ void produce(const Params& p, Shared& s, const Part& part) {
    const int producer = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (producer >= kProducers) return;
    uint32_t n = 0;  // stages so far
    int quads = 0;
    for_each_group(part, UnitsOf{p}, [&](int quad, int first, int stop) {
      if (threadIdx.x == 0) {
        const int buffer = quads % kBuffers;
        if (quads >= kBuffers) {
          barrier_wait(&s.queries_empty[buffer], (quads / kBuffers - 1) & 1);
        }
        uint64_t* full = &s.queries_full[buffer];
        barrier_expect(full, kQueryBytes + kRows * Heads * 4);
        bulk_copy(s.queries[buffer], p.queries + int64_t(quad) * kQueryBytes, kQueryBytes, full);
        const float* weights = p.weights + int64_t(quad) * kRows * Heads;
#pragma unroll 1
        for (int r = 0; r < kRows; ++r) {
          bulk_copy(s.weights[buffer][r], weights + r * Heads, Heads * 4, full);
        }
      }
      ++quads;
      const uint32_t* entries = p.entries + quad * p.entries_stride;
      const auto* ranks = reinterpret_cast<const uint2*>(p.ranks) + quad * p.ranks_stride;
      const int count = p.counts[2 * quad], keys = p.quad_first[quad];
      const int second = p.counts[2 * quad + 1];
      const StagesOf one = stages_of(count, 0, first, stop);
      const StagesOf two = stages_of(second, units(count), first, stop);
      const int total = one.count + two.count;
      const int before_second = (count + kStageBlocks - 1) / kStageBlocks;
      const int mine = ((producer - n) % kProducers + kProducers) % kProducers;
      // This lane's entry of stage i, and the ranks before the stage; 0 past a list's end.
      auto stage_of = [&](int i) {
        return i < one.count ? one.begin + i : two.begin + i - one.count;
      };
      auto entry_of = [&](int i) {
        const int index = stage_of(i) * kStageBlocks + lane;
        if (index >= (i < one.count ? count : second)) return 0u;
        return __ldg(entries + index + (i < one.count ? 0 : before_second * kStageBlocks));
      };
      auto ranks_of = [&](int i) {
        const int stage = stage_of(i);
        if (stage * kStageBlocks >= (i < one.count ? count : second)) return make_uint2(0, 0);
        return __ldg(ranks + stage + (i < one.count ? 0 : before_second));
      };
      uint32_t next = entry_of(mine);
      uint2 next_ranks = ranks_of(mine);
      for (int i = mine; i < total; i += kProducers) {
        const uint32_t entry = next;
        const uint2 before = next_ranks;
        next = entry_of(i + kProducers), next_ranks = ranks_of(i + kProducers);  // meanwhile
        const uint32_t stage = n + i;
        const uint32_t at = __shfl_sync(~0u, stage % kStages, 0);  // the same in all lanes
        const int block = min(keys + static_cast<int>(entry & kIdMask), p.num_blocks - 1);
        const uint32_t bases[kRows] = {before.x & 0xffff, before.x >> 16, before.y & 0xffff,
                                       before.y >> 16};
        int at_bytes[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const bool has = entry >> (kIdBits + r) & 1;
          const uint32_t rows = __ballot_sync(~0u, has);
          const int rank = static_cast<int>(bases[r]) + __popc(rows & ((1u << lane) - 1));
          at_bytes[r] = has && rank < p.out_blocks ? rank * 32 : kNone;
        }
        barrier_wait(&s.empty[at], stage / kStages & 1 ^ 1);
        *reinterpret_cast<int4*>(s.at_bytes[at][lane]) =
            make_int4(at_bytes[0], at_bytes[1], at_bytes[2], at_bytes[3]);
        __syncwarp();  // the places are written before the barrier says so
        const bool elected = elect_one();
        if (elected) barrier_expect(&s.full[at], kStageBlocks * kCopyBytes);
        if (kWarpArrivals > 1 && !elected) barrier_arrive(&s.full[at]);
        // Past the list's end the request's first block is copied, unused: no branch. Addresses are
        // computed outside the branch, unrolled, and so in uniform registers.
        uint8_t* to = s.keys[at];
        uint64_t* full = &s.full[at];
#pragma unroll
        for (int j = 0; j < kStageBlocks; ++j) {
          const uint8_t* from = p.keys + int64_t(__shfl_sync(~0u, block, j)) * kBlockBytes;
          if (elected) bulk_copy(to + j * kBlockBytes, from, kCopyBytes, full);
        }
      }
      n += total;
    });
  }

  // What a consumer thread knows of its place.
  struct Place {
    int warpgroup, lane, g;
    int block;      // of a stage: this warp's first of two, in the first tile
    int scales;     // bytes from a stage to this lane's first scale
    uint32_t keys;  // operand: this warpgroup's part of stage 0
  };

  // The kConsumers threads from 128 on. For each quad, whose units from `first` to `stop` are
  // scored, sink.begin(quad, first, stop) says where the logits of its rows go, p.out_stride apart;
  // sink.end() is called when this thread has written its own.
  template <typename Sink>
  static __device__ __forceinline__ void consume(const Params& p, Shared& s, const Part& part,
                                                 Sink& sink) {
    // The compiler knows a shuffled value is the same in all lanes: it keeps it in uniform
    // registers.
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, t = lane % 4;
    const int block = warpgroup * 8 * kTiles + warp * 2;
    const Place place{warpgroup,
                      lane,
                      lane / 4,
                      block,
                      block * kBlockBytes + 8 * kKeyBytes + lane / 4 * 4,
                      operand(shared_address(s.keys[0]) + warpgroup * 8 * kTiles * kBlockBytes)};
    uint32_t n = 0;  // stages so far
    int quads = 0;
    for_each_group(part, UnitsOf{p}, [&](int quad, int first, int stop) {
      char* const out = sink.begin(quad, first, stop);
      const int buffer = quads % kBuffers;
      barrier_wait(&s.queries_full[buffer], quads / kBuffers & 1);
      ++quads;
      const uint32_t queries = operand(shared_address(s.queries[buffer]));
      const uint32_t weights = shared_address(s.weights[buffer]);
      const int64_t row_bytes = p.out_stride * 4;
      const int count = p.counts[2 * quad], second = p.counts[2 * quad + 1];
      const int here = stages_of(count, 0, first, stop).count;
      if (second < 0) {
        score_list<Sum>(p, s, place, n, weights, queries, out + t * row_bytes, t, here);
      } else {
        const int then = stages_of(second, units(count), first, stop).count;
#pragma unroll 1
        for (int pair = 0; pair < 2; ++pair) {
          const int row = pair * 2 + t / 2;
          score_list<PairSum<Heads>>(p, s, place, n, weights + pair * 2 * shared_weights(Heads) * 4,
                                     queries + pair * PairSum<Heads>::kN * kKeyBytes / 16,
                                     out + row * row_bytes, row, pair == 0 ? here : then);
        }
      }
      warp_arrive(&s.queries_empty[buffer], lane);
      sink.end();
    });
  }

  template <int N>
  struct Count {
    static constexpr int value = N;
  };

  // Scores `stages` stages of a list from stage n on. `row`, whose logits begin at `out`, is this
  // thread's of the quad.
  template <typename S>
  static __device__ __forceinline__ void score_list(const Params& p, Shared& s, const Place& place,
                                                    uint32_t& n, uint32_t weights, uint32_t queries,
                                                    char* out, int row, int stages) {
    using Chains = typename S::Chains;
    constexpr bool kHalves = S::kN == 256;  // an MMA has half the heads, not all of a tile
    constexpr int kN = kHalves ? S::kN / 2 : S::kN;
    using Sums = float[kN / 2];
    S head;
    head.load_shared(weights);
    out += place.g * 4;
    uint32_t own_places = shared_address(&s.at_bytes[0][place.block][row]);
    asm volatile("" : "+l"(out), "+r"(own_places));  // kept, not computed again for each tile

    auto score = [&](Sums& d, uint32_t stage, int tile, int half) {
      const uint32_t a =
          place.keys + stage % kStages * (kStageBytes / 16) + tile * 8 * (kBlockBytes / 16);
      const uint32_t b = queries + half * kN * kKeyBytes / 16;
      // 0, but the compiler cannot tell, and keeps the accumulators where they are: no spills. With
      // 32 heads it would copy them, which costs more than the few spills.
      const int zero = kHalves ? p.quads >> 31 : 0;
      wgmma_use(d);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kKeyBytes / 32; ++k) {
        Wgmma<E, kN, kBlockBytes, 8 * kKeyBytes>::issue(d, a + k * 16, b + k * 16,
                                                        k > 0 ? 1 : zero);
      }
      wgmma_commit();
    };
    auto wait = [&](uint32_t stage) {
      barrier_wait(&s.full[stage % kStages], stage / kStages & 1);
    };
    // Writes the logits of a tile of stage n; with the last one the stage is free.
    auto write = [&](const Chains& chains, int tile) {
      const uint8_t* from = s.keys[n % kStages] + place.scales + tile * 8 * kBlockBytes;
      const float scale[2] = {*reinterpret_cast<const float*>(from),
                              *reinterpret_cast<const float*>(from + kBlockBytes)};
      const uint32_t places = own_places + n % kStages * sizeof(s.at_bytes[0]);
      const int at[2] = {load_shared(places + tile * 8 * kRows * 4),
                         load_shared(places + (tile * 8 + 1) * kRows * 4)};
      if (tile == kTiles - 1) {
        warp_arrive(&s.empty[n % kStages], place.lane);  // scales and places have been read
        ++n;
      }
      if constexpr (S::kRows == kRows) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float logit = S::finish(chains, r) * scale[r];
          if (at[r] >= 0) store(out + uint32_t(at[r]), logit);
        }
      } else {  // two lanes have both logits, each writes one
        const float logits[2] = {S::finish(chains, 0) * scale[0], S::finish(chains, 1) * scale[1]};
        const bool odd = place.lane & 1;
        const int mine = odd ? at[1] : at[0];
        if (mine >= 0) store(out + uint32_t(mine), odd ? logits[1] : logits[0]);
      }
    };

    auto score_stages = [&](auto count) {
      constexpr int kCount = decltype(count)::value;
      Sums one, two;
      Chains chains;
      wait(n);
      score(one, n, 0, 0);
      score(two, n, !kHalves, kHalves);
#pragma unroll
      for (int stage = 0; stage < kCount; ++stage) {
        const bool last = stage + 1 == kCount;
        if constexpr (!kHalves) {
          const uint32_t next = n + 1;
          wgmma_wait<1>();
          wgmma_use(one);
          head.template add<0>(one, chains);
          if (!last) wait(next);
          if (!last) score(one, next, 0, 0);
          write(chains, 0);
          wait_but_one(last);
          wgmma_use(two);
          head.template add<0>(two, chains);
          if (!last) score(two, next, 1, 0);
          write(chains, 1);
        } else {
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            const bool end = last && tile == kTiles - 1;
            const uint32_t next = tile == kTiles - 1 ? n + 1 : n;
            wgmma_wait<1>();
            wgmma_use(one);
            head.template add<0>(one, chains);
            if (!end && next != n) wait(next);
            if (!end) score(one, next, (tile + 1) % kTiles, 0);
            wait_but_one(end);
            wgmma_use(two);
            head.template add<S::kN / 16>(two, chains);
            if (!end) score(two, next, (tile + 1) % kTiles, 1);
            write(chains, tile);
          }
        }
      }
    };
#pragma unroll 1
    for (; stages >= kUnitStages; stages -= kUnitStages) score_stages(Count<kUnitStages>{});
#pragma unroll 1
    for (; stages > 0; --stages) score_stages(Count<1>{});
  }

  static __device__ __forceinline__ int load_shared(uint32_t at) {
    int value;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
    return value;
  }

  // To global memory, which the compiler cannot tell of a pointer that it must not compute again.
  static __device__ __forceinline__ void store(char* at, float value) {
    asm volatile("st.global.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(at)), "f"(value)
                 : "memory");
  }

  // Waits until at most one MMA is under way, or none.
  static __device__ __forceinline__ void wait_but_one(bool none) {
    if (none) {
      wgmma_wait<0>();
    } else {
      wgmma_wait<1>();
    }
  }
};

}  // namespace sparse_indexer
