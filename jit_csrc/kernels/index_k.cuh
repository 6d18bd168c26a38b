// SPDX-License-Identifier: Apache-2.0
// index_k: index keys, paged or flat, of any format and layout, into the flat scratch that a scorer
// reads: values of 128 dims and one fp32 scale a position. values * scale is the stored key,
// exactly:
//
//   to e4m3   from fp8: as stored. From fp4: exact while the group exponents lie within 14 of each
//             other; a smaller group contributes less than 2^-14 of the largest and is rounded.
//   to fp16   from fp8: 2^-8 times the stored value, scale times 2^8. From fp4: exact while the
//   group
//             exponents lie within 23. From bf16: exact for elements within 2^-23 of the largest.
//   to bf16   from fp8, fp4: exact, the fp4 scales in the values.
//
// Packed (packed_keys.h), 8 positions and their scales are one block, in the order of core matrices
// that Hopper's MMA reads without swizzle: chunk c of 16 bytes (16 dims of e4m3, 8 of halves) of
// position p is at c * 128 + p % 8 * 16, behind the chunks comes the scale, 4 bytes a position.
//
// A NaN scale (ue8m0 code 255) makes the position's scale NaN, so does a page or column that does
// not exist. Positions at or past a request's length are not looked up and not written.
#pragma once

#include "kernels/index_k.h"
#include "sparse_indexer/formats.cuh"

namespace sparse_indexer {

enum class KeyFormat { kFp4, kFp8, kFp16, kBf16 };

template <KeyFormat From, KeyFormat To>
struct IndexK {
  using Params = IndexKParams;
  static constexpr int kThreads = index_k_config::kThreads;
  static constexpr int kMinBlocks = 1;
  static constexpr int kLanes = index_k_config::kLanes;
  static constexpr int kBlock = index_k_config::kBlock;
  static constexpr int kDims = 128 / kLanes;  // of a thread
  static constexpr int kBytes = From == KeyFormat::kFp4   ? kDims / 2
                                : From == KeyFormat::kFp8 ? kDims
                                                          : kDims * 2;
  static constexpr int kWords = kBytes / 4;
  static constexpr int kOutWords = To == KeyFormat::kFp8 ? kDims / 4 : kDims / 2;
  static constexpr int kChunks = kOutWords / 4;  // of a thread, 16 bytes each
  static_assert(To != KeyFormat::kFp8 || From == KeyFormat::kFp4 || From == KeyFormat::kFp8,
                "halves are not quantized behind the caller's back");
  static_assert(To != KeyFormat::kBf16 || From != KeyFormat::kFp16, "bf16 does not hold fp16");

  static __device__ void run(const Params& p) {
    const int request = blockIdx.x / p.parts;
    const int first = static_cast<int>(blockIdx.x % p.parts) * index_k_config::kPart;
    const int len = p.lens[request];
    const int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int pass = 0; pass < index_k_config::kPasses; ++pass) {
      const int position = first + (pass * kThreads + static_cast<int>(threadIdx.x)) / kLanes;
      uint32_t in[kWords] = {};
      uint32_t stored_scale = 0;
      bool exists = false;
      if (position < len) {
        exists = load(p, request, position, lane, in, stored_scale);
      }
      uint32_t out[kOutWords];
      float scale = convert(in, stored_scale, lane, out);  // all lanes: it shuffles
      if (position >= len) continue;
      if (!exists) scale = quiet_nan();
      const int64_t start = p.out_starts[request];
      if (p.out_scales != nullptr) {
        const int64_t row = start + position;
        store<1>(static_cast<uint4*>(p.out_values) + (row * kLanes + lane) * kChunks, out);
        if (lane == 0) p.out_scales[row] = scale;
      } else {
        constexpr int kKeyBytes = kLanes * kOutWords * 4;
        constexpr int kValues = packed_keys::value_bytes(kKeyBytes) / 16;
        constexpr int kStep = packed_keys::block_bytes(kKeyBytes) / 16;
        uint4* block = static_cast<uint4*>(p.out_values) + (start + position / kBlock) * kStep;
        store<kBlock>(block + lane * kChunks * kBlock + position % kBlock, out);
        if (lane == 0) reinterpret_cast<float*>(block + kValues)[position % kBlock] = scale;
      }
    }
  }

