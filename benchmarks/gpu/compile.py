"""Compile all kernels for several GPUs as they would be launched, without one.

    python -m benchmarks.gpu.compile ["latent decode"] [--sm 90]

Finds what the interpreter cannot: types of the bfloat16 and FP8 paths, shared memory beyond the
device's, registers that spill, matrix products that miss the tensor cores. Exits with 1 if a kernel
is beyond its budget.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kvrelay.engine.model.config import Experts
from kvrelay.engine.model.gpu import attention_prefill
from kvrelay.engine.model.gpu import latent as latent_kernels
from kvrelay.engine.model.gpu.attention_decode import (
    decode_attention,
    decode_tiling,
    list_splits,
)
from kvrelay.engine.model.gpu.attention_prefill import prefill_attention
from kvrelay.engine.model.gpu.cache_pool import Pool
from kvrelay.engine.model.gpu.cache_write import latent_write, rope_write
from kvrelay.engine.model.gpu.experts import ExpertWeights, add_experts
from kvrelay.engine.model.gpu.index_scores import index_scores
from kvrelay.engine.model.gpu.latent import (
    Selected,
    latent_decode,
    latent_prefill,
    latent_tiling,
)
from kvrelay.engine.model.gpu.linear import fp8, int8
from kvrelay.engine.model.gpu.norm_activation import gated, rms_norm
from kvrelay.engine.model.gpu.penalties import penalize
from kvrelay.engine.model.gpu.recurrent import GpuRecurrent
from kvrelay.engine.model.gpu.recurrent_chunks import Chunks, Where
from kvrelay.engine.model.gpu.routing import route
from kvrelay.engine.model.gpu.sampling import draw, draws_of
from kvrelay.engine.model.recurrence import DeltaRows
from kvrelay.engine.model.state_layout import (
    GATED_DELTA_NET,
    KIMI_DELTA_ATTENTION,
    MAMBA2,
    Recurrent,
)
from kvrelay.engine.model.states import StatePool
from kvrelay.engine.model.weights import RecurrentWeights
from kvrelay.engine.request import DEFAULTS, PENALTIES
from kvrelay.engine.step import ScheduledSeq
from kvrelay.kvtransfer.checksum import head_weights
from kvrelay.kvtransfer.layout import HeadShare
from kvrelay.kvtransfer.movers.checksum_kernels import Checksums

KIB = 1024
MAX_SHARED = {80: 163 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}  # a program's
FP8_FROM = 89  # capability, for KV in FP8
MAX_SPILLED = 256  # bytes of a thread
# With tiles of 16 rows it spills nothing, and reads and widens latents four times as often.
KNOWN = {
    (90, "latent decode fp8"): 304,
    (90, "latent sparse fp8"): 328,
}
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def compiled(launch: Callable[[], object], sm: int) -> Iterator[tuple[str, Any]]:
    """(name, compiled kernel) of every kernel that `launch` would start on such a GPU."""
    launched: list[tuple[JITFunction, tuple, dict[str, Any]]] = []

    def record(kernel: JITFunction, *args: Any, **kwargs: Any) -> None:
        launched.append((kernel, args, kwargs))

    run, JITFunction.run = JITFunction.run, record
    tilings = (attention_prefill, latent_kernels)
    rooms = [module.shared_memory for module in tilings]
    try:
        for module in tilings:
            module.shared_memory = lambda _: MAX_SHARED[sm]
        launch()
    finally:
        JITFunction.run = run
        for module, room in zip(tilings, rooms, strict=True):
            module.shared_memory = room
    for kernel, args, kwargs in launched:
        yield kernel.__name__, _compile(kernel, args, kwargs, GPUTarget("cuda", sm, 32))


def _compile(kernel: JITFunction, args: tuple, kwargs: dict[str, Any], target: GPUTarget) -> Any:
    signature, constants, attributes = {}, {}, {}
    values = dict(zip([p.name for p in kernel.params], args, strict=False)) | kwargs
    for index, param in enumerate(kernel.params):
        value = values[param.name]
        is_one = type(value) is int and value == 1 and not param.do_not_specialize
        if param.is_constexpr or value is None or is_one:  # as the JIT does
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, tuple):
            signature[param.name] = type(value)(*(TYPES[each.dtype] for each in value))
            for at in range(len(value)):
                attributes[(index, at)] = [["tt.divisibility", 16]]
        else:
            signature[param.name] = "i32"
            if value % 16 == 0 and not param.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    options = {name: kwargs[name] for name in ("num_warps", "num_stages") if name in kwargs}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options)


def attention(
    kernel: str,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
    value_dim: int = 0,
    **options: Any,
) -> Callable[[], None]:
    """The launch of a model with 32 heads over 8 KV heads. dtype: of the pool."""
    width = 16 * (head_dim + 1) if dtype == torch.uint8 else head_dim
    shape = (2, 32, 2, 8, width) if dtype == torch.uint8 else (2, 32, 2, 8, 16, width)
    data, apart = torch.empty(shape, dtype=dtype), 16 * head_dim if value_dim else 0
    pool = Pool(data[:, :, :1] if apart else data, head_dim, value_dim, apart)
    kind = torch.bfloat16 if dtype == torch.uint8 else dtype
    widths = 48 * head_dim, 32 * pool.value_dim
    qkv, out = (torch.empty(4, width, dtype=kind) for width in widths)
    ints, table = torch.empty(4, dtype=torch.int32), torch.empty(4, 32, dtype=torch.int32)
    late = torch.empty_like(out) if options.get("num_sinks") else None
    if options.pop("learned", False):
        options["head_sinks"] = torch.zeros(32)
    common = {"num_heads": 32, "scale": 0.1, "sink_queries": late} | options
    if kernel == "decode":
        block_n, window = decode_tiling(pool, 4).block_n, options.get("window", 0)
        splits = splits_of(32, pool.value_dim, block_n, window, common.pop("longest", 4096))
        return lambda: decode_attention(
            out, qkv, pool, 1, ints, ints, table, splits=splits(), **common
        )
    tiles = torch.zeros(4, 2, dtype=torch.int32)
    return lambda: prefill_attention(out, qkv, pool, 1, tiles, ints, ints, ints, table, **common)


def splits_of(
    heads: int, width: int, block_n: int, window: int = 0, longest: int = 4096
) -> Callable[[], Any]:
    """The launch that lists splits of four sequences."""
    ints = torch.empty(4, dtype=torch.int32)
    sizes = heads, width, block_n, window
    return lambda: list_splits(ints, ints, [longest] * 4, *sizes)


def latent(kernel: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Callable[[], None]:
    """The launch of DeepSeek-V3: 128 heads, rank 512, 64 rotated."""
    shape = (2, 4, 1, 1, 16 * 577) if dtype == torch.uint8 else (2, 4, 1, 1, 16, 576)
    pool = Pool(torch.empty(shape, dtype=dtype), 576)
    kind = torch.bfloat16 if dtype == torch.uint8 else dtype
    queries, out = (torch.empty(4, 128, width, dtype=kind) for width in (576, 512))
    ints, table = torch.empty(4, dtype=torch.int32), torch.empty(4, 32, dtype=torch.int32)
    common = {"rank": 512, "scale": 0.1} | options
    if kernel == "prefill":
        tiles, tail = torch.zeros(4, 2, dtype=torch.int32), (ints, ints, ints, table)
        return lambda: latent_prefill(out, queries, pool, 1, tiles, *tail, **common)
    if kernel == "sparse":
        places = torch.empty(4, 2048, dtype=torch.int32)
        common["selected"] = Selected(places, ints, ints, ints, ints)

    def launches() -> None:
        splits = splits_of(128, 512, latent_tiling(pool, 128).block_n)()
        latent_decode(out, queries, pool, 1, ints, ints, table, splits=splits, **common)

    return launches


def scores(dtype: torch.dtype = torch.bfloat16) -> Callable[[], object]:
    """The launch of DeepSeek V3.2: 64 index heads of 128."""
    shape = (2, 1, 1, 1, 16 * 129) if dtype == torch.uint8 else (2, 1, 1, 1, 16, 128)
    pool = Pool(torch.empty(shape, dtype=dtype), 128)
    queries, weights = torch.empty(4, 64 * 128).bfloat16(), torch.empty(4, 64)
    longs, ints = torch.empty(4, dtype=torch.int64), torch.empty(4, dtype=torch.int32)
    table = torch.empty(4, 512, dtype=torch.int32)
    return lambda: index_scores(queries, weights, pool, longs, ints, table, 8192)


def write(dtype: torch.dtype = torch.bfloat16, norm: bool = False) -> Callable[[], None]:
    shape = (2, 32, 2, 8, 16 * 129) if dtype == torch.uint8 else (2, 32, 2, 8, 16, 128)
    pool = Pool(torch.empty(shape, dtype=dtype), 128)
    qkv = torch.empty(4, 48 * 128, dtype=torch.bfloat16)
    longs, angles = torch.empty(4, dtype=torch.int64), torch.empty(9, 64)
    norms = (torch.empty(128, dtype=torch.bfloat16),) * 2 if norm else None
    late = torch.empty(4, 32 * 128, dtype=torch.bfloat16) if norm else None
    return lambda: rope_write(
        qkv, pool, 1, longs, longs, (angles, angles), num_heads=32, norms=norms, eps=1e-6,
        sink_queries=late, sink_position=100,
    )  # fmt: skip


def write_latent(dtype: torch.dtype) -> Callable[[], None]:
    shape = (2, 4, 1, 1, 16 * 577) if dtype == torch.uint8 else (2, 4, 1, 1, 16, 576)
    pool = Pool(torch.empty(shape, dtype=dtype), 576)
    q, c = torch.empty(4, 128, 64).bfloat16(), torch.empty(4, 576).bfloat16()
    longs, angles = torch.empty(4, dtype=torch.int64), torch.empty(9, 32)
    return lambda: latent_write(q, c, pool, 1, longs, longs, (angles, angles))


def recurrent(kind: str, groups: int, dims: tuple[int, int], rule: bool) -> Callable[[], object]:
    """The launches of a layer with 32 heads; dims: of keys and values. A decode's, those of a
    prompt's chunks, and that of a pass with drafts."""
    keys, values = dims
    channels = 2 * groups * keys + 32 * values
    shape = Recurrent(kind, 4, channels, False, 32, groups, keys, values)
    layout = shape.layout(4)
    memory = torch.zeros(2, 4 * layout.unit_size * 4, dtype=torch.uint8)
    made = GpuRecurrent(shape, StatePool(memory, layout, {0: (0, 0)}), 96)
    by_keys = keys if kind == KIMI_DELTA_ATTENTION else 1
    weights = RecurrentWeights(
        None, torch.zeros(4, channels), torch.zeros(channels), None, torch.zeros(32),
        torch.zeros(32 * by_keys), None, torch.zeros(32) if kind == MAMBA2 else None,
    )  # fmt: skip
    longs, ints = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int32)
    chunks = Chunks(ints.view(16, 4), ints[:63].view(21, 3))
    where = Where(torch.zeros(64, 32, dtype=torch.int32), longs, longs, ints, ints, chunks)
    x, beta = (torch.zeros(64, width, dtype=torch.bfloat16) for width in (channels, 32))
    decay = beta if by_keys == 1 else torch.zeros(64, 32 * keys, dtype=torch.bfloat16)
    verified, rows = where._replace(chunks=None, keeps=True), DeltaRows(x, decay, beta)

    def launches() -> None:
        for each in (where, verified):
            made.convolve(x, weights, 0, each, silu=True)
            if rule:
                made.delta_rule(rows, weights, 0, each)

    return launches


