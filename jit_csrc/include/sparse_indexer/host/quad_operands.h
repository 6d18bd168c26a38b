// SPDX-License-Identifier: Apache-2.0
// What the kernels that score quads of rows have in common: packed keys and queries, weights, where
// a quad's keys begin, and a variant for each element and number of heads.
#pragma once

#include <string>

#include "kernels/packed_keys.h"
#include "sparse_indexer/host/check.h"

namespace sparse_indexer {

struct QuadOperands {
  Size blocks{"blocks"};
  Size quads{"quads"};
  Size heads{"heads"};  // 32 or 64
  int key_bytes = 0;    // 128 (e4m3) or 256 (halves)
  int element = 0;      // 0: e4m3, 1: fp16, 2: bf16

  void check(const TensorView& keys, const TensorView& queries, const TensorView& weights,
             const TensorView& quad_first, Device& device) {
    const DLDataType stored = keys.dtype();
    if (!same(stored, uint8) && !same(stored, float16) && !same(stored, bfloat16)) {
      bad_argument("keys", "[blocks, 1152] uint8 or [blocks, 1088] float16 or bfloat16",
                   std::string(tvm::ffi::DLDataTypeToString(stored)));
    }
    element = same(stored, uint8) ? 0 : same(stored, float16) ? 1 : 2;
    key_bytes = element == 0 ? 128 : 256;
    Match("keys")
        .shape({blocks, packed_keys::block_bytes(key_bytes) / (element == 0 ? 1 : 2)})
        .dtype(stored)
        .on(device)
        .contiguous()
        .aligned(16)
        .check(keys);
    Match("weights")
        .shape({quads, 4, heads})
        .dtype(float32)
        .on(device)
        .contiguous()
        .aligned(16)
        .check(weights);
    if (heads != 32 && heads != 64) {
      bad_argument("weights", "32 or 64 heads", std::to_string(heads));
    }
    Match("queries")
        .shape({quads, 4 * heads, 128})
        .dtype(keys.dtype())
        .on(device)
        .contiguous()
        .aligned(16)
        .check(queries);
    Match("quad_first").shape({quads}).dtype(int32).on(device).contiguous().check(quad_first);
  }

  // Of symbols by element and then by 32 or 64 heads.
  const char* variant(const char* const (&symbols)[3][2]) const {
    return symbols[element][heads == 64];
  }
};

}  // namespace sparse_indexer
