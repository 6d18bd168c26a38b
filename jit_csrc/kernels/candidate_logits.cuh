// SPDX-License-Identifier: Apache-2.0
// candidate_logits: the logits of each row at its candidate blocks, in the order of its list; see
// candidate_scoring.cuh.
#pragma once

#include "kernels/candidate_scoring.cuh"

namespace sparse_indexer {

template <Element E, int Heads>
struct CandidateLogits {
  using Params = CandidateLogitsParams;
  static constexpr int kKeyBytes = E == Element::kE4m3 ? 128 : 256;
  // Weights of so many heads are kept in registers: more do not fit beside two MMAs' sums.
  static constexpr int kKept = E == Element::kE4m3 && Heads == 32 ? 28 : Heads;
  using Scoring = CandidateScoring<E, Heads, candidate_logits_config::stages(kKeyBytes, Heads),
                                   kKept, /*LeastUnits=*/0>;
  static constexpr int kThreads = 128 + Scoring::kConsumers;
  static constexpr int kMinBlocks = 1;
  using Shared = typename Scoring::Shared;
  static_assert(sizeof(Shared) <= candidate_logits_config::shared_bytes(kKeyBytes, Heads),
                "the launch's");

  static __device__ void run(const Params& p) {
    extern __shared__ __align__(128) uint8_t raw[];
    Shared& s = *reinterpret_cast<Shared*>(raw);
    if (threadIdx.x == 0) Scoring::init_barriers(s);
    find_part<kThreads>(p.quads, typename Scoring::UnitsOf{p}, s.part);
    __syncthreads();  // barriers and part are there
    if (threadIdx.x < 128) {
      fewer_registers<40>();
      Scoring::produce(p, s, s.part);
    } else {
      more_registers<232>();
      Rows rows{p};
      Scoring::consume(p, s, s.part, rows);
    }
  }

  // Logits go to the quad's rows of p.out.
  struct Rows {
    const Params& p;
    __device__ __forceinline__ char* begin(int quad, int, int) const {
      return reinterpret_cast<char*>(p.out + int64_t(quad) * Scoring::kRows * p.out_stride);
    }
    __device__ __forceinline__ void end() const {}
  };
};

}  // namespace sparse_indexer
