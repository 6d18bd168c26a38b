# SPDX-License-Identifier: Apache-2.0
"""A trace: captured tensors of one request and up to two index layers, a safetensors file.

key                      dtype, shape                            meaning
positions                int32 or int64 [rows]                   token of each row, ascending
source.index_q           float8_e4m3fn [rows, heads, 128]        queries; or float16, bfloat16;
                         uint8 [rows, heads, 64]                 or fp4
source.index_q_scales    float32 (fp8) or int32 (fp4)            fp4: four ue8m0 codes; none with
                         [rows, heads]                           fp8: folded in the weights
source.head_weights      float32 or bfloat16 [rows, heads]
source.index_k           float8_e4m3fn [positions, 128]          keys; or float16, bfloat16;
                         uint8 [positions, 64]                   or fp4
source.index_k_scales    float32 (fp8) or int32 (fp4)            with fp8 and fp4 keys, always
                         [positions]
consumer.*               as source.*; optional as a whole        without keys: the source's
token_text               uint8 [bytes]; optional                 UTF-8 text of all tokens
token_offsets            int32 [tokens + 1]; with token_text     first byte of each token, end

Metadata, optional: compress_ratio, the tokens a position stands for (default 1); model, text and
layers are shown.
"""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from sparse_indexer.errors import expect_tensor, mismatch, one_line
from sparse_indexer.formats import HEAD_DIM, KeyFormat
from sparse_indexer.inputs import FlatIndexK, IndexQ

_LAYERS = ("source", "consumer")
_LAYER_KEYS = ("index_q", "index_q_scales", "head_weights", "index_k", "index_k_scales")
KEYS = (
    "positions",
    *(f"{layer}.{key}" for layer in _LAYERS for key in _LAYER_KEYS),
    "token_text",
    "token_offsets",
)

_FORMAT_OF: dict[torch.dtype, KeyFormat] = {
    torch.uint8: "fp4",
    torch.float8_e4m3fn: "fp8",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}
_Tensors = dict[str, torch.Tensor]


class TraceLayer(msgspec.Struct, frozen=True, eq=False):
    """What one layer's indexer saw."""

    index_q: IndexQ
    head_weights: torch.Tensor  # [rows, heads] float32 or bfloat16
    index_k: FlatIndexK  # [positions]


