"""In a Ray of a machine's own a guardian stays for the next epoch of its worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from kvrelay.cluster.control.messages import Machine
from kvrelay.cluster.processes import ray as runtime
from kvrelay.cluster.processes.here import HERE
from kvrelay.cluster.processes.ray import RayWorkers
from kvrelay.engine.stats import Role
from kvrelay.engine.wire.channel import pack
from kvrelay.worker.messages import StartFailed
from kvrelay.worker.process import Listening
from kvrelay.worker.spec import WorkerSpec

pytestmark = pytest.mark.anyio
MACHINE = Machine(HERE, "10.0.0.5", 4.0)


class Guardian:
    """As Ray's handle of one; its worker says that it does not start, which is all that is asked
    of it here."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.answers = True

    def __getattr__(self, name: str) -> Any:
        async def call(*_: Any) -> Any:
            self.calls.append(name)
            if not self.answers:
                raise RayError
            return pack(StartFailed("decode-0", 1, "no", permanent=False))

        return SimpleNamespace(remote=call)


class Bench:
    """RayWorkers whose guardians are those above."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, here: Machine | None) -> None:
        self.made: list[Guardian] = []
        self.removed: list[str] = []
        self.told: list[Any] = []
        monkeypatch.setattr(runtime, "own_machine", lambda: "ray's name")
        monkeypatch.setattr(runtime.ray, "kill", lambda *_, **__: None)
        monkeypatch.setattr(runtime, "_remove_group", self.removed.append)
        self.workers = RayWorkers(Listening("127.0.0.1", b"", 1 << 20), self.told.append, here)
        made: Any = self.workers
        made._place, made._guardian = self._place, self._guardian

    async def _place(self, spec: WorkerSpec) -> Any:
        self.workers._placed[spec.worker] = spec.epoch, f"group {spec.epoch}"
        return "group"

    async def _guardian(self, *_: Any) -> Guardian:
        self.made.append(Guardian())
        return self.made[-1]

    async def life(self, epoch: int, role: Role = Role.DECODE) -> None:
        """One starts; when it has, the controller hears of its end."""
        machine = HERE if self.workers._here else "ray's name"
        spec: Any = SimpleNamespace(
            worker="decode-0", epoch=epoch, role=role, machine=machine, further=(), num_gpus=0
        )
        running = runtime._Running(epoch, None, asyncio.create_task(asyncio.sleep(0)), role)
        self.workers._running["decode-0"] = running
        await self.workers._create(spec)
        self.workers.end("decode-0", epoch)
        await asyncio.sleep(0.05)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine | None], Bench]:
    monkeypatch.setattr(runtime, "pack", lambda order: order)
    return lambda here: Bench(monkeypatch, here)


async def test_it_starts_the_next_epoch_where_the_last_one_was(bench: Any) -> None:
    found = bench(MACHINE)
    for epoch in (1, 2, 3):
        await found.life(epoch)
    (guardian,) = found.made
    assert guardian.calls == ["start", "stop"] * 3
    assert found.removed == []
    await found.workers.close()
    assert guardian.calls[-1] == "end"
    assert found.removed == ["group 1"]


@pytest.mark.parametrize("changed", ["it is gone", "the role"])
async def test_another_one_is_made_where_it_cannot(bench: Any, changed: str) -> None:
    found = bench(MACHINE)
    await found.life(1)
    if changed == "it is gone":
        first, spares = found.made[0], found.workers._spares
        first.answers = False
        stopped = asyncio.ensure_future(runtime._stop(first))
        spares["decode-0"] = replace(spares["decode-0"], stopped=stopped)
    await found.life(2, Role.DECODE if changed == "it is gone" else Role.PREFILL)
    assert len(found.made) == 2
    assert "end" in found.made[0].calls
    assert found.removed == ["group 1"]


async def test_nobody_waits_for_it_for_ever(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "SPARE_S", 0.05)
    found = bench(MACHINE)
    await found.life(1)
    await asyncio.sleep(0.2)
    assert found.made[0].calls == ["start", "stop", "end"]
    assert found.removed == ["group 1"]


async def test_in_a_ray_that_was_joined_each_epoch_has_its_own(bench: Any) -> None:
    found = bench(None)
    for epoch in (1, 2):
        await found.life(epoch)
    assert [guardian.calls for guardian in found.made] == [["start", "end"]] * 2
    assert found.removed == ["group 1", "group 2"]
