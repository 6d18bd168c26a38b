// SPDX-License-Identifier: Apache-2.0
// topk: the k best columns of each row, exact, in ascending order.
//
// Larger key first, then lower column; -0 equals +0; NaN counts as -inf, which still beats what is
// past the row's length. The result does not depend on the launch or on other rows.
//
// With `blocks` a column is one of the 8 positions of a candidate block, and `lens` is either how
// many columns count or, of a row that sees more positions than there are columns, its
// compressed_lens: all its columns are then those of candidates, of which the last is the row's
// newest block and ends where the row's sight does.
//
// One CTA a row of keys. A histogram of the upper 12 bits finds the bin of the k-th largest key.
// The columns of that bin, usually few, are listed, and the list is settled in shared memory by two
// more digits. The upper 16 bits of the row's keys stay in shared memory, so global memory is read
// once; a slab of 32 columns a thread at a time, each thread then marks its own columns, and prefix
// sums over the threads give every selected column its place. A bin too full for the list (ties,
// NaN, narrow ranges) is narrowed to 16 bits first. If that does not do, either its keys are all
// the same, or the row is read again for each digit: slower, still exact, with no buffer that could
// overflow. So are rows too long for shared memory.
#pragma once

#include "kernels/topk.h"
#include "sparse_indexer/histogram.cuh"
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
  using Bins = Histogram<Threads>;
  using Four32 = uint32_t[kVector];
  static_assert(32 - topk_config::kCoarseBits == 2 * kDigitBits, "three digits are a key");
  static_assert(kOwned == 32, "a thread's marks are one word");

  // Shared memory: the histogram, later the list; a digit's histogram; upper halves, see `slot`.
  static __device__ uint32_t* shared() {
    extern __shared__ uint4 bytes[];
    return reinterpret_cast<uint32_t*>(bytes);
  }
  static __device__ uint32_t* coarse_bins() { return shared(); }               // [kCoarseBins]
  static __device__ uint32_t* list_keys() { return shared(); }                 // [kListed]
  static __device__ uint32_t* list_columns() { return shared() + kListed; }    // [kListed]
  static __device__ uint32_t* digit_bins() { return shared() + kCoarseBins; }  // [kDigitBins]
  static __device__ uint16_t* kept() {  // [slabs of a row, or 1][kSlab]
    return reinterpret_cast<uint16_t*>(shared() + kCoarseBins + kDigitBins);
  }

  const Params& p;
  const Key* row;
  int columns;
  int forced;    // this column is selected whatever it holds; -1: none
  bool vectors;  // the row starts at a multiple of a vector's bytes

  static __device__ void run(const Params& p) {
    const int64_t r = row_number(p);
    if (r < 0) return;
    const int len = p.lens[blockIdx.x];
    const int64_t seen = len > 0 ? len : 0;
    const int64_t counted = (seen + p.per_column - 1) / p.per_column;
    int columns = counted < p.width ? static_cast<int>(counted) : p.width;
    if (p.blocks != nullptr) {
      const int unseen = static_cast<int>(-seen & 7);  // positions of the newest block
      columns = min(columns, (p.width + 7) / 8 * 8 - unseen);
    }
    if (columns <= p.k) {  // all of them; no key is read
      int32_t* out = p.out + r * p.out_stride;
      for (int i = threadIdx.x; i < p.k; i += Threads) {
        out[i] = i < columns ? place(p, r, i) : p.unused;
      }
      return;
    }
    const Key* row = static_cast<const Key*>(p.keys) + int64_t(blockIdx.x) * p.stride;
    const Topk self{p, row, columns, p.force_last ? columns - 1 : -1,
                    reinterpret_cast<uint64_t>(row) % (kVector * sizeof(Key)) == 0};
    self.select();
  }

  // The row of out that is this CTA's; -1: none. Asked again where it is needed: registers are
  // what is short.
  static __device__ __forceinline__ int64_t row_number(const Params& p) {
    return p.rows != nullptr ? __ldg(p.rows + blockIdx.x) : int64_t(blockIdx.x);
  }

  // 0. Keys ---------------------------------------------------------------------------------------

  __device__ uint32_t load(int c) const { return c == forced ? kForced : load_ordered(row + c); }

  // Where column c's upper half is. A thread owns 32 columns, four 16-byte vectors in a row of 64
  // bytes; the vectors are permuted so that neither writing columns nor reading owned ones
  // conflicts.
  static __device__ __forceinline__ uint32_t slot(uint32_t c) {
    return c ^ (c >> 6 & 3) << 3;  // bits 6 and 7: the owner's number / 2; bits 3 and 4: the vector
  }

  // Calls visit(first column, four keys, whole) for all columns of [first, stop). Past the row's
  // end a key is 0, below every key; `whole` says that none is.
  template <typename Visit>
  __device__ __forceinline__ void for_each_key(int first, int stop, Visit visit) const {
    constexpr int kAhead = 2;  // loads in flight
    int base = first;
    if (vectors) {
      const int ordinary = min(stop, forced >= 0 ? forced : columns);
      for (; base + kAhead * kTile <= ordinary; base += kAhead * kTile) {
        const int c = base + static_cast<int>(threadIdx.x) * kVector;
        Four<Key> raw[kAhead];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) raw[a] = load_four(row + c + a * kTile);
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          uint32_t key[kVector];
          ordered(raw[a], key);
          visit(c + a * kTile, key, true);
        }
      }
    }
    for (; base < stop; base += kTile) {
      const int c = base + static_cast<int>(threadIdx.x) * kVector;
      uint32_t key[kVector];
#pragma unroll
      for (int j = 0; j < kVector; ++j) key[j] = c + j < columns ? load(c + j) : 0;
      if (c < stop) visit(c, key, false);
    }
  }

  // This thread's columns of a slab, 8 at a time: visit(first column, their upper halves by pairs).
  template <typename Visit>
  __device__ __forceinline__ void for_each_owned(int slab, Visit visit) const {
    const uint16_t* owned = kept() + slab + threadIdx.x * kOwned;
#pragma unroll 1  // registers are what is short
    for (int v = 0; v < 4; ++v) {
      const uint4 x = *reinterpret_cast<const uint4*>(owned + (v ^ (threadIdx.x >> 1 & 3)) * 8);
      const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
      visit(v * 8, pairs);
    }
  }

  // Bits of this thread's columns of a slab whose upper half is at least `from`, below 0x10000.
  __device__ __forceinline__ uint32_t owned_from(int slab, uint32_t from) const {
    uint32_t bits = 0;
    const uint32_t shifted = from << 16;
    for_each_owned(slab, [&](int first, const uint32_t (&pairs)[4]) {
      uint32_t eight = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (pairs[i] << 16 >= shifted) eight |= 1u << 2 * i;
        if (pairs[i] >= shifted) eight |= 2u << 2 * i;
      }
      bits |= eight << first;
    });
    return bits;
  }

  // 2. Selection ----------------------------------------------------------------------------------

  __device__ __forceinline__ void select() const {
    const Bins histogram(coarse_bins()), digits(digit_bins());
    histogram.template clear<kCoarseBins>();
    const int slabs = (columns + kSlab - 1) / kSlab;
    for_each_key(0, p.kept ? slabs * kSlab : columns, [&](int c, const Four32& key, bool whole) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (whole || key[j] != 0) histogram.count(key[j] >> 2 * kDigitBits);
      }
      if (p.kept) keep(c, key);
    });
    const Found coarse = histogram.template find<kCoarseBins>(p.k);

    if (p.kept) {
      // Bits of the upper half that are settled: 12, or all 16 if the bin is too full.
      int shift = 4;
      uint32_t bin = coarse.bin;
      Found tied = coarse;
      if (tied.count > kListed) {
        digits.template clear<16>();
        for (int s = 0; s < columns; s += kSlab) {
          for_each_owned(s, [&](int, const uint32_t (&pairs)[4]) {
#pragma unroll
            for (uint32_t pair : pairs) {
              if ((pair & 0xffff) >> 4 == bin) digits.count(pair & 15);
              if (pair >> 20 == bin) digits.count(pair >> 16 & 15);
            }
          });
        }
        tied = digits.template find<16>(coarse.need);
        bin = bin << 4 | tied.bin;
        shift = 0;
      }
      if (tied.count <= kListed) {
        settle_listed(bin << shift, (bin + 1) << shift, tied.need, tied.count);
        write_kept(min((bin + 1) << shift, 0xffffu), 0);  // what is selected is all ones
        return;
      }
      if (same_keys(bin)) {
        write_kept(bin + 1, tied.need);
        return;
      }
    }
    select_again(p, row, columns, forced, vectors, coarse.bin, coarse.need);
  }

  // Digit by digit from global memory. A call of its own: the usual path keeps its registers.
  static __device__ __noinline__ void select_again(const Params& p, const Key* row, int columns,
                                                   int forced, bool vectors, uint32_t bin,
                                                   int need) {
    const Topk self{p, row, columns, forced, vectors};
    const Bins digits(digit_bins());
    digits.template clear<kDigitBins>();
    self.count_digit(digits, bin, 2 * kDigitBits, kDigitBits);
    const Found middle = digits.template find<kDigitBins>(need);
    const uint32_t upper = bin << kDigitBits | middle.bin;
    digits.template clear<kDigitBins>();
    self.count_digit(digits, upper, kDigitBits, 0);
    const Found last = digits.template find<kDigitBins>(middle.need);
    self.write_again(upper << kDigitBits | last.bin, last.need);
  }

  // Keeps the upper halves of four columns; 0 past the row's end.
  __device__ __forceinline__ void keep(int c, const Four32& key) const {
    *reinterpret_cast<uint2*>(kept() + slot(c)) =
        make_uint2(__byte_perm(key[0], key[1], 0x7632), __byte_perm(key[2], key[3], 0x7632));
  }

  // Counts one digit of the keys that agree with `prefix` above it.
  __device__ __forceinline__ void count_digit(const Bins& digits, uint32_t prefix, int prefix_shift,
                                              int shift) const {
    for_each_key(0, columns, [&](int, const Four32& key, bool) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (key[j] >> prefix_shift == prefix) digits.count(key[j] >> shift & (kDigitBins - 1));
      }
    });
  }

  // Whether all keys with this upper half are the same; always so for bfloat16.
  __device__ __forceinline__ bool same_keys(uint32_t half) const {
    if constexpr (sizeof(Key) == 2) return true;
    bool any = false, same = true;
    uint32_t first = 0;
    for_each_key(0, columns, [&](int, const Four32& key, bool) {
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

  // Lists the columns whose upper half is in [from, to) in column order, finds which of them are
  // selected, and replaces their upper halves: all ones if selected, else 0.
  __device__ __forceinline__ void settle_listed(uint32_t from, uint32_t to, int need,
                                                int count) const {
    const Bins digits(digit_bins());
    uint32_t listed = 0;
    for (int s = 0; s < columns; s += kSlab) {
      uint32_t mine = owned_from(s, from);
      if (to <= 0xffff) mine &= ~owned_from(s, to);
      uint32_t total;
      uint32_t at = listed + exclusive_scan<kWarps, uint32_t>(__popc(mine), &total);
      listed += total;
      for (; mine != 0; mine &= mine - 1) {
        list_columns()[at++] = s + threadIdx.x * kOwned + __ffs(mine) - 1;
      }
    }
    digits.template clear<kDigitBins>();  // and the list of columns is complete
    for (int i = threadIdx.x; i < count; i += Threads) {
      const uint32_t key = load(static_cast<int>(list_columns()[i]));
      list_keys()[i] = key;
      digits.count(key >> kDigitBits & (kDigitBins - 1));
    }
    const Found middle = digits.template find<kDigitBins>(need);
    digits.template clear<kDigitBins>();
    for (int i = threadIdx.x; i < count; i += Threads) {
      const uint32_t key = list_keys()[i];
      if ((key >> kDigitBits & (kDigitBins - 1)) == middle.bin)
        digits.count(key & (kDigitBins - 1));
    }
    const Found last = digits.template find<kDigitBins>(middle.need);
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

  // Kept rows: columns whose upper half is at least `from`, and the first `need` of those one
  // below.
  __device__ __forceinline__ void write_kept(uint32_t from, int need) const {
    uint32_t before_above = 0, before_equal = 0;
    for (int s = 0; s < columns; s += kSlab) {
      const uint32_t higher = owned_from(s, from);
      const uint32_t same = need > 0 ? owned_from(s, from - 1) & ~higher : 0;
      write_slab(s, higher, same, need, before_above, before_equal);
    }
    finish();
  }

  // Any rows: the keys are read once more, and compared with the whole threshold.
  __device__ __forceinline__ void write_again(uint32_t threshold, int need) const {
    uint32_t before_above = 0, before_equal = 0;
    for (int s = 0; s < columns; s += kSlab) {
      // 2: above, 1: equal, 0: neither; in place of the slab's upper halves.
      for_each_key(s, s + kSlab, [&](int c, const Four32& key, bool) {
        uint32_t mark[kVector];
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          mark[j] = key[j] > threshold ? 2 : key[j] == threshold ? 1 : 0;
        }
        *reinterpret_cast<uint2*>(kept() + slot(c - s)) =
            make_uint2(mark[0] | mark[1] << 16, mark[2] | mark[3] << 16);
      });
      __syncthreads();  // the marks are complete
      const uint32_t higher = owned_from(0, 2);
      const uint32_t same = owned_from(0, 1) & ~higher;
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
    int32_t* out = p.out + row_number(p) * p.out_stride;
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
    const int64_t r = row_number(p);
    int32_t* out = p.out + r * p.out_stride;
    for (int i = threadIdx.x; i < p.k; i += Threads) out[i] = place(p, r, out[i]);
  }

  static __device__ int32_t place(const Params& p, int64_t r, int c) {
    int position = c;
    if (p.blocks != nullptr)
      position = p.blocks[blockIdx.x * p.blocks_stride + (c >> 3)] * 8 + (c & 7);
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
