"""What batches of twenty tenants take, beside four that do what they can to hold others up.

python -m benchmarks.serving.tenants_batches [--rows 500] [--json OUT]

The real runner and store in virtual time, above a stand-in for generation: a row takes two seconds
however many run, so what a batch loses it loses to the runner. Of the tenants one is at its rate
limit, rows of one take 700 s each, the model of one has no worker, and the answers of one find no
room in the store until it cancels its batch after ten minutes (a stand-in refuses them, as a full
store does). Each kind of batch is measured alone first. The day that the batch without a worker
has passes too.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import click

from benchmarks.report import json_option, make_console, number_table, write_json
from kvrelay.cluster.api.batches.store import BatchStore, Result
from kvrelay.cluster.api.batches.uploads import WINDOW_S
from kvrelay.cluster.api.tenants import Tenant
from tests.cluster.api.batches.clusters import (
    BEGAN_AT,
    ENDS,
    Backend,
    Cluster,
    Sent,
    line,
    no_workers,
    tenant,
)
from tests.support.virtual_loop import run_in_virtual_time

NUM_TENANTS = 20
ROW_S = 2.0
SLOW_ROW_S = 700.0
NUM_SLOW_ROWS = 200
RATE = 300  # requests a minute
CANCEL_AFTER_S = 600.0
EARLY_S = 3600.0  # until then the looks at what has ended are close together
SLOW_FROM = 1_000_000  # rows with these numbers are slow
LIMITED, SLOW, NO_WORKER, FULL = "at its rate", "slow rows", "no worker", "no room"
MODELS = {NO_WORKER: "b"}


class PartlyFullStore(BatchStore):
    """Takes no answer of one tenant's batch."""

    def put_results(self, batch: str, results: Collection[Result]) -> None:
        if batch == name_of(FULL) and not all(result.is_error for result in results):
            raise OSError(errno.ENOSPC, "files and results have all that they may")
        super().put_results(batch, results)


def name_of(who: str) -> str:
    return f"batch_{who.replace(' ', '_')}"


def kinds() -> dict[str, Tenant]:
    """All tenants, by what they do."""
    usual = [f"tenant {number}" for number in range(NUM_TENANTS - 4)]
    found = {name: tenant(name) for name in (*usual, SLOW, NO_WORKER, FULL)}
    return found | {LIMITED: tenant(LIMITED, requests_per_minute=RATE)}


def refuse(sent: Sent, body: Any) -> None:
    if body["model"] == MODELS[NO_WORKER]:
        no_workers(sent, body)


async def run(names: Collection[str], num_rows: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Seconds and ends of the batches of these tenants, which begin together."""
    tenants = {name: each for name, each in kinds().items() if name in names}
    backend = Backend(seconds=lambda body: SLOW_ROW_S if body["i"] >= SLOW_FROM else ROW_S)
    backend.refusal = refuse
    store = PartlyFullStore(folder)
    store._connection.execute("PRAGMA synchronous = OFF")
    cluster = Cluster(store, backend, tenants)
    for name in tenants:
        cluster.add(name_of(name), rows_of(name, num_rows), name, MODELS.get(name, "a"))
    cluster.runner.start()
    if FULL in names:
        cluster.loop.call_later(CANCEL_AFTER_S, cluster.cancel, name_of(FULL))
    found: dict[str, dict[str, Any]] = {}
    while len(found) < len(tenants):
        for name in tenants.keys() - found.keys():
            record = cluster.record(name_of(name), name)
            if record["status"] in ENDS:
                counts, end = record["request_counts"], record["status"]
                took_s = cluster.loop.time()
                if took_s > EARLY_S:
                    took_s = float(record[f"{end}_at"] - BEGAN_AT)
                found[name] = {"s": took_s, "end": end} | counts
        await asyncio.sleep(0.25 if cluster.loop.time() < EARLY_S else 10.0)
    await cluster.runner.close()
    store.close()
    return found


def rows_of(name: str, num_rows: int) -> bytes:
    first, count = (SLOW_FROM, NUM_SLOW_ROWS) if name == SLOW else (0, num_rows)
    return b"".join(line(first + i, MODELS.get(name, "a")) for i in range(count))


def measured(names: Collection[str], num_rows: int) -> Mapping[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_in_virtual_time(lambda: run(names, num_rows, Path(folder)))


@click.command()
@click.option("--rows", default=500, help="Of each batch but the slow one's.")
@json_option()
def main(rows: int, json_path: Path | None) -> None:
    """Measure what batches of one tenant do to those of others."""
    logging.getLogger("kvrelay.api").setLevel(logging.ERROR)
    console, names = make_console(), list(kinds())
    with console.status("each kind alone"):
        alone = {name: measured([name], rows)[name] for name in (names[0], LIMITED, SLOW)}
    with console.status(f"all {len(names)} together, for a day"):
        beside = measured(names, rows)
    table = number_table("tenant", "rows", "s alone", "s beside", "ratio", "ends", title="Batches")
    ratios = []
    for name in names:
        each, first = beside[name], alone.get(name, alone[names[0]])
        is_compared = name in alone or name.startswith("tenant")
        ratio = first["s"] / each["s"]
        ratios += [ratio] * name.startswith("tenant")
        counts = f"{each['completed']} of {each['total']}"
        shown = (f"{first['s']:,.0f}", f"{each['s']:,.0f}", f"{ratio:.2f}")
        shown = shown if is_compared else ("", shown[1], "")
        table.add_row(name, counts, *shown, each["end"])
    console.print(table)
    latest = max(each["s"] for each in beside.values())
    console.print(f"the others' speed, to alone: {min(ratios):.2f} at least")
    console.print(f"the last batch ended after {latest:,.0f} s of a window of {WINDOW_S:,}")
    write_json(json_path, {"alone": alone, "beside": dict(beside)})


if __name__ == "__main__":
    main()
