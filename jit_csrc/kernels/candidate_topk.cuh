// SPDX-License-Identifier: Apache-2.0
// candidate_topk: the k best positions of each row among its candidates: what `topk` selects of
// what `candidate_logits` writes, bit for bit. Only e4m3.
//
// The logits of a quad go to a slot in memory. As soon as they are complete, one warpgroup of the
// CTA selects of its four rows, or two of two each, whose logits are in the L2 yet, while the
// others score the next quad. A CTA has two slots in turns for the quads that it scores alone.
//
// The work is cut into equal parts, so a part may begin and end within a quad. Such a quad is
// selected by the CTA that scores its last units, from a third slot. All CTAs that score units of
// it write there, and count the units in a counter of the selecting CTA.
//
// No CTA waits forever. CTAs take their parts in the order in which they begin to run, so those
// with the earlier units of a quad have begun before the one that selects it. Scoring waits for no
// other CTA; only the last thing that a CTA's selectors do is to wait for the units of its third
// slot. So CTAs that have begun finish scoring, whether or not others find a place meanwhile.
#pragma once

#include "kernels/candidate_scoring.cuh"
#include "kernels/candidate_topk.h"
#include "kernels/topk.cuh"

namespace sparse_indexer {

template <int Heads>
struct CandidateTopk {
  using Params = CandidateTopkParams;
  // Weights of so many heads are kept in registers: of more, ptxas spills.
  static constexpr int kKept = Heads == 32 ? 4 : 48;
  // A quad without candidates has a unit, too: its rows are written.
  using Scoring = CandidateScoring<Element::kE4m3, Heads, candidate_topk_config::stages(Heads),
                                   kKept, /*LeastUnits=*/1>;
  using UnitsOf = typename Scoring::UnitsOf;
  static constexpr int kFirstSelector = 128 + Scoring::kConsumers;
  static constexpr int kSelectors = candidate_topk_config::kSelectors;
  static constexpr int kSlots = candidate_topk_config::kSlots;
  static constexpr int kAlone = kSlots - 1;  // slots of quads that a CTA scores alone
  static constexpr int kGroups = candidate_topk_config::groups(Heads);
  static constexpr int kThreads = candidate_topk_config::threads(Heads);
  static_assert(kThreads == kFirstSelector + kSelectors * kGroups, "one warpgroup produces");
  static constexpr int kMinBlocks = 1;
  static constexpr int kConsumerWarps = Scoring::kConsumers / 32;
  // Registers of a thread, and at the launch.
  static constexpr int kOfProducer = kGroups == 2 ? 32 : 40;
  static constexpr int kOfConsumer = kGroups == 2 ? 176 : 208;
  static constexpr int kOfSelector = kGroups == 2 ? 48 : 56;
  static constexpr int kAtLaunch = 65536 / kThreads / 8 * 8;
  static_assert(128 * kOfProducer + Scoring::kConsumers * kOfConsumer +
                        kSelectors * kGroups * kOfSelector <=
                    kThreads * kAtLaunch,
                "else setmaxnreg waits forever");

  // What a group of selectors does.
  struct Turn {
    Part left;   // of the part
    int shared;  // the quad whose earlier units other CTAs score, if it was met; -1
    int alone;   // quads so far that the CTA scored alone
    int quad;    // this turn's; -1: none is left
    int slot;    // where its logits are
  };

  struct Shared {
    typename Scoring::Shared scoring;
    Turn turns[kGroups];
    uint64_t written[kAlone], free[kAlone];  // of slots
    int number;                              // of the CTA's part
    int64_t end;                             // the part's last unit, plus one
    int64_t total;                           // units of all quads
  };
  static_assert(sizeof(Shared) <= candidate_topk_config::scoring_bytes(Heads), "the launch's");

  static __device__ void run(const Params& p) {
    extern __shared__ __align__(128) uint8_t raw[];
    Shared& s = *reinterpret_cast<Shared*>(raw);
    if (threadIdx.x == 0) {
      for (int i = 0; i < kAlone; ++i) {
        barrier_init(&s.written[i], kConsumerWarps * kWarpArrivals);
        barrier_init(&s.free[i], kGroups);
      }
      Scoring::init_barriers(s.scoring);
      s.number = atomicAdd(&p.counters[0], 1);
      // The last to begin leaves a zero for the next launch.
      if (s.number == static_cast<int>(gridDim.x) - 1) p.counters[0] = 0;
    }
    __syncthreads();  // the number is known
    const int64_t total = find_part<kThreads>(p.logits.quads, UnitsOf{p.logits}, s.scoring.part,
                                              static_cast<unsigned>(s.number));
    if (threadIdx.x == 0) s.total = total, s.end = total * (s.number + 1) / gridDim.x;
    __syncthreads();  // barriers and part are there
    if (threadIdx.x < 128) {
      fewer_registers<kOfProducer>();
      Scoring::produce(p.logits, s.scoring, s.scoring.part);
    } else if (threadIdx.x < kFirstSelector) {
      more_registers<kOfConsumer>();
      Slots slots{p, s};
      Scoring::consume(p.logits, s.scoring, s.scoring.part, slots);
    } else {
      fewer_registers<kOfSelector>();
      select(p, s);
    }
  }

