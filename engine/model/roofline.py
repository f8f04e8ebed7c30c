"""The roofline of the engine: the least time of a pass.

Two rates are measured on the device of the engine: memory bandwidth, and throughput of large GEMMs.
The bytes and operations of a pass are counted from the checkpoint. A pass takes at least as long as
the slower of the two (the roofline model).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open

from kvrelay.engine.kv.spec import DTYPE_BYTES
from kvrelay.engine.model.checkpoint.mistral import read_raw
from kvrelay.engine.model.checkpoint.quantized_config import float_type, quantization_of
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.ops import TORCH_DTYPES
from kvrelay.engine.model.quantize import GROUPS, bits_of

PROBE_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}  # far beyond any cache
PROBE_SIZE = {"cpu": 1024, "cuda": 8192}  # sides of the square matrices
PROBES = 9  # the best counts: other load only makes one slower
SCALE_BYTES = 2
STORED = {"F32": "float32", "F16": "float32", "BF16": "bfloat16"}  # on a CPU, by the checkpoint


@dataclass(frozen=True, slots=True)
class Rates:
    """What one device does, with as many threads as the engine has."""

    read_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Weights:
    """Numbers in the matrices of a model, and what they take in memory. The embedding table is not
    among them: a row of it is read, no more."""

    every: int  # that every token passes
    head: int  # those of the logits, which only sampled tokens pass
    experts: int  # all experts together
    share: float  # part of the experts that one token passes
    bytes_per_number: float

    def num_bytes(self, batch: int) -> float:
        """Bytes that a pass of `batch` tokens reads, if each chooses its experts independently."""
        chosen = 1.0 - (1.0 - self.share) ** batch
        return (self.every + chosen * self.experts) * self.bytes_per_number

    def flops(self, num_tokens: int, num_sampled: int) -> float:
        body = self.every - self.head + self.share * self.experts
        return 2.0 * (body * num_tokens + self.head * num_sampled)


def measure_rates(device: str, dtype: str, num_threads: int) -> Rates:
    """`dtype`: of the products. Takes about a second."""
    torch.set_num_threads(num_threads)
    size, num_bytes = PROBE_SIZE[device], PROBE_BYTES[device]
    numbers = torch.ones(num_bytes // 8, dtype=torch.int64, device=device)
    wide = numbers.view(torch.float32)
    read_s = min(_best_s(kind.sum, device) for kind in (numbers, wide))
    left = torch.randn(size, size, device=device).to(TORCH_DTYPES[dtype])
    product = torch.empty_like(left)
    multiply_s = _best_s(lambda: torch.mm(left, left, out=product), device)
    return Rates(num_bytes / read_s, 2.0 * size**3 / multiply_s)


def _best_s(call: Callable[[], object], device: str) -> float:
    found = []
    for _ in range(PROBES + 1):  # the first touches its memory
        began = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return min(found[1:])


def _quantized_bytes(quantization: str, is_head: bool) -> float:
    """What a number takes, with its share of the scales; 0: it is not quantized."""
    if quantization == "fp8":
        return 0.0 if is_head else 1.0
    bits = bits_of(quantization, "logits" if is_head else "")
    return {0: 0.0, 8: 1 + SCALE_BYTES / GROUPS[8], 4: 0.5 + 2 * SCALE_BYTES / GROUPS[4]}[bits]


def count_weights(
    path: Path, config: ModelConfig, device: str, dtype: str, quantization: str
) -> Weights:
    """From the headers of the checkpoint in `path`; `dtype` and `quantization`: of the engine."""
    every = experts = head = table = 0
    num_bytes = table_bytes = 0.0
    for name, count, kept in _matrices(path, device, dtype):
        is_head = "lm_head" in name or "embed_tokens" in name
        each = _quantized_bytes(quantization, is_head) or DTYPE_BYTES[kept]
        if device == "cuda" and is_head:
            each = DTYPE_BYTES[kept]  # the layers' matrices alone are quantized there
        if "embed_tokens" in name:
            table, table_bytes = count, count * each
            continue
        num_bytes += count * each
        if "lm_head" in name:
            head = count
        elif ".experts." in name:
            experts += count
        else:
            every += count
    if config.tie_word_embeddings or not head:  # the table is the head
        head = table
        num_bytes += table_bytes
    every += head
    routed = config.experts
    share = routed.num_per_token / routed.num_experts if routed is not None else 0.0
    return Weights(every, head, experts, share, num_bytes / (every + experts))


def _matrices(path: Path, device: str, dtype: str) -> Iterator[tuple[str, int, str]]:
    """(name, numbers, the type that they are kept in) of each."""
    raw = read_raw(path)
    quantized, widened = quantization_of(path, raw), float_type(raw)
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                part = tensors.get_slice(name)
                shape = part.get_shape()
                stored = part.get_dtype()
                number = quantized.num_numbers(name, shape, stored) if quantized else prod(shape)
                # Narrow numbers are widened to what the model was made in.
                kept = STORED.get(stored, "bfloat16" if widened == "bfloat16" else "float32")
                if device == "cuda" or dtype == "bfloat16":
                    kept = dtype
                if len(shape) > 1 and number:
                    yield name, number, kept


def decode_roofline_s(
    rates: Rates, weights: Weights, batch: int, context: float, kv_bytes_per_token: float
) -> float:
    """How long a step of `batch` decodes takes, each after `context` tokens."""
    read = weights.num_bytes(batch) + batch * context * kv_bytes_per_token
    return max(read / rates.read_bytes_per_s, weights.flops(batch, batch) / rates.flops_per_s)


def prefill_roofline_s(
    rates: Rates, weights: Weights, config: ModelConfig, num_tokens: int
) -> float:
    """How long a prompt of `num_tokens` takes up to its first token."""
    attention = 2.0 * sum(
        _attention(config, layer, num_tokens) for layer in range(config.num_layers)
    )
    flops = weights.flops(num_tokens, 1) + attention
    return max(weights.num_bytes(num_tokens) / rates.read_bytes_per_s, flops / rates.flops_per_s)


def _attention(config: ModelConfig, layer: int, num_tokens: int) -> float:
    """Numbers of queries that meet a key's, and of values, in a layer."""
    heads, indexer = config.kv_heads(layer), config.indexer
    if indexer is None:
        width, scores = heads.key_dim + heads.value_dim, 0.0
        pairs = _pairs(num_tokens, config.window(layer))
    else:  # values are a part of keys, and no more than `topk` are met, but all index keys
        width, pairs = 2 * heads.key_dim, _pairs(num_tokens, indexer.topk)
        scores = indexer.num_heads * heads.value_dim * _pairs(num_tokens, 0)
    return config.num_heads * width * pairs + scores


def _pairs(num_tokens: int, window: int) -> float:
    if window and window < num_tokens:
        return window * (window + 1) / 2 + window * (num_tokens - window)
    return num_tokens * (num_tokens + 1) / 2
