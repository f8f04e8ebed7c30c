"""Attention on a GPU, beside the device's copy bandwidth and torch's flash attention.

    python -m benchmarks.gpu.attention [--sweep] [--only NAME]

Decode is judged by bytes of KV read per second, prefill by time against
`scaled_dot_product_attention` on the same lengths, contiguous. --sweep tries other tilings and
writes nothing. Writes benchmarks/results/gpu_attention.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.measure import copy_bandwidth, matrix_rate, print_table, seconds, write_json
from kvrelay.engine.model.gpu.attention_decode import (
    Splits,
    decode_attention,
    decode_tiling,
    list_splits,
)
from kvrelay.engine.model.gpu.attention_prefill import prefill_attention, prefill_tiles
from kvrelay.engine.model.gpu.attention_tile import Tiling
from kvrelay.engine.model.gpu.cache_pool import Pool
from kvrelay.engine.model.gpu.latent import (
    latent_decode,
    latent_prefill,
    latent_tiles,
    latent_tiling,
)

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
LATENT_HEADS, RANK, ROPE_DIM = 128, 512, 64
DECODE = {  # contexts
    "batch 64, 8k": [8192] * 64,
    "batch 256, 1k": [1024] * 256,
    "batch 8, 32k": [32_768] * 8,
    "batch 1, 128k": [131_072],
    "one of 128k, 63 of 2k": [131_072] + [2048] * 63,
}
PREFILL = {  # (query_len, context_len) of each sequence
    "1 x 8k": [(8192, 8192)],
    "8 x 1k": [(1024, 1024)] * 8,
    "16 ragged": [(256 * (1 + i % 8), 256 * (1 + i % 8)) for i in range(16)],
    "2k after 30k": [(2048, 32_768)],
}
Lengths = list[tuple[int, int]]


class Load:
    """Sequences over a pool of random blocks, in random order."""

    def __init__(self, lengths: Lengths, kv_heads: int, head_dim: int, planes: int, fp8: bool):
        counts = [-(-context // BLOCK_SIZE) for _, context in lengths]
        shape = (sum(counts), 1, planes, kv_heads)
        if fp8:
            width = BLOCK_SIZE * (head_dim + 1)
            data = torch.randint(0, 255, (*shape, width), dtype=torch.uint8, device="cuda")
            data &= 0xBF  # below 2: no NaN
            data[..., BLOCK_SIZE * head_dim :] = 127
        else:
            data = torch.randn((*shape, BLOCK_SIZE, head_dim), device="cuda", dtype=torch.bfloat16)
        self.pool = Pool(data, head_dim)
        self.num_tokens = sum(count for count, _ in lengths)
        self.spans, first, taken = [], 0, 0
        order = torch.randperm(sum(counts)).int()
        tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for index, ((count, context), blocks) in enumerate(zip(lengths, counts, strict=True)):
            tables[index, :blocks] = order[taken : taken + blocks]
            self.spans.append((first, count, context))
            first, taken = first + count, taken + blocks
        rows = torch.tensor(self.spans, dtype=torch.int32).T.contiguous().cuda()
        self.tensors = (*rows, tables.cuda())
        self.of_decodes = (rows[0], rows[2], self.tensors[3])
        self.kv_bytes = sum(c for _, c in lengths) * data[0, 0].nbytes // BLOCK_SIZE

    def splits(self, heads: int, width: int, block_n: int, window: int = 0) -> Splits | None:
        _, query_len, context_len, _ = self.tensors
        contexts = [context for _, _, context in self.spans]
        return list_splits(query_len, context_len, contexts, heads, width, block_n, window)


def decode(lengths: Lengths, fp8: bool, tiling: Tiling | None = None, **options: Any) -> Callable:
    """Work that attends once, for `seconds`; its `load` says what is read."""
    load = Load(lengths, KV_HEADS, HEAD_DIM, 2, fp8)
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    qkv = torch.randn(load.num_tokens, width, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(load.num_tokens, HEADS * HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    own, lists = decode_tiling(load.pool, HEADS // KV_HEADS), {}
    window = options.get("window", 0)

    def work(tiling: Tiling | None = tiling) -> None:
        tiling = tiling or own
        if tiling.block_n not in lists:
            lists[tiling.block_n] = load.splits(HEADS, HEAD_DIM, tiling.block_n, window)
        decode_attention(
            out, qkv, load.pool, 0, *load.of_decodes, num_heads=HEADS, scale=HEAD_DIM**-0.5,
            splits=lists[tiling.block_n], tiling=tiling, **options,
        )  # fmt: skip

    work.load = load
    return work


def prefill(lengths: Lengths, fp8: bool, **options: Any) -> Callable:
    load = Load(lengths, KV_HEADS, HEAD_DIM, 2, fp8)
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    qkv = torch.randn(load.num_tokens, width, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(load.num_tokens, HEADS * HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    work_lists = {None: torch.from_numpy(prefill_tiles(load.spans, HEADS, load.pool)).cuda()}

    def work(tiling: Tiling | None = None) -> None:
        if tiling not in work_lists:
            tiles = prefill_tiles(load.spans, HEADS, load.pool, tiling)
            work_lists[tiling] = torch.from_numpy(tiles).cuda()
        prefill_attention(
            out, qkv, load.pool, 0, work_lists[tiling], *load.tensors, num_heads=HEADS,
            scale=HEAD_DIM**-0.5, tiling=tiling, **options,
        )  # fmt: skip

    return work


def latent(lengths: Lengths, fp8: bool) -> Callable:
    load = Load(lengths, 1, RANK + ROPE_DIM, 1, fp8)
    shape = (load.num_tokens, LATENT_HEADS)
    queries = torch.randn(*shape, RANK + ROPE_DIM, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(*shape, RANK, dtype=torch.bfloat16, device="cuda")
    own, lists = latent_tiling(load.pool, LATENT_HEADS), {}
    is_decode = lengths[0][0] == 1
    options = {"rank": RANK, "scale": 0.07}
    work_lists = {}

    def work(tiling: Tiling | None = None) -> None:
        if is_decode:
            block_n = (tiling or own).block_n
            if block_n not in lists:
                lists[block_n] = load.splits(LATENT_HEADS, RANK, block_n)
            latent_decode(
                out, queries, load.pool, 0, *load.of_decodes, splits=lists[block_n], tiling=tiling,
                **options,
            )  # fmt: skip
            return
        if tiling not in work_lists:
            tiles = latent_tiles(load.spans, LATENT_HEADS, load.pool, tiling)
            work_lists[tiling] = torch.from_numpy(tiles).cuda()
        latent_prefill(
            out, queries, load.pool, 0, work_lists[tiling], *load.tensors, tiling=tiling, **options
        )

    work.load = load
    return work


def pairs(lengths: Lengths) -> int:
    """Query and key pairs that are visible."""
    return sum(count * context - count * (count - 1) // 2 for count, context in lengths)


def torch_seconds(lengths: Lengths, backend: SDPBackend) -> float | None:
    """Times torch's attention over contiguous keys and values, heads repeated beforehand. Sequences
    of one length go together. None: the backend does not do it."""
    total = 0.0
    for count, context in sorted(set(lengths)):
        batch = lengths.count((count, context))
        q = torch.randn(batch, HEADS, count, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        k, v = (
            torch.randn(batch, HEADS, context, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        )
        try:
            with sdpa_kernel(backend):
                if count == context:
                    total += seconds(lambda q=q, k=k, v=v: _causal(q, k, v))
                else:  # a prefix that all tokens see, and the triangle
                    a, b = k[:, :, : context - count], v[:, :, : context - count]
                    c, d = k[:, :, context - count :], v[:, :, context - count :]
                    total += seconds(lambda q=q, k=c, v=d: _causal(q, k, v))
                    total += seconds(lambda q=q, k=a, v=b: F.scaled_dot_product_attention(q, k, v))
        except RuntimeError:
            return None
    return total


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def decode_rows(bandwidth: float) -> Iterator[dict[str, Any]]:
    cases = [("attention", decode, kind, {}) for kind in ("bf16", "fp8")]
    cases += [("window 4k, 4 sinks", _windowed, "bf16", {})]
    cases += [("latent", latent, kind, {}) for kind in ("bf16", "fp8")]
    for name, contexts in DECODE.items():
        for label, make, kind, options in cases:
            work = make([(1, context) for context in contexts], kind == "fp8", **options)
            read = work.load.kv_bytes
            if "window" in label:
                read *= sum(min(context, 4096) for context in contexts) / sum(contexts)
            took = seconds(work)
            yield {
                "decode": name,
                "what": label,
                "kv": kind,
                "us": took * 1e6,
                "tokens_per_s": len(contexts) / took,
                "TB_per_s": read / took / 1e12,
                "share_of_copy": read / took / bandwidth,
            }
            del work
            torch.cuda.empty_cache()


def _windowed(lengths: Lengths, fp8: bool) -> Callable:
    late = torch.randn(len(lengths), HEADS * HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    return decode(lengths, fp8, window=4096, num_sinks=4, sink_queries=late)


def prefill_rows(rate: float) -> Iterator[dict[str, Any]]:
    for name, lengths in PREFILL.items():
        flash = torch_seconds(lengths, SDPBackend.FLASH_ATTENTION)
        cudnn = torch_seconds(lengths, SDPBackend.CUDNN_ATTENTION)
        for label, make, kind in (
            ("attention", prefill, "bf16"), ("attention", prefill, "fp8"),
            ("latent", latent, "bf16"), ("latent", latent, "fp8"),
        ):  # fmt: skip
            took = seconds(make(lengths, kind == "fp8"))
            is_latent = label == "latent"
            width = LATENT_HEADS * (2 * RANK + ROPE_DIM) if is_latent else HEADS * 2 * HEAD_DIM
            done = 2 * pairs(lengths) * width / took
            yield {
                "prefill": name,
                "what": label,
                "kv": kind,
                "us": took * 1e6,
                "TFLOP_per_s": done / 1e12,
                "share_of_matmul": done / rate,
                "torch_flash_us": "-" if is_latent or flash is None else flash * 1e6,
                "torch_cudnn_us": "-" if is_latent or cudnn is None else cudnn * 1e6,
            }
            torch.cuda.empty_cache()


SWEEPS = {  # work, rows of a tile, keys, warps, stages
    "decode bf16": (decode, "batch 64, 8k", False, (16,), (32, 64, 128), (2, 4, 8), (1, 3, 5, 7)),
    "decode fp8": (decode, "batch 64, 8k", True, (16,), (32, 64, 128), (2, 4, 8), (1, 3, 5, 7)),
    "prefill bf16": (prefill, "1 x 8k", False, (64, 128), (64, 128), (4, 8), (2, 3, 5)),
    "prefill fp8": (prefill, "1 x 8k", True, (64, 128), (32, 64, 128), (4, 8), (2, 3, 5)),
    "latent bf16": (latent, "batch 64, 8k", False, (16, 64), (16, 32, 64), (4, 8), (1, 2, 3, 5)),
    "latent fp8": (latent, "batch 64, 8k", True, (16, 64), (16, 32, 64), (4, 8), (1, 2, 3, 5)),
}


def sweep(name: str) -> list[dict[str, Any]]:
    """Every tiling of SWEEPS[name] that compiles and fits, the fastest first."""
    make, load, fp8, *choices = SWEEPS[name]
    lengths = [(1, each) for each in DECODE[load]] if load in DECODE else PREFILL[load]
    work, rows = make(lengths, fp8), []
    for choice in product(*choices):
        try:
            took = seconds(lambda choice=choice: work(Tiling(*choice)), repeats=5)
        except Exception as error:  # out of shared memory, or not to be compiled
            torch.cuda.synchronize()
            print(f"{name} {choice}: {str(error).splitlines()[0][:90]}", flush=True)
            continue
        names = ("rows", "keys", "warps", "stages")
        rows.append({"sweep": name, **dict(zip(names, choice, strict=True)), "us": took * 1e6})
    rows.sort(key=lambda row: row["us"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="try tilings; writes nothing")
    parser.add_argument("--only", default="", help="with --sweep: names that contain this")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    if chosen.sweep:
        for name in SWEEPS:
            if chosen.only in name:
                print_table(sweep(name)[:12])
        return
    bandwidth, rate = copy_bandwidth(), matrix_rate()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bf16 product {rate / 1e12:.0f} TFLOP/s\n")
    decoded, prefilled = list(decode_rows(bandwidth)), list(prefill_rows(rate))
    print_table(decoded)
    print_table(prefilled)
    write_json(
        "gpu_attention.json",
        {"copy_bytes_per_s": bandwidth, "matmul_flop_per_s": rate, "decode": decoded,
         "prefill": prefilled},
    )  # fmt: skip


if __name__ == "__main__":
    main()
