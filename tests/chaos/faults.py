"""What is done to a system, and undone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from random import Random

import httpx
import psutil

from tests.chaos.disks import Disk
from tests.chaos.kvrelay import OnHosts, System
from tests.chaos.network import Hosts

FULL_S = 20.0
HUNG_S = 30.0  # longer than a router or the controller may be silent
BURST, LEAVING = 64, 16  # requests
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
    yield Fault("upgrade: everything restarted, one by one", _restarting(system))
    yield Fault("a worker at half speed", _slowing(system, system.slowed))


def client_faults(system: System) -> Iterator[Fault]:
    yield Fault(f"a burst of {BURST} requests", _bursting(system))
    yield Fault(f"{LEAVING} clients leave in mid-stream", _leaving(system))


def link_faults(hosts: Hosts) -> Iterator[Fault]:
    """Cuts links to any host but the first, where the API is."""
    for seconds in (5.0, 30.0):
        yield Fault(f"a link cut for {seconds:g} s", _on_host(hosts, seconds, hosts.cut))
    yield Fault("10 % of packets lost for 20 s", _on_host(hosts, 20.0, hosts.lose))


def _restarting(system: System) -> Apply:
    async def apply(_: Random) -> str | None:
        began = time.monotonic()
        if not await asyncio.to_thread(system.restart, system.restart_within_s):
            return f"not over after {system.restart_within_s:.0f} s"
        to = f" to {system.version or 'this version'}" if system.version is not None else ""
        return f"in {time.monotonic() - began:.0f} s{to}"

    return apply


def day_faults(system: OnHosts) -> Iterator[Fault]:
    """What else a day has, but for the upgrades of `process_faults`."""
    yield Fault("a machine is lost", _losing(system))
    yield Fault("Redis forgets everything", _calling(system.flush))
    if system.tls:
        yield Fault("the certificate is renewed", _calling(system.renew))


def _calling(act: Callable[[], str]) -> Apply:
    async def apply(_: Random) -> str | None:
        return await asyncio.to_thread(act)

    return apply


def _losing(system: OnHosts) -> Apply:
    async def apply(random: Random) -> str | None:
        """All that runs there ends at one time; its raylet starts again as on a machine that does.
        The first host has Redis, Ray's head and the API."""
        number = random.randrange(1, len(system.hosts.names))
        ended = await asyncio.to_thread(system.hosts.kill, number)
        return f"host {number}, {ended} processes"

    return apply


def disk_faults(name: str, disk: Disk, system: System) -> Iterator[Fault]:
    yield Fault(f"a full {name} disk for {FULL_S:g} s", _on_disk(disk, system, FULL_S, _fill))
    yield Fault(f"a hung {name} disk for {HUNG_S:g} s", _on_disk(disk, system, HUNG_S, _hang))
    yield Fault(f"a slow {name} disk for {FULL_S:g} s", _on_disk(disk, system, FULL_S, _slow))


def _on_disk(
    disk: Disk,
    system: System,
    seconds: float,
    act: Callable[[Disk, float], Awaitable[None]],
) -> Apply:
    async def apply(_: Random) -> str | None:
        """Answers are stored meanwhile, for a state disk to have writes."""
        storing = asyncio.create_task(system.store_answers(seconds))
        await act(disk, seconds)
        return f"{disk.path.name}, {await storing}"

    return apply


async def _fill(disk: Disk, seconds: float) -> None:
    rest = disk.path / "in the way"
    with rest.open("wb", buffering=0) as out, contextlib.suppress(OSError):
        while out.write(bytes(1 << 16)):
            pass
    try:
        await asyncio.sleep(seconds)
    finally:
        rest.unlink()


async def _hang(disk: Disk, seconds: float) -> None:
    await asyncio.to_thread(disk.hang, True)
    try:
        await asyncio.sleep(seconds)
    finally:
        await asyncio.to_thread(disk.hang, False)


async def _slow(disk: Disk, seconds: float) -> None:
    """Nine tenths of the time, whoever writes waits."""
    for _ in range(round(seconds)):
        await _hang(disk, 0.9)
        await asyncio.sleep(0.1)


def _bursting(system: System) -> Apply:
    async def ask(client: httpx.AsyncClient, number: int) -> str:
        body = {"model": system.model, "prompt": f"{number} " * 64, "max_tokens": 16}
        try:
            answer = await client.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            return type(error).__name__
        return str(answer.status_code)

    async def apply(_: Random) -> str | None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=system.urls[0], timeout=system.up_within_s, limits=limits
        ) as client:
            found = await asyncio.gather(*(ask(client, number) for number in range(BURST)))
        return ", ".join(f"{found.count(each)} x {each}" for each in sorted(set(found)))

    return apply


def _leaving(system: System) -> Apply:
    async def leave(client: httpx.AsyncClient, number: int) -> bool:
        body = {"model": system.model, "prompt": f"{number} " * 64, "max_tokens": 1000}
        with contextlib.suppress(httpx.HTTPError):
            async with client.stream(
                "POST", "/v1/completions", json=body | {"stream": True}
            ) as answer:
                async for _ in answer.aiter_bytes():
                    return True
        return False

    async def apply(_: Random) -> str | None:
        async with httpx.AsyncClient(base_url=system.urls[0], timeout=60.0) as client:
            begun = await asyncio.gather(*(leave(client, number) for number in range(LEAVING)))
        return f"{sum(begun)} had begun"

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
