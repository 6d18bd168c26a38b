# SPDX-License-Identifier: Apache-2.0
"""Small runs of every kernel for compute-sanitizer; the other tests check what they compute.

    compute-sanitizer --tool memcheck python tests/sanitized.py CASE
    compute-sanitizer --tool racecheck python tests/sanitized.py CASE --racecheck

`test_sanitizer.py` does so with all cases. With --racecheck each lane of a warp arrives at Hopper's
barriers: racecheck reports a race where one lane arrives for all.
"""

import sys
from collections.abc import Callable

import pytest
import torch
from sm90_support import layers, run, sm90

from sparse_indexer import quad_scopes
from sparse_indexer.jit import Kernel

DEVICE = torch.device("cuda:0")
LENS = [[700 + 5 * i for i in range(9)], [], [1900 - i for i in range(6)], [40, 0, 900]]


def topk() -> None:
    import test_topk as tests

    for dtype in (torch.float32, torch.bfloat16):
        for width, k in [(255, 64), (2049, 2048), (5003, 512), (20_001, 2051)]:
            tests.test_random_keys(width, k, dtype)
    for make in tests.PATTERNS.values():
        for width, k in [(16_384, 512), (3000, 1000)]:
            rows = torch.stack([make(width) for _ in range(3)]).to(DEVICE)
            tests.check(rows, tests.lens_of(width, width - 1, k + 1), k)


def topk_of_many_rows() -> None:
    import test_topk as tests

    for name in ("any bits", "all equal", "the sample too low", "one bin, all distinct"):
        for width, k, times in [(16_384, 9000, 1), (4000, 512, 200), (33_000, 512, 40)]:
            rows = torch.stack([tests.PATTERNS[name](width) for _ in range(2)]).to(DEVICE)
            tests.check(rows.repeat(times, 1), tests.lens_of(width, width - 1).repeat(times), k)
    tests.test_block_keys_count_positions_and_force_the_newest()
    tests.test_any_row_stride_and_padding_is_not_read(257, torch.bfloat16)
    tests.test_maps_through_blocks_starts_and_pages()
    tests.test_rows_of_keys_stand_for_other_rows(16_384, 512, "negative", 9, torch.float32)


def blocks() -> None:
    import test_block_keys
    import test_candidate_table

    for dtype in (torch.float32, torch.bfloat16):
        for width in (8, 64, 8200, 16_383):
            test_block_keys.test_equals_the_definition(width, dtype)
    test_block_keys.test_rows_with_few_blocks_are_left_alone()
    for n in (1, 64, 300):
        test_candidate_table.test_equals_loops(n, 24)


def keys() -> None:
    import test_index_k as tests

    for pair in tests.PAIRS:
        for layout in ("planar", "interleaved", "flat"):
            tests.test_values_times_scale_are_the_stored_keys(*pair, layout)
    tests.test_packed_blocks_are_those_values_and_scales(*tests.PAIRS[0], "planar")
    tests.test_places_that_do_not_exist_give_nan()


def attention() -> None:
    import test_kv_gather
    import test_relu_head_sum
    import test_sparse_softmax

    for dtype in test_kv_gather.DTYPES:
        for stored in (torch.bfloat16, "fp8"):
            for dim in (576, 133):
                test_kv_gather.test_equals_the_definition(dim, stored, dtype)
    for k in (1, 37, 640, 2176, 50_001):
        test_sparse_softmax.test_is_the_formula(k, "cuda")
    for width in (1, 1000, 1025):
        for heads in (1, 32, 64):
            test_relu_head_sum.test_whole_numbers_are_exact(width, heads)


def sm90_backend() -> None:
    for form, heads in (("fp8", 32), ("fp4", 64), ("bf16", 32), ("bf16", 64)):
        run(sm90(topk=32, topk_blocks=50), *layers(LENS, form, heads=heads))
    run(sm90(topk=32, topk_blocks=50), *layers([[30_000 - i for i in range(100)]], "fp8", heads=32))


