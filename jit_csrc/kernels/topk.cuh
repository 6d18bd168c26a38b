// SPDX-License-Identifier: Apache-2.0
// topk: the k best columns of each row, exact, in ascending order.
//
// Larger key first, then lower column; -0 equals +0; NaN counts as -inf, which still beats what is
// past the row's length. The result does not depend on the launch or on other rows.
//
// One CTA a row. The threshold, the k-th largest key, is found by radix selection in four digits of
// 11, 5, 11 and 5 bits. Keys are read from global memory once: their upper halves stay in shared
// memory, which settles all but the columns that tie with the threshold in it, and those few are
// read again (from L2). Nothing is collected into a buffer that could overflow, so a row of equal
// keys takes the same path, only with all of its columns read again.
// Rows that do not fit in shared memory (Kept = false) are read from global memory in each pass.
#pragma once

#include "kernels/topk.h"
#include "sparse_indexer/order.cuh"
#include "sparse_indexer/scan.cuh"

namespace sparse_indexer {

template <typename Key, bool Kept>
struct Topk {
  using Params = TopkParams;
  static constexpr int kThreads = topk_config::kThreads;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 750
  static constexpr int kMinBlocks = 2;  // 1024 threads an SM
#else
  static constexpr int kMinBlocks = Kept ? 3 : 2;
#endif
  static constexpr int kVector = topk_config::kVector;
  static constexpr int kTile = topk_config::kTile;
  static constexpr int kWarps = topk_config::kWarps;
  static constexpr int kBins = topk_config::kBins;
  static constexpr int kFineBits = topk_config::kFineBits;
  static constexpr int kFineBins = 1 << kFineBits;
  static constexpr bool kHasLower = sizeof(Key) == 4;  // bfloat16 has nothing below its upper half
  static constexpr uint32_t kForced = 0xffffffffu;

  // A digit's bin that holds the threshold, and what is left to take of it.
  struct Found {
    int bin;
    int need;   // columns still to take from this bin
    int count;  // columns in it
  };

  const Key* row;
  uint32_t* histogram;  // [kBins], shared
  ushort4* kept;        // [tiles, kThreads], shared: a thread's four upper halves
  int columns;
  int forced;    // this column is selected whatever it holds; -1: none
  bool vectors;  // the row starts at a multiple of a vector's bytes

