// SPDX-License-Identifier: Apache-2.0
// Work of groups of different sizes, cut into equal parts, one a CTA.
#pragma once

#include "sparse_indexer/scan.cuh"

namespace sparse_indexer {

// Units that a CTA does: from this one of this group on, through the groups that follow.
struct Part {
  int group, unit, left;
};

// Units [total * c / CTAs, total * (c + 1) / CTAs) for part c, of CTA c unless said otherwise;
// units_of(group) says how many a group has. All threads of the CTA call and get the total; `part`,
// in shared memory, is complete after the next barrier.
template <int Threads, typename UnitsOf>
__device__ __forceinline__ int64_t find_part(int groups, UnitsOf units_of, Part& part,
                                             unsigned number = blockIdx.x) {
  const int each = (groups + Threads - 1) / Threads;
  const int begin = min(static_cast<int>(threadIdx.x) * each, groups);
  const int end = min(begin + each, groups);
  int64_t mine = 0, total;
  for (int group = begin; group < end; ++group) mine += units_of(group);
  int64_t before = exclusive_scan(Cta<Threads>{}, mine, &total);
  const int64_t first = total * number / gridDim.x;
  const int left = static_cast<int>(total * (number + 1) / gridDim.x - first);
  if (threadIdx.x == 0 && left == 0) part = {0, 0, 0};
  if (left == 0 || first < before || first >= before + mine) return total;
  for (int group = begin; group < end; ++group) {
    const int units = units_of(group);
    if (first < before + units) {
      part = {group, static_cast<int>(first - before), left};
      break;
    }
    before += units;
  }
  return total;
}

// Calls visit(group, first unit, stop) for the groups of a part that have units in it.
template <typename UnitsOf, typename Visit>
__device__ __forceinline__ void for_each_group(Part part, UnitsOf units_of, Visit visit) {
  while (part.left > 0) {
    const int stop = min(units_of(part.group), part.unit + part.left);
    if (stop > part.unit) visit(part.group, part.unit, stop);
    part.left -= stop - part.unit;
    ++part.group, part.unit = 0;
  }
}

}  // namespace sparse_indexer
