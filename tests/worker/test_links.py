"""What a worker knows of its links before KV goes by them: a small read when they were made."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from kvrelay.engine.node import Note
from kvrelay.engine.stats import KVLink, RouterUp, WorkerStats
from kvrelay.kvtransfer.agent import PeerConnected
from tests.worker.world import World

PROMPT = list(range(1, 10))


class Timed(World):
    """Each peer is connected with what `answer` says; reads of requests wait."""

    def __init__(self, **answer: Any) -> None:
        self.answer = answer
        self.notes: list[Note] = []
        super().__init__()
        self.hold_reads = True
        self.deliver("decode", RouterUp("router"))

    def perform(self, node: str, effects: list[Any]) -> None:
        self.notes += [effect for effect in effects if isinstance(effect, Note)]
        super().perform(node, effects)
        self.queue = deque(
            (to, replace(message, **self.answer) if isinstance(message, PeerConnected) else message)
            for to, message in self.queue
        )

    def told(self) -> WorkerStats:
        self.tick(0.25)
        self.drain()
        return [m for m in self.to_router if isinstance(m, WorkerStats)][-1]


def test_routers_hear_of_a_rate_before_the_first_read_for_a_request() -> None:
    world = Timed(bytes_per_s=8e9)
    assert (world.told().links, world.told().read_bytes_per_s) == ((), 0.0)
    world.submit("a", PROMPT, 4, remote=True)
    world.drain()
    assert world.reads
    stats = world.told()
    assert stats.links == (KVLink("prefill", 8e9),)
    assert stats.read_bytes_per_s == pytest.approx(8e9)
    world.hold_reads = False
    world.now += 1.0
    world.assert_finishes("a", PROMPT, 4)
    after = world.told()
    assert 0 < after.read_bytes_per_s < 10, "of reads for requests alone, now that there was one"
    assert after.links == stats.links
    counters = world.decode.exchange.connector.rates.counters
    assert counters.keys() == {"kv_read_bytes:peer:prefill", "kv_read_seconds:peer:prefill"}


def test_a_read_that_was_not_timed_is_noted_and_nothing_else() -> None:
    world = Timed(not_timed="p has left")
    world.hold_reads = False
    world.submit("a", PROMPT, 4, remote=True)
    world.assert_finishes("a", PROMPT, 4)
    assert world.told().links == (KVLink("prefill", 0.0),)
    (note,) = [note for note in world.notes if note.counter == "kv_read_not_timed"]
    assert note.text == "prefill is connected, its rate is not known: p has left"
    world.assert_idle()


def test_how_long_a_read_may_take_does_not_follow_from_a_small_one() -> None:
    """It is not checked, and has its link for itself."""
    world = Timed(bytes_per_s=1e12)
    rates = world.decode.exchange.connector.rates
    before = rates.timeout_s(None, 10**9)
    world.submit("a", PROMPT, 4, remote=True)
    world.drain()
    assert rates.bytes_per_s(None) == pytest.approx(1e12)
    assert rates.timeout_s(None, 10**9) == before