def int8_linear(rows: int) -> Callable[[], object]:
    weight = torch.zeros(4096, 4096, dtype=torch.bfloat16)
    return lambda: int8.linear(weight[:rows], int8.int8_matrix(weight, None))


def experts() -> Callable[[], None]:
    """Compiles Mixtral's kind, but smaller."""
    ups, downs = torch.zeros(8, 512, 256).bfloat16(), torch.zeros(8, 256, 256).bfloat16()
    hidden, chosen = torch.zeros(4, 256).bfloat16(), torch.zeros(4, 2, dtype=torch.int64)
    weights = torch.ones(4, 2)
    return lambda: add_experts(hidden, hidden, ExpertWeights(ups, downs), chosen, weights, "silu")


def packed_experts(num_tokens: int) -> Callable[[], None]:
    """Compiles gpt-oss' kind, in MXFP4."""
    ups, downs = torch.zeros(8, 512, 128).byte(), torch.zeros(8, 256, 128).byte()
    scales = (torch.zeros(8, rows, 8).byte() for rows in (512, 256))
    hidden, chosen = torch.zeros(num_tokens, 256).bfloat16(), torch.zeros(num_tokens, 2).long()
    stacked, weights = ExpertWeights(ups, downs, *scales), torch.ones(num_tokens, 2)
    biases = torch.zeros(8, 512), torch.zeros(8, 256)
    kind = "clamped_swish"
    return lambda: add_experts(hidden, hidden, stacked, chosen, weights, kind, biases)


