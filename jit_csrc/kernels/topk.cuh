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
// is settled in shared memory. If the list overflows, the smallest key that reaches the bound may
// be so frequent that it is the k-th. If it is not, and where no list would fit, the k-th key is
// found digit by digit: slower, still exact, with no buffer that could overflow.
#pragma once

#include "kernels/topk.h"
#include "sparse_indexer/histogram.cuh"
#include "sparse_indexer/order.cuh"
#include "sparse_indexer/scan.cuh"

namespace sparse_indexer {

// The threads of a CTA and the row that it selects: what RowTopk takes from its Task.
template <int Threads>
struct RowOfCta : Cta<Threads> {
  using By = ReadOnly;                                    // keys are read
  static constexpr int kBinBits = topk_config::kBinBits;  // of a key at a time
  // The row of keys, of lens and of blocks.
  static __device__ __forceinline__ unsigned row() { return blockIdx.x; }
  template <typename Key>
  static __device__ __forceinline__ const Key* keys(const TopkParams& p) {
    return static_cast<const Key*>(p.keys) + int64_t(blockIdx.x) * p.stride;
  }
  // Shared memory, a multiple of 16: a histogram, then the list.
  static __device__ uint32_t* shared() {
    extern __shared__ uint4 bytes[];
    return reinterpret_cast<uint32_t*>(bytes);
  }
};

// All threads of a Task select one row.
template <typename Key, typename Task>
struct RowTopk {
  using Params = TopkParams;
  using By = typename Task::By;
  static constexpr int kThreads = Task::kThreads;
  static constexpr int kVector = 4;  // columns of a load
  static constexpr int kRun = 32;    // columns whose order a thread settles
  static constexpr int kWarpColumns = 32 * kRun;
  static constexpr int kChunk = kThreads * kRun;  // columns compared at a time
  static constexpr int kBinBits = Task::kBinBits;
  static constexpr int kBins = 1 << kBinBits;
  static constexpr int kGroup = topk_config::kGroup;
  static constexpr int kSamples = topk_config::kSamples;
  static constexpr uint32_t kForced = 0xffffffffu;  // above every key
  static constexpr uint32_t kLowest = 0x007fffffu;  // -inf
  static constexpr uint32_t kTop = 0x80000000u;
  static_assert(kSamples * 8 == kGroup, "a group's samples are at one of eight places");
  using Bins = Histogram<Task>;
  using Four32 = uint32_t[kVector];

  struct Kth {
    uint32_t key;  // the k-th largest, but for the forced column
    int need;      // how many columns with this key are selected: the first ones
  };

  __device__ Bins histogram() const { return Bins(task.shared(), task); }     // [kBins]
  __device__ uint32_t* list_keys() const { return task.shared() + kBins; }    // [p.list]
  __device__ uint32_t* list_columns() const { return list_keys() + p.list; }  // [p.list]

  const Params& p;
  const Task task;
  const Key* row;
  int columns;

  // The column that is selected whatever it holds; -1: none.
  __device__ __forceinline__ int forced() const { return p.force_last ? columns - 1 : -1; }

  // Whether the row starts at a multiple of a vector's bytes.
  __device__ __forceinline__ bool vectors() const {
    return reinterpret_cast<uint64_t>(row) % (kVector * sizeof(Key)) == 0;
  }

  static __device__ __forceinline__ void run(const Params& p, const Task& task) {
    const int r = row_number(p, task);
    if (r < 0) return;
    const int len = p.lens[task.row()];
    const uint32_t seen = max(len, 0);
    uint32_t counted = seen;
    if (p.per_column > 1) counted = (seen + p.per_column - 1) / uint32_t(p.per_column);
    int columns = min(static_cast<int>(counted), p.width);
    if (p.blocks != nullptr) {
      const int unseen = static_cast<int>(0u - seen & 7);  // positions of the newest block
      columns = min(columns, (p.width + 7) / 8 * 8 - unseen);
    }
    const bool only_forced = p.force_last && p.k == 1;
    if (columns <= p.k || only_forced) {  // no key is read
      int32_t* out = p.out + int64_t(r) * p.out_stride;
      for (int i = task.thread(); i < p.k; i += kThreads) {
        out[i] = columns > p.k ? place(p, task, r, columns - 1)
                 : i < columns ? place(p, task, r, i)
                               : p.unused;
      }
      return;
    }
    RowTopk{p, task, task.template keys<Key>(p), columns}.select();
  }

