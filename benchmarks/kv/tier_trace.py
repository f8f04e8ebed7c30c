"""How many KV blocks of a request trace are found in device memory, host memory and on disk.

`python -m benchmarks.kv.tier_trace TRACE`: one worker's real BlockPool and Tiers in virtual time,
as if it served the whole trace. A line of TRACE is a JSON object with `timestamp` in ms and
`hash_ids`, the ids of the chained blocks of its prompt. Moves take no time unless
`--bytes-per-token` is given; requests take none. `--policies` compares rules of eviction on one
cache instead.
"""

from __future__ import annotations

import heapq
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.kv.tier_policies import POLICIES
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.kv.cache_manager import KVCacheManager
from kvrelay.engine.kv.tier import Retention, Tier
from kvrelay.engine.node import Effect
from kvrelay.engine.stats import Role
from kvrelay.kvtransfer.agent import CopyBlocks, CopyDone
from kvrelay.kvtransfer.tiers.manager import Tiers

TICK_S = 1.0
GIB = 2**30


@dataclass(frozen=True)
class TraceRequest:
    at: float  # seconds
    names: list[bytes]


@dataclass
class Result:
    """Blocks of prompts by where they were found, as shares of all."""

    device_tokens: int
    host_tokens: int
    disk_tokens: int
    device: float = 0.0
    host: float = 0.0
    disk: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return self.device + self.host + self.disk


class Replay:
    """One worker. Moves are `(time, number, CopyDone)` in `pending` until they are done."""

    def __init__(
        self, sizes: dict[Tier, int], bytes_per_block: int, gib_s: dict[Tier, float], keep_s: float
    ) -> None:
        self.config = WorkerConfig(
            node_id="replay",
            role=Role.DECODE,
            epoch=1,
            num_blocks=sizes[Tier.DEVICE],
            block_size=1,
            bytes_per_block=bytes_per_block,
            max_model_len=1,
            fingerprint=b"",
            num_host_blocks=sizes[Tier.HOST],
            num_disk_blocks=sizes[Tier.DISK],
        )
        self.kv = KVCacheManager(self.config.num_blocks, block_size=1)
        self.tiers = Tiers(self.config, self.kv)
        self.gib_s = gib_s
        self.retention = Retention(keep_s)
        self.pending: list[tuple[float, int, CopyDone]] = []
        self.next_tick = TICK_S
        self.found = dict.fromkeys(Tier, 0)
        # A block's "bytes" are its name, so its checksum follows it wherever it is moved.
        self.content: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}

    def serve(self, request: TraceRequest) -> None:
        self._run_until(request.at)
        now, names, pool, tiers = request.at, request.names, self.kv.pool, self.tiers
        blocks = pool.lookup(names)
        pool.acquire(blocks)
        tiers.use(now, names, self.retention)
        sources = tiers.find(names[len(blocks) :])
        self.found[Tier.DEVICE] += len(blocks)
        for source in sources:
            self.found[source.tier] += 1
        fresh = self.kv.allocate(len(names) - len(blocks))
        if fresh is None:
            raise click.ClickException(
                f"a prompt of {len(names)} blocks does not fit into {pool.num_free} free ones of"
                " the device; --device-tokens has to be larger"
            )
        for block, name in zip(fresh, names[len(blocks) :], strict=True):
            checksum = int.from_bytes(name, "big")
            self.kv.checksums[block] = self.content[Tier.DEVICE][block] = checksum
            if pool.seal(block, name) and self.kv.collect_sealed:
                self.kv.newly_sealed.append((block, name, self.retention))
        tiers.use(now, names, self.retention)
        pool.release(blocks + fresh)
        self._perform(now, tiers.advance(now))

    def _run_until(self, time: float) -> None:
        """Let everything happen that is due by then."""
        while True:
            moved_at = self.pending[0][0] if self.pending else float("inf")
            now = min(moved_at, self.next_tick)
            if now > time:
                return
            if moved_at <= now:
                done = heapq.heappop(self.pending)[2]
                effects = self.tiers.on_copy_done(now, done)
                assert effects is not None
                self._perform(now, [*effects, *self.tiers.advance(now)])
            else:
                self.next_tick += TICK_S
                self._perform(now, self.tiers.tick(now))

    def _perform(self, now: float, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, CopyBlocks):
                self._move(now, effect)
        while self.pending and self.pending[0][0] <= now:
            done = heapq.heappop(self.pending)[2]
            settled = self.tiers.on_copy_done(now, done)
            assert settled is not None
            self._perform(now, [*settled, *self.tiers.advance(now)])

    def _move(self, now: float, read: CopyBlocks) -> None:
        source, target = self.content[read.src_tier], self.content[read.dst_tier]
        checksums = tuple(source[slot] for slot in read.src)
        target.update(zip(read.dst, checksums, strict=True))
        num_bytes = len(checksums) * self.config.bytes_per_block
        slowest = min(self.gib_s[tier] for tier in (read.src_tier, read.dst_tier))
        elapsed_s = num_bytes / (slowest * GIB)
        done = CopyDone(read.transfer_id, None, checksums, elapsed_s, num_bytes)
        heapq.heappush(self.pending, (now + elapsed_s, read.transfer_id.number, done))


