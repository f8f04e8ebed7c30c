"""What is done to a system, and undone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil

from tests.chaos.kvrelay import System
from tests.chaos.network import Hosts

RESTART_WITHIN_S = 300.0
FULL_S = 20.0
SLOW_S = 10.0  # a process that is slowed down runs half of this time, in short turns
TURN_S = 0.1
Apply = Callable[[Random], Awaitable[str | None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """`apply` returns when it is undone, and says to what it was done; None: to nothing."""

    name: str
    apply: Apply
    breaks_clients: bool = False  # whoever is connected to the process that is hit


def process_faults(system: System, stop_s: float) -> Iterator[Fault]:
    for kind in system.kinds:
        breaks = kind == "router"
        yield Fault(f"kill -9 of a {kind}", _killing(system, kind), breaks)
        yield Fault(f"{kind} stopped for {stop_s:g} s", _stopping(system, kind, stop_s), breaks)
    yield Fault("everything restarted, one by one", _restarting(system))
    yield Fault("a worker at half speed", _slowing(system, "decode worker"))


def link_faults(hosts: Hosts) -> Iterator[Fault]:
    """Cuts links to any host but the first, where the API is."""
    for seconds in (5.0, 30.0):
        yield Fault(f"a link cut for {seconds:g} s", _on_host(hosts, seconds, hosts.cut))
    yield Fault("10 % of packets lost for 20 s", _on_host(hosts, 20.0, hosts.lose))


def _restarting(system: System) -> Apply:
    async def apply(_: Random) -> str | None:
        began = time.monotonic()
        if not await asyncio.to_thread(system.restart, RESTART_WITHIN_S):
            return None
        return f"in {time.monotonic() - began:.0f} s"

    return apply


def disk_faults(disk: Path) -> Iterator[Fault]:
    yield Fault(f"a full disk for {FULL_S:g} s", _filling(disk))


def _filling(disk: Path) -> Apply:
    async def apply(random: Random) -> str | None:
        rest = disk / "in the way"
        with rest.open("wb") as out, contextlib.suppress(OSError):
            while True:
                out.write(bytes(1 << 20))
                out.flush()
        try:
            await asyncio.sleep(FULL_S)
        finally:
            rest.unlink()
        return str(disk)

    return apply


def _victim(system: System, kind: str, random: Random) -> psutil.Process | None:
    found = system.processes(kind)
    return random.choice(found) if found else None


def _killing(system: System, kind: str) -> Apply:
    async def apply(random: Random) -> str | None:
        if (victim := _victim(system, kind, random)) is None:
            return None
        victim.kill()
        return f"pid {victim.pid}"

    return apply


def _stopping(system: System, kind: str, seconds: float) -> Apply:
    async def apply(random: Random) -> str | None:
        if (victim := _victim(system, kind, random)) is None:
            return None
        victim.suspend()
        try:
            await asyncio.sleep(seconds)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.resume()
        return f"pid {victim.pid}"

    return apply


def _slowing(system: System, kind: str) -> Apply:
    async def apply(random: Random) -> str | None:
        if (victim := _victim(system, kind, random)) is None:
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            for _ in range(int(SLOW_S / (2 * TURN_S))):
                victim.suspend()
                try:
                    await asyncio.sleep(TURN_S)
                finally:
                    victim.resume()
                await asyncio.sleep(TURN_S)
        return f"pid {victim.pid}"

    return apply


def _on_host(hosts: Hosts, seconds: float, act: Callable[[int, bool], None]) -> Apply:
    """`act(host, True)`, and `act(host, False)` when the time is over."""

    async def apply(random: Random) -> str | None:
        number = random.randrange(1, len(hosts.names))
        act(number, True)
        try:
            await asyncio.sleep(seconds)
        finally:
            act(number, False)
        return f"host {number}"

    return apply