class Trace(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One request's rows and the layers that scored them."""

    name: str  # the file's
    metadata: dict[str, str]
    compress_ratio: int
    positions: torch.Tensor  # [rows] int64: token of each row, strictly ascending
    source: TraceLayer
    consumer: TraceLayer | None
    shared_keys: bool  # the consumer scores the source's keys
    token_text: bytes | None  # UTF-8
    token_offsets: list[int]  # [tokens + 1], empty without token_text

    @property
    def compressed_lens(self) -> torch.Tensor:
        """`[rows]` int64: positions each row sees."""
        return (self.positions + 1) // self.compress_ratio

    def words(self, first: int, stop: int) -> str:
        """The text of tokens first ... stop - 1 (those past the text left out), on one line."""
        assert self.token_text is not None
        stop = min(stop, len(self.token_offsets) - 1)
        piece = self.token_text[self.token_offsets[first] : self.token_offsets[stop]]
        return one_line(piece.decode(errors="replace"))


def load_trace(path: Path | None = None) -> Trace:
    """Load a trace; without `path` the one that ships with the package.

    Raises:
        ValueError: not a readable safetensors file, or a key that is missing, unknown or of a
            wrong shape, dtype or value; the message names it.
    """
    if path is None:
        shipped = files("sparse_indexer") / "data" / "smollm2_trace.safetensors"
        with as_file(shipped) as file:
            return load_trace(file)
    if not path.is_file():
        raise mismatch("path", "a safetensors file", f"no file {str(path)!r}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise mismatch("path", "a safetensors file", f"{str(path)!r} ({error})") from error
    return _trace(path.name, tensors, metadata)


def _trace(name: str, tensors: _Tensors, metadata: dict[str, str]) -> Trace:
    for key in tensors:
        if key not in KEYS:
            raise mismatch(key, f"a key of {', '.join(KEYS)}", "an unknown key")
    ratio = metadata.get("compress_ratio", "1")[:20]
    if not (ratio.isascii() and ratio.isdigit() and int(ratio)):
        raise mismatch("compress_ratio", "an integer of at least 1 in the metadata", repr(ratio))
    positions = _get(tensors, "positions", ("rows",), torch.int32, torch.int64).long()
    if not len(positions):
        raise mismatch("positions", "at least 1 row", "0 rows")
    if positions[0] < 0 or (positions.diff() <= 0).any():
        raise mismatch("positions", "tokens from 0, strictly ascending", "other values")
    source = _layer(tensors, "source", len(positions), None)
    has_consumer = any(key.startswith("consumer.") for key in tensors)
    consumer = _layer(tensors, "consumer", len(positions), source) if has_consumer else None
    last = int(positions[-1])
    for layer_name, layer in zip(_LAYERS, (source, consumer), strict=True):
        seen = max(1, (last + 1) // int(ratio))
        if layer is not None and len(layer.index_k.values) < seen:
            want = f"at least the {seen} positions that the last row sees"
            raise mismatch(f"{layer_name}.index_k", want, f"{len(layer.index_k.values)} positions")
    text, offsets = _text(tensors, last)
    return Trace(
        name=name,
        metadata=metadata,
        compress_ratio=int(ratio),
        positions=positions,
        source=source,
        consumer=consumer,
        shared_keys=consumer is not None and consumer.index_k is source.index_k,
        token_text=text,
        token_offsets=offsets,
    )


def _layer(tensors: _Tensors, name: str, rows: int, source: TraceLayer | None) -> TraceLayer:
    """The layer's tensors; without keys of its own, those of `source`."""
    key = f"{name}.index_q"
    values = _get_values(tensors, key, (rows, "heads"))
    heads = values.shape[1]
    if not heads:
        raise mismatch(key, "at least 1 head", values)
    optional = values.dtype == torch.float8_e4m3fn and f"{key}_scales" not in tensors
    scales = None if optional else _get_scales(tensors, key, values)
    dtypes = (torch.float32, torch.bfloat16)
    weights = _get(tensors, f"{name}.head_weights", (rows, heads), *dtypes)
    key = f"{name}.index_k"
    if source is not None and key not in tensors:
        if f"{key}_scales" in tensors:
            raise mismatch(f"{key}_scales", f"no such key without {key}", tensors[f"{key}_scales"])
        return TraceLayer(IndexQ(values, scales), weights, source.index_k)
    keys = _get_values(tensors, key, ("positions",))
    index_k = FlatIndexK(keys, _get_scales(tensors, key, keys), _FORMAT_OF[keys.dtype])
    return TraceLayer(IndexQ(values, scales), weights, index_k)


def _get(
    tensors: _Tensors, key: str, shape: tuple[int | str, ...], *dtypes: torch.dtype
) -> torch.Tensor:
    if key not in tensors:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise mismatch(key, f"[{', '.join(map(str, shape))}] {names}", "no such key")
    return expect_tensor(key, tensors[key], shape, dtypes)


def _get_values(tensors: _Tensors, key: str, shape: tuple[int | str, ...]) -> torch.Tensor:
    """Queries or keys: the dtype tells the format, the format the last dimension."""
    packed = key in tensors and tensors[key].dtype == torch.uint8
    if packed:
        return _get(tensors, key, (*shape, HEAD_DIM // 2), torch.uint8)
    plain = (torch.float8_e4m3fn, torch.float16, torch.bfloat16)
    return _get(tensors, key, (*shape, HEAD_DIM), *plain)


def _get_scales(tensors: _Tensors, key: str, values: torch.Tensor) -> torch.Tensor | None:
    """The scales that belong to `values`, one a vector; `None` with float16 and bfloat16."""
    key, shape = f"{key}_scales", tuple(values.shape[:-1])
    if values.dtype == torch.uint8:
        return _get(tensors, key, shape, torch.int32)
    if values.dtype == torch.float8_e4m3fn:
        return _get(tensors, key, shape, torch.float32)
    if key in tensors:
        raise mismatch(key, f"no such key with {values.dtype} values", tensors[key])
    return None


def _text(tensors: _Tensors, last: int) -> tuple[bytes | None, list[int]]:
    """The text and the tokens' byte offsets, which reach token `last`; nothing if left out."""
    if "token_text" not in tensors and "token_offsets" not in tensors:
        return None, []
    text = bytes(_get(tensors, "token_text", ("bytes",), torch.uint8).tolist())
    offsets = _get(tensors, "token_offsets", ("tokens + 1",), torch.int32).long()
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise mismatch("token_text", "UTF-8", str(error)) from error
    if len(offsets) < last + 2:
        want = f"at least {last + 2} offsets, as positions reach token {last}"
        raise mismatch("token_offsets", want, f"{len(offsets)} offsets")
    if offsets[0] != 0 or offsets[-1] != len(text) or (offsets.diff() < 0).any():
        got = f"{int(offsets[0])} to {int(offsets[-1])}, or a descent between"
        raise mismatch("token_offsets", f"ascending offsets from 0 to {len(text)}", got)
    return text, offsets.tolist()