  // The ordered keys of columns c ... c + 3; 0, below every key, past the end.
  __device__ void load(int c, uint32_t (&key)[kVector]) const {
    if (vectors && c + kVector <= columns) {
      load_ordered(row + c, key);
    } else {
#pragma unroll
      for (int j = 0; j < kVector; ++j) key[j] = c + j < columns ? load_ordered(row + c + j) : 0;
    }
    if (c <= forced && forced < c + kVector) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) key[j] = c + j == forced ? kForced : key[j];
    }
  }

  // The upper halves of the keys of a tile's columns of this thread.
  __device__ void upper(int tile, uint32_t (&half)[kVector]) const {
    if constexpr (Kept) {
      const ushort4 u = kept[tile * kThreads + threadIdx.x];
      half[0] = u.x, half[1] = u.y, half[2] = u.z, half[3] = u.w;
    } else {
      load((tile * kThreads + threadIdx.x) * kVector, half);
#pragma unroll
      for (int j = 0; j < kVector; ++j) half[j] >>= 16;
    }
  }

  // The lower half of one column's key.
  __device__ uint32_t lower(int c) const {
    return c == forced ? kForced & 0xffff : load_ordered(row + c) & 0xffff;
  }

  __device__ void clear(int bins) {
    for (int b = threadIdx.x; b < bins; b += kThreads) histogram[b] = 0;
    __syncthreads();  // before anyone counts
  }

  // The bin of the histogram, counted from its top, that holds the need-th column.
  template <int Bins>
  __device__ Found find(int need) {
    constexpr int kPer = (Bins + kThreads - 1) / kThreads;
    __shared__ Found found;
    __syncthreads();  // all have counted
    uint32_t counts[kPer];
    uint32_t sum = 0;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int bin = Bins - 1 - (static_cast<int>(threadIdx.x) * kPer + j);
      counts[j] = bin >= 0 ? histogram[bin] : 0;
      sum += counts[j];
    }
    uint32_t above = exclusive_scan<kWarps>(sum);
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int left = need - static_cast<int>(above);
      if (left > 0 && left <= static_cast<int>(counts[j])) {
        found = {Bins - 1 - (static_cast<int>(threadIdx.x) * kPer + j), left,
                 static_cast<int>(counts[j])};
      }
      above += counts[j];
    }
    __syncthreads();  // `found` is written, the histogram has been read
    const Found result = found;
    return result;
  }

  // Where a selected column goes.
  static __device__ int32_t place(const Params& p, int64_t r, int c) {
    int position = c;
    if (p.blocks != nullptr) position = p.blocks[r * p.blocks_stride + (c >> 3)] * 8 + (c & 7);
    if (p.request_of_row == nullptr) return position;
    const int32_t request = p.request_of_row[r];
    if (p.page_table != nullptr) {
      const int32_t page = p.page_table[request * p.table_stride + position / p.page_size];
      return page * p.page_size + position % p.page_size;
    }
    return position + p.request_starts[request];
  }

  static __device__ void run(const Params& p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    const int64_t r = blockIdx.x;
    int32_t* out = p.out + r * p.out_stride;
    const int64_t seen = p.lens[r] > 0 ? p.lens[r] : 0;
    const int64_t counted = (seen + p.per_column - 1) / p.per_column;
    const int columns = counted < p.width ? static_cast<int>(counted) : p.width;

    if (columns <= p.k) {  // all of them; no key is read
      for (int i = threadIdx.x; i < p.k; i += kThreads) out[i] = i < columns ? place(p, r, i) : -1;
      return;
    }
    Topk self;
    self.row = static_cast<const Key*>(p.keys) + r * p.stride;
    self.histogram = reinterpret_cast<uint32_t*>(bytes);
    self.kept = reinterpret_cast<ushort4*>(bytes + kBins * 4);
    self.columns = columns;
    self.forced = p.force_last ? columns - 1 : -1;
    self.vectors = reinterpret_cast<uint64_t>(self.row) % (kVector * sizeof(Key)) == 0;
    self.select(p, r, out);
  }

  __device__ void select(const Params& p, int64_t r, int32_t* out) {
    const int tiles = (columns + kTile - 1) / kTile;

    // 1. Upper half of the threshold.
    clear(kBins);
    count_coarse(tiles);
    const Found coarse = find<kBins>(p.k);
    clear(kFineBins);
    for (int i = 0; i < tiles; ++i) {
      uint32_t half[kVector];
      upper(i, half);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (static_cast<int>(half[j] >> kFineBits) == coarse.bin) {
          atomicAdd(&histogram[half[j] & (kFineBins - 1)], 1u);
        }
      }
    }
    Found tied = find<kFineBins>(coarse.need);
    const uint32_t threshold = coarse.bin << kFineBits | tied.bin;

    // 2. Its lower half, if it takes one to choose among the columns that tie in the upper half.
    uint32_t low_threshold = 0;
    const bool by_lower = kHasLower && tied.need < tied.count;
    if (by_lower) {
      clear(kBins);
      count_lower(tiles, threshold, -1);
      const Found low_coarse = find<kBins>(tied.need);
      clear(kFineBins);
      count_lower(tiles, threshold, low_coarse.bin);
      tied = find<kFineBins>(low_coarse.need);
      low_threshold = low_coarse.bin << kFineBits | tied.bin;
    }

    // 3. Compaction in column order. A column that is above the threshold, or the n-th that equals
    // it with n < need, goes behind all such columns before it.
    auto* before = reinterpret_cast<uint64_t*>(histogram);  // [tiles of a round, warps]
    const int warp = threadIdx.x / 32;
    const uint32_t lanes_below = (1u << (threadIdx.x % 32)) - 1;
    uint64_t base = 0;  // columns above | columns equal << 32, before this round
    for (int round = 0; round < tiles; round += topk_config::kCountedTiles) {
      const int stop = min(tiles, round + topk_config::kCountedTiles);
      for (int i = round; i < stop; ++i) {
        uint32_t above, equal;
        classify(i, threshold, low_threshold, by_lower, above, equal);
        const uint32_t total_above = sum_of_ballots(above, ~0u);
        const uint32_t total_equal = sum_of_ballots(equal, ~0u);
        if (threadIdx.x % 32 == 0) {
          before[(i - round) * kWarps + warp] = total_above | uint64_t(total_equal) << 32;
        }
      }
      __syncthreads();  // the counts are complete
      constexpr int kPer = topk_config::kCountedTiles * kWarps / kThreads;
      const int counts = (stop - round) * kWarps;
      uint64_t own[kPer];
      uint64_t sum = 0;
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        const int c = threadIdx.x * kPer + j;
        own[j] = c < counts ? before[c] : 0;
        sum += own[j];
      }
      uint64_t total;
      uint64_t prefix = base + exclusive_scan<kWarps>(sum, &total);
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        const int c = threadIdx.x * kPer + j;
        if (c < counts) before[c] = prefix;
        prefix += own[j];
      }
      base += total;
      __syncthreads();  // the prefixes are complete
      for (int i = round; i < stop; ++i) {
        const uint64_t prefix_here = before[(i - round) * kWarps + warp];
        uint32_t above, equal;
        classify(i, threshold, low_threshold, by_lower, above, equal);
        uint32_t rank_above = static_cast<uint32_t>(prefix_here) + sum_of_ballots(above, lanes_below);
        uint32_t rank_equal =
            static_cast<uint32_t>(prefix_here >> 32) + sum_of_ballots(equal, lanes_below);
        const uint32_t need = tied.need;
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const bool is_above = above >> j & 1, is_equal = equal >> j & 1;
          if (is_above || (is_equal && rank_equal < need)) {
            const int c = (i * kThreads + threadIdx.x) * kVector + j;
            out[rank_above + min(rank_equal, need)] = place(p, r, c);
          }
          rank_above += is_above;
          rank_equal += is_equal;
        }
      }
      __syncthreads();  // the prefixes have been read
    }
  }

  // Histogram of the upper 11 bits; keeps the upper halves if they are kept.
  __device__ void count_coarse(int tiles) {
    constexpr int kAhead = 4;  // tiles whose loads are in flight
    for (int first = 0; first < tiles; first += kAhead) {
      uint32_t key[kAhead][kVector];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        load(((first + a) * kThreads + threadIdx.x) * kVector, key[a]);
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (first + a >= tiles) break;
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const uint32_t bin = key[a][j] >> (32 - topk_config::kCoarseBits);
          if (key[a][j] != 0) atomicAdd(&histogram[bin], 1u);
        }
        if constexpr (Kept) {
          kept[(first + a) * kThreads + threadIdx.x] =
              make_ushort4(key[a][0] >> 16, key[a][1] >> 16, key[a][2] >> 16, key[a][3] >> 16);
        }
      }
    }
  }

  // Histogram of the lower halves of the columns that tie with the threshold in their upper half:
  // of the upper 11 bits (coarse < 0), or of the lower 5 of those in that coarse bin.
  __device__ void count_lower(int tiles, uint32_t threshold, int coarse) {
    for (int i = 0; i < tiles; ++i) {
      uint32_t half[kVector];
      upper(i, half);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (half[j] != threshold) continue;
        const uint32_t low = lower((i * kThreads + threadIdx.x) * kVector + j);
        if (coarse < 0) {
          atomicAdd(&histogram[low >> kFineBits], 1u);
        } else if (static_cast<int>(low >> kFineBits) == coarse) {
          atomicAdd(&histogram[low & (kFineBins - 1)], 1u);
        }
      }
    }
  }

  // Bits j = 0 ... 3: this thread's column j of the tile is above, or equals, the threshold.
  __device__ void classify(int tile, uint32_t threshold, uint32_t low_threshold, bool by_lower,
                           uint32_t& above, uint32_t& equal) const {
    uint32_t half[kVector];
    upper(tile, half);
    above = equal = 0;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      above |= uint32_t(half[j] > threshold) << j;
      if (half[j] != threshold) continue;
      if (!by_lower) {
        equal |= 1u << j;
      } else {
        const uint32_t low = lower((tile * kThreads + threadIdx.x) * kVector + j);
        above |= uint32_t(low > low_threshold) << j;
        equal |= uint32_t(low == low_threshold) << j;
      }
    }
  }

  // Over the lanes of `lanes`: how many of the four low bits are set.
  static __device__ uint32_t sum_of_ballots(uint32_t bits, uint32_t lanes) {
    const int count = __popc(bits);
    if (!__any_sync(~0u, count)) return 0;
    uint32_t sum = 0;
#pragma unroll
    for (int b = 0; b < 3; ++b) {
      sum += __popc(__ballot_sync(~0u, count >> b & 1) & lanes) << b;
    }
    return sum;
  }
};

}  // namespace sparse_indexer
