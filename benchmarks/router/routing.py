"""How long a router looks for the holders of a prompt, with many workers and many blocks.

`python -m benchmarks.router.routing` fills a prefix index with sessions and with a prefix that
every worker holds, and asks it for prompts of 12,000 and 120,000 tokens: held whole, held by half,
begun with what all hold, and new. A lookup counts with the choice of the best holders of both
roles. Then whole decisions are timed: names of the prompt's blocks, lookup, costs, choice, booking.

With `--peer-python`, `RadixTree.find_matches` of ai-dynamo-runtime gets the same blocks and prompts
in the same run. It has an environment of its own:

    python3 -m venv dynamo && dynamo/bin/pip install ai-dynamo-runtime
    python -m benchmarks.router.routing --peer-python dynamo/bin/python
"""

from __future__ import annotations

import gc
import json
import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from benchmarks.report import json_option, make_console, number_table, write_json
from benchmarks.router.decision import (
    BLOCK_SIZE,
    Samples,
    decision,
    name_of,
    start_workers,
    timed,
)
from benchmarks.router.load import KINDS, PROMPT_BLOCKS, RoutingLoad, Session
from kvrelay.engine.kv.events import KVEvents
from kvrelay.engine.kv.tier import Tier
from kvrelay.lab.bench.load import percentile
from kvrelay.router.config import RouterConfig
from kvrelay.router.dispatch import Dispatcher
from kvrelay.router.index.prefix_index import PrefixIndex
from kvrelay.router.placement.policy import GROUP

EVENT_BLOCKS = 64
NUM_EVENTS = 2000
MOVED_BLOCKS = 2_000_000
PEER_EXIT_S = 60.0


def fill(
    index: PrefixIndex, load: RoutingLoad, advance: Callable[[int], None]
) -> tuple[list[Session], list[float]]:
    """Each worker's blocks at once, as a snapshot tells them. Returns the sessions, and the seconds
    that each of the calls took."""
    known = list(load.sessions())
    held: list[list[Session]] = [[] for _ in range(load.num_workers)]
    for session in known:
        for worker in session.holders:
            held[worker].append(session)
    calls = []
    for number, sessions in enumerate(held):
        names = b"".join([load.hot, *map(load.names, sessions)])
        worker, tiers = name_of(number), {Tier.DEVICE: names}
        began = time.perf_counter()
        index.restore(0.0, worker, 1, 0, tiers)
        calls.append(time.perf_counter() - began)
        advance(index.table.num_blocks)
    return known, calls


def measure_lookups(index: PrefixIndex, load: RoutingLoad, known: list[Session], n: int) -> Samples:
    found: Samples = {}
    for num_blocks in PROMPT_BLOCKS:
        for kind in KINDS:
            times = found[f"{kind} {num_blocks}"] = []
            for names in load.prompts(kind, num_blocks, n, known):
                began = time.perf_counter()
                matches = index.lookup(0.0, names)
                for group in GROUP.values():
                    matches.best(group)
                times.append(time.perf_counter() - began)
    return found


def measure_changes(index: PrefixIndex, load: RoutingLoad) -> dict[str, Any]:
    """What else a router does with its index: events, a worker that goes, a copy of it."""
    rng = random.Random(load.seed)
    seqs = [0] * load.num_workers
    events = []
    for n in range(NUM_EVENTS):
        number = n % load.num_workers
        seqs[number] += 1
        stored = tuple(rng.randbytes(16) for _ in range(EVENT_BLOCKS))
        update = KVEvents(name_of(number), 1, seqs[number], stored, ())
        events.append(timed(lambda update=update: index.apply(0.0, update)))  # type: ignore[misc]
    copied = min(MOVED_BLOCKS, load.num_blocks)
    copy = PrefixIndex()
    export_s = restore_s = 0.0
    for number in range(load.num_workers):
        began = time.perf_counter()
        export = index.export(name_of(number))
        export_s += time.perf_counter() - began
        assert export is not None
        copy.add(name_of(number), 1)
        restore_s += timed(lambda number=number, e=export: copy.restore(0.0, name_of(number), *e))  # type: ignore[misc]
        if copy.table.num_blocks >= copied:
            break
    copied = copy.table.num_blocks
    return {
        "event_blocks": EVENT_BLOCKS,
        "event_p50_s": percentile(events, 50),
        "event_p99_s": percentile(events, 99),
        "event_max_s": max(events),
        "copied_blocks": copied,
        "export_s": export_s,
        "restore_s": restore_s,
        "remove_s": timed(lambda: index.remove(name_of(0))),
    }


def run_peer(
    python: Path,
    load: RoutingLoad,
    num_lookups: int,
    limit_s: float,
    on_blocks: Callable[[int], None],
) -> dict[str, Any]:
    """What the peer measured in its own interpreter."""
    asked = {
        "workers": load.num_workers, "blocks": load.num_blocks, "seed": load.seed,
        "limit_s": limit_s, "lookups": num_lookups,
    }  # fmt: skip
    command = [str(python), "-m", "benchmarks.router.peer"]
    root = Path(__file__).parents[2]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=root) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.close()
        said: dict[str, Any] = {}
        for line in process.stdout:
            said = json.loads(line)
            if "blocks" in said:
                on_blocks(said["blocks"])
        if process.wait(PEER_EXIT_S) or "lookups" not in said:
            raise click.ClickException(
                f"{python} could not run the peer (status {process.returncode}): expected an"
                " interpreter with ai-dynamo-runtime; see --help"
            )
    return said


def us(values: list[float], percent: float) -> str:
    found = percentile(values, percent)
    return "-" if found is None else f"{found * 1e6:,.0f}"