  // The row of out that is this task's; -1: none. Asked again where it is needed: registers are
  // what is short.
  static __device__ __forceinline__ int row_number(const Params& p, const Task& task) {
    return p.rows != nullptr ? __ldg(p.rows + task.row()) : static_cast<int>(task.row());
  }

  // How many columns are selected, but for the forced one.
  __device__ __forceinline__ int wanted() const { return p.k - p.force_last; }

  __device__ __forceinline__ void select() const {
    uint32_t bound = kLowest;
    int reached = columns;
    if (columns <= p.list) {
      for (int i = task.thread(); i < columns; i += kThreads) list_columns()[i] = i;
    } else if (p.list > 0) {
      bound = sampled_bound();
      reached = list_from(bound);
    }
    if (reached >= p.k && reached <= p.list) {
      write_listed(settle_listed(bound, reached), reached);
      return;
    }
    if (reached > p.list) {  // perhaps the smallest of them is the k-th key
      const uint32_t least = least_from(bound);
      const int above = count_from(least + 1);
      if (above < p.k) {
        write({least, p.k - above});
        return;
      }
    }
    write(kth_by_digits());
  }

  // 1. The bound ----------------------------------------------------------------------------------

  // Of the row's groups of 64 columns, at most one a thread, eight neighbors each: not always the
  // same eight. A load of 32 bytes, the least that memory is read by.
  __device__ __forceinline__ uint32_t sampled_bound() const {
    const int groups = columns / kGroup, sampled = min(groups, kThreads);
    const bool samples = task.thread() < sampled;
    uint32_t key[kSamples];
    if (samples) {
      int group = task.thread();
      if (sampled < groups) {  // of each stretch one by chance: a row may repeat itself
        const float stretch = float(groups) / float(kThreads);
        const float chance = float(uint32_t(group) * 0x9e3779b1u >> 8) / float(1 << 24);
        const float at = float(group) * stretch + chance * (stretch - 1);
        group = min(static_cast<int>(at), groups - 1);
      }
      load_sample(group * kGroup + (group ^ group >> 3 ^ group >> 6) % 8 * kSamples, key);
    }
    const Bins bins = histogram();
    bins.template clear<kBins>();
    if (samples) {
#pragma unroll
      for (uint32_t k : key) bins.count(k >> 32 - kBinBits);
    }
    // The bound's rank in the sample: 6 deviations on the safe side, since neighbors resemble each
    // other. As in the host's list_length.
    const float expected = float(p.k) * float(sampled * kSamples) / float(columns);
    const int rank = static_cast<int>(expected + 6 * sqrtf(expected)) + 3;
    if (rank > sampled * kSamples) return kLowest;
    const Found upper = bins.template find<kBins>(rank);
    bins.template clear<kBins>();
    if (samples) {
#pragma unroll
      for (uint32_t k : key) {
        bins.count_if(k >> 32 - kBinBits == upper.bin, k >> 32 - 2 * kBinBits & (kBins - 1));
      }
    }
    const Found lower = bins.template find<kBins>(upper.need);
    return static_cast<uint32_t>(upper.bin << kBinBits | lower.bin) << 32 - 2 * kBinBits;
  }

  __device__ __forceinline__ void load_sample(int c, uint32_t (&key)[kSamples]) const {
#pragma unroll
    for (int i = 0; i < kSamples; i += kVector) {
      Four32 four;
      if (vectors()) {
        ordered(load_four<By>(row + c + i), four);
      } else {
#pragma unroll
        for (int j = 0; j < kVector; ++j) four[j] = load_ordered<By>(row + c + i + j);
      }
#pragma unroll
      for (int j = 0; j < kVector; ++j) key[i + j] = four[j];
    }
  }

  // 2. The list -----------------------------------------------------------------------------------