  // This lane's chunks, so many apart.
  template <int Step>
  static __device__ __forceinline__ void store(uint4* to, const uint32_t (&out)[kOutWords]) {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      to[j * Step] = make_uint4(out[4 * j], out[4 * j + 1], out[4 * j + 2], out[4 * j + 3]);
    }
  }

  // This lane's stored values and the position's stored scale; false if there is no such position.
  static __device__ bool load(const Params& p, int request, int position, int lane,
                              uint32_t (&in)[kWords], uint32_t& scale) {
    int64_t page = 0, offset;
    if (p.page_table != nullptr) {
      const int column = position / p.page_size;
      offset = position - column * p.page_size;
      page = column < p.max_pages ? p.page_table[request * p.table_stride + column] : -1;
      if (page < 0 || page >= p.slots) return false;
    } else {
      offset = int64_t(p.key_starts[request]) + position;
      if (offset < 0 || offset >= p.slots) return false;
    }
    const uint8_t* at = p.values + page * p.page_stride + offset * p.value_step + lane * kBytes;
    if (!p.vectors) {
#pragma unroll
      for (int j = 0; j < kWords; ++j) in[j] = __ldcs(reinterpret_cast<const uint32_t*>(at) + j);
    } else if constexpr (kBytes == 8) {
      const uint2 v = __ldcs(reinterpret_cast<const uint2*>(at));
      in[0] = v.x, in[1] = v.y;
    } else {
#pragma unroll
      for (int j = 0; j < kWords / 4; ++j) {
        const uint4 v = __ldcs(reinterpret_cast<const uint4*>(at) + j);
        in[4 * j] = v.x, in[4 * j + 1] = v.y, in[4 * j + 2] = v.z, in[4 * j + 3] = v.w;
      }
    }
    if (p.scales != nullptr) {
      scale = *reinterpret_cast<const uint32_t*>(p.scales + page * p.page_stride +
                                                 offset * p.scale_step);
    }
    return true;
  }

  // Largest of the position's eight lanes.
  static __device__ int max_of_lanes(int x) {
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) x = max(x, __shfl_xor_sync(~0u, x, step));
    return x;
  }

  // Converts this lane's 16 dims; the position's scale.
  static __device__ float convert(const uint32_t (&in)[kWords], uint32_t stored, int lane,
                                  uint32_t (&out)[kOutWords]) {
    if constexpr (From == To) {
#pragma unroll
      for (int j = 0; j < kOutWords; ++j) out[j] = in[j];
      return From == KeyFormat::kFp8 ? __uint_as_float(stored) : 1.0f;
    } else if constexpr (From == KeyFormat::kFp4) {
      return convert_fp4(in, stored, lane, out);
    } else if constexpr (From == KeyFormat::kFp8) {
      const float scale = __uint_as_float(stored);
#pragma unroll
      for (int j = 0; j < kOutWords; ++j) {
        const uint32_t halves = half2_of_e4m3(in[j / 2] >> (j % 2 * 16));
        if constexpr (To == KeyFormat::kFp16) {
          out[j] = halves;
        } else {
          const float low = float_of_half(halves & 0xffff) * 256.0f;
          const float high = float_of_half(halves >> 16) * 256.0f;
          out[j] = __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000u);
        }
      }
      return To == KeyFormat::kFp16 ? scale * 256.0f : scale;
    } else {
      static_assert(From == KeyFormat::kBf16 && To == KeyFormat::kFp16, "a conversion that exists");
      int largest = 0;  // exponent field of the largest finite element
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        const int low = in[j] >> 7 & 0xff, high = in[j] >> 23 & 0xff;
        largest = max(largest, max(low == 255 ? 0 : low, high == 255 ? 0 : high));
      }
      largest = max_of_lanes(largest);
      // The largest becomes 2^6 to 2^7: fp16 then holds 8 bits of elements down to 2^-23 of it.
      // Two factors, since one alone may be beyond what a float holds.
      const int shift = 127 + 6 - largest;
      const float factor = exp2_of(shift / 2), rest = exp2_of(shift - shift / 2);
#pragma unroll
      for (int j = 0; j < kOutWords; ++j) {
        const float low = __uint_as_float(in[j] << 16) * factor * rest;
        const float high = __uint_as_float(in[j] & 0xffff0000u) * factor * rest;
        out[j] = half_bits(low) | half_bits(high) << 16;
      }
      return exp2_of(-shift);
    }
  }

  static __device__ float convert_fp4(const uint32_t (&in)[kWords], uint32_t stored, int lane,
                                      uint32_t (&out)[kOutWords]) {
    const int code = stored >> (lane / 2 * 8) & 0xff;
    // A group of zeros has no say in the common exponent.
    const bool zero = ((in[0] | in[1]) & 0x77777777u) == 0;
    const int largest = max_of_lanes(zero ? 0 : code);
    const bool nan = max_of_lanes(code) == 255;
    if constexpr (To == KeyFormat::kFp8) {
      const uint2 table = e4m3_of_e2m1_table(zero ? 0 : largest - code);
#pragma unroll
      for (int j = 0; j < kOutWords; ++j) {
        out[j] = e4m3_of_e2m1(in[j / 2] >> (j % 2 * 16), table);
      }
      return nan ? quiet_nan() : exp2_of(largest - 127 - 6);
    } else {
      const int shift = To == KeyFormat::kFp16 ? (zero ? 0 : code - largest) : code - 127;
      const float factor = exp2_of(shift > -149 ? shift : -149);
#pragma unroll
      for (int j = 0; j < kOutWords; ++j) {
        const uint32_t pair = in[j / 4] >> (j % 4 * 8);
        const float low = float_of_e2m1(pair & 15) * factor;
        const float high = float_of_e2m1(pair >> 4 & 15) * factor;
        if constexpr (To == KeyFormat::kFp16) {
          out[j] = half_bits(low) | half_bits(high) << 16;
        } else {
          out[j] = __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000u);
        }
      }
      if (nan) return quiet_nan();
      return To == KeyFormat::kFp16 ? exp2_of(largest - 127) : 1.0f;
    }
  }
};

}  // namespace sparse_indexer
