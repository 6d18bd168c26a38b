# SPDX-License-Identifier: Apache-2.0
"""Trace files: every format is read as it is, and every wrong key is named."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sparse_indexer.formats import quantize_fp4, quantize_fp8
from sparse_indexer.trace import Trace, load_trace

Tensors = dict[str, torch.Tensor]

ROWS, HEADS, POSITIONS = 3, 2, 6
WORDS = ["The", " naïve", "\n\n  cat", " sat", "\x1b", "."]


def random_layer(name: str, fmt: str, rows: int, heads: int, positions: int) -> Tensors:
    """Keys `name`.* of a layer in one format; `positions` 0: without keys of its own."""
    generator = torch.Generator().manual_seed(len(name))
    quantize = {
        "fp4": quantize_fp4,
        "fp8": quantize_fp8,
        "fp16": lambda x: (x.half(), None),
        "bf16": lambda x: (x.bfloat16(), None),
    }[fmt]
    tensors = {f"{name}.head_weights": torch.rand(rows, heads, generator=generator)}
    for key, shape in (("index_q", (rows, heads)), ("index_k", (positions,))):
        if 0 not in shape:
            values, scales = quantize(torch.randn(*shape, 128, generator=generator))
            tensors[f"{name}.{key}"] = values
            if scales is not None:
                tensors[f"{name}.{key}_scales"] = scales
    return tensors


def tensors_of(fmt: str = "fp8") -> Tensors:
    offsets = [0]
    for word in WORDS:
        offsets.append(offsets[-1] + len(word.encode()))
    return {
        "positions": torch.tensor([1, 2, 5], dtype=torch.int32),
        "token_text": torch.tensor(list("".join(WORDS).encode()), dtype=torch.uint8),
        "token_offsets": torch.tensor(offsets, dtype=torch.int32),
        **random_layer("source", fmt, ROWS, HEADS, POSITIONS),
        **random_layer("consumer", fmt, ROWS, HEADS, POSITIONS),
    }


def saved(folder: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> Path:
    path = folder / "trace.safetensors"
    save_file(tensors, path, metadata)
    return path


def test_shipped_trace() -> None:
    trace = load_trace()
    assert trace.name == "smollm2_trace.safetensors"
    assert "SmolLM2-135M" in trace.metadata["model"]
    assert trace.positions.tolist() == list(range(7936, 8192))
    assert trace.compressed_lens.tolist() == list(range(7937, 8193))
    for layer in (trace.source, trace.consumer):
        assert layer is not None
        assert layer.index_q.values.shape == (256, 6, 128)
        assert layer.index_q.scales is not None
        assert layer.head_weights.shape == (256, 6)
        assert layer.index_k.format == "fp8"
        assert layer.index_k.values.shape == (8192, 128)
    assert not trace.shared_keys
    assert trace.words(0, 5) == 'The "assert" statement'
    assert trace.token_text is not None
    assert hashlib.sha256(trace.token_text).hexdigest().startswith("3b26ded7")


@pytest.mark.parametrize("fmt", ["fp4", "fp8", "fp16", "bf16"])
def test_reads_what_was_written(tmp_path: Path, fmt: str) -> None:
    tensors = tensors_of(fmt)
    trace = load_trace(saved(tmp_path, tensors, {"model": "a model", "compress_ratio": "1"}))
    assert trace.metadata["model"] == "a model"
    for name, layer in (("source", trace.source), ("consumer", trace.consumer)):
        assert layer is not None
        assert layer.index_k.format == fmt
        read = {
            "index_q": layer.index_q.values,
            "index_q_scales": layer.index_q.scales,
            "head_weights": layer.head_weights,
            "index_k": layer.index_k.values,
            "index_k_scales": layer.index_k.scales,
        }
        for key, tensor in read.items():
            want = tensors.get(f"{name}.{key}")
            assert (tensor is None) == (want is None)
            if tensor is not None and want is not None:
                assert tensor.dtype == want.dtype
                assert torch.equal(tensor.view(torch.uint8), want.view(torch.uint8))


def test_formats_may_differ_and_fp8_query_scales_may_be_folded(tmp_path: Path) -> None:
    tensors = tensors_of("fp8") | random_layer("consumer", "bf16", ROWS, 5, POSITIONS)
    for key in ("source.index_q_scales", "consumer.index_q_scales", "consumer.index_k_scales"):
        del tensors[key]
    tensors["positions"] = tensors["positions"].long()
    tensors["source.head_weights"] = tensors["source.head_weights"].bfloat16()
    trace = load_trace(saved(tmp_path, tensors))
    assert trace.source.index_q.scales is None
    assert trace.consumer is not None
    assert (trace.source.index_k.format, trace.consumer.index_k.format) == ("fp8", "bf16")
    assert trace.consumer.index_q.values.shape[1] == 5


def test_consumer_without_keys_shares_the_sources(tmp_path: Path) -> None:
    tensors = tensors_of()
    del tensors["consumer.index_k"], tensors["consumer.index_k_scales"]
    trace = load_trace(saved(tmp_path, tensors))
    assert trace.shared_keys
    assert trace.consumer is not None
    assert trace.consumer.index_k is trace.source.index_k


def test_consumer_and_text_may_be_left_out(tmp_path: Path) -> None:
    kept = {k: v for k, v in tensors_of().items() if k.startswith(("source", "positions"))}
    trace = load_trace(saved(tmp_path, kept, {"compress_ratio": "4"}))
    assert trace.consumer is None
    assert not trace.shared_keys
    assert trace.token_text is None
    assert trace.compressed_lens.tolist() == [0, 0, 1]


def test_words_are_one_printable_line(tmp_path: Path) -> None:
    trace = load_trace(saved(tmp_path, tensors_of()))
    assert trace.words(0, 3) == "The naïve cat"
    assert trace.words(2, 3) == " cat"
    assert trace.words(4, 99) == "?."


def replaced(key: str, value: torch.Tensor) -> Tensors:
    return tensors_of() | {key: value}


def without(*keys: str, fmt: str = "fp8") -> Tensors:
    return {k: v for k, v in tensors_of(fmt).items() if k not in keys}


WRONG: dict[str, tuple[Tensors, str]] = {
    "unknown": (
        replaced("source.index_v", torch.zeros(1)),
        r"^source\.index_v: expected a key of positions, source\.index_q, .*, got an unknown key$",
    ),
    "no positions": (
        without("positions"),
        r"^positions: expected \[rows\] int32 or int64, got no such key$",
    ),
    "no queries": (
        without("source.index_q"),
        r"^source\.index_q: expected \[3, heads, 128\] float8_e4m3fn or float16 or bfloat16, "
        r"got no such key$",
    ),
    "no weights": (
        without("consumer.head_weights"),
        r"^consumer\.head_weights: expected \[3, 2\] float32 or bfloat16, got no such key$",
    ),
    "no source keys": (
        without("source.index_k"),
        r"^source\.index_k: expected \[positions, 128\] .*, got no such key$",
    ),
    "no fp8 key scales": (
        without("source.index_k_scales"),
        r"^source\.index_k_scales: expected \[6\] float32, got no such key$",
    ),
    "no fp4 query scales": (
        without("source.index_q_scales", fmt="fp4"),
        r"^source\.index_q_scales: expected \[3, 2\] int32, got no such key$",
    ),
    "scales of plain keys": (
        tensors_of("fp16") | {"source.index_k_scales": torch.ones(POSITIONS)},
        r"^source\.index_k_scales: expected no such key with torch\.float16 values, "
        r"got \[6\] float32 on cpu$",
    ),
    "consumer scales without keys": (
        without("consumer.index_k"),
        r"^consumer\.index_k_scales: expected no such key without consumer\.index_k, got \[6\]",
    ),
    "positions dtype": (
        replaced("positions", torch.tensor([1.0, 2.0, 5.0])),
        r"^positions: expected \[rows\] int32 or int64, got \[3\] float32 on cpu$",
    ),
    "positions repeat": (
        replaced("positions", torch.tensor([1, 1, 5])),
        r"^positions: expected tokens from 0, strictly ascending, got other values$",
    ),
    "negative position": (
        replaced("positions", torch.tensor([-1, 1, 5])),
        r"^positions: expected tokens from 0, strictly ascending",
    ),
    "no rows": (
        replaced("positions", torch.zeros(0, dtype=torch.int32)),
        r"^positions: expected at least 1 row, got 0 rows$",
    ),
    "queries of other rows": (
        replaced("source.index_q", torch.zeros(4, HEADS, 128, dtype=torch.float16)),
        r"^source\.index_q: expected \[3, heads, 128\] .*, got \[4, 2, 128\] float16 on cpu$",
    ),
    "queries dtype": (
        replaced("source.index_q", torch.zeros(ROWS, HEADS, 128)),
        r"^source\.index_q: expected .*, got \[3, 2, 128\] float32 on cpu$",
    ),
    "packed width": (
        replaced("source.index_q", torch.zeros(ROWS, HEADS, 128, dtype=torch.uint8)),
        r"^source\.index_q: expected \[3, heads, 64\] uint8, got \[3, 2, 128\] uint8 on cpu$",
    ),
    "no heads": (
        replaced("source.index_q", torch.zeros(ROWS, 0, 128, dtype=torch.float16)),
        r"^source\.index_q: expected at least 1 head, got \[3, 0, 128\] float16 on cpu$",
    ),
    "weights of other heads": (
        replaced("source.head_weights", torch.zeros(ROWS, 3)),
        r"^source\.head_weights: expected \[3, 2\] float32 or bfloat16, got \[3, 3\] float32",
    ),
    "scales dtype": (
        replaced("consumer.index_k_scales", torch.ones(POSITIONS, dtype=torch.float16)),
        r"^consumer\.index_k_scales: expected \[6\] float32, got \[6\] float16 on cpu$",
    ),
    "too few keys": (
        tensors_of() | random_layer("consumer", "fp8", ROWS, HEADS, 5),
        r"^consumer\.index_k: expected at least the 6 positions that the last row sees, "
        r"got 5 positions$",
    ),
    "text without offsets": (
        without("token_offsets"),
        r"^token_offsets: expected \[tokens \+ 1\] int32, got no such key$",
    ),
    "offsets without text": (
        without("token_text"),
        r"^token_text: expected \[bytes\] uint8, got no such key$",
    ),
    "text is not UTF-8": (
        replaced("token_text", torch.full((30,), 255, dtype=torch.uint8)),
        r"^token_text: expected UTF-8, got 'utf-8' codec can't decode",
    ),
    "too few offsets": (
        replaced("token_offsets", torch.tensor([0, 3], dtype=torch.int32)),
        r"^token_offsets: expected at least 7 offsets, as positions reach token 5, got 2 offsets$",
    ),
    "offsets descend": (
        replaced("token_offsets", tensors_of()["token_offsets"][[0, 2, 1, 3, 4, 5, 6]]),
        r"^token_offsets: expected ascending offsets from 0 to \d+, got 0 to \d+, or a descent",
    ),
    "offsets past the text": (
        replaced("token_offsets", tensors_of()["token_offsets"] + 1),
        r"^token_offsets: expected ascending offsets from 0 to \d+, got 1 to \d+",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_keys_are_named(tmp_path: Path, case: str) -> None:
    tensors, match = WRONG[case]
    with pytest.raises(ValueError, match=match):
        load_trace(saved(tmp_path, tensors))


@pytest.mark.parametrize("ratio", ["0", "-4", "four", "", "1.5"])
def test_wrong_ratios_are_named(tmp_path: Path, ratio: str) -> None:
    match = rf"^compress_ratio: expected an integer of at least 1 in the metadata, got '{ratio}'$"
    with pytest.raises(ValueError, match=match):
        load_trace(saved(tmp_path, tensors_of(), {"compress_ratio": ratio}))


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^path: expected a safetensors file, got no file '.*x'$"):
        load_trace(tmp_path / "x")
    with pytest.raises(ValueError, match=r"^path: expected a safetensors file, got no file"):
        load_trace(tmp_path)
    text = tmp_path / "trace.txt"
    text.write_text("positions: 1, 2, 5\n")
    with pytest.raises(ValueError, match=r"^path: expected a safetensors file, got '.*' \(.*\)$"):
        load_trace(text)


def test_traces_are_frozen(tmp_path: Path) -> None:
    trace = load_trace(saved(tmp_path, tensors_of()))
    assert isinstance(trace, Trace)
    with pytest.raises(AttributeError, match="immutable"):
        trace.compress_ratio = 2
