"""Processes that are stopped, steps that hang, devices that fail for good: of one life only."""

from __future__ import annotations

import pytest

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.step import Execute
from kvrelay.kvtransfer.agent import ConnectPeer
from kvrelay.lab.sim.faults import Sickness, SicknessKind
from kvrelay.lab.sim.runtime import SimRuntime
from tests.lab.sim.test_runtime import add, life, plan, read
from tests.lab.sim.toys import Ping, Recorder, pings, step_of


def test_a_stopped_process_goes_on_later() -> None:
    runtime = SimRuntime(1)
    b = add(runtime, "b")
    runtime.faults.fall_sick(1, Sickness("b", 0.0, SicknessKind.STOPPED, for_s=5.0))
    add(runtime, "a", *pings("b", 3))
    runtime.run_until(4.9)
    assert b.got == []
    runtime.run_until(6.0)
    assert b.messages == [Ping(n) for n in range(3)]


def test_another_life_of_a_stopped_worker_is_not_stopped() -> None:
    runtime = SimRuntime(1)
    add(runtime, "b")
    runtime.faults.fall_sick(1, Sickness("b", 0.0, SicknessKind.STOPPED))
    add(runtime, "a")
    runtime.crash("b")
    reborn = runtime.restart("b")
    assert isinstance(reborn, Recorder)
    runtime.post("a", "b", Ping(7))
    runtime.run_until(7.0)
    assert reborn.messages == [Ping(7)]


@pytest.mark.parametrize(("kind", "num_done"), [(SicknessKind.HANGS, 0), (SicknessKind.FAILS, 1)])
def test_a_sick_device_is_sick_until_the_process_ends(kind: SicknessKind, num_done: int) -> None:
    runtime = SimRuntime(1)
    runtime.faults.fall_sick(1, Sickness("b", 0.0, kind))
    b = add(runtime, "b", Execute(step_of([1, 2], [0])))
    runtime.run_until(100.0)
    assert len(b.messages) == num_done
    assert all(done.error for done in b.messages)
    assert life(runtime, "b").executor.is_busy is (num_done == 0)
    runtime.crash("b")
    reborn = runtime.restart("b")
    runtime.run_until(101.0)
    assert isinstance(reborn, Recorder)
    assert [done.error for done in reborn.messages] == [None]


def test_a_read_that_hangs_outlives_its_timeout_and_the_faults() -> None:
    runtime = SimRuntime(7)
    add(runtime, "p", Execute(step_of(list(range(1, 17)), [0, 1, 2, 3])))
    consumer = add(runtime, "c", ConnectPeer("p", 1, 8, b""))
    runtime.run_until(0.1)
    consumer.got.clear()
    plan(runtime, read_hang=1.0, until_s=3.0, hang_s=5.0)
    runtime.post("test", "c", read(timeout_s=0.5))
    runtime.run_until(3.0)
    assert consumer.messages == []
    assert life(runtime, "c").executor.writable[Tier.DEVICE] == {4, 5, 6, 7}
    runtime.run_until(8.5)
    assert consumer.messages[0].error == "given up"
    assert life(runtime, "c").executor.writable[Tier.DEVICE] == set()