def fp8_experts(num_tokens: int) -> Callable[[], None]:
    """Compiles DeepSeek V3's kind, but smaller: a scale for 128 x 128."""
    ups, downs = (torch.zeros(8, rows, 256).to(torch.float8_e4m3fn) for rows in (512, 256))
    scales = (torch.zeros(8, rows // 128, 2) for rows in (512, 256))
    hidden, chosen = torch.zeros(num_tokens, 256).bfloat16(), torch.zeros(num_tokens, 2).long()
    stacked, weights = ExpertWeights(ups, downs, *scales, (128, 128)), torch.ones(num_tokens, 2)
    return lambda: add_experts(hidden, hidden, stacked, chosen, weights, "silu")


def routing(family: str) -> Callable[[], object]:
    """The launch of DeepSeek V3, or of gpt-oss."""
    groups = {"scoring": "sigmoid", "num_groups": 8, "num_chosen_groups": 4, "scale": 2.5}
    each, more = (8, groups) if family == "DeepSeek V3" else (4, {})
    num_experts, bias = (256, torch.zeros(256)) if more else (128, None)
    experts, x = Experts(num_experts, each, 2048, True, **more), ROWS
    config, layer = SimpleNamespace(experts=experts), SimpleNamespace(bias=bias, scales=None)
    return lambda: route(x, torch.zeros(4, num_experts), layer, config)


def drawing() -> Callable[[], None]:
    rows = [ScheduledSeq("", [0], 0, [0], True, DEFAULTS, [0], 1)] * 4
    draws = {name: torch.from_numpy(each) for name, each in draws_of(rows).items()}
    return lambda: draw(torch.zeros(4, 128_256), draws, draws["seed"])


def penalizing() -> Callable[[], None]:
    draws = {name: torch.zeros(4, dtype=torch.float64) for name in PENALTIES}
    times, rows = torch.zeros(4, 128_256, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    return lambda: penalize(torch.zeros(4, 128_256), times, rows, draws)


ROWS = torch.zeros(4, 4096, dtype=torch.bfloat16)
FP8 = torch.uint8
CASES = {
    "decode bf16": attention("decode"),
    "decode fp8": attention("decode", FP8),
    "decode bf16, short contexts": attention("decode", longest=256),
    "decode bf16, window, sinks": attention("decode", window=4096, num_sinks=4),
    "decode bf16, 256 wide, softcap": attention("decode", head_dim=256, softcap=50.0),
    "decode bf16, 64 wide, learned sinks": attention("decode", head_dim=64, learned=True),
    "decode bf16, 192 and 128 wide": attention("decode", head_dim=192, value_dim=128, learned=True),
    "prefill bf16": attention("prefill"),
    "prefill fp8": attention("prefill", FP8),
    "prefill bf16, 64 wide": attention("prefill", head_dim=64),
    "prefill bf16, window, sinks": attention("prefill", window=4096, num_sinks=4),
    "prefill bf16, 256 wide, softcap": attention("prefill", head_dim=256, softcap=50.0),
    "prefill bf16, 64 wide, learned sinks": attention("prefill", head_dim=64, learned=True),
    "prefill bf16, 192 and 128 wide": attention(
        "prefill", head_dim=192, value_dim=128, learned=True
    ),
    "latent decode bf16": latent("decode"),
    "latent decode fp8": latent("decode", FP8),
    "latent prefill bf16": latent("prefill"),
    "latent sparse bf16": latent("sparse"),
    "latent sparse fp8": latent("sparse", FP8),
    "index scores bf16": scores(),
    "index scores fp8": scores(FP8),
    "write bf16": write(),
    "write fp8, norm, sinks": write(FP8, norm=True),
    "write latent fp8": write_latent(FP8),
    "norm": lambda: rms_norm(ROWS, ROWS[0], 1e-5),
    "gate": lambda: gated(ROWS, "silu"),
    "gate, clamped": lambda: gated(ROWS, "clamped_swish"),
    "squared ReLU": lambda: gated(ROWS, "squared_relu"),
    "convolution": recurrent(GATED_DELTA_NET, 16, (128, 128), rule=False),
    "convolution, Mamba 2": recurrent(MAMBA2, 1, (256, 64), rule=False),
    "delta rule": recurrent(GATED_DELTA_NET, 16, (128, 128), rule=True),
    "delta rule, by keys": recurrent(KIMI_DELTA_ATTENTION, 32, (128, 128), rule=True),
    "delta rule, Mamba 2": recurrent(MAMBA2, 1, (256, 64), rule=True),
    "int8": int8_linear(4),
    "int8, many rows": int8_linear(256),
    "fp8 inputs": lambda: fp8.quantize_rows(torch.zeros(4, 4096).bfloat16()),
    "experts": experts(),
    "experts in MXFP4": packed_experts(4),
    "experts in MXFP4, many rows": packed_experts(512),
    "experts fp8": fp8_experts(4),
    "experts fp8, many rows": fp8_experts(512),
    "routing, DeepSeek V3": routing("DeepSeek V3"),
    "routing, gpt-oss": routing("gpt-oss"),
    "draw": drawing(),
    "penalize": penalizing(),
    "checksums, one chunk": lambda: Checksums(
        torch.zeros(4, 1 << 18, dtype=torch.uint8), head_weights(HeadShare(0, 1, 8, 16, 2048))
    ).of([0, 1]),
    "checksums": lambda: Checksums(
        torch.zeros(4, 2 << 20, dtype=torch.uint8), head_weights(HeadShare(0, 1, 8, 64, 4096))
    ).of([0, 1]),
}


def facts(kernel: Any) -> dict[str, int]:
    """Shared memory in bytes, registers, bytes spilled, and instructions that multiply tiles:
    `wgmma` from shared memory, `mma` from registers."""
    ptx, tools = kernel.asm["ptx"], Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        run = [str(tools / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(run, capture_output=True, text=True, timeout=60).stdout
    found = {
        name: int(match.group(1)) if (match := re.search(rf"{name}:(\d+)", usage)) else -1
        for name in ("REG", "STACK")
    }
    return {
        "shared": kernel.metadata.shared,
        "registers": found["REG"],
        "spilled": found["STACK"],
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "async loads": ptx.count("cp.async.c"),
    }


@click.command()
@click.argument("wanted", default="")
@click.option("--sm", "targets", multiple=True, type=click.Choice([*map(str, MAX_SHARED)]))
def main(wanted: str, targets: tuple[str, ...]) -> None:
    """Compile the cases that begin with WANTED."""
    beyond = 0
    for sm in map(int, targets or MAX_SHARED):
        for case, launch in CASES.items():
            if not case.startswith(wanted) or ("fp8" in case and sm < FP8_FROM):
                continue
            for name, kernel in compiled(launch, sm):
                found = facts(kernel)
                spilled = KNOWN.get((sm, case), MAX_SPILLED)
                is_beyond = found["shared"] > MAX_SHARED[sm] or found["spilled"] > spilled
                beyond += is_beyond
                about = ", ".join(f"{key} {value}" for key, value in found.items())
                print(f"sm_{sm:<4} {case:32} {name:14} {about}{'  BEYOND' * is_beyond}", flush=True)
    sys.exit(1 if beyond else 0)


if __name__ == "__main__":
    main()
