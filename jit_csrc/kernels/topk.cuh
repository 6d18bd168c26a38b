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
// One CTA a row of keys. A sample of the row gives a bound that most likely somewhat more than k
// keys reach. One pass compares all keys with it and lists the columns that do, in order; the list
// is settled in shared memory. If the list overflows because the bound itself, which is a key of
// the row, is found often, it is the k-th key, and the row is compared once more. Otherwise, and
// where no list would fit, the k-th key is found digit by digit: slower, still exact, with no
// buffer that could overflow.
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
  static constexpr int kWarps = Threads / 32;
  static constexpr int kRun = topk_config::kRun;  // columns whose order a thread settles
  static constexpr int kWarpColumns = 32 * kRun;
  static constexpr int kChunk = Threads * kRun;  // columns compared at a time
  static constexpr int kBinBits = topk_config::kBinBits;
  static constexpr int kBins = topk_config::kBins;
  static constexpr int kSampled = topk_config::kSampled;
  static constexpr uint32_t kForced = 0xffffffffu;  // above every key
  static constexpr uint32_t kLowest = 0x007fffffu;  // -inf
  static_assert(kRun == 32, "a thread's marks are one word");
  static_assert(kVector == topk_config::kSamples, "a sample is a load");
  using Bins = Histogram<Threads>;
  using Four32 = uint32_t[kVector];

  struct Kth {
    uint32_t key;  // the k-th largest, but for the forced column
    int need;      // how many columns with this key are selected: the first ones
  };

  // Shared memory: a histogram, then the list.
  static __device__ uint32_t* shared() {
    extern __shared__ uint4 bytes[];
    return reinterpret_cast<uint32_t*>(bytes);
  }
  static __device__ Bins histogram() { return Bins(shared()); }               // [kBins]
  static __device__ uint32_t* list_keys() { return shared() + kBins; }        // [p.list]
  __device__ uint32_t* list_columns() const { return list_keys() + p.list; }  // [p.list]

  const Params& p;
  const Key* row;
  int columns;

  // The column that is selected whatever it holds; -1: none.
  __device__ __forceinline__ int forced() const { return p.force_last ? columns - 1 : -1; }

  // Whether the row starts at a multiple of a vector's bytes.
  __device__ __forceinline__ bool vectors() const {
    return reinterpret_cast<uint64_t>(row) % (kVector * sizeof(Key)) == 0;
  }

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
    const bool only_forced = p.force_last && p.k == 1;
    if (columns <= p.k || only_forced) {  // no key is read
      int32_t* out = p.out + r * p.out_stride;
      for (int i = threadIdx.x; i < p.k; i += Threads) {
        out[i] = columns > p.k ? place(p, r, columns - 1) : i < columns ? place(p, r, i) : p.unused;
      }
      return;
    }
    const Key* row = static_cast<const Key*>(p.keys) + int64_t(blockIdx.x) * p.stride;
    Topk{p, row, columns}.select();
  }

  // The row of out that is this CTA's; -1: none. Asked again where it is needed: registers are
  // what is short.
  static __device__ __forceinline__ int64_t row_number(const Params& p) {
    return p.rows != nullptr ? __ldg(p.rows + blockIdx.x) : int64_t(blockIdx.x);
  }

  // How many columns are selected, but for the forced one.
  __device__ __forceinline__ int wanted() const { return p.k - p.force_last; }

  __device__ __forceinline__ void select() const {
    uint32_t bound = kLowest;
    int reached = columns;
    if (columns <= p.list) {
      for (int i = threadIdx.x; i < columns; i += Threads) list_columns()[i] = i;
    } else if (p.list > 0) {
      bound = sampled_bound();
      reached = list_from(bound);
    }
    if (reached >= p.k && reached <= p.list) {
      write_listed(settle_listed(bound, reached), reached);
      return;
    }
    if (reached > p.list) {  // perhaps the bound is the k-th key
      const int above = count_from(bound + 1);
      if (above < p.k) {
        write({bound, p.k - above});
        return;
      }
    }
    write(kth_by_digits());
  }

  // 1. The bound ----------------------------------------------------------------------------------

  // Of the row's groups of 32 columns, at most kSampled a thread, four columns each: not always the
  // same four, since what a column holds may depend on its place in a block.
  __device__ __forceinline__ uint32_t sampled_bound() const {
    __shared__ uint32_t smallest;
    const int groups = columns / kRun, sampled = min(groups, kSampled * Threads);
    uint32_t key[kSampled][kVector];
#pragma unroll
    for (int s = 0; s < kSampled; ++s) {
      const int i = static_cast<int>(threadIdx.x) + s * Threads;
      if (i < sampled) {
        const int group = groups == sampled ? i : static_cast<int>(int64_t(i) * groups / sampled);
        const int four = (group ^ group >> 3 ^ group >> 6) & 7;
        load(group * kRun + four * kVector, key[s]);
      } else {
#pragma unroll
        for (uint32_t& k : key[s]) k = 0;
      }
    }
    if (threadIdx.x == 0) smallest = kForced;
    const Bins bins = histogram();
    bins.template clear<kBins>();
    for_each_sample(key, [&](uint32_t k) { bins.count(k >> 32 - kBinBits); });
    // The bound's rank in the sample: 4.5 deviations on the safe side.
    const float expected = float(p.k) * float(sampled) * kVector / float(columns);
    const int rank = static_cast<int>(expected + 4.5f * sqrtf(expected)) + 3;
    if (rank > sampled * kVector) return kLowest;
    const Found upper = bins.template find<kBins>(rank);
    bins.template clear<kBins>();
    for_each_sample(key, [&](uint32_t k) {
      if (k >> 32 - kBinBits == upper.bin) bins.count(k >> 32 - 2 * kBinBits & (kBins - 1));
    });
    const Found lower = bins.template find<kBins>(upper.need);
    const uint32_t digits = static_cast<uint32_t>(upper.bin) << kBinBits | lower.bin;
    uint32_t low = kForced;
    for_each_sample(key, [&](uint32_t k) {
      if (k >> 32 - 2 * kBinBits == digits) low = min(low, k);
    });
    low = min_of_warp(low);
    if (threadIdx.x % 32 == 0) atomicMin(&smallest, low);
    __syncthreads();  // the smallest is known
    return smallest;
  }

  template <typename Visit>
  static __device__ __forceinline__ void for_each_sample(const uint32_t (&key)[kSampled][kVector],
                                                         Visit visit) {
#pragma unroll
    for (int s = 0; s < kSampled; ++s) {
      if (key[s][0] == 0) continue;
#pragma unroll
      for (uint32_t k : key[s]) visit(k);
    }
  }

  // Four ordered keys of a row.
  __device__ __forceinline__ void load(int c, Four32& key) const {
    if (vectors()) {
      ordered(load_four_of_line(row + c), key);
    } else {
#pragma unroll
      for (int j = 0; j < kVector; ++j) key[j] = load_ordered(row + c + j);
    }
  }

  // 2. The list -----------------------------------------------------------------------------------

  // This thread's columns of a chunk, 32 from the one returned in `first` on: a bit for each whose
  // key is at least `bound`, and for the forced one.
  template <int Ahead>
  __device__ __forceinline__ uint32_t reaching(int chunk, uint32_t bound, int& first) const {
    const int lane = threadIdx.x % 32;
    const int of_warp = chunk + static_cast<int>(threadIdx.x / 32) * kWarpColumns;
    first = of_warp + lane * kRun;
    const int left = columns - first;  // of the row
    if (of_warp >= columns) return 0;
    uint32_t bits = ~0u;
    if (bound > kLowest) bits = run_of_lane(compared<Ahead>(of_warp, from_ordered(bound)));
    if (left < kRun) bits &= left > 0 ? (1u << left) - 1 : 0;
    if (p.force_last && left > 0 && left <= kRun) bits |= 1u << (left - 1);
    return bits;
  }

  // Bit 4 v + j: whether column of_warp + 128 v + 4 lane + j is at least `bound`. Undefined for
  // columns past the row's end.
  template <int Ahead>  // loads in flight
  __device__ __forceinline__ uint32_t compared(int of_warp, float bound) const {
    const int first = of_warp + static_cast<int>(threadIdx.x) % 32 * kVector;
    if (!vectors()) return compared_singly(first, bound);
    if (of_warp + kWarpColumns <= columns) return compared_vectors<Ahead, true>(first, bound);
    uint32_t bits = compared_vectors<1, false>(first, bound);
    const int whole = columns / kVector * kVector - first;  // columns from here to the last few
    if (whole >= 0 && whole % (32 * kVector) == 0) {
      const int from = whole / 32;
      bits = (bits & ((1u << from) - 1)) | compared_singly(first, bound, from);
    }
    return bits;
  }

  // Of whole vectors of the row; `All`: of a warp whose vectors are.
  template <int Ahead, bool All>
  __device__ __forceinline__ uint32_t compared_vectors(int first, float bound) const {
    constexpr int kVectors = kRun / kVector, kStep = 32 * kVector;
    const Key* at = row + first;
    const int last = columns - kVector - first;  // where the last vector may begin
    uint32_t bits = 0;
#pragma unroll(Ahead == 1 ? 1 : kVectors)
    for (int v = 0; v < kVectors; v += Ahead) {
      Four<Key> raw[Ahead];
#pragma unroll
      for (int a = 0; a < Ahead; ++a) {
        if (!All) raw[a] = {};
        if (All || (v + a) * kStep <= last) raw[a] = load_four(at + (v + a) * kStep);
      }
#pragma unroll
      for (int a = 0; a < Ahead; ++a) {
        float key[kVector];
        floats(raw[a], key);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          if (key[j] >= bound) bits |= 1u << ((v + a) * kVector + j);
        }
      }
    }
    return bits;
  }

  // From bit `from` on, a load a column.
  __device__ __forceinline__ uint32_t compared_singly(int first, float bound, int from = 0) const {
    uint32_t bits = 0;
#pragma unroll 4
    for (int i = from; i < kRun; ++i) {
      const int c = first + i / kVector * 32 * kVector + i % kVector;
      if (c >= columns) break;
      if (load_float(row + c) >= bound) bits |= 1u << i;
    }
    return bits;
  }

  // From the bits of `compared` to those of 32 consecutive columns a lane, in order of lanes.
  static __device__ __forceinline__ uint32_t run_of_lane(uint32_t bits) {
    // Eight lanes transpose their 8 x 8 groups of four bits.
    const int lane = threadIdx.x % 32;
    bits = __byte_perm(bits, __shfl_xor_sync(~0u, bits, 4), lane & 4 ? 0x3276 : 0x5410);
    bits = __byte_perm(bits, __shfl_xor_sync(~0u, bits, 2), lane & 2 ? 0x3715 : 0x6240);
    const uint32_t other = __shfl_xor_sync(~0u, bits, 1);
    constexpr uint32_t kLow = 0x0f0f0f0f;
    bits = lane & 1 ? (bits & ~kLow) | (other >> 4 & kLow) : (bits & kLow) | (other & kLow) << 4;
    return __shfl_sync(~0u, bits, lane % 4 * 8 + lane / 4);
  }

  // Lists the columns whose key is at least `bound`, as many as the list takes; how many they are.
  __device__ __forceinline__ int list_from(uint32_t bound) const {
    int listed = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < columns; chunk += kChunk) {
      int first, total;
      uint32_t mine = reaching<4>(chunk, bound, first);
      int at = listed + exclusive_scan<kWarps>(__popc(mine), &total);
      listed += total;
      for (; mine != 0 && at < p.list; mine &= mine - 1) {
        list_columns()[at++] = first + __ffs(mine) - 1;
      }
    }
    return listed;
  }

  // Reads the keys of the listed columns, all at least `bound`, and finds the k-th.
  __device__ __forceinline__ Kth settle_listed(uint32_t bound, int count) const {
    constexpr int kFew = 32;  // keys that a warp settles
    __shared__ uint32_t largest, few[kFew];
    __shared__ int num_few;
    if (threadIdx.x == 0) largest = bound, num_few = 0;
    __syncthreads();  // those, and the list of columns is complete
    uint32_t high = bound;
#pragma unroll 2
    for (int i = threadIdx.x; i < count; i += Threads) {
      const int c = static_cast<int>(list_columns()[i]);
      const uint32_t key = c == forced() ? kForced : load_ordered(row + c);
      list_keys()[i] = key;
      if (c != forced()) high = max(high, key);
    }
    high = max_of_warp(high);
    if (threadIdx.x % 32 == 0) atomicMax(&largest, high);
    const Bins bins = histogram();
    bins.template clear<kBins>();  // and the largest and the list of keys are complete

    uint32_t low = bound, span = largest - bound;  // the k-th is in [low, low + span]
    int need = wanted();
    while (true) {
      const int shift = max(0, 32 - kBinBits - __clz(span));
#pragma unroll 1
      for (int i = threadIdx.x; i < count; i += Threads) {
        const uint32_t above = list_keys()[i] - low;  // large for keys below
        if (above <= span) bins.count(above >> shift);
      }
      const Found found = bins.template find<kBins>(need);
      low += static_cast<uint32_t>(found.bin) << shift;
      span = (1u << shift) - 1;
      need = found.need;
      if (shift == 0) return {low, need};
      if (found.count <= kFew) break;
      bins.template clear<kBins>();
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += Threads) {
      const uint32_t key = list_keys()[i];
      if (key - low <= span) few[atomicAdd(&num_few, 1)] = key;
    }
    __syncthreads();  // the few are complete
    // Every warp for itself: a lane's key is the k-th if the keys above it and those equal to it
    // enclose what is needed.
    const int lane = threadIdx.x % 32, n = num_few;
    const uint32_t mine = lane < n ? few[lane] : 0;
    int above = 0, equal = 0;
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
      const uint32_t key = few[i];
      above += key > mine;
      equal += key == mine;
    }
    const bool found = lane < n && above < need && need <= above + equal;
    const int from = __ffs(__ballot_sync(~0u, found)) - 1;
    return {__shfl_sync(~0u, mine, from), need - __shfl_sync(~0u, above, from)};
  }

  // Writes the selected ones of the listed columns.
  __device__ __forceinline__ void write_listed(const Kth& kth, int count) const {
    const int per = (count + Threads - 1) / Threads;  // neighbors, since equal keys go by column
    const int first = threadIdx.x * per, stop = min(first + per, count);
    uint32_t counts = 0;
#pragma unroll 1
    for (int i = first; i < stop; ++i) {
      const uint32_t key = list_keys()[i];
      counts += (key > kth.key) | (key == kth.key) << 16;
    }
    const uint32_t before = exclusive_scan<kWarps>(counts);
    Writer writer(*this, kth.need, before & 0xffff, before >> 16);
#pragma unroll 1
    for (int i = first; i < stop; ++i) {
      const uint32_t key = list_keys()[i];
      if (key >= kth.key) writer.write(list_columns()[i], key == kth.key);
    }
  }

  // 3. Without a list -----------------------------------------------------------------------------

  // Columns whose key is at least `bound`, the forced one among them.
  __device__ __forceinline__ int count_from(uint32_t bound) const {
    int count = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < columns; chunk += kChunk) {
      int first, total;
      exclusive_scan<kWarps>(__popc(reaching<1>(chunk, bound, first)), &total);
      count += total;
    }
    return count;
  }

  __device__ __forceinline__ Kth kth_by_digits() const {
    const Bins bins = histogram();
    uint32_t prefix = 0;
    int need = wanted();
#pragma unroll 1
    for (int shift = 32 - kBinBits, above = 0;; above = shift, shift = max(0, shift - kBinBits)) {
      bins.template clear<kBins>();
#pragma unroll 4
      for (int c = threadIdx.x; c < columns; c += Threads) {
        if (c == forced()) continue;
        const uint32_t key = load_ordered(row + c);
        if (above == 0 || key >> above == prefix >> above) {
          bins.count((key >> shift) - (prefix >> shift));
        }
      }
      const Found found = bins.template find<kBins>(need);
      prefix += static_cast<uint32_t>(found.bin) << shift;
      need = found.need;
      if (shift == 0) return {prefix, need};
    }
  }

  // Writes the columns above the k-th key and the first ones equal to it.
  __device__ __forceinline__ void write(const Kth& kth) const {
    uint32_t before_above = 0, before_equal = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < columns; chunk += kChunk) {
      int first;
      uint32_t left = reaching<1>(chunk, kth.key, first);
      const uint32_t higher = reaching<1>(chunk, kth.key + 1, first);
      const uint32_t same = left & ~higher;
      uint32_t total;
      const uint32_t before =
          exclusive_scan<kWarps>(uint32_t(__popc(higher) | __popc(same) << 16), &total);
      Writer writer(*this, kth.need, before_above + (before & 0xffff),
                    before_equal + (before >> 16));
      before_above += total & 0xffff, before_equal += total >> 16;
      for (; left != 0; left &= left - 1) {
        const int bit = __ffs(left) - 1;
        writer.write(first + bit, same >> bit & 1);
      }
    }
  }

  // 4. Output -------------------------------------------------------------------------------------

  // Writes columns, in order, behind all selected ones before them.
  struct Writer {
    const Topk& topk;
    int r;
    int32_t* out;
    uint32_t need, above, equal;

    __device__ __forceinline__ Writer(const Topk& topk, int need, uint32_t above, uint32_t equal)
        : topk(topk),
          r(static_cast<int>(row_number(topk.p))),
          out(topk.p.out + row_number(topk.p) * topk.p.out_stride),
          need(need),
          above(above),
          equal(equal) {}

    __device__ __forceinline__ void write(int column, bool is_equal) {
      if (!is_equal || equal < need) {
        out[above + min(equal, need)] = place(topk.p, r, column);
      }
      equal += is_equal;
      above += !is_equal;
    }
  };

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