def summarize(samples: Samples) -> dict[str, dict[str, float | None]]:
    return {
        key: {f"p{p}_us": (percentile(values, p) or 0.0) * 1e6 for p in (50, 99)}
        for key, values in samples.items()
    }


def lookup_table(ours: Samples, peer: dict[str, Any] | None) -> Table:
    theirs = ("find_matches p50", "p99", "with scores p50", "p99") if peer else ()
    caption = "; ".join(f"{kind}: {about}" for kind, about in KINDS.items())
    headings = ("prompt", "p50", "p99", *theirs)
    table = number_table(*headings, title="one lookup, µs", caption=caption)
    for key, values in ours.items():
        kind, num_blocks = key.split()
        row = [f"{int(num_blocks) * BLOCK_SIZE:,} tokens, {kind}", us(values, 50), us(values, 99)]
        if peer:
            for what in ("call_s", "with_scores_s"):
                row += [us(peer["lookups"][key][what], p) for p in (50, 99)]
        table.add_row(*row)
    return table


def build_table(built: dict[str, Any], peer: dict[str, Any] | None) -> Table:
    table = number_table("", "blocks", "bytes per block", "built in s", title="the index")
    for name, row in (("KVRelay", built), ("RadixTree", peer)):
        if row:
            cells = (
                f"{row['num_blocks']:,}",
                f"{row['bytes_per_block']:.0f}",
                f"{row['build_s']:.1f}",
            )
            table.add_row(name, *cells)
    return table


def decision_table(decisions: dict[int, dict[str, Samples]]) -> Table:
    headings = ("prompt", "names p50", "p99", "the rest p50", "p99")
    table = number_table(*headings, title="one routing decision, ms")
    for num_blocks, kinds in decisions.items():
        for kind, times in kinds.items():
            cells = [
                f"{(percentile(times[what], p) or 0.0) * 1e3:.2f}"
                for what in ("names", "rest")
                for p in (50, 99)
            ]
            table.add_row(f"{num_blocks * BLOCK_SIZE:,} tokens, {kind}", *cells)
    return table


@click.command(help=__doc__)
@click.option("--workers", "num_workers", type=click.IntRange(2, 65_535), default=1000)
@click.option("--blocks", "num_blocks", type=click.IntRange(50_000), default=10_000_000)
@click.option("--lookups", "num_lookups", type=click.IntRange(10), default=1000, help="Of a kind.")
@click.option("--peer-python", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--peer-seconds", type=float, default=300.0, help="For filling the peer.")
@click.option("--seed", type=int, default=1)
@json_option()
def main(
    num_workers: int, num_blocks: int, num_lookups: int, peer_python: Path | None,
    peer_seconds: float, seed: int, json_path: Path | None,
) -> None:  # fmt: skip
    load = RoutingLoad(num_workers, num_blocks, seed)
    console = make_console()
    gc.freeze()
    with Progress(console=console) as progress:
        tasks: dict[str, TaskID] = {}

        def bar(what: str) -> Callable[[int], None]:
            task = tasks[what] = progress.add_task(what, total=num_blocks)
            return lambda done: progress.update(task, completed=done)

        rss_before = psutil.Process().memory_info().rss
        dispatcher = Dispatcher(RouterConfig(max_inflight_per_worker=1 << 20))
        start_workers(dispatcher, num_workers)
        index = dispatcher.index
        known, calls = fill(index, load, bar("filling the index"))
        built = {
            "num_blocks": index.table.num_blocks,
            "bytes_per_block": index.table.num_bytes / index.table.num_blocks,
            "rss_per_block": (psutil.Process().memory_info().rss - rss_before) / num_blocks,
            "build_s": sum(calls),
            "longest_snapshot_s": max(calls),
        }
        ours = measure_lookups(index, load, known, num_lookups)
        decisions = {n: decision(dispatcher, load, n) for n in PROMPT_BLOCKS}
        changes = measure_changes(index, load)
        peer = None
        if peer_python is not None:
            peer = run_peer(peer_python, load, num_lookups, peer_seconds, bar("filling the peer"))
    show(console, built, ours, decisions, changes, peer)
    results: dict[str, Any] = {"load": asdict(load), "built": built, "lookups": summarize(ours)}
    results["changes"] = changes
    results["decisions"] = {
        n: {kind: summarize(times) for kind, times in kinds.items()}
        for n, kinds in decisions.items()
    }
    if peer:
        theirs = peer.pop("lookups")
        results["peer"] = peer | {
            what.removesuffix("_s"): summarize({key: each[what] for key, each in theirs.items()})
            for what in ("call_s", "with_scores_s")
        }
    write_json(json_path, results)


def show(
    console: Console,
    built: dict[str, Any],
    ours: Samples,
    decisions: dict[int, dict[str, Samples]],
    changes: dict[str, Any],
    peer: dict[str, Any] | None,
) -> None:
    console.print(build_table(built, peer))
    console.print(lookup_table(ours, peer))
    console.print(decision_table(decisions))
    event = [f"{changes[f'event_{p}_s'] * 1e6:,.0f}" for p in ("p50", "p99", "max")]
    console.print(
        f"An event of {changes['event_blocks']} blocks: {event[0]} µs (p50), {event[1]} (p99),"
        f" {event[2]} (longest). A worker that goes: {changes['remove_s'] * 1e6:,.0f} µs."
        f" {changes['copied_blocks']:,} blocks are exported in {changes['export_s']:.2f} s and"
        f" restored in {changes['restore_s']:.2f} s."
    )


if __name__ == "__main__":
    main()