def load(path: Path) -> list[TraceRequest]:
    requests = []
    with path.open() as lines:
        for line in lines:
            fields = json.loads(line)
            names = [number.to_bytes(16, "big") for number in fields["hash_ids"]]
            requests.append(TraceRequest(fields["timestamp"] / 1000, names))
    return requests


def infinite_hit_rate(requests: list[TraceRequest]) -> float:
    total = sum(len(request.names) for request in requests)
    return 1 - len({name for request in requests for name in request.names}) / total


def compare_policies(
    requests: list[TraceRequest], console: Console, block_tokens: int, *, as_json: bool
) -> None:
    """Hit rates of one cache of various sizes under various rules."""
    sizes = [2_000_000, 8_000_000, 16_000_000, 50_000_000]
    total = sum(len(request.names) for request in requests)
    rates: dict[str, list[float]] = {}
    runs = [(name, size) for name in POLICIES for size in sizes]
    for name, size in track(runs, description="policies", console=console):
        cache = POLICIES[name](size // block_tokens)
        found = sum(cache.serve(request.names) for request in requests)
        rates.setdefault(name, []).append(found / total)
    if as_json:
        sys.stdout.write(json.dumps({"tokens": sizes, "hit_rates": rates}, indent=2) + "\n")
        return
    table = Table(title="Blocks found in one cache, %", caption="columns: million tokens of cache")
    table.add_column("policy")
    for size in sizes:
        table.add_column(f"{size / 1e6:g}", justify="right")
    for name, row in rates.items():
        table.add_row(name, *(f"{100 * rate:.2f}" for rate in row))
    Console().print(table)


def show(alone: Result, tiers: Result, infinite: float, moved: bool) -> None:
    table = Table(
        title="Prompt blocks found, % of all",
        caption="moves take the time of their bytes" if moved else "moves take no time",
    )
    for column in ("cache", "M tokens", "found"):
        table.add_column(column, justify="left" if column == "cache" else "right")
    table.add_row("device alone", f"{alone.device_tokens / 1e6:g}", f"{100 * alone.total:.2f}")
    table.add_section()
    for tier in Tier:
        tokens = getattr(tiers, f"{tier}_tokens")
        table.add_row(
            f"with tiers: {tier}", f"{tokens / 1e6:g}", f"{100 * getattr(tiers, tier):.2f}"
        )
    table.add_row("with tiers: all", "", f"[bold]{100 * tiers.total:.2f}[/]")
    table.add_section()
    table.add_row("infinite cache", "", f"{100 * infinite:.2f}")
    Console().print(table)


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--device-tokens", default=1_000_000, show_default=True)
@click.option("--host-tokens", default=12_000_000, show_default=True)
@click.option("--disk-tokens", default=50_000_000, show_default=True)
@click.option(
    "--block-tokens", default=512, show_default=True, help="Tokens of one block of TRACE."
)
@click.option("--bytes-per-token", default=0, show_default=True, help="0: moves take no time.")
@click.option("--host-gib-s", default=20.0, show_default=True, help="Between device and host.")
@click.option("--disk-gib-s", default=3.0, show_default=True, help="To and from the disk.")
@click.option("--keep-s", default=3600.0, show_default=True, help="Retention after the last use.")
@click.option("--policies", is_flag=True, help="Compare rules of eviction on one cache.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    trace: Path,
    device_tokens: int,
    host_tokens: int,
    disk_tokens: int,
    block_tokens: int,
    bytes_per_token: int,
    host_gib_s: float,
    disk_gib_s: float,
    keep_s: float,
    policies: bool,
    as_json: bool,
) -> None:
    """Replay TRACE on one worker, first with device memory alone, then with the tiers below it."""
    requests = load(trace)
    progress = Console(stderr=True)
    if policies:
        compare_policies(requests, progress, block_tokens, as_json=as_json)
        return
    total = sum(len(request.names) for request in requests)
    rates = {Tier.DEVICE: float("inf"), Tier.HOST: host_gib_s, Tier.DISK: disk_gib_s}
    results = []
    for name, host, disk in (("device alone", 0, 0), ("with tiers", host_tokens, disk_tokens)):
        tokens = {Tier.DEVICE: device_tokens, Tier.HOST: host, Tier.DISK: disk}
        sizes = {tier: count // block_tokens for tier, count in tokens.items()}
        replay = Replay(sizes, bytes_per_token * block_tokens, rates, keep_s)
        for request in track(requests, description=name, console=progress):
            replay.serve(request)
        shares = {str(tier): found / total for tier, found in replay.found.items()}
        counters = replay.tiers.counters
        results.append(Result(device_tokens, host, disk, **shares, counters=counters))
    alone, tiers = results
    infinite = infinite_hit_rate(requests)
    if as_json:
        shown = {
            "device_alone": asdict(alone),
            "tiers": {**asdict(tiers), "total": tiers.total},
            "infinite": infinite,
        }
        sys.stdout.write(json.dumps(shown, indent=2) + "\n")
    else:
        show(alone, tiers, infinite, bool(bytes_per_token))


if __name__ == "__main__":
    main()
