"""`python -m tests.chaos`: faults one after the other, and what clients saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.report import make_console, write_json
from kvrelay.engine.model.checkpoint.resolve import resolve_model
from tests.chaos import disks
from tests.chaos.clients import Clients, Stream, User, requests_of
from tests.chaos.faults import (
    Fault,
    client_faults,
    day_faults,
    disk_faults,
    link_faults,
    process_faults,
)
from tests.chaos.kvrelay import OnHosts, OnLoopback, System
from tests.chaos.leaks import LEAST_LIFE_S, Growth, Watch
from tests.chaos.network import Hosts, what_is_missing
from tests.chaos.peer import Deployment, Peer
from tests.chaos.users import Agent, Batches

NOTICED_S = 1.0  # before that, a system may not know of a fault
SETTLE_S = 5.0  # for streams, after everything is up and before the next fault
MAX_SILENCE_S = 3.0
AGENTS = 4  # with --day
COUNTS = ("streams", "failed", "altered")


@dataclass(slots=True)
class Seen:
    """One fault, and what the streams saw that ran while it was there."""

    fault: str
    to: str
    streams: int
    failed: int
    altered: int
    silence_s: float
    up_after_s: float | None  # None: not within `up_within_s`
    errors: tuple[str, ...]


async def disturb(system: System, clients: Clients, fault: Fault, random: Random) -> Seen | None:
    began, first = time.monotonic(), len(clients.ended)
    to = await fault.apply(random)
    if to is None:
        return None
    await asyncio.sleep(NOTICED_S)
    up_after_s = await asyncio.to_thread(system.wait_up, system.up_within_s)
    if up_after_s is not None:
        up_after_s += NOTICED_S
    await asyncio.sleep(SETTLE_S)
    streams = [stream for stream in clients.ended[first:] if stream.ended_at > began]
    return seen(fault, to, streams, up_after_s)


def seen(fault: Fault, to: str, streams: Sequence[Stream], up_after_s: float | None) -> Seen:
    failed = [stream.error for stream in streams if stream.error]
    return Seen(
        fault=fault.name,
        to=to,
        streams=len(streams),
        failed=len(failed),
        altered=sum(stream.altered for stream in streams),
        silence_s=max((stream.silence_s for stream in streams if not stream.error), default=0.0),
        up_after_s=up_after_s,
        errors=tuple(sorted(set(failed)))[:3],
    )


async def run(
    console: Console, system: System, faults: Sequence[Fault], minutes: float, num_streams: int,
    random: Random, every_s: float, max_tokens: int, others: Sequence[User] = (),
) -> tuple[list[Seen], list[str]]:  # fmt: skip
    bodies = requests_of(system.model, 2 * num_streams, max_tokens)
    clients = Clients(system.urls, bodies, num_streams, others)
    with console.status(f"{len(bodies)} requests at rest, and what {len(others)} others ask"):
        await clients.learn()
    clients.start()
    await asyncio.sleep(SETTLE_S)
    found: list[Seen] = []
    deadline = time.monotonic() + 60 * minutes
    while time.monotonic() < deadline:
        for fault in random.sample(faults, len(faults)):
            if time.monotonic() > deadline:
                break
            began = time.monotonic()
            with console.status(fault.name):
                result = await disturb(system, clients, fault, random)
            if result is None:
                continue
            found.append(result)
            console.print(line(result, fault))
            if result.up_after_s is None:
                console.print("it does not come up again: the run ends here", style="bold red")
                deadline = 0.0
                break
            await asyncio.sleep(max(0.0, min(began + every_s, deadline) - time.monotonic()))
    with console.status("the last streams end"):
        await clients.stop()
    left = await asyncio.to_thread(system.left_over) if deadline else ["it is not up"]
    return found, left


def line(result: Seen, fault: Fault) -> str:
    is_bad = result.altered or result.up_after_s is None
    is_bad = is_bad or (not fault.breaks_clients and bool(result.failed))
    colour = "red" if is_bad else "yellow" if result.silence_s > MAX_SILENCE_S else "green"
    up = "not up again" if result.up_after_s is None else f"up after {result.up_after_s:.1f} s"
    text = (
        f"[{colour}]{result.fault}[/] ({result.to}): {result.streams} streams, {result.failed}"
        f" failed, {result.altered} altered, silence {result.silence_s:.1f} s, {up}"
    )
    return "\n    ".join([text, *result.errors])


def table(found: Sequence[Seen]) -> Table:
    made = Table(box=SIMPLE_HEAD, title="What clients saw")
    for name in ("fault", "times", "streams", "failed", "altered", "longest silence", "up again"):
        made.add_column(name, justify="left" if name == "fault" else "right")
    for fault in dict.fromkeys(each.fault for each in found):
        mine = [each for each in found if each.fault == fault]
        ups = [each.up_after_s for each in mine]
        worst = max((up for up in ups if up is not None), default=0.0)
        made.add_row(
            fault,
            str(len(mine)),
            *(
                str(sum(getattr(e, name) for e in mine))
                for name in ("streams", "failed", "altered")
            ),
            f"{max(each.silence_s for each in mine):.1f} s",
            "never" if None in ups else f"{worst:.1f} s",
        )
    return made


def growth_table(growths: Sequence[Growth]) -> Table:
    title = f"What was there for {LEAST_LIFE_S / 60:g} minutes or more"
    made = Table(box=SIMPLE_HEAD, title=title)
    for name in ("what", "for", "MiB", "files", "threads", "MiB an hour", "grows"):
        made.add_column(name, justify="right" if name in ("for", "MiB an hour") else "left")
    for each in growths:
        pairs = (f"{a:.0f} to {b:.0f}" for a, b in (each.mib, each.files, each.threads))
        minutes = f"{each.life_s / 60:.0f} min"
        name = f"{each.kind} {each.pid}" if each.pid else each.kind
        made.add_row(name, minutes, *pairs, f"{each.mib_an_hour:+.1f}", each.leaks)
    return made


def peer_of(path: Path, python: str, network: Hosts | None) -> Peer:
    try:
        deployment = Deployment.read(path)
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    values = {"python": python, "prefix": str(Path(python).parent.parent)}
    if "{model_path}" in " ".join(deployment.replica.command):
        values["model_path"] = str(resolve_model(deployment.model, progress=lambda _: None))
    return Peer(deployment, values, network)


@click.command()
@click.option("--minutes", type=float, default=5.0, show_default=True)
@click.option("--streams", type=click.IntRange(1), default=16, show_default=True)
@click.option("--tokens", type=click.IntRange(1), default=80, show_default=True, help="Of each.")
@click.option("--hosts", is_flag=True, help="Three hosts (network namespaces; needs root).")
@click.option("--ranks", type=click.IntRange(1), default=1, help="Of a worker, without --hosts.")
@click.option("--stop-s", type=float, default=60.0, show_default=True, help="Of stopped processes.")
@click.option("--every-s", type=float, default=0.0, help="From a fault to the next, at least.")
@click.option("--only", multiple=True, help="Faults whose name contains this.")
@click.option(
    "--day",
    is_flag=True,
    help="A day in operation, on --hosts: TLS, agents and batches beside the streams, machines that"
    " are lost, a Redis that forgets, renewed certificates.",
)
@click.option("--first", default="", help="With --day: a commit; upgrades go from it, and back.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--peer", "peer_path", type=click.Path(path_type=Path), help="A TOML file: another.")
@click.option("--peer-python", default="python3", help="Its {python}.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the results.")
def main(
    minutes: float, streams: int, tokens: int, hosts: bool, ranks: int, stop_s: float,
    every_s: float, only: Sequence[str], day: bool, first: str, seed: int,
    peer_path: Path | None, peer_python: str, json_path: Path | None,
) -> None:  # fmt: skip
    """Disturb a server of one's own, with streams running all the time. Exits with 1 if a stream
    failed that was not connected to what was hit, if one was altered, if anything is left, or if a
    process that lived for ten minutes, or the shared memory, grows."""
    console = make_console()
    hosts = hosts or day
    if first and not day:
        raise click.UsageError("--first is for --day")
    if hosts and (missing := what_is_missing() or disks.what_is_missing()):
        raise click.UsageError(f"--hosts needs {missing}")
    with ExitStack() as stack:
        faults: list[Fault] = []
        network = stack.enter_context(Hosts(3)) if hosts else None
        with console.status("the server"):
            if peer_path is not None:
                system: System = stack.enter_context(peer_of(peer_path, peer_python, network))
            elif network is not None:
                on_hosts = stack.enter_context(OnHosts(network, tls=day, first=first))
                system = on_hosts
                for name, disk in on_hosts.disks.items():
                    faults += disk_faults(name, disk, system)
                if day:
                    faults += day_faults(on_hosts)
            else:
                system = stack.enter_context(OnLoopback(ranks))
        faults += link_faults(network) if network is not None else ()
        faults += [*process_faults(system, stop_s), *client_faults(system)]
        faults = [f for f in faults if not only or any(part in f.name for part in only)]
        others: list[User] = []
        if day:
            others = [*(Agent(system.model, i) for i in range(AGENTS)), Batches(system.model)]
        watch = Watch(system)
        watch.start()
        try:
            found, left = asyncio.run(
                run(
                    console, system, faults, minutes, streams, Random(seed), every_s, tokens, others
                )
            )
        finally:
            watch.stop()
    console.print(table(found))
    growths = watch.growths()
    if growths:
        console.print(growth_table(growths))
    for each in left:
        console.print(f"left over: {each}", style="red", markup=False)
    results: dict[str, Any] = {
        "seen": [asdict(each) for each in found],
        "left": left,
        "held": [asdict(each) for each in growths],
    }
    write_json(json_path, results)
    excused = {fault.name for fault in faults if fault.breaks_clients}
    bad = [e for e in found if e.altered or (e.failed and e.fault not in excused)]
    leaks = [each for each in growths if each.leaks]
    raise SystemExit(1 if bad or left or leaks else 0)


if __name__ == "__main__":
    main()