  // This thread's 32 columns of a chunk from `first` on, whose bits begin with the highest: set if
  // the column's key is at least `bound`, or it is the forced one.
  template <int Ahead>
  __device__ __forceinline__ uint32_t reaching(int chunk, uint32_t bound, int& first) const {
    const int lane = task.thread() % 32;
    const int of_warp = chunk + static_cast<int>(task.thread() / 32) * kWarpColumns;
    first = of_warp + lane * kRun;
    const int left = columns - first;  // of the row
    if (of_warp >= columns) return 0;
    uint32_t bits = ~0u;
    if (bound > kLowest) bits = run_of_lane(above<Ahead>(of_warp, float_below(bound)));
    if (left < kRun) bits &= left > 0 ? ~(~0u >> left) : 0;
    if (p.force_last && left > 0 && left <= kRun) bits |= 1u << (kRun - left);
    return bits;
  }

  // Bit 31 - i, with i = 4 v + j: whether column of_warp + 128 v + 4 lane + j is above `bound`.
  // Undefined for columns past the row's end.
  template <int Ahead>  // loads in flight
  __device__ __forceinline__ uint32_t above(int of_warp, float bound) const {
    const int first = of_warp + static_cast<int>(task.thread()) % 32 * kVector;
    if (!vectors()) return above_singly(first, bound);
    if (of_warp + kWarpColumns <= columns) return above_by_vectors<Ahead, true>(first, bound);
    uint32_t bits = above_by_vectors<2, false>(first, bound);
    const int whole = columns / kVector * kVector - first;  // columns from here to the last few
    if (whole >= 0 && whole % (32 * kVector) == 0) {
      const int from = whole / 32;
      bits = (bits & ~(~0u >> from)) | above_singly(first, bound, from);
    }
    return bits;
  }

  // Of whole vectors of the row; `All`: of a warp that has no others.
  template <int Ahead, bool All>
  __device__ __forceinline__ uint32_t above_by_vectors(int first, float bound) const {
    constexpr int kVectors = kRun / kVector, kStep = 32 * kVector;
    const Key* at = row + first;
    const int last = columns - kVector - first;  // where the last vector may begin
    uint32_t bits = 0;
#pragma unroll(Ahead < 4 ? 1 : kVectors)
    for (int v = 0; v < kVectors; v += Ahead) {
      Four<Key> raw[Ahead];
#pragma unroll
      for (int a = 0; a < Ahead; ++a) {
        if (!All) raw[a] = {};
        if (All || (v + a) * kStep <= last) raw[a] = load_four<By>(at + (v + a) * kStep);
      }
#pragma unroll
      for (int a = 0; a < Ahead; ++a) {
        float key[kVector];
        floats(raw[a], key);
        // A sign a key. NaN has none, nor has a difference of equals.
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          bits = __funnelshift_l(__float_as_uint(__fsub_rn(bound, key[j])), bits, 1);
        }
      }
    }
    return bits;
  }

  // From column i on, a load each.
  __device__ __forceinline__ uint32_t above_singly(int first, float bound, int i = 0) const {
    uint32_t bits = 0;
#pragma unroll 2
    for (; i < kRun; ++i) {
      const int c = first + i / kVector * 32 * kVector + i % kVector;
      if (c >= columns) break;
      if (load_float<By>(row + c) > bound) bits |= kTop >> i;
    }
    return bits;
  }

  // From the bits of `above` to those of 32 consecutive columns a lane, in order of lanes.
  __device__ __forceinline__ uint32_t run_of_lane(uint32_t bits) const {
    // Eight lanes transpose their 8 x 8 groups of four bits.
    const int lane = task.thread() % 32;
    bits = __byte_perm(bits, __shfl_xor_sync(~0u, bits, 4), lane & 4 ? 0x5410 : 0x3276);
    bits = __byte_perm(bits, __shfl_xor_sync(~0u, bits, 2), lane & 2 ? 0x6240 : 0x3715);
    const uint32_t other = __shfl_xor_sync(~0u, bits, 1);
    constexpr uint32_t kLow = 0x0f0f0f0f;
    bits = lane & 1 ? (bits & kLow) | (other & kLow) << 4 : (bits & ~kLow) | (other >> 4 & kLow);
    return __shfl_sync(~0u, bits, lane % 4 * 8 + lane / 4);
  }

  // From the highest bit on.
  template <typename Visit>
  static __device__ __forceinline__ void for_each_bit(uint32_t bits, Visit visit) {
    while (bits != 0) {
      const int i = __clz(bits);
      visit(i);
      bits ^= kTop >> i;
    }
  }