def candidate_logits() -> None:
    import test_candidate_topk as tests

    for heads in (32, 64):  # each stage is filled many times
        case = tests.make_case([tests.falling(400, 9000)], n=500, heads=heads)
        tests.two_kernels(case, 40)


def candidate_topk() -> None:
    import test_candidate_topk as tests

    quad_scopes._ONE_KERNEL_QUADS = 0
    for form, heads in (("fp8", 32), ("fp4", 64)):
        run(sm90(topk=32, topk_blocks=50), *layers(LENS, form, heads=heads))
        case = tests.make_case([tests.falling(50, 9000), [], [0, 0, 5]], n=500, heads=heads)
        tests.check(case, 40, [7])
    tests.check(tests.make_case([tests.falling(50, 9000)], n=300, alike=0.0), 300, [132])


def fused(code: str) -> None:
    import fused_support
    import test_fused_scoring

    from sparse_indexer.backends.sm70 import Sm70Indexer

    if code != "own":
        for kernel in fused_support.KERNELS:
            kernel.loaded[DEVICE] = fused_support.ptx_module(kernel, code)
    for form, heads in (("fp8", 32), ("fp4", 64), ("bf16", 32), ("fp16", 64)):
        indexer = Sm70Indexer(DEVICE, topk=32, topk_blocks=50)
        run(indexer, *layers(LENS, form, heads=heads))  # type: ignore[arg-type]
    operands = test_fused_scoring.exact(("fp8", "fp8"), 32)
    fused_support.logits_of(fused_support.pack(operands), test_fused_scoring.WIDTH)
    for kernel in fused_support.KERNELS if code != "own" else ():  # that is what ran
        assert kernel.loaded[DEVICE] is fused_support.ptx_module(kernel, code)


def sm100_backend() -> None:
    import sm100_support
    import test_sm100_gpu as tests

    sm100_support.run(tests.quiet(), *tests.exact_layers(tests.SHORT, device=str(DEVICE)))


def gemm_route() -> None:
    import test_gemm_scoring as tests

    tests.test_exact_data_gives_what_mask_gives("planar", 96)
    tests.test_exact_data(("fp8", "fp8"), 3)


def faults() -> None:
    """That the tools see any: a read that is not ordered after its write, one past an end."""
    cupy = pytest.importorskip("cupy")
    faulty = """extern "C" __global__ void faulty(const int* from, int* to) {
        __shared__ int shared[64];
        shared[threadIdx.x] = from[threadIdx.x + 4096];
        to[threadIdx.x] = shared[threadIdx.x ^ 32];
    }"""
    memory = cupy.zeros(64, cupy.int32)
    cupy.RawKernel(faulty, "faulty")((1,), (64,), (memory, memory))
    cupy.cuda.Device().synchronize()


CASES: dict[str, Callable[[], None]] = {
    "topk": topk,
    "topk of many rows": topk_of_many_rows,
    "blocks": blocks,
    "keys": keys,
    "attention": attention,
    "sm90": sm90_backend,
    "candidate_logits": candidate_logits,
    "candidate_topk": candidate_topk,
    "fused, own": lambda: fused("own"),
    "fused, compute_75": lambda: fused("compute_75"),
    "fused, compute_70": lambda: fused("compute_70"),
    "sm100": sm100_backend,
    "gemm": gemm_route,
    "faults": faults,
}


UNIT = Kernel.unit.fget


def each_lane_arrives(kernel: Kernel) -> str:
    assert UNIT is not None
    text: str = UNIT(kernel)
    return f"#define SPARSE_INDEXER_RACECHECK\n{text}" if kernel.capabilities == (90, 90) else text


def main(case: str, *options: str) -> None:
    if options:
        assert options == ("--racecheck",)
        Kernel.unit = property(each_lane_arrives)  # type: ignore[assignment]
    torch.manual_seed(0)
    CASES[case]()
    torch.cuda.synchronize()
    print("done:", case)


if __name__ == "__main__":
    main(*sys.argv[1:])
