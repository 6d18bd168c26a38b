// SPDX-License-Identifier: Apache-2.0
// Which variant of a kernel converts a stored format to what an output holds.
#pragma once

#include <string>

#include "sparse_indexer/host/check.h"

namespace sparse_indexer {

struct Conversions {
  const char* name;    // of the stored format
  const char* to_fp8;  // the variant that converts it, or null: it would lose bits
  const char* to_fp16;
  const char* to_bf16;

  // The variant for an out_values of this dtype; ValueError if there is none.
  const char* to(DLDataType out) const {
    const char* symbol = same(out, uint8) ? to_fp8 : same(out, float16) ? to_fp16 : to_bf16;
    if (symbol == nullptr) {
      bad_argument("out_values", std::string("a dtype that holds ") + name,
                   same(out, uint8)     ? "fp8"
                   : same(out, float16) ? "fp16"
                                        : "bf16");
    }
    return symbol;
  }
};

}  // namespace sparse_indexer
