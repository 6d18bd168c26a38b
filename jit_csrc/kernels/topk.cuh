// SPDX-License-Identifier: Apache-2.0
// topk: the k best columns of each row, exact, in ascending order.
//
// Larger key first, then lower column; -0 equals +0; NaN counts as -inf, which still beats what is
// past the row's length. The result does not depend on the launch or on other rows.
//
// One CTA a row. A histogram of the upper 12 bits finds the bin of the k-th largest key. The
// columns of that bin, usually few, are listed, and the list is settled in shared memory by two
// more digits. The upper 16 bits of the row's keys stay in shared memory, so global memory is read
// once; a slab of 32 columns a thread at a time, each thread then marks its own columns, and prefix
// sums over the threads give every selected column its place. A bin too full for the list (ties,
// NaN, narrow ranges) is narrowed to 16 bits first. If that does not do, either its keys are all
// the same, or the row is read again for each digit: slower, still exact, with no buffer that could
// overflow. So are rows too long for shared memory.
#pragma once

#include "kernels/topk.h"
#include "sparse_indexer/order.cuh"
#include "sparse_indexer/scan.cuh"

namespace sparse_indexer {

template <typename Key, int Threads>
struct Topk {
  using Params = TopkParams;
  static constexpr int kThreads = Threads;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 750
  static constexpr int kMinBlocks = 1024 / Threads;  // threads an SM has
#else
  static constexpr int kMinBlocks = Threads == 512 ? 3 : 1;
#endif
  static constexpr int kVector = 4;  // columns of a load
  static constexpr int kTile = Threads * kVector;
  static constexpr int kWarps = Threads / 32;
  static constexpr int kOwned = topk_config::kOwned;
  static constexpr int kSlab = Threads * kOwned;  // columns settled at a time
  static constexpr int kTilesOfSlab = kSlab / kTile;
  static constexpr int kCoarseBins = topk_config::kCoarseBins;
  static constexpr int kDigitBins = topk_config::kDigitBins;
  static constexpr int kDigitBits = topk_config::kDigitBits;
  static constexpr int kListed = topk_config::kListed;
  static constexpr uint32_t kForced = 0xffffffffu;
  static_assert(32 - topk_config::kCoarseBits == 2 * kDigitBits, "three digits are a key");
  static_assert(kOwned == 32, "a thread's marks are one word");

  // The bin that holds the threshold, columns still to take from it, and columns in it.
  struct Found {
    int bin;
    int need;
    int count;
  };

  // Shared memory: the histogram, later the list; a digit's histogram; upper halves, see `slot`.
  static __device__ uint32_t* shared() {
    extern __shared__ uint4 bytes[];
    return reinterpret_cast<uint32_t*>(bytes);
  }
  static __device__ uint32_t* histogram() { return shared(); }               // [kCoarseBins]
  static __device__ uint32_t* list_keys() { return shared(); }               // [kListed]
  static __device__ uint32_t* list_columns() { return shared() + kListed; }  // [kListed]
  static __device__ uint32_t* digits() { return shared() + kCoarseBins; }    // [kDigitBins]
  static __device__ uint16_t* kept() {  // [slabs of a row, or 1][kSlab]
    return reinterpret_cast<uint16_t*>(shared() + kCoarseBins + kDigitBins);
  }

  const Params& p;
  const Key* row;
  int columns;
  int forced;    // this column is selected whatever it holds; -1: none
  bool vectors;  // the row starts at a multiple of a vector's bytes

  static __device__ void run(const Params& p) {
    const int64_t r = blockIdx.x;
    const int64_t seen = p.lens[r] > 0 ? p.lens[r] : 0;
    const int64_t counted = (seen + p.per_column - 1) / p.per_column;
    const int columns = counted < p.width ? static_cast<int>(counted) : p.width;
    if (columns <= p.k) {  // all of them; no key is read
      int32_t* out = p.out + r * p.out_stride;
      for (int i = threadIdx.x; i < p.k; i += Threads) out[i] = i < columns ? place(p, r, i) : -1;
      return;
    }
    const Key* row = static_cast<const Key*>(p.keys) + r * p.stride;
    Topk self{p, row, columns, p.force_last ? columns - 1 : -1,
              reinterpret_cast<uint64_t>(row) % (kVector * sizeof(Key)) == 0};
    self.select();
  }

