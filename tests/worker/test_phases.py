"""A worker's phases of a request cover its time there, up to its first token, without a gap."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.messages import TokenDeltas
from kvrelay.prefill_worker.messages import Prefill
from tests.worker.world import World

PROMPT = list(range(1, 41))
MESSAGE_S = 0.01
TIERS: dict[str, Any] = {"num_host_blocks": 40, "num_disk_blocks": 40}


class Timed(World):
    """Every message takes a while. `told`: (worker, request) -> its first phases."""

    def __init__(self, **options: Any) -> None:
        self.arrived: dict[tuple[str, str], float] = {}
        self.told: dict[tuple[str, str], dict[str, float]] = {}
        super().__init__(**options)

    def deliver(self, node: str, message: Any) -> None:
        self.now += MESSAGE_S
        if isinstance(message, Prefill | Decode):
            self.arrived[node, message.request_id] = self.now
        num_before = len(self.to_router)
        super().deliver(node, message)
        for frame in self.to_router[num_before:]:
            if isinstance(frame, TokenDeltas):
                for delta in frame.deltas:
                    self.on_delta(frame.worker, delta)

    def on_delta(self, worker: str, delta: Any) -> None:
        key = (worker, delta.request_id)
        if key not in self.told:
            assert delta.phases, f"{worker} does not say where the time of its first token went"
            self.told[key] = delta.phases
            assert sum(delta.phases.values()) == pytest.approx(self.now - self.arrived[key])

    def finish(self, name: str, prompt: list[int], **options: Any) -> None:
        self.submit(name, prompt, 4, remote=options.pop("remote", False), **options)
        self.drain()


def test_a_local_prompt_waits_and_is_computed() -> None:
    world = Timed(max_num_batched_tokens=8)
    world.finish("a", PROMPT)
    assert list(world.told["decode", "a"]) == ["worker_queue", "prefill"]
    assert world.told["decode", "a"]["prefill"] == pytest.approx(5 * MESSAGE_S)


def test_a_handoff_is_waited_for_then_moved_then_decoded() -> None:
    world = Timed()
    world.finish("a", PROMPT, remote=True)
    assert list(world.told["prefill", "a"]) == ["worker_queue", "prefill"]
    told = world.told["decode", "a"]
    assert list(told) == ["prefill_wait", "worker_queue", "transfer", "first_decode"]
    assert told["first_decode"] == pytest.approx(MESSAGE_S)


def test_a_handoff_that_fails_is_lost_time() -> None:
    world = Timed()
    world.submit("a", PROMPT, 4, remote=True)
    world.hold_reads = True
    while not world.reads:
        assert world.step()
    world.settle_read("torn cable")
    world.hold_reads = False
    world.drain()
    assert list(world.told["decode", "a"]) == ["prefill_wait", "worker_queue", "lost", "prefill"]


def test_what_a_lower_tier_holds_is_loaded_and_what_a_peer_holds_fetched() -> None:
    world = Timed(num_blocks=14, num_decode=2, **TIERS)
    world.finish("a", PROMPT)
    world.finish("other", list(range(50, 90)))
    world.finish("b", PROMPT)
    assert list(world.told["decode", "b"]) == ["worker_queue", "load", "prefill"]
    world.finish("c", PROMPT, decode="decode-1", fetch_from="decode")
    assert list(world.told["decode-1", "c"]) == ["worker_queue", "fetch", "prefill"]


@pytest.mark.parametrize("remote", [False, True])
def test_preemption_leaves_no_gap(remote: bool) -> None:
    world = Timed(num_blocks=14, prefill_blocks=10)
    names = [f"r{i}" for i in range(6)]
    for i, name in enumerate(names):
        world.submit(name, [i + 1] * (5 + i), 12, remote=remote)
    world.drain()
    assert world.decode.core.scheduler.num_preemptions > 0 or remote
    assert {name for worker, name in world.told if worker == "decode"} == set(names)
