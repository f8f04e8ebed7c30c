"""A worker changes its weights, and pauses: what becomes of each of its requests, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.messages import Refused
from kvrelay.engine.request import Refusal, SamplingParams
from kvrelay.engine.stats import RouterUp
from kvrelay.engine.weights import (
    LoadWeights,
    PauseMode,
    PauseWorker,
    UpdateMode,
    UpdateWeights,
    UseWeights,
    WeightsChanged,
    WeightsLoaded,
    WeightsUpdated,
    WeightsUsed,
    WeightVersion,
)
from kvrelay.worker.weights import Phase, weight_updates
from tests.worker.world import BLOCK_SIZE, World, reference

NEW = WeightVersion("new", b"new digest", "/new")
PROMPT = [3] * 5 * BLOCK_SIZE


class Updated(World):
    """A world whose decode worker gets other weights when the test says so."""

    def __init__(self, **limits: Any) -> None:
        self.asked: list[Any] = []
        super().__init__(**limits)
        self.deliver("decode", RouterUp("router"))

    def perform(self, node: str, effects: list[Any]) -> None:
        self.asked += [each for each in effects if isinstance(each, LoadWeights | UseWeights)]
        super().perform(node, effects)

    def update(self, mode: UpdateMode, **fields: Any) -> None:
        """Up to when the weights are loaded."""
        self.deliver("decode", UpdateWeights("router", NEW, mode, **fields))
        self.deliver("decode", WeightsLoaded(NEW.digest))

    def use(self, why: str = "") -> WeightsUpdated:
        assert isinstance(self.asked[-1], UseWeights)
        assert not self.decode.core.scheduler.in_flight
        self.deliver("decode", WeightsUsed(NEW.digest, why))
        return self.said(WeightsUpdated)[-1]

    def said(self, kind: type) -> list[Any]:
        return [each for each in self.to_router if isinstance(each, kind)]

    def begin(self, name: str, max_tokens: int = 40, **fields: Any) -> None:
        self.submit(name, PROMPT, max_tokens, remote=False, **fields)
        while not self.output(name, PROMPT):
            assert self.step()

    @property
    def phase(self) -> Phase:
        return weight_updates(self.decode.plugs).phase


def test_a_drain_finishes_what_it_has_before_and_lets_what_comes_wait() -> None:
    world = Updated()
    world.begin("old")
    world.update(UpdateMode.DRAIN)
    world.now += 1.0
    world.submit("late", [5] * 9, 3, remote=False)
    while world.step():
        pass
    assert world.output("old", PROMPT) == reference(PROMPT, 40)
    assert world.output("late", [5] * 9) == []
    assert world.use().why == ""
    world.drain()
    assert world.output("late", [5] * 9) == reference([5] * 9, 3)
    names = {
        delta.request_id: [name for _, name in delta.weights]
        for frame in world.to_router
        for delta in getattr(frame, "deltas", ())
        if delta.weights
    }
    assert names == {"old": [""], "late": ["", "new"]}
    world.assert_idle()


def test_a_drain_that_takes_too_long_computes_the_rest_again() -> None:
    world = Updated(num_blocks=80)
    world.begin("old", 200)
    world.update(UpdateMode.DRAIN, drain_s=2.0)
    assert world.step()
    assert world.phase is Phase.ENDING
    world.tick(2.5)
    while world.step():
        pass
    assert world.phase is Phase.PROBING
    assert len(world.output("old", PROMPT)) < 200
    world.use()
    world.drain()
    assert world.output("old", PROMPT) == reference(PROMPT, 200)
    world.assert_idle()


@pytest.mark.parametrize("mode", [UpdateMode.RECOMPUTE, UpdateMode.KEEP])
def test_what_old_weights_have_left_is_found_by_nobody_else(mode: UpdateMode) -> None:
    world = Updated()
    world.begin("old")
    pool = world.decode.core.kv.pool
    before = set(pool.block_hashes())
    world.update(mode)
    while world.step():
        pass
    world.use()
    world.drain()
    assert world.output("old", PROMPT) == reference(PROMPT, 40)
    new = set(pool.block_hashes()) - before
    assert bool(new) == (mode is UpdateMode.RECOMPUTE), "KV of two versions is sealed"
    fingerprint = world.decode.core.fingerprint
    world.submit("again", PROMPT, 4, remote=False, fingerprint=fingerprint)
    world.drain()
    (cached,) = [
        delta.num_cached_tokens
        for frame in world.to_router
        for delta in getattr(frame, "deltas", ())
        if delta.request_id == "again" and delta.num_cached_tokens is not None
    ]
    assert (cached > 0) == (mode is UpdateMode.RECOMPUTE)
    world.assert_idle()


def test_one_that_has_kv_of_both_is_an_ordinary_one_once_it_has_lost_it() -> None:
    world = Updated()
    world.begin("old")
    world.update(UpdateMode.KEEP)
    while world.step():
        pass
    world.use()
    (seq,) = world.decode.core.seqs.values()
    assert seq.next_chain is not None
    world.deliver("decode", PauseWorker(PauseMode.KEEP))
    world.drain()
    world.decode.core.scheduler.preempt(seq)
    assert seq.next_chain is None
    world.deliver("decode", PauseWorker(None))
    world.drain()
    assert seq.chain.fingerprint == world.decode.core.fingerprint
    assert world.output("old", PROMPT) == reference(PROMPT, 40)
    world.assert_idle()


def test_requests_that_wait_for_kv_of_others_or_are_pinned_are_given_back() -> None:
    world = Updated()
    world.hold_reads = True
    world.begin("pinned", is_pinned=True)
    world.submit("remote", [7] * 40, 4, remote=True)
    while world.step() and world.decode.core.seqs.keys() >= {("pinned", 0)}:
        if ("remote", 0) in world.decode.exchange.connector.arrivals and world.reads:
            break
    world.update(UpdateMode.KEEP)
    while world.step():
        pass
    world.use()
    refused = {each.request_id: each.reason for each in world.said(Refused)}
    assert refused == {"pinned": Refusal.UNKNOWN, "remote": Refusal.UNKNOWN}
    order = [type(each) for each in world.to_router]
    assert order.index(WeightsChanged) < order.index(Refused)
    world.hold_reads = False
    world.drain()
    world.tick(100.0)
    world.drain()
    world.assert_idle()


def test_a_request_that_was_sent_for_other_weights_is_refused_after_it_is_said_which() -> None:
    world = Updated()
    world.update(UpdateMode.RECOMPUTE)
    world.use()
    changed = world.said(WeightsChanged)[-1]
    params = SamplingParams(max_tokens=2, temperature=0)
    for number, fingerprint in enumerate((b"", b"tiny", changed.fingerprint)):
        work = f"r{number}", params, 0, "router", tuple(PROMPT), len(PROMPT), 60.0
        world.deliver("decode", Decode(*work, fingerprint=fingerprint))
    world.drain()
    assert [each.request_id for each in world.said(Refused)] == ["r0", "r1"]
    assert world.output("r2", PROMPT) == reference(PROMPT, 2)
    last = [type(e) for e in world.to_router if isinstance(e, WeightsChanged | Refused)]
    assert last == [WeightsChanged, WeightsChanged, Refused, WeightsChanged, Refused]
    world.deliver("decode", RouterUp("router"))
    assert world.said(WeightsChanged)[-1] == changed


@pytest.mark.parametrize("why", ["the new weights do not answer", ""])
def test_weights_that_fail_leave_everything_as_it_was(why: str) -> None:
    world = Updated()
    world.begin("old")
    if why:
        world.update(UpdateMode.RECOMPUTE)
        while world.step():
            pass
        answer = world.use(why)
    else:
        why = "no such folder"
        world.deliver("decode", UpdateWeights("router", NEW, UpdateMode.RECOMPUTE))
        world.deliver("decode", UpdateWeights("router", NEW, UpdateMode.RECOMPUTE))
        assert len(world.asked) == 1, "a repeat is ignored"
        other = WeightVersion("other", b"other", "/other")
        world.deliver("decode", UpdateWeights("router", other, UpdateMode.RECOMPUTE))
        assert "one update at a time" in world.said(WeightsUpdated)[-1].why
        world.deliver("decode", WeightsLoaded(NEW.digest, why))
        answer = world.said(WeightsUpdated)[-1]
    assert (answer.why, answer.version.name) == (why, "")
    assert world.said(WeightsChanged) == []
    world.drain()
    assert world.output("old", PROMPT) == reference(PROMPT, 40)
    world.assert_idle()


@pytest.mark.parametrize("mode", list(PauseMode))
def test_a_pause_holds_all_requests_or_those_that_come(mode: PauseMode) -> None:
    world = Updated()
    world.begin("old")
    world.deliver("decode", PauseWorker(mode))
    world.now += 1.0
    world.submit("late", [5] * 9, 3, remote=False)
    world.drain()
    assert (len(world.output("old", PROMPT)) == 40) == (mode is PauseMode.WAIT)
    assert world.output("late", [5] * 9) == []
    world.deliver("decode", PauseWorker(None))
    world.drain()
    assert world.output("old", PROMPT) == reference(PROMPT, 40)
    assert world.output("late", [5] * 9) == reference([5] * 9, 3)
    world.assert_idle()
