"""Workers whose steps make no progress end themselves; all others go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvrelay.engine.node import Exit, Woken
from kvrelay.engine.request import Refusal
from kvrelay.engine.stats import Progress, ProgressReport, ProgressRequest, RouterUp, WorkerStats
from kvrelay.engine.step import AskProgress, StepDone, StepProgress
from kvrelay.kvtransfer.agent import CopyDone
from tests.worker.world import World, reference

PROMPT = list(range(1, 10))


class Watched(World):
    """Notes when a worker ends itself, and may keep steps from ending."""

    def __init__(self, **limits: Any) -> None:
        self.exits: list[str] = []
        self.hangs: list[bool] = []  # for each, whether a step hangs
        self.layers_per_s = 0.0  # that the step in flight passes
        self.num_asked = 0
        super().__init__(**limits)
        self.deliver("decode", RouterUp("router"))

    def perform(self, node: str, effects: list[Any]) -> None:
        exits = [effect for effect in effects if isinstance(effect, Exit)]
        self.exits += [effect.reason for effect in exits]
        self.hangs += [effect.hangs for effect in exits]
        if AskProgress() in effects:
            self.num_asked += 1
            self.queue.append((node, StepProgress(int(self.layers_per_s * self.now))))
        super().perform(node, [effect for effect in effects if not isinstance(effect, Exit)])

    def hang(self) -> None:
        """The step in flight does not end."""
        self.queue.clear()
        assert self.decode.core.scheduler.in_flight

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            self.deliver("decode", Woken("tick"))

    def told(self) -> Progress:
        return [m for m in self.to_router if isinstance(m, WorkerStats)][-1].progress


def warm(world: Watched) -> None:
    """Enough steps that their cost is known."""
    for number in range(12):
        world.submit(f"w{number}", [number] * 9, 12, remote=False)
        world.drain()


def test_a_step_that_never_ends_ends_the_worker() -> None:
    world = Watched()
    warm(world)
    world.submit("a", PROMPT, 8, remote=False)
    world.step()
    world.hang()
    world.pass_time(9.5)
    assert world.told() is Progress.MADE
    world.pass_time(10.0)
    assert world.told() is Progress.LATE, "others serve its requests better"
    assert world.exits == []
    world.pass_time(11.0)
    assert world.exits == ["a step has not ended after 30 s"]
    assert world.hangs == [True]
    assert world.told() is Progress.NONE
    world.pass_time(5.0)
    assert len(world.exits) == 1


def test_a_step_that_is_slow_goes_on_as_long_as_it_passes_layers() -> None:
    """A machine whose cores others want takes minutes for what takes seconds, and whoever began
    again elsewhere would take longer."""
    world = Watched()
    warm(world)
    world.submit("a", PROMPT, 8, remote=False)
    world.step()
    (done,) = [message for _, message in world.queue if isinstance(message, StepDone)]
    world.queue.clear()
    world.layers_per_s = 0.2
    for _ in range(180):
        world.pass_time(0.25)
        world.drain()
        assert world.told() is Progress.MADE
    assert world.exits == []
    assert 0 < world.num_asked < 180, "not while it is young"
    world.layers_per_s = 0.0
    world.pass_time(11.0)
    assert world.told() is Progress.LATE
    world.queue.clear()
    world.queue.append(("decode", done))
    world.drain()
    assert world.output("a", PROMPT) == reference(PROMPT, 8)


def test_the_first_steps_may_compile() -> None:
    world = Watched()
    world.submit("a", PROMPT, 8, remote=False)
    world.step()
    world.hang()
    world.pass_time(60.0)
    assert world.told() is Progress.MADE
    world.pass_time(250.0)
    assert world.exits


def test_an_idle_worker_goes_on_for_ever() -> None:
    world = Watched()
    warm(world)
    world.pass_time(1000.0)
    assert world.exits == []
    assert world.told() is Progress.MADE


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    world = Watched()
    warm(world)
    world.submit("a", PROMPT, 8, remote=False)
    world.step()
    done = world.queue.popleft()
    world.now += 50.0
    world.pass_time(0.25)
    world.queue.append(done)
    world.drain()
    assert world.exits == []
    assert world.output("a", PROMPT) == reference(PROMPT, 8)


def test_no_deadline_where_there_is_to_be_none() -> None:
    world = Watched(step_timeout_s=0.0)
    warm(world)
    world.submit("a", PROMPT, 8, remote=False)
    world.step()
    world.hang()
    world.pass_time(1000.0)
    assert world.exits == []


def failing(world: Watched, done: Callable[[StepDone], StepDone], name: str) -> None:
    """The next step ends with `done` of what it would have brought."""
    world.submit(name, PROMPT, 4, remote=False)
    world.step()
    node, good = world.queue.popleft()
    world.queue.append((node, done(good)))
    world.drain()


def sticky(good: StepDone) -> StepDone:
    return StepDone(good.step_id, [None], [], 0.0, "CUDA error: an illegal memory access")


def test_steps_that_all_fail_end_the_worker() -> None:
    """It stayed up for ever, refused what it got, and was left alone for 30 s at a time."""
    world = Watched()
    world.fault = lambda _: "CUDA error: an illegal memory access"
    for name in "abc":
        world.submit(name, [ord(name)] * 9, 4, remote=False)
    world.drain()
    assert world.exits == ["the last 3 health checks failed: CUDA error: an illegal memory access"]
    assert world.hangs == [False]
    assert [r.reason for r in world.refused()] == [Refusal.WORKER_FAILED] * 3, "others serve them"
    world.submit("d", PROMPT, 4, remote=False)
    world.step()
    assert not world.decode.core.scheduler.in_flight


def test_a_device_that_is_lost_ends_the_worker_at_once() -> None:
    world = Watched()
    failing(world, lambda good: replace(sticky(good), device_lost=True), "a")
    assert world.exits == ["its device is lost: CUDA error: an illegal memory access"]
    assert [r.reason for r in world.refused()] == [Refusal.WORKER_FAILED], "others serve it"


def test_a_step_that_succeeds_ends_the_count() -> None:
    world = Watched()
    for number in range(8):
        failing(world, sticky, f"a{number}")
        world.submit(f"b{number}", PROMPT, 4, remote=False)
        world.drain()
    assert world.exits == []


@pytest.mark.parametrize("kind", ["invalid", "ungrammatical", "failed"])
def test_what_a_request_brought_itself_does_not_count(kind: str) -> None:
    world = Watched()

    def left_out(good: StepDone) -> StepDone:
        fault: dict[str, Any] = {kind: {0: "why"}}
        return replace(good, sampled=[None], **fault)

    for number in range(5):
        failing(world, left_out, f"a{number}")
    assert world.exits == []
    reasons = {"invalid": Refusal.INVALID_TOKENS, "ungrammatical": Refusal.GRAMMAR}
    expected = reasons.get(kind, Refusal.BLOCK_TABLE)
    assert {refused.reason for refused in world.refused()} == {expected}


def with_stalled_peer() -> Watched:
    """More than half of the blocks are left to reads from a worker that does not move."""
    world = Watched(num_blocks=16)
    world.hold_reads = True
    for number in range(3):
        world.submit(f"a{number}", [50 + number] * 15, 4, remote=True)
    drive(world, 3.0)
    assert world.decode.exchange.unsettled.num_blocks > 8
    return world


def drive(world: World, seconds: float) -> None:
    for _ in range(round(seconds / 0.25)):
        world.tick(0.25)
        world.drain()


def test_half_of_the_memory_left_to_reads_that_never_settle_is_enough() -> None:
    world = with_stalled_peer()
    drive(world, world.decode.config.left_reads_s + 1.0)
    assert "of 16 KV blocks are left to reads that do not settle" in world.exits[0]


def test_a_stalled_peer_is_ended_before_those_that_read_from_it_are() -> None:
    """It ended its reader after 2.75 s; a controller needs 8 s to find and kill it."""
    world = with_stalled_peer()
    drive(world, 8.0)
    world.submit("b", PROMPT, 4, remote=False)
    for node, read in world.reads:
        world.deliver(node, CopyDone(read.transfer_id, "its peer is gone"))
    world.reads.clear()
    drive(world, 10.0)
    assert world.exits == []
    assert world.output("b", PROMPT) == reference(PROMPT, 4)
    world.assert_idle()


def test_time_in_which_the_reader_was_stopped_itself_does_not_count() -> None:
    world = with_stalled_peer()
    world.tick(100.0)
    world.drain()
    assert world.exits == []


def test_whoever_asks_is_told_of_progress() -> None:
    world = Watched()
    warm(world)
    world.perform("decode", world.decode.receive(world.now, ProgressRequest("router")))
    report = world.to_router[-1]
    assert isinstance(report, ProgressReport)
    assert report.num_steps == world.decode.core.watch.num_done > 12
    assert report.progress is Progress.MADE
