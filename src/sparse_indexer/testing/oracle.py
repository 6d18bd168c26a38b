# SPDX-License-Identifier: Apache-2.0
"""The oracle: stored bytes to selection in plain Python loops.

It shares no code with any backend: it decodes bytes by the formats' definitions, multiplies and
adds Python floats (fp64), rounds each logit once to fp32, and sorts. Slow, meant for small inputs.
"""

from __future__ import annotations

import ctypes
import math
import struct

import torch

from sparse_indexer.inputs import BLOCK_SIZE, FlatIndexK, IndexKPool, PrefillIndexerInputs

LogitRows = list[list[float]]
"""Per row, the fp32 logit of each position it sees."""


def oracle_logits(inputs: PrefillIndexerInputs) -> LogitRows:
    """`k_scale[n] * sum_h w[r, h] * relu(q[r, h] . k[n])`, rounded once to fp32.

    Dot products are rounded once (`math.fsum`), heads summed in order.
    """
    lens = inputs.plan.compressed_lens.tolist()
    requests = inputs.plan.request_of_row.tolist()
    keys: dict[tuple[int, int], tuple[list[float], float]] = {}
    rows = []
    for row, (request, length) in enumerate(zip(requests, lens, strict=True)):
        queries, weights = _query(inputs, row)
        logits = []
        for position in range(length):
            if (request, position) not in keys:
                keys[request, position] = _key(inputs, request, position)
            key, k_scale = keys[request, position]
            total = 0.0
            for query, weight in zip(queries, weights, strict=True):
                dot = _dot(query, key)
                total += weight * (dot if dot > 0 or math.isnan(dot) else 0.0)
            logits.append(ctypes.c_float(total * k_scale).value)
        rows.append(logits)
    return rows


def oracle_publish(logits: LogitRows, topk_blocks: int) -> list[list[int]]:
    """Per row, the ascending ids of the blocks it publishes (rules 3 and 4)."""
    published = []
    for row in logits:
        keys = [
            max(_rank(value) for value in row[start : start + BLOCK_SIZE])
            for start in range(0, len(row), BLOCK_SIZE)
        ]
        newest = len(keys) - 1
        order = sorted(range(len(keys)), key=lambda block: (block != newest, -keys[block], block))
        published.append(sorted(order[:topk_blocks]))
    return published


def oracle_select(
    logits: LogitRows, topk: int, blocks: list[list[int]] | None = None
) -> list[list[int]]:
    """Per row, the ascending positions it selects (rules 1 and 2), all or those of its blocks."""
    selected = []
    for i, row in enumerate(logits):
        allowed = list(range(len(row)))
        if blocks is not None:
            published = set(blocks[i])
            allowed = [n for n in allowed if n // BLOCK_SIZE in published]
        order = sorted(allowed, key=lambda n: (-_rank(row[n]), n))
        selected.append(sorted(order[:topk]))
    return selected


def _rank(logit: float) -> float:
    return -math.inf if math.isnan(logit) else logit


def _dot(query: list[float], key: list[float]) -> float:
    products = [a * b for a, b in zip(query, key, strict=True)]
    try:
        return math.fsum(products)
    except (OverflowError, ValueError):  # infinities; inf - inf
        return sum(products)


def _query(inputs: PrefillIndexerInputs, row: int) -> tuple[list[list[float]], list[float]]:
    """The heads' vectors and weights of a row; an fp8 scale multiplies the weight."""
    q = inputs.index_q
    weights = [float(w) for w in inputs.head_weights[row].tolist()]
    scales = None if q.scales is None else q.scales[row].tolist()
    vectors = []
    for head in range(len(weights)):
        data = _bytes(q.values[row, head])
        if q.values.dtype == torch.uint8:
            assert scales is not None
            vectors.append(_decode_fp4(data, struct.pack("<i", scales[head])))
        elif q.values.dtype == torch.float8_e4m3fn:
            vectors.append([_decode_e4m3(byte) for byte in data])
            weights[head] *= 1.0 if scales is None else scales[head]
        else:
            vectors.append(_decode_half(data, q.values.dtype == torch.bfloat16))
    return vectors, weights


def _key(inputs: PrefillIndexerInputs, request: int, position: int) -> tuple[list[float], float]:
    """The stored vector of a position and the scale that multiplies its logit."""
    payload, scale = _stored(inputs, request, position)
    form = inputs.index_k.format
    if form == "fp4":
        return _decode_fp4(payload, scale), 1.0
    if form == "fp8":
        return [_decode_e4m3(byte) for byte in payload], float(struct.unpack("<f", scale)[0])
    return _decode_half(payload, form == "bf16"), 1.0


def _stored(inputs: PrefillIndexerInputs, request: int, position: int) -> tuple[bytes, bytes]:
    """The payload and scale bytes of a position, found by the formats' layout."""
    keys, plan = inputs.index_k, inputs.plan
    if isinstance(keys, FlatIndexK):
        assert plan.key_starts is not None
        column = int(plan.key_starts[request]) + position
        scales = b"" if keys.scales is None else _bytes(keys.scales[column : column + 1])
        return _bytes(keys.values[column]), scales
    assert isinstance(keys, IndexKPool)
    assert plan.page_table is not None
    page = _bytes(keys.pages[int(plan.page_table[request, position // keys.page_size])].flatten())
    offset = position % keys.page_size
    payload, scale = {"fp4": (64, 4), "fp8": (128, 4), "fp16": (256, 0), "bf16": (256, 0)}[
        keys.format
    ]
    if keys.layout == "planar":
        start, scales_start = offset * payload, keys.page_size * payload + offset * scale
    else:
        start = offset * (payload + scale)
        scales_start = start + payload
    return page[start : start + payload], page[scales_start : scales_start + scale]


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().contiguous().view(torch.uint8).tolist())


def _decode_e4m3(code: int) -> float:
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if code & 128 else value


def _decode_fp4(payload: bytes, codes: bytes) -> list[float]:
    values = []
    for i in range(2 * len(payload)):
        nibble = payload[i // 2] >> 4 if i % 2 else payload[i // 2] & 15
        magnitude = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[nibble & 7]
        code = codes[i // 32]
        scale = math.nan if code == 255 else 2.0 ** (code - 127)
        values.append((-magnitude if nibble & 8 else magnitude) * scale)
    return values


def _decode_half(data: bytes, brain: bool) -> list[float]:
    if not brain:
        return list(struct.unpack(f"<{len(data) // 2}e", data))
    pairs = (b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
    return [float(struct.unpack("<f", pair)[0]) for pair in pairs]