  // 0. Keys ---------------------------------------------------------------------------------------

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

  __device__ uint32_t load(int c) const { return c == forced ? kForced : load_ordered(row + c); }

  // Where column c's upper half is. A thread owns 32 columns, four 16-byte vectors in a row of 64
  // bytes; the vectors are permuted so that neither writing columns nor reading owned ones
  // conflicts.
  static __device__ int slot(int c) {
    const int owner = c / kOwned, vector = c / 8 % 4;
    return owner * kOwned + ((vector ^ (owner >> 1 & 3)) * 8) + c % 8;
  }

  // Calls visit(first column, keys) for all columns from `first` on, a few loads ahead.
  template <typename Visit>
  __device__ __forceinline__ void for_each_key(int first, int stop, Visit visit) const {
    constexpr int kAhead = 2;
    for (int base = first; base < stop; base += kAhead * kTile) {
      uint32_t key[kAhead][kVector];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        load(base + a * kTile + static_cast<int>(threadIdx.x) * kVector, key[a]);
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int c = base + a * kTile + static_cast<int>(threadIdx.x) * kVector;
        if (c < stop) visit(c, key[a]);
      }
    }
  }

  // The upper halves of this thread's columns of a slab, 8 at a time: visit(bit, half).
  template <typename Visit>
  __device__ __forceinline__ void for_each_owned(const uint16_t* slab, Visit visit) const {
    const int owner = threadIdx.x;
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const uint4 x =
          *reinterpret_cast<const uint4*>(slab + owner * kOwned + ((v ^ (owner >> 1 & 3)) * 8));
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        visit(v * 8 + w * 2, words[w] & 0xffff);
        visit(v * 8 + w * 2 + 1, words[w] >> 16);
      }
    }
  }

  // 1. Digits -------------------------------------------------------------------------------------

  template <int Bins>
  __device__ void clear(uint32_t* bins) const {
    for (int b = threadIdx.x; b < Bins; b += Threads) bins[b] = 0;
    __syncthreads();  // before anyone counts
  }

  // The bin, from the top, that holds the need-th column.
  template <int Bins>
  __device__ __noinline__ Found find(const uint32_t* bins, int need) const {
    constexpr int kPer = (Bins + Threads - 1) / Threads;
    __shared__ Found found;
    __syncthreads();  // all have counted
    const int top = Bins - 1 - static_cast<int>(threadIdx.x) * kPer;
    uint32_t sum = 0;
#pragma unroll
    for (int j = 0; j < kPer; ++j) sum += top - j >= 0 ? bins[top - j] : 0;
    const uint32_t above = exclusive_scan<kWarps>(sum);
    int left = need - static_cast<int>(above);
    if (left > 0 && left <= static_cast<int>(sum)) {  // one thread
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        const int count = top - j >= 0 ? static_cast<int>(bins[top - j]) : 0;
        if (left > 0 && left <= count) found = {top - j, left, count};
        left -= count;
      }
    }
    __syncthreads();  // `found` is written, the bins have been read
    return found;
  }

  // 2. Selection ----------------------------------------------------------------------------------

  __device__ void select() {
    clear<kCoarseBins>(histogram());
    const int slabs = (columns + kSlab - 1) / kSlab;
    for_each_key(0, p.kept ? slabs * kSlab : columns, [&](int c, const uint32_t (&key)[kVector]) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (key[j] != 0) atomicAdd(&histogram()[key[j] >> 2 * kDigitBits], 1u);
      }
      if (p.kept) keep(c, key);
    });
    const Found coarse = find<kCoarseBins>(histogram(), p.k);

    if (p.kept) {
      // Bits of the upper half that are settled: 12, or all 16 if the bin is too full.
      int shift = 4;
      uint32_t bin = coarse.bin;
      Found tied = coarse;
      if (tied.count > kListed) {
        clear<16>(digits());
        for (int s = 0; s < columns; s += kSlab) {
          for_each_owned(kept() + s, [&](int bit, uint32_t half) {
            if (half >> 4 == bin && half != 0) atomicAdd(&digits()[half & 15], 1u);
          });
        }
        tied = find<16>(digits(), coarse.need);
        bin = bin << 4 | tied.bin;
        shift = 0;
      }
      if (tied.count <= kListed) {
        settle_listed(bin, shift, tied);
        write_kept(min((bin + 1) << shift, 0xffffu) - 1, 0, 0);  // what is selected is all ones
        return;
      }
      if (same_keys(bin)) {
        write_kept(bin, bin, tied.need);
        return;
      }
    }
    // Digit by digit from global memory.
    clear<kDigitBins>(digits());
    count_digit(coarse.bin, 2 * kDigitBits, kDigitBits);
    const Found middle = find<kDigitBins>(digits(), coarse.need);
    const uint32_t upper = static_cast<uint32_t>(coarse.bin) << kDigitBits | middle.bin;
    clear<kDigitBins>(digits());
    count_digit(upper, kDigitBits, 0);
    const Found last = find<kDigitBins>(digits(), middle.need);
    write_again(upper << kDigitBits | last.bin, last.need);
  }

  // Keeps the upper halves of four columns; 0 past the row's end.
  __device__ void keep(int c, const uint32_t (&key)[kVector]) {
    *reinterpret_cast<uint2*>(kept() + slot(c)) =
        make_uint2(__byte_perm(key[0], key[1], 0x7632), __byte_perm(key[2], key[3], 0x7632));
  }

  // Counts one digit of the keys that agree with `prefix` above it.
  __device__ void count_digit(uint32_t prefix, int prefix_shift, int shift) const {
    for_each_key(0, columns, [&](int, const uint32_t (&key)[kVector]) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (key[j] != 0 && key[j] >> prefix_shift == prefix) {
          atomicAdd(&digits()[key[j] >> shift & (kDigitBins - 1)], 1u);
        }
      }
    });
  }

  // Whether all keys with this upper half are the same; always so for bfloat16.
  __device__ bool same_keys(uint32_t half) const {
    if constexpr (sizeof(Key) == 2) return true;
    bool any = false, same = true;
    uint32_t first = 0;
    for_each_key(0, columns, [&](int, const uint32_t (&key)[kVector]) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (key[j] >> 16 != half) continue;
        same &= !any || key[j] == first;
        first = key[j];
        any = true;
      }
    });
    __shared__ uint32_t smallest, largest;
    if (threadIdx.x == 0) smallest = ~0u, largest = 0;
    __syncthreads();  // both are initialized
    if (any) atomicMin(&smallest, first), atomicMax(&largest, same ? first : ~0u);
    __syncthreads();  // both are complete
    return smallest == largest;
  }

  // Lists the columns in `bin` in column order, finds which of them are selected, and replaces
  // their upper halves: all ones if selected, else 0.
  __device__ void settle_listed(uint32_t bin, int shift, const Found& tied) {
    uint32_t listed = 0;
    for (int s = 0; s < columns; s += kSlab) {
      uint32_t mine = 0;
      for_each_owned(kept() + s, [&](int bit, uint32_t half) {
        mine |= uint32_t(half >> shift == bin && half != 0) << bit;
      });
      uint32_t total;
      uint32_t at = listed + exclusive_scan<kWarps, uint32_t>(__popc(mine), &total);
      listed += total;
      for (; mine != 0; mine &= mine - 1) {
        list_columns()[at++] = s + threadIdx.x * kOwned + __ffs(mine) - 1;
      }
    }
    clear<kDigitBins>(digits());  // and the list of columns is complete
    const int count = tied.count;
    for (int i = threadIdx.x; i < count; i += Threads) {
      const uint32_t key = load(static_cast<int>(list_columns()[i]));
      list_keys()[i] = key;
      atomicAdd(&digits()[key >> kDigitBits & (kDigitBins - 1)], 1u);
    }
    const Found middle = find<kDigitBins>(digits(), tied.need);
    clear<kDigitBins>(digits());
    for (int i = threadIdx.x; i < count; i += Threads) {
      const uint32_t key = list_keys()[i];
      if ((key >> kDigitBits & (kDigitBins - 1)) == middle.bin) {
        atomicAdd(&digits()[key & (kDigitBins - 1)], 1u);
      }
    }
    const Found last = find<kDigitBins>(digits(), middle.need);
    const uint32_t low = static_cast<uint32_t>(middle.bin) << kDigitBits | last.bin;
    constexpr uint32_t kLow = (1u << 2 * kDigitBits) - 1;

    constexpr int kPer = kListed / Threads;  // neighbors, since equal keys go by column
    uint32_t equals = 0;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int i = static_cast<int>(threadIdx.x) * kPer + j;
      equals += i < count && (list_keys()[i] & kLow) == low;
    }
    uint32_t rank = exclusive_scan<kWarps>(equals);
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int i = static_cast<int>(threadIdx.x) * kPer + j;
      if (i >= count) break;
      const uint32_t key = list_keys()[i] & kLow;
      const bool equal = key == low;
      const bool selected = key > low || (equal && rank < static_cast<uint32_t>(last.need));
      rank += equal;
      const int c = static_cast<int>(list_columns()[i]);
      kept()[slot(c)] = selected ? 0xffff : 0;
    }
    __syncthreads();  // before the kept halves are read, and the list's place is taken
  }

  // 3. Ordered output -----------------------------------------------------------------------------

  // Kept rows: columns whose upper half is above `above`, and the first `need` that equal `equal`.
  __device__ void write_kept(uint32_t above, uint32_t equal, int need) {
    uint32_t before_above = 0, before_equal = 0;
    for (int s = 0; s < columns; s += kSlab) {
      uint32_t higher = 0, same = 0;
      for_each_owned(kept() + s, [&](int bit, uint32_t half) {
        higher |= uint32_t(half > above) << bit;
        if (need > 0) same |= uint32_t(half == equal) << bit;
      });
      write_slab(s, higher, same, need, before_above, before_equal);
    }
    finish();
  }

  // Any rows: the keys are read once more, and compared with the whole threshold.
  __device__ void write_again(uint32_t threshold, int need) {
    uint32_t before_above = 0, before_equal = 0;
    for (int s = 0; s < columns; s += kSlab) {
      // 2: above, 1: equal, 0: neither; in place of the slab's upper halves.
      for_each_key(s, s + kSlab, [&](int c, const uint32_t (&key)[kVector]) {
        uint32_t mark[kVector];
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          mark[j] = key[j] > threshold ? 2 : key[j] == threshold ? 1 : 0;
        }
        *reinterpret_cast<uint2*>(kept() + slot(c - s)) =
            make_uint2(mark[0] | mark[1] << 16, mark[2] | mark[3] << 16);
      });
      __syncthreads();  // the marks are complete
      uint32_t higher = 0, same = 0;
      for_each_owned(kept(), [&](int bit, uint32_t mark) {
        higher |= (mark >> 1) << bit;
        same |= (mark & 1) << bit;
      });
      write_slab(s, higher, same, need, before_above, before_equal);  // its scan holds barriers
    }
    finish();
  }

  // Writes the selected columns of a slab: each goes behind all selected before it.
  __device__ __forceinline__ void write_slab(int s, uint32_t higher, uint32_t same, int need,
                                             uint32_t& before_above, uint32_t& before_equal) const {
    const uint32_t counts = __popc(higher) | __popc(same) << 16;
    uint32_t total;
    const uint32_t prefix = exclusive_scan<kWarps>(counts, &total);
    uint32_t rank_above = before_above + (prefix & 0xffff);
    uint32_t rank_equal = before_equal + (prefix >> 16);
    before_above += total & 0xffff;
    before_equal += total >> 16;
    int32_t* out = p.out + blockIdx.x * p.out_stride;
    for (uint32_t left = higher | same; left != 0; left &= left - 1) {
      const int bit = __ffs(left) - 1;
      const bool is_equal = same >> bit & 1;
      if (!is_equal || rank_equal < static_cast<uint32_t>(need)) {
        out[rank_above + min(rank_equal, static_cast<uint32_t>(need))] =
            s + static_cast<int>(threadIdx.x) * kOwned + bit;
      }
      rank_equal += is_equal;
      rank_above += !is_equal;
    }
  }

  // Maps the columns that were written to where they go.
  __device__ void finish() const {
    if (p.blocks == nullptr && p.request_of_row == nullptr) return;
    __syncthreads();  // the row's columns are written, by this CTA
    int32_t* out = p.out + blockIdx.x * p.out_stride;
    for (int i = threadIdx.x; i < p.k; i += Threads) out[i] = place(p, blockIdx.x, out[i]);
  }

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
};

}  // namespace sparse_indexer
