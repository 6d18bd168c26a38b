# SPDX-License-Identifier: Apache-2.0
"""Scoring by mma.sync of Turing and Volta: logits, block keys, logits of candidates."""

from collections.abc import Sequence

import pytest
import torch
from fused_support import (
    CODES,
    DEVICE,
    POISON,
    beyond_halves,
    block_keys_of,
    candidate_logits_of,
    logits_of,
    pack,
    use_code,
)

from sparse_indexer import FlatIndexK, IndexQ, PrefillIndexerInputs
from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.formats import INT32_MAX, KeyFormat
from sparse_indexer.inputs import BLOCK_SIZE, flat_index_k
from sparse_indexer.testing import (
    make_inputs,
    palette_keys,
    palette_queries,
    random_keys,
    random_queries,
)
from sparse_indexer.torch_ops.as_kernels import block_keys

pytestmark = pytest.mark.gpu

# Requests of no rows, of fewer than a group and of several; lengths around blocks and tiles.
LENS = [
    [0, 1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 100],
    [],
    [1000 - 13 * i for i in range(21)],
    [5],
    [0, 0],
    [257, 0, 0, 0, 0, 0, 0, 0, 3],
]
ROWS, WIDTH = sum(map(len, LENS)), 1000  # the longest
FORMS: list[tuple[KeyFormat, KeyFormat]] = [  # of keys and of queries
    ("fp8", "fp8"),
    ("fp4", "fp4"),
    ("fp16", "fp16"),
    ("bf16", "bf16"),
    ("fp8", "bf16"),
    ("bf16", "fp4"),
]
HEADS = (32, 64, 3, 40)


@pytest.fixture(params=CODES, autouse=True)
def code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_code(request.param, monkeypatch)
    return str(request.param)


def inputs_of(
    keys: Sequence[FlatIndexK],
    queries: tuple[IndexQ, torch.Tensor],
    lens: Sequence[Sequence[int]] | None = None,
) -> PrefillIndexerInputs:
    lens = LENS if lens is None else lens
    flat = [n for request in lens for n in request]
    return make_inputs(*queries, keys, [n - 1 for n in flat], [len(request) for request in lens])


def keys_of(make: object, form: KeyFormat) -> list[FlatIndexK]:
    assert callable(make)
    return [
        make(max(request, default=0), form, seed=i, device=DEVICE) for i, request in enumerate(LENS)
    ]


def exact(forms: tuple[KeyFormat, KeyFormat], heads: int) -> PrefillIndexerInputs:
    queries = palette_queries(ROWS, heads, forms[1], seed=9, device=DEVICE)
    return inputs_of(keys_of(palette_keys, forms[0]), queries)


def random(forms: tuple[KeyFormat, KeyFormat], heads: int) -> PrefillIndexerInputs:
    queries = random_queries(ROWS, heads, forms[1], seed=9, device=DEVICE)
    return inputs_of(keys_of(random_keys, forms[0]), queries)


def oracle(inputs: PrefillIndexerInputs) -> torch.Tensor:
    """Logits in float64, rounded once; -inf where a row does not see."""
    indexer = MaskIndexer(DEVICE, accumulate=torch.float64, memory_budget=1 << 30)
    return indexer.dense_logits(inputs)