  // Lists the columns whose key is at least `bound`, if the list takes them; how many they are.
  __device__ __forceinline__ int list_from(uint32_t bound) const {
    int listed = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < columns; chunk += 2 * kChunk) {
      int first, second;
      const uint32_t mine = reaching<4>(chunk, bound, first);
      const uint32_t more = reaching<4>(chunk + kChunk, bound, second);
      uint32_t total;
      const uint32_t before =
          exclusive_scan(task, uint32_t(__popc(mine) | __popc(more) << 16), &total);
      uint32_t* at = list_columns() + listed;
      listed += (total & 0xffff) + (total >> 16);
      if (listed > p.list) continue;  // it will not be read
      uint32_t* at_more = at + (total & 0xffff) + (before >> 16);
      at += before & 0xffff;
      for_each_bit(mine, [&](int i) { *at++ = first + i; });
      for_each_bit(more, [&](int i) { *at_more++ = second + i; });
    }
    return listed;
  }

  // Reads the keys of the listed columns, all at least `bound`, replaces the columns by where they
  // go, meanwhile, and finds the k-th key.
  __device__ __forceinline__ Kth settle_listed(uint32_t bound, int count) const {
    constexpr int kFew = 32;  // keys that a warp settles
    struct Shared {
      int num_few;
      Kth kth;
      uint32_t largest;
      uint32_t few[kFew];
    };
    __shared__ Shared of_groups[Task::kGroups];
    Shared& s = of_groups[task.group()];
    if (task.thread() == 0) s.largest = bound, s.num_few = 0;
    task.sync();  // those, and the list of columns is complete
    uint32_t high = bound;
    const int r = row_number(p, task);
#pragma unroll 1
    for (int i = task.thread(); i < count; i += 2 * kThreads) {
      const bool both = i + kThreads < count;
      const int one = static_cast<int>(list_columns()[i]);
      const int two = both ? static_cast<int>(list_columns()[i + kThreads]) : one;
      const uint32_t keys[2] = {load_ordered<By>(row + one), load_ordered<By>(row + two)};
      const int places[2] = {place(p, task, r, one), place(p, task, r, two)};
      if (one != forced()) high = max(high, keys[0]);
      if (two != forced()) high = max(high, keys[1]);
      list_keys()[i] = one != forced() ? keys[0] : kForced;
      list_columns()[i] = places[0];
      if (both) {
        list_keys()[i + kThreads] = two != forced() ? keys[1] : kForced;
        list_columns()[i + kThreads] = places[1];
      }
    }
    high = max_of_warp(high);
    if (task.thread() % 32 == 0) atomicMax(&s.largest, high);
    const Bins bins = histogram();
    bins.template clear<kBins>();  // and the largest and the list of keys are complete

    uint32_t low = bound, span = s.largest - bound;  // the k-th is in [low, low + span]
    int need = wanted();
    while (true) {
      const int shift = max(0, 32 - kBinBits - __clz(span));
#pragma unroll 1
      for (int i = task.thread(); i < count; i += kThreads) {
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
    for (int i = task.thread(); i < count; i += kThreads) {
      const uint32_t key = list_keys()[i];
      if (key - low <= span) s.few[atomicAdd(&s.num_few, 1)] = key;
    }
    task.sync();  // the few are complete
    if (task.thread() < 32) {
      // A lane's key is the k-th if the keys above it and those equal to it enclose what is needed.
      const int lane = task.thread(), n = s.num_few;
      const uint32_t mine = lane < n ? s.few[lane] : 0;
      int above = 0, equal = 0;
#pragma unroll 1
      for (int i = 0; i < n; ++i) {
        const uint32_t key = s.few[i];
        above += key > mine;
        equal += key == mine;
      }
      const uint32_t found = __ballot_sync(~0u, above < need && need <= above + equal);
      if (lane == __ffs(found) - 1) s.kth = {mine, need - above};
    }
    task.sync();  // the k-th is known
    return s.kth;
  }

  // Writes the selected ones of the listed columns.
  __device__ __forceinline__ void write_listed(const Kth& kth, int count) const {
    const int per = (count + kThreads - 1) / kThreads;  // neighbors, since equal keys go by column
    const int first = task.thread() * per, stop = min(first + per, count);
    uint32_t counts = 0;
#pragma unroll 1
    for (int i = first; i < stop; ++i) {
      const uint32_t key = list_keys()[i];
      counts += (key > kth.key) | (key == kth.key) << 16;
    }
    const uint32_t before = exclusive_scan(task, counts);
    Writer writer(*this, kth.need, before & 0xffff, before >> 16);
#pragma unroll 1
    for (int i = first; i < stop; ++i) {
      const uint32_t key = list_keys()[i];
      if (key >= kth.key) writer.write(list_columns()[i], key == kth.key);
    }
  }

  // 3. Without a list -----------------------------------------------------------------------------

  // The smallest key of those that are at least `bound`, but for the forced one.
  __device__ __forceinline__ uint32_t least_from(uint32_t bound) const {
    __shared__ uint32_t of_groups[Task::kGroups];
    uint32_t& least = of_groups[task.group()];
    if (task.thread() == 0) least = kForced;
    task.sync();  // before anyone compares
    uint32_t mine = kForced;
#pragma unroll 4
    for (int c = task.thread(); c < columns; c += kThreads) {
      const uint32_t key = c != forced() ? load_ordered<By>(row + c) : kForced;
      if (key >= bound) mine = min(mine, key);
    }
    mine = min_of_warp(mine);
    if (task.thread() % 32 == 0) atomicMin(&least, mine);
    task.sync();  // all have compared
    return least;
  }

  // Columns whose key is at least `bound`, the forced one among them.
  __device__ __forceinline__ int count_from(uint32_t bound) const {
    int count = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < columns; chunk += kChunk) {
      int first, total;
      exclusive_scan(task, __popc(reaching<2>(chunk, bound, first)), &total);
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
      for (int c = task.thread(); c < columns; c += kThreads) {
        if (c == forced()) continue;
        const uint32_t key = load_ordered<By>(row + c);
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
    const int r = row_number(p, task);
    uint32_t before_above = 0, before_equal = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < columns; chunk += kChunk) {
      int first;
      uint32_t left = 0, higher = 0;
#pragma unroll 1  // registers are what is short
      for (int above = 0; above < 2; ++above) {
        left = higher, higher = reaching<2>(chunk, kth.key + above, first);
      }
      const uint32_t same = left & ~higher;
      uint32_t total;
      const uint32_t before =
          exclusive_scan(task, uint32_t(__popc(higher) | __popc(same) << 16), &total);
      Writer writer(*this, kth.need, before_above + (before & 0xffff),
                    before_equal + (before >> 16));
      before_above += total & 0xffff, before_equal += total >> 16;
      for_each_bit(left,
                   [&](int i) { writer.write(place(p, task, r, first + i), same << i >> 31); });
    }
  }

  // 4. Output -------------------------------------------------------------------------------------

  // Writes places of columns, in order, each behind all selected ones before it.
  struct Writer {
    int32_t* out;
    uint32_t need, above, equal;

    __device__ __forceinline__ Writer(const RowTopk& topk, int need, uint32_t above, uint32_t equal)
        : out(topk.p.out + int64_t(row_number(topk.p, topk.task)) * topk.p.out_stride),
          need(need),
          above(above),
          equal(equal) {}

    __device__ __forceinline__ void write(int32_t place, bool is_equal) {
      if (!is_equal || equal < need) out[above + min(equal, need)] = place;
      equal += is_equal;
      above += !is_equal;
    }
  };

  static __device__ __forceinline__ int32_t place(const Params& p, const Task& task, int r, int c) {
    int position = c;
    if (p.blocks != nullptr)
      position = p.blocks[task.row() * p.blocks_stride + (c >> 3)] * 8 + (c & 7);
    if (p.request_of_row == nullptr) return position;
    const int32_t request = p.request_of_row[r];
    if (p.page_table != nullptr) {
      const int32_t page = p.page_table[request * p.table_stride + position / p.page_size];
      return page * p.page_size + position % p.page_size;
    }
    return position + p.request_starts[request];
  }
};

template <typename Key, int Threads>
struct Topk {
  using Params = TopkParams;
  static constexpr int kThreads = Threads;
  // 40 registers a thread are enough, but for the older architectures.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  static constexpr int kMinBlocks = 1024 / Threads;
#else
  static constexpr int kMinBlocks = Threads == 1024 ? 1 : 1536 / Threads;
#endif

  static __device__ void run(const Params& p) {
    RowTopk<Key, RowOfCta<Threads>>::run(p, RowOfCta<Threads>{});
  }
};

}  // namespace sparse_indexer