  static __device__ __forceinline__ float* slot_of(const Params& p, int number, int slot) {
    const int64_t row = (int64_t(number) * kSlots + slot) * Scoring::kRows;
    return p.logits.out + row * p.logits.out_stride;
  }

  // Where consumers write, and how they say so.
  struct Slots {
    const Params& p;
    Shared& s;
    int alone = 0;         // quads so far that this CTA scores alone
    uint64_t* written;     // of this quad's slot; null: it is shared
    int owner = 0, units;  // of a shared quad: the part with its last unit; units of it here

    __device__ __forceinline__ char* begin(int quad, int first, int stop) {
      const int of_quad = UnitsOf{p.logits}(quad);
      int slot = kAlone;
      owner = s.number, units = stop - first, written = nullptr;
      if (units == of_quad) {
        slot = alone % kAlone;
        // For the barrier's sake also of the first round, in which the slots are free.
        if (alone >= kAlone) barrier_wait(&s.free[slot], alone / kAlone - 1 & 1);
        written = &s.written[slot];
        ++alone;
      } else {
        // Part c ends at unit total * (c + 1) / CTAs, rounded down.
        const int64_t after = s.end + of_quad - stop;  // the quad's last unit, plus one
        while (s.total * (owner + 1) < after * gridDim.x) ++owner;
      }
      return reinterpret_cast<char*>(slot_of(p, owner, slot));
    }

    __device__ __forceinline__ void end() const {
      const int lane = threadIdx.x % 32;
      if (written != nullptr) {
        warp_arrive(written, lane);
      } else {
        __syncwarp();  // the warp's logits are written
        if (lane == 0) __threadfence(), atomicAdd(&p.counters[1 + owner], units);
      }
    }
  };

  using Group = PartOfCta<kSelectors, kFirstSelector, kGroups, 1>;

  // A row of a slot, selected by a group of selectors.
  struct RowOfSlot : Group {
    using By = PastL1;  // what the consumers, perhaps of other CTAs, wrote
    static constexpr int kBinBits = candidate_topk_config::kBinBits;
    const float* at;
    unsigned number;

    __device__ __forceinline__ RowOfSlot(const float* at, unsigned number)
        : at(at), number(number) {}
    __device__ __forceinline__ unsigned row() const { return number; }
    template <typename Key>
    __device__ __forceinline__ const Key* keys(const TopkParams&) const {
      return at;
    }
    __device__ __forceinline__ uint32_t* shared() const {
      extern __shared__ __align__(128) uint8_t raw[];
      constexpr int kBytes = candidate_topk_config::kSelectBytes / kGroups;
      return reinterpret_cast<uint32_t*>(raw + candidate_topk_config::scoring_bytes(Heads) +
                                         this->group() * kBytes);
    }
  };

  // The part's quads whose last unit is in it, in the order in which they are complete: those that
  // the CTA scores alone, then the one that it shares; each group selects its rows of them. One
  // thread of it looks for the next and waits for it; what it remembers is in shared memory, since
  // the selection takes all registers.
  static __device__ __forceinline__ void select(const Params& p, Shared& s) {
    Turn& turn = s.turns[Group().group()];
    if (Group().thread() == 0) turn = {s.scoring.part, -1, 0, -1, kAlone};
    while (true) {
      if (Group().thread() == 0) next(p, s, turn);
      Group().sync();  // the turn is known, and all its logits are written
      if (turn.quad < 0) return;
#pragma unroll 1
      for (int r = Group().group(); r < Scoring::kRows; r += kGroups) {
        const float* at = slot_of(p, s.number, turn.slot) + r * p.logits.out_stride;
        const auto row = static_cast<unsigned>(turn.quad * Scoring::kRows + r);
        const RowOfSlot task(at, row);
        RowTopk<float, RowOfSlot>::run(p.topk, task);
        task.sync();  // the row's logits and shared memory have been read, and the turn
      }
      if (Group().thread() == 0 && turn.slot < kAlone) barrier_arrive(&s.free[turn.slot]);
    }
  }

  // Of one thread.
  static __device__ __forceinline__ void next(const Params& p, Shared& s, Turn& turn) {
    Part part = turn.left;
    int quad = -1;
    while (part.left > 0 && quad < 0) {
      const int units = UnitsOf{p.logits}(part.group);
      const int stop = min(units, part.unit + part.left);
      if (stop == units) (part.unit == 0 ? quad : turn.shared) = part.group;
      part.left -= stop - part.unit;
      ++part.group, part.unit = 0;
    }
    turn.left = part;
    if (quad >= 0) {
      turn.slot = turn.alone % kAlone;
      barrier_wait(&s.written[turn.slot], turn.alone / kAlone & 1);
      ++turn.alone;
    } else if (turn.shared >= 0) {
      quad = turn.shared;
      turn.shared = -1, turn.slot = kAlone;
      int* counter = &p.counters[1 + s.number];
      const int all = kConsumerWarps * UnitsOf{p.logits}(quad);
      while (load_acquire(counter) < all) __nanosleep(200);
      // The last group leaves a zero for the next launch.
      if (atomicAdd(counter, 1) == all + kGroups - 1) *counter = 0;
    }
    turn.quad = quad;
  }

  static __device__ __forceinline__ int load_acquire(const int* at) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                 : "=r"(value)
                 : "l"(__cvta_generic_to_global(at))
                 : "memory");
    return value;
  }
};

}  // namespace sparse_indexer