def seen(inputs: PrefillIndexerInputs) -> torch.Tensor:
    return (
        torch.arange(max(inputs.plan.context_lens), device=DEVICE)
        < inputs.plan.compressed_lens[:, None]
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("forms", FORMS, ids="-".join)
def test_exact_data(forms: tuple[KeyFormat, KeyFormat], heads: int) -> None:
    """No rounding anywhere: the oracle's numbers, and nothing where a row does not see."""
    inputs = exact(forms, heads)
    got, want, visible = logits_of(pack(inputs), WIDTH), oracle(inputs), seen(inputs)
    assert want[visible].unique().numel() > 100
    assert torch.equal(got[visible], want[visible])
    assert (got[~visible] == POISON).all()


def magnitudes(inputs: PrefillIndexerInputs, forms: tuple[KeyFormat, KeyFormat]) -> torch.Tensor:
    """The oracle's logits of the operands without their signs."""

    def without_signs(values: torch.Tensor) -> torch.Tensor:
        if values.dtype == torch.uint8:
            return values & 0x77
        if values.dtype == torch.float8_e4m3fn:
            return (values.view(torch.uint8) & 0x7F).view(values.dtype)
        return values.abs()

    keys = [
        FlatIndexK(without_signs(k.values), k.scales, k.format)
        for k in keys_of(random_keys, forms[0])
    ]
    q = inputs.index_q
    queries = IndexQ(without_signs(q.values), q.scales), inputs.head_weights.abs()
    return oracle(inputs_of(keys, queries))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("forms", FORMS, ids="-".join)
def test_random_data(forms: tuple[KeyFormat, KeyFormat], heads: int) -> None:
    """Within what sums of float32 may lose, in the worst case and as a whole.

    At most 32 MMAs of 4 terms and a sum (or 16 of 8), each cut to 2^-23 of the largest; then at
    most 14 roundings: weights, heads, lanes, warps, scale.
    """
    inputs = random(forms, heads)
    got, want, visible = logits_of(pack(inputs), WIDTH), oracle(inputs), seen(inputs)
    bound = (32 * 5 + 14) * 2.0**-23 * magnitudes(inputs, forms)
    assert ((got - want).abs() <= bound)[visible].all()
    x, y = got[visible].double(), want[visible].double()
    assert 1 - 2 * (x @ y) / (x @ x + y @ y) < 1e-11  # relative error of 4.5e-6
    assert (x != y).any()  # else the data is exact, and the test says nothing


@pytest.mark.parametrize("half_scores", [False, True])
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("forms", FORMS[:4], ids="-".join)
def test_block_keys_are_the_maxima_of_the_logits(
    forms: tuple[KeyFormat, KeyFormat], heads: int, half_scores: bool
) -> None:
    """Bit for bit, and nothing is written past a row's newest block."""
    inputs = random(forms, heads)
    packed, lens = pack(inputs), inputs.plan.compressed_lens
    logits = logits_of(packed, WIDTH, half_scores=half_scores)
    blocks = WIDTH // BLOCK_SIZE
    want = torch.full((ROWS, blocks), torch.nan, device=DEVICE)
    block_keys(logits, lens, out=want)
    got = block_keys_of(packed, blocks, half_scores=half_scores)
    written = torch.arange(blocks, device=DEVICE) * BLOCK_SIZE < lens[:, None]
    assert torch.equal(bits(got[written]), bits(want[written]))
    assert (got[~written] == POISON).all()
    assert (got[written].isinf().sum(), written.sum()) == ((lens > 0).sum(), -(-lens // 8).sum())


def some_blocks(lens: torch.Tensor, n: int, share: float) -> torch.Tensor:
    """Ascending blocks that each row sees, the newest among them, then INT32_MAX."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for length in lens.tolist():
        count = -(-length // BLOCK_SIZE)
        picked = (torch.rand(count, generator=generator) < share).nonzero().flatten()[: n - 1]
        picked = torch.cat((picked, torch.tensor([count - 1] if count else []).long())).unique()
        rows.append(torch.nn.functional.pad(picked, (0, n - len(picked)), value=INT32_MAX))
    return torch.stack(rows).to(DEVICE, torch.int32)


@pytest.mark.parametrize("share", [0.03, 0.4, 1.0])
@pytest.mark.parametrize("half_scores", [False, True])
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("forms", FORMS[:4], ids="-".join)
def test_logits_of_candidates(
    forms: tuple[KeyFormat, KeyFormat], heads: int, half_scores: bool, share: float
) -> None:
    """Those of the dense logits, bit for bit, at the rank of their block; nothing past a list."""
    inputs = random(forms, heads)
    packed, lens, n = pack(inputs), inputs.plan.compressed_lens, 130
    logits = logits_of(packed, WIDTH, half_scores=half_scores)
    blocks = some_blocks(lens, n, share)
    columns = 8 * n - 16  # no row has as many
    got = candidate_logits_of(packed, blocks, columns, half_scores=half_scores)
    positions = blocks.long()[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=DEVICE)
    positions = positions.flatten(1)[:, :columns]
    listed = (blocks != INT32_MAX).repeat_interleave(BLOCK_SIZE, 1)[:, :columns]
    visible = positions < lens[:, None]
    want = logits.gather(1, torch.where(visible, positions, 0))
    assert visible.sum() >= (lens > 0).sum()
    assert torch.equal(bits(got[visible]), bits(want[visible]))
    assert (got[~listed] == POISON).all()


@pytest.mark.parametrize("heads", [32, 64])
def test_columns_that_are_not_there_are_left_out(heads: int) -> None:
    inputs = random(("fp8", "fp8"), heads)
    packed, lens = pack(inputs), inputs.plan.compressed_lens
    all_logits, all_keys = logits_of(packed, WIDTH), block_keys_of(packed, 125)
    for width in (1, 31, 77, 264):
        assert torch.equal(bits(logits_of(packed, width)), bits(all_logits[:, :width]))
    for width in (1, 5, 33):
        assert torch.equal(bits(block_keys_of(packed, width)), bits(all_keys[:, :width]))
    blocks = some_blocks(lens, 125, 0.5)
    few, many = (candidate_logits_of(packed, blocks, columns) for columns in (40, 1000))
    assert torch.equal(bits(few), bits(many[:, :40]))


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("form", ["fp8", "fp16"])
def test_other_rows_do_not_matter(form: KeyFormat, heads: int) -> None:
    """A row's bits in another place, among others or alone, whatever part a CTA gets."""
    inputs = random((form, form), heads)
    want = logits_of(pack(inputs), WIDTH)
    keys, q = keys_of(random_keys, form), inputs.index_q
    for pick in ([20], list(range(32, 12, -1)), [12, 12, 30, 12]):  # of the request of 21 rows
        lens = [[], [], [LENS[2][row - 12] for row in pick], [], [], []]
        index = torch.tensor(pick, device=DEVICE)
        scales = None if q.scales is None else q.scales[index]
        queries = IndexQ(q.values[index], scales), inputs.head_weights[index]
        got = logits_of(pack(inputs_of(keys, queries, lens)), WIDTH)
        assert torch.equal(bits(got), bits(want[index]))


@pytest.mark.parametrize("form", ["fp8", "fp4", "fp16", "bf16"])
@pytest.mark.parametrize("heads", [32, 64])
def test_nan_and_infinity(form: KeyFormat, heads: int) -> None:
    """What the formula gives; NaN is no block's key."""
    generator = torch.Generator(DEVICE).manual_seed(3)
    values = torch.randn(1000, 128, device=DEVICE, generator=generator)
    if form in ("fp16", "bf16"):
        values[3, 5], values[40, 100], values[77, 8] = torch.inf, -torch.inf, torch.nan
        values[200:208] = torch.nan
    keys = flat_index_k(values, form)
    if form == "fp8":
        assert keys.scales is not None
        codes = keys.values.view(torch.uint8)
        codes[3, 5], codes[40, 100] = 0x7F, 0xFF
        codes[200:208, 17] = 0x7F
        keys.scales[50], keys.scales[51], keys.scales[77] = torch.inf, -torch.inf, torch.nan
    if form == "fp4":
        assert keys.scales is not None
        for position in (3, 77, *range(200, 208)):
            keys.scales[position] |= 0xFF << 8
    queries, weights = random_queries(9, heads, form, seed=4, device=DEVICE)
    weights[2, 3] = torch.nan
    inputs = inputs_of([keys], (queries, weights), [[1000, 999, 998, 210, 207, 204, 42, 4, 0]])
    packed, lens, visible = pack(inputs), inputs.plan.compressed_lens, seen(inputs)
    got, want = logits_of(packed, 1000), oracle(inputs)
    assert torch.equal(got.isnan()[visible], want.isnan()[visible])
    unusual = visible & (want.isinf() | want.isnan())
    infinite = visible & want.isinf()
    assert torch.equal(got[infinite], want[infinite])
    assert unusual[0].sum() >= 10
    assert unusual[2].sum() == 998
    expected = torch.full((9, 125), torch.nan, device=DEVICE)
    block_keys(got, lens, out=expected)
    keys_got = block_keys_of(packed, 125)
    written = torch.arange(125, device=DEVICE) * BLOCK_SIZE < lens[:, None]
    assert torch.equal(bits(keys_got[written]), bits(expected[written]))
    assert (keys_got[:2, 25] == -torch.inf).all()  # positions 200 to 207


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("form", ["fp8", "fp16"])
def test_half_scores(form: KeyFormat, heads: int) -> None:
    """Integers beyond 2^11, exact in float32: each head's is rounded to float16, to nearest."""
    inputs, scores = beyond_halves(form, heads)
    packed, weights = pack(inputs), inputs.head_weights
    rounded = (scores.half().float().relu() * weights[:, :, None]).sum(1)
    unrounded = (scores.relu() * weights[:, :, None]).sum(1)
    assert (rounded != unrounded).float().mean() > 0.2
    assert torch.equal(logits_of(packed, 300, half_scores=True), rounded)
    assert torch.equal(logits_of(packed, 300), unrounded)


@pytest.mark.parametrize("lens", [[[]], [[0, 0, 0]], [[], [0]]], ids=str)
def test_nothing_to_score(lens: list[list[int]]) -> None:
    rows = sum(map(len, lens))
    keys = [random_keys(0, "fp8", seed=1, device=DEVICE) for _ in lens]
    queries = random_queries(rows, 32, "fp8", seed=1, device=DEVICE)
    packed = pack(inputs_of(keys, queries, lens))
    assert packed.keys.shape[0] == 0
    assert (logits_of(packed, 64) == POISON).all()
    assert (block_keys_of(packed, 8) == POISON).all()
    none = torch.full((rows, 3), INT32_MAX, dtype=torch.int32, device=DEVICE)
    assert (candidate_logits_of(packed, none, 24) == POISON).all()
