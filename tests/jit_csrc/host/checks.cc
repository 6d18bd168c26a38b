// SPDX-License-Identifier: Apache-2.0
// Every kind of check that check.h has, to be tried with tensors of the CPU.
#include "sparse_indexer/host/check.h"

#include "sparse_indexer/host/launch.h"

using namespace sparse_indexer;

// Returns [rows, columns] as they were bound.
tvm::ffi::Array<int64_t> shapes(TensorView logits, TensorView lens, TensorView pairs) {
  Size rows("rows"), columns("columns");
  Match("logits").shape({rows, columns}).dtype(float32, bfloat16).check(logits);
  Match("lens").shape({rows}).dtype(int32).check(lens);
  Match("pairs").shape({rows, 2, columns}).dtype(uint8).check(pairs);
  return {rows, columns};
}

void last_dim_contiguous(TensorView x) {
  Size rows("rows"), columns("columns");
  Match("x").shape({rows, columns}).last_dim_contiguous().check(x);
}

void contiguous(TensorView x) {
  Size rows("rows"), columns("columns");
  Match("x").shape({rows, columns}).contiguous().check(x);
}

void aligned(TensorView x) {
  Size rows("rows"), columns("columns");
  Match("x").shape({rows, columns}).last_dim_contiguous().aligned(16).check(x);
}

bool rows_aligned_16(TensorView x) {
  return rows_aligned(x, 16);
}

void scalar(int64_t topk) {
  expect_int("topk", topk, 1, 2048);
}

// True if the tensor is there, and then it has to fit.
bool optional(tvm::ffi::Optional<TensorView> starts) {
  Size requests("requests");
  if (!starts.has_value()) return false;
  Match("starts").shape({requests}).dtype(int32).check(starts.value());
  return true;
}

double first(TensorView x) {
  return *data<const float>(x);
}

SPARSE_INDEXER_MODULE();
SPARSE_INDEXER_EXPORT(shapes);
SPARSE_INDEXER_EXPORT(last_dim_contiguous);
SPARSE_INDEXER_EXPORT(contiguous);
SPARSE_INDEXER_EXPORT(aligned);
SPARSE_INDEXER_EXPORT(rows_aligned_16);
SPARSE_INDEXER_EXPORT(scalar);
SPARSE_INDEXER_EXPORT(optional);
SPARSE_INDEXER_EXPORT(first);
