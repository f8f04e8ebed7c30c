"""How fast KV blocks move: between processes, between tiers of memory, and to and from a disk,
beside what the machine does without us: memcpy, pwrite and pread.

`python -m benchmarks.kv.transfer`: each round moves about `--mib` of blocks by shuffled lists of
indices; all ways take turns within a round, so that a busy machine slows them alike. Medians.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.kv import transfer_ways as ways
from benchmarks.kv.transfer_ways import Ways, serve_as_peer

BLOCK_BYTES = (46_080, 368_640, 737_280)
RATIOS = {
    "NIXL between processes / memcpy": (ways.BETWEEN, ways.MEMCPY),
    "disk read / raw pread": (ways.DISK_READ, ways.RAW_READ),
    "disk write / raw pwrite": (ways.DISK_WRITE, ways.RAW_WRITE),
}
GIB = 2**30


def measure(
    block_bytes: int, total_bytes: int, rounds: int, folder: Path, direct: bool
) -> dict[str, list[float]]:
    """Measures each way in each round, in GiB/s."""
    count = max(1, total_bytes // block_bytes)
    rng = random.Random(0)
    rates: dict[str, list[float]] = {}
    with Ways(block_bytes, 2 * count, folder) as compared:
        for turn in range(rounds + 1):
            src, dst = (rng.sample(range(2 * count), count) for _ in range(2))
            for name in rng.sample(list(compared.ways), len(compared.ways)):
                seconds = compared.turn(name, src, dst, direct)
                if turn:  # the first connects, and touches the memory
                    rates.setdefault(name, []).append(count * block_bytes / seconds / GIB)
        return {name: rates[name] for name in compared.ways}


def ratio(rates: dict[str, list[float]], ours: str, theirs: str) -> float:
    """Median of the rounds' ratios: what slows a round down slows both."""
    return statistics.median(
        mine / other for mine, other in zip(rates[ours], rates[theirs], strict=True)
    )


def about() -> dict[str, Any]:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("nixl-cu12", "numpy")},
        "commit": commit,
        "ucx_tls": os.environ.get("UCX_TLS", "UCX's own choice"),
    }


def show(console: Console, result: dict[str, Any]) -> None:
    sizes = result["block_bytes"]
    cache = (
        "written through to the disk, read with an empty page cache"
        if result["direct"]
        else "the file is in the page cache"
    )
    table = Table(
        title=f"GiB/s, median of {result['rounds']} rounds of {result['mib']} MiB",
        caption=f"{result['machine']['cores']} cores, Python {result['python']}; disk: {cache}",
    )
    table.add_column("bytes per block")
    for size in sizes:
        table.add_column(f"{int(size):,}", justify="right")
    for name in next(iter(sizes.values()))["rates"]:
        medians = (statistics.median(each["rates"][name]) for each in sizes.values())
        table.add_row(name, *(f"{rate:.2f}" for rate in medians))
    table.add_section()
    for name in RATIOS:
        table.add_row(name, *(f"{each['ratios'][name]:.2f}" for each in sizes.values()))
    console.print(table)
    console.print(f"UCX_TLS between the processes: {result['ucx_tls']}")


@click.command()
@click.option("--mib", default=64, show_default=True, help="Moved in a round.")
@click.option("--rounds", default=9, show_default=True)
@click.option("--direct", is_flag=True, help="Keep the page cache out of disk reads and writes.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="On the disk to measure.  [default: where temporary files are]",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the results.")
@click.option("--peer", nargs=2, type=int, hidden=True)
def main(
    mib: int,
    rounds: int,
    direct: bool,
    folder: Path | None,
    json_path: Path | None,
    peer: tuple[int, int] | None,
) -> None:
    """Compare ways to move KV blocks, in GiB/s."""
    if peer is not None:
        serve_as_peer(*peer)
        return
    console = Console()
    sizes: dict[str, Any] = {}
    for block_bytes in BLOCK_BYTES:
        with (
            console.status(f"blocks of {block_bytes:,} bytes"),
            tempfile.TemporaryDirectory(dir=folder) as files,
        ):
            rates = measure(block_bytes, mib << 20, rounds, Path(files), direct)
        ratios = {name: ratio(rates, *pair) for name, pair in RATIOS.items()}
        sizes[str(block_bytes)] = {"ratios": ratios, "rates": rates}
    result = {**about(), "mib": mib, "rounds": rounds, "direct": direct, "block_bytes": sizes}
    show(console, result)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
