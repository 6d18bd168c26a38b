// SPDX-License-Identifier: Apache-2.0
#include "kernels/candidate_logits.h"

#include "kernels/candidate_quads.h"

#include "sparse_indexer/host/check.h"
#include "sparse_indexer/host/launch.h"

using namespace sparse_indexer;
namespace config = candidate_logits_config;
constexpr int kEvery = candidate_quads_config::kRankEvery;

namespace {

void candidate_logits(TensorView keys, TensorView queries, TensorView weights, TensorView entries,
                      TensorView ranks, TensorView counts, TensorView quad_first, TensorView out) {
  Size num_blocks("blocks"), quads("quads"), heads("heads"), width("width"), columns("columns");
  Device device;
  const bool e4m3 = same(keys.dtype(), uint8);
  const int key_bytes = e4m3 ? 128 : 256;
  Match("keys")
      .shape({num_blocks, packed_keys::block_bytes(key_bytes) / (e4m3 ? 1 : 2)})
      .dtype(uint8, float16, bfloat16)
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
  if (heads != 32 && heads != 64) bad_argument("weights", "32 or 64 heads", std::to_string(heads));
  Match("queries")
      .shape({quads, 4 * heads, 128})
      .dtype(keys.dtype())
      .on(device)
      .contiguous()
      .aligned(16)
      .check(queries);
  Match("entries").shape({quads, width}).dtype(int32).on(device).contiguous().check(entries);
  Match("ranks")
      .shape({quads, (width + kEvery - 1) / kEvery, 4})
      .dtype(int16)
      .on(device)
      .contiguous()
      .aligned(8)
      .check(ranks);
  Match("counts").shape({quads, 2}).dtype(int32).on(device).contiguous().check(counts);
  Match("quad_first").shape({quads}).dtype(int32).on(device).contiguous().check(quad_first);
  Match("out")
      .shape({4 * quads, columns})
      .dtype(float32)
      .on(device)
      .last_dim_contiguous()
      .check(out);
  if (columns % 8 != 0 || columns > 8 * 0xffff) {
    bad_argument("out", "columns of at most 65535 whole blocks", std::to_string(columns));
  }
  if (quads == 0 || columns == 0 || width == 0) return;
  expect_int("keys blocks", num_blocks, 1, INT32_MAX);
  expect_int("quads", quads, 0, INT32_MAX / 4);

  CandidateLogitsParams params{};
  params.keys = data<const uint8_t>(keys);
  params.queries = data<const uint8_t>(queries);
  params.weights = data<const float>(weights);
  params.entries = data<const uint32_t>(entries);
  params.ranks = data<const uint16_t>(ranks);
  params.ranks_stride = (width + kEvery - 1) / kEvery;
  params.counts = data<const int32_t>(counts);
  params.quad_first = data<const int32_t>(quad_first);
  params.out = data<float>(out);
  params.entries_stride = width;
  params.out_stride = out.stride(0);
  params.quads = static_cast<int32_t>(quads);
  params.out_blocks = static_cast<int32_t>(columns / 8);
  params.num_blocks = static_cast<int32_t>(num_blocks);
  const char* symbol =
      e4m3 ? (heads == 32 ? "candidate_logits_e4m3_32" : "candidate_logits_e4m3_64")
      : same(keys.dtype(), float16)
          ? (heads == 32 ? "candidate_logits_f16_32" : "candidate_logits_f16_64")
          : (heads == 32 ? "candidate_logits_bf16_32" : "candidate_logits_bf16_64");
  const int known = static_cast<int>(heads);
  Launch(symbol, device)
      .grid(on_device(device).sm_count)
      .block(128 * (1 + config::kWarpgroups))
      .shared(config::shared_bytes(key_bytes, known))
      .run(params);
}

}  // namespace

SPARSE_INDEXER_MODULE();
SPARSE_INDEXER_EXPORT(candidate_logits);
