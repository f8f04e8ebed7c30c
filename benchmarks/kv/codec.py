"""What the lossless codec of the disk tier saves, and what it costs.

`python -m benchmarks.kv.codec ratio`: real KV of a model that has read this repository's documents:
bytes to bytes coded, and to the pages that they take on disk; GB/s of one core.

`python -m benchmarks.kv.codec resume`: two servers, with the codec and without, and two prompts
of which a device holds one, asked for in turns: each time its KV comes from disk, out of the page
cache or from the device below it. TTFT and the rate of the loads, in pairs.

`python -m benchmarks.kv.codec blocks`: a million blocks of the worst kinds, to and fro.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np
from numpy.typing import NDArray

from benchmarks.engine.fp8 import prose
from benchmarks.kv.resume import drop_page_cache, wait_settled
from benchmarks.report import json_option, make_console, number_table, write_json
from benchmarks.serving.first_light import MODEL, time_one
from benchmarks.serving.served import Served
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.model.checkpoint.resolve import resolve_model
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import ScheduledSeq, Step
from kvrelay.kvtransfer.codec import MORE_BYTES, ExponentCodec
from kvrelay.kvtransfer.movers.pool import pool_bytes
from kvrelay.kvtransfer.store import slot_bytes
from kvrelay.lab.bench.load import LoadSpec, make_prompts

BLOCK_SIZE = 16
CHUNK = 256  # tokens of a step
CODECS = ("none", "lossless")
KINDS = (("bfloat16", "auto"), ("bfloat16", "float8_e4m3"), ("float32", "auto"))
ROUNDS = 5
Blocks = NDArray[np.uint8]


@click.group()
def main() -> None:
    """The lossless codec of the disk tier."""


@dataclass(frozen=True, slots=True)
class Coded:
    kind: str
    ratio: float
    ratio_on_disk: float  # in whole pages
    encode_gb_s: float
    decode_gb_s: float


def real_blocks(model: str, dtype: str, kv_dtype: str, num_tokens: int) -> Blocks:
    """`[num_blocks, bytes_per_block]`: every group's blocks of one prompt."""
    path = resolve_model(model, progress=lambda _: None)
    tokens = Tokenizer(path).encode(prose())[:num_tokens]
    rows = -(-len(tokens) // BLOCK_SIZE)
    sections = ModelSection(dtype=dtype, device="cpu"), EngineSection(kv_dtype=kv_dtype)
    groups = ModelRunner(path, *sections_of(sections, 1)).kv_spec.num_groups
    runner = ModelRunner(path, *sections_of(sections, rows * groups))
    table = list(range(rows * groups))
    for start in range(0, len(tokens), CHUNK):
        part = tokens[start : start + CHUNK]
        sampling = SamplingParams(temperature=0.0)
        share = ScheduledSeq("text", part, start, table, True, sampling, part, len(tokens))
        runner.execute(Step(0, [share]))
    return np.array(pool_bytes(runner.kv_pool)[: len(tokens) // BLOCK_SIZE * groups])


def sections_of(sections: tuple[Any, Any], num_blocks: int) -> tuple[Any, Any]:
    model, engine = sections
    fields = {"kv_dtype": engine.kv_dtype, "num_blocks": num_blocks, "block_size": BLOCK_SIZE}
    return model, EngineSection(**fields).sized(gpu=False)


def measure(kind: str, blocks: Blocks) -> Coded:
    codec, size = ExponentCodec(), blocks.shape[1]
    coded = np.empty((len(blocks), size + MORE_BYTES), np.uint8)
    back = np.zeros_like(blocks)
    taken: list[int] = []
    times: dict[str, float] = {"encode": float("inf"), "decode": float("inf")}
    for _ in range(ROUNDS):
        began = time.perf_counter()
        taken = [codec.encode(block, out) for block, out in zip(blocks, coded, strict=True)]
        encoded = time.perf_counter()
        for each, num, block in zip(coded, taken, back, strict=True):
            assert codec.decode(each[:num], block)
        times["encode"] = min(times["encode"], encoded - began)
        times["decode"] = min(times["decode"], time.perf_counter() - encoded)
    assert np.array_equal(back, blocks)
    slot = slot_bytes(size)
    on_disk = [min(slot_bytes(num), slot) for num in taken]
    rates = [blocks.nbytes / 1e9 / times[name] for name in ("encode", "decode")]
    return Coded(kind, blocks.nbytes / sum(taken), slot * len(blocks) / sum(on_disk), *rates)


@main.command()
@click.option("--model", default=MODEL, show_default=True)
@click.option("--tokens", type=click.IntRange(64), default=2048, show_default=True)
@json_option()
def ratio(model: str, tokens: int, json_path: Path | None) -> None:
    """How much smaller real KV becomes, and how fast."""
    console = make_console()
    rows = []
    for dtype, kv_dtype in KINDS:
        kind = dtype if kv_dtype == "auto" else kv_dtype
        rows.append(measure(kind, real_blocks(model, dtype, kv_dtype, tokens)))
    table = number_table(
        *("KV", "bytes", "pages on disk", "encode GB/s", "decode GB/s"),
        title=f"{tokens:,} tokens of prose, {model}; one core",
        caption="bytes, pages on disk: as they were, to coded. GB/s of blocks as they were",
    )
    for row in rows:
        shown = row.ratio, row.ratio_on_disk, row.encode_gb_s, row.decode_gb_s
        table.add_row(row.kind, *(f"{value:.3f}" for value in shown))
    console.print(table)
    fields = [{name: getattr(row, name) for name in Coded.__slots__} for row in rows]
    write_json(json_path, {"model": model, "tokens": tokens, "kv": fields})


class Side:
    """One of the two servers. Owns nothing."""

    def __init__(self, codec: str, folder: Path, served: Served) -> None:
        self.codec = codec
        self.folder = folder
        self.url = served.url
        self.ttft_s: dict[str, list[float]] = {"cold": [], "warm": []}
        self.rates: dict[str, list[float]] = {"cold": [], "warm": []}
        self.texts: list[str] = []

    def worker(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/status", timeout=30, auth=OwnKey()).json()[
            "workers"
        ][0]
        return found

    def loaded(self) -> tuple[float, float]:
        """Bytes that came from disk, and seconds."""
        counters = self.worker()["counters"]
        return (
            counters.get("kv_read_bytes:disk:", 0.0),
            counters.get("kv_read_seconds:disk:", 0.0),
        )

    def ask(self, way: str, prompt: str) -> None:
        if way == "cold":
            drop_page_cache(self.folder)
        before = self.loaded()
        timing = time_one(self.url, prompt, 4)
        self.ttft_s[way].append(timing.ttft_s)
        self.texts.append(timing.text)
        deadline = time.monotonic() + 5.0
        while (after := self.loaded()) == before and time.monotonic() < deadline:
            time.sleep(0.1)  # statistics come once in a while
        if after != before:
            self.rates[way].append((after[0] - before[0]) / (after[1] - before[1]) / 1e9)


@main.command()
@click.option("--tokens", type=click.IntRange(64, 7800), default=7600, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=16, show_default=True)
@click.option("--kv-dtype", type=click.Choice(["auto", "float8_e4m3"]), default="auto")
@click.option(
    "--disk-path", type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Where to make the temporary folder of the disk tiers.",
)  # fmt: skip
@json_option()
def resume(
    tokens: int, rounds: int, kv_dtype: str, disk_path: Path | None, json_path: Path | None
) -> None:
    """TTFT of a prompt whose KV is on disk, with the codec and without, in turns."""
    console = make_console()
    prompts = [str(p) for p in make_prompts(LoadSpec("", "", 2, input_len=tokens, seed=1))]
    num_blocks = (tokens + 256) // BLOCK_SIZE
    with tempfile.TemporaryDirectory(dir=disk_path) as name, ExitStack() as stack:
        sides = []
        for codec in CODECS:
            folder = Path(name) / codec
            settings: dict[str, object] = {
                "engine.num_blocks": num_blocks,
                "engine.kv_dtype": kv_dtype,
                "tiers.host_gib": 0.0,
                "tiers.disk_gib": 4.0,
                "tiers.disk_path": str(folder),
                "tiers.disk_codec": codec,
                "sessions.state_dir": f"{name}/state-{codec}",
            }
            served = stack.enter_context(Served(settings, "--prefill", "0", "--decode", "1"))
            sides.append(Side(codec, folder, served))
        console.print(f"load average {os.getloadavg()[0]:.2f}")
        for side in sides:
            for prompt in prompts:
                time_one(side.url, prompt, 4)
                wait_settled(side.url, Tier.DISK)
        for number, way, prompt in turns(rounds, prompts):
            for side in sides[:: 1 if number % 2 else -1]:
                side.ask(way, prompt)
        counters = [side.worker()["counters"] for side in sides]
        load = os.getloadavg()[0]
    table = number_table(
        *("KV on disk", "none ms", "lossless ms", "faster", "none GB/s", "lossless GB/s"),
        title=f"TTFT of {tokens:,} tokens, {rounds} rounds; load average {load:.2f}",
        caption="medians; faster: the median of the pairs, TTFT without to TTFT with the codec",
    )
    found: dict[str, Any] = {}
    for way in ("warm", "cold"):
        times, rates = [s.ttft_s[way] for s in sides], [s.rates[way] for s in sides]
        faster = statistics.median(a / b for a, b in zip(*times, strict=True))
        middle = [statistics.median(each) for each in (*times, *rates)]
        found[way] = {"ttft_s": dict(zip(CODECS, times, strict=True)), "faster": faster}
        found[way]["gb_per_s"] = dict(zip(CODECS, rates, strict=True))
        shown = [f"{1e3 * each:.0f}" for each in middle[:2]]
        table.add_row(way, *shown, f"{faster:.3f}", *(f"{each:.2f}" for each in middle[2:]))
    console.print(table)
    same = sides[0].texts == sides[1].texts
    console.print(f"the same answers: {same}")
    write_json(json_path, {"tokens": tokens, "load": load, "counters": counters, **found})


def turns(rounds: int, prompts: list[str]) -> Iterator[tuple[int, str, str]]:
    for number in range(rounds):
        for way in ("cold", "warm"):
            for prompt in prompts:
                yield number, way, prompt


def _hard_blocks(rng: np.random.Generator, count: int, size: int) -> Iterator[tuple[str, Blocks]]:
    """Forever: `count` blocks of each kind in turn."""

    def bits(dtype: str) -> Any:
        return rng.integers(0, 256, (count, size), np.uint8).view(dtype)

    kinds: dict[str, Callable[[], Any]] = {
        "random bytes": lambda: bits("u1"),
        "NaN": lambda: bits("<u2") | np.uint16(0x7FC0),
        "infinite": lambda: bits("<u2") & np.uint16(0x8000) | np.uint16(0x7F80),
        "denormal": lambda: bits("<u2") & np.uint16(0x807F),
        "NaN of 4 bytes": lambda: bits("<u4") | np.uint32(0x7FC00000),
        "denormal of 4 bytes": lambda: bits("<u4") & np.uint32(0x807FFFFF),
        "float8": lambda: bits("u1") & np.uint8(0x9F),
        "all equal": lambda: np.repeat(bits("u1")[:, :1], size, axis=1),
        "normal": lambda: rng.standard_normal((count, size // 4), np.float32),
        "normal of 2 bytes": lambda: rng.standard_normal((count, size // 2), np.float32).view(
            "<u2"
        )[:, 1::2],
        "few symbols": lambda: rng.choice(np.array([3, 60, 61, 62, 200], np.uint8), (count, size)),
    }
    while True:
        for name, make in kinds.items():
            yield name, np.ascontiguousarray(make()).view(np.uint8).reshape(count, -1)


@main.command()
@click.option("--blocks", "num_blocks", type=click.IntRange(1), default=1_000_000)
@click.option("--seconds", type=float, default=900.0, show_default=True, help="At most.")
@click.option("--seed", type=int, default=0, show_default=True)
def blocks(num_blocks: int, seconds: float, seed: int) -> None:
    """Blocks of the worst kinds, of many sizes, to and fro; each is compared, and some are cut or
    changed, which may give other bytes but nothing worse."""
    codec, rng = ExponentCodec(), np.random.default_rng(seed)
    sizes = (16, 100, 1040, 2048, 4096, 5000, 8192, 12_289, 18_432)
    done: dict[str, int] = {}
    deadline, count = time.monotonic() + seconds, 200
    while sum(done.values()) < num_blocks and time.monotonic() < deadline:
        size = int(rng.choice(sizes))
        made = _hard_blocks(rng, count, -(-size // 4) * 4)
        for _ in range(11):
            name, found = next(made)
            coded = np.empty(found.shape[1] + MORE_BYTES, np.uint8)
            for block in found[:, :size].copy():
                taken = codec.encode(block, coded)
                back = np.full(size, 0xA5, np.uint8)
                assert codec.decode(coded[:taken], back), (name, size)
                assert np.array_equal(back, block), (name, size)
                done[name] = done.get(name, 0) + 1
            coded[rng.integers(taken)] ^= np.uint8(1 << rng.integers(8))
            codec.decode(coded[: rng.integers(taken + 1)], back)
    print(f"{sum(done.values()):,} blocks came back as they were:", done)


if __name__ == "__main__":
    main()
