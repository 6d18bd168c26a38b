# SPDX-License-Identifier: Apache-2.0
"""The README's Python runs as it stands."""

import re
from importlib import import_module
from inspect import get_annotations
from pathlib import Path

import pytest
import torch

from sparse_indexer.protocol import CandidateIndexer
from sparse_indexer.testing import sparse_attention_reference

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(block: str) -> dict:
    namespace: dict = {}
    exec(compile(block, "README.md", "exec"), namespace)
    return namespace


def test_the_score_is_the_librarys() -> None:
    from sparse_indexer import FlatIndexK, IndexQ, PrefillIndexerInputs, plan_prefill

    logit = run(BLOCKS[0])["logit"]
    values = torch.randn(5, 128).to(torch.float8_e4m3fn)
    k_scale = torch.rand(5)
    q = torch.randn(2, 3, 128).to(torch.float8_e4m3fn)
    w = torch.randn(2, 3)
    plan = plan_prefill([4, 4], [2])
    dense = PrefillIndexerInputs(plan, IndexQ(q), w, FlatIndexK(values, k_scale, "fp8"))
    q, k = q.double(), values.double()
    for r in range(2):
        for n in range(5):
            want = logit(q, w.double(), k, k_scale.double(), r, n)
            assert dense.dense_scores()[r, n] == want
    k[3] = torch.nan
    assert logit(q, w.double(), k, k_scale.double(), 0, 3).isnan()


def test_the_attention_backend_example_selects() -> None:
    made = run(BLOCKS[1])
    assert made["indexer"].name == "mask"
    positions = made["positions"]
    assert (positions[:2] >= 0).all()
    assert (positions[:2, 1:] > positions[:2, :-1]).all()
    assert positions[2].tolist() == [*range(31), *[-1] * 33]
    page_table = made["page_table"]
    for row, request in ((0, 0), (2, 1)):
        used = positions[row][positions[row] >= 0].long()
        want = page_table[request, used // 64] * 64 + used % 64
        assert made["kv_slots"][row].tolist() == want.tolist() + [-1] * (64 - len(used))
    assert made["tail"].blocks.tolist() == made["candidates"].blocks[[1, 4]].tolist()


def test_the_attention_example_attends() -> None:
    made = run(BLOCKS[2])
    options = {"sink": torch.zeros(64), "scale": 192**-0.5, "value_dim": 512}
    want = sparse_attention_reference(made["q"], made["pool"], made["slots"], **options)
    assert made["out"].shape == (3, 64, 512)
    torch.testing.assert_close(made["out"].double(), want, rtol=2.0**-10, atol=1e-5)


def test_the_conformance_examples_pass(capsys: pytest.CaptureFixture[str]) -> None:
    report = run(BLOCKS[3])["report"]
    assert report.backend == "sm100"
    assert report.selecting_rows > 40
    run(BLOCKS[4])
    assert "mask: 0 of" in capsys.readouterr().out


def test_all_that_a_backend_needs_is_named() -> None:
    text = README.split("## Writing a backend")[1].split("```")[0]
    own = [name for name in get_annotations(CandidateIndexer) if not name.startswith("_")]
    assert own == ["name", "device", "topk", "topk_blocks"]
    assert all(f"`{name}`" in text for name in own)


def test_what_is_named_outside_the_examples_has_its_module() -> None:
    for name, module in {
        "Sm70Indexer": "sparse_indexer.backends.sm70",
        "warmup": "sparse_indexer.jit",
    }.items():
        assert hasattr(import_module(module), name)
        assert re.search(rf"`{name}\(device[^`]*\)`\s+of\s+`{re.escape(module)}`", README)


def test_the_support_matrix_is_the_factorys() -> None:
    from sparse_indexer.factory import BACKENDS

    states = dict(re.findall(r"^\| `(\w+)` \|.*\| (ready|not yet) \|$", README, re.MULTILINE))
    want = {n: "not yet" if spec.make is None else "ready" for n, spec in BACKENDS.items()}
    assert states == want


def test_the_variables_are_those_that_the_code_reads() -> None:
    root = Path(__file__).parents[1]
    sources = [p for folder in ("src", "jit_csrc") for p in (root / folder).rglob("*.*")]
    texts = [p.read_text() for p in sources if p.suffix in (".py", ".h", ".cc", ".cuh")]
    read = {name for text in texts for name in re.findall(r'"(SPARSE_INDEXER_[A-Z_]+)"', text)}
    assert set(re.findall(r"^\| `(SPARSE_INDEXER_\w+)` \|", README, re.MULTILINE)) == read
