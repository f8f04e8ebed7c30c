"""What a router has written of its index, and what it makes of what was kept."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.kv.block_hash import HASH_BYTES
from kvrelay.engine.kv.events import KVEvents, KVSnapshot, KVSnapshotRequest
from kvrelay.engine.kv.tier import Tier, TierHashes
from kvrelay.engine.node import Send, Wake, Woken
from kvrelay.engine.request import SamplingParams
from kvrelay.router.messages import Submit, TenantShare, WorkerDown, WorkerUp
from kvrelay.router.router import Router
from kvrelay.router.state import (
    TICK,
    ForgetView,
    IndexLoaded,
    IndexView,
    IndexWriter,
    OthersLoads,
    SaveEvents,
    SaveLoads,
    SaveView,
    StateConfig,
    TenantLoad,
    total_loads,
)
from tests.router.script import worker_info

E = TypeVar("E")


def name(number: int) -> bytes:
    return number.to_bytes(HASH_BYTES, "big")


def names(first: int, number: int) -> tuple[bytes, ...]:
    return tuple(name(i) for i in range(first, first + number))


class Sharing:
    """A router that shares, and the effects it had and no test has looked at yet."""

    def __init__(self, **config: Any) -> None:
        state = StateConfig(index=True, loads=True, **config)
        self.now = 0.0
        self.router = Router("router-0", state=state)
        self.effects: list[Any] = self.router.start(0.0)

    def say(self, *messages: Any) -> None:
        for message in messages:
            self.effects += self.router.receive(self.now, message)

    def take(self, kind: type[E]) -> list[E]:
        taken = [effect for effect in self.effects if isinstance(effect, kind)]
        self.effects = [effect for effect in self.effects if not isinstance(effect, kind)]
        return taken

    def tick(self, after_s: float = 0.0) -> float:
        """What it waits for now; returns for how long it wants to wait next."""
        self.now += after_s
        self.take(Wake)
        self.say(Woken(TICK))
        (wake,) = [wake for wake in self.take(Wake) if wake.tag == TICK]
        return wake.after_s

    def views(self) -> dict[str, IndexView]:
        """All that it writes now."""
        while self.tick() < 0.5:
            self.now += 0.05
        return {effect.view.worker: effect.view for effect in self.take(SaveView)}

    def asked(self) -> list[str]:
        """Who is asked for a snapshot."""
        sent = self.take(Send)
        return [send.to for send in sent if isinstance(send.message, KVSnapshotRequest)]

    def up(self, worker: str, number: int = 0, epoch: int = 1, seq: int = 5) -> None:
        """A worker comes up and tells of `number` blocks."""
        self.say(WorkerUp(worker_info(worker, epoch=epoch)))
        self.say(KVSnapshot(worker, epoch, seq, names(0, number)))


def test_only_the_writer_writes_each_worker_once() -> None:
    sharing = Sharing()
    sharing.up("decode-0", 10)
    sharing.up("decode-1", 3)
    assert sharing.views() == {}
    sharing.say(IndexWriter(True))
    found = sharing.views()
    assert {w: (v.epoch, v.seq, v.num_blocks) for w, v in found.items()} == {
        "decode-0": (1, 5, 10),
        "decode-1": (1, 5, 3),
    }
    assert set(found["decode-0"].block_hashes) >= {Tier.DEVICE}
    sharing.now += 1000.0
    assert sharing.views() == {}  # nothing has changed
    sharing.say(IndexWriter(True))  # what was written is lost
    assert set(sharing.views()) == {"decode-0", "decode-1"}
    sharing.say(IndexWriter(False))
    sharing.up("decode-0", 20, epoch=2)
    assert sharing.views() == {}


def test_events_are_written_beside_the_view_until_they_change_enough_of_it() -> None:
    sharing = Sharing(rewrite_share=0.5)
    sharing.say(IndexWriter(True))
    sharing.up("decode-0", 4000)
    first = KVEvents("decode-0", 1, 6, names(9000, 1), ())
    sharing.say(first)
    assert sharing.take(SaveEvents) == []  # no view is there yet
    assert sharing.views()["decode-0"].seq == 6
    told = (TierHashes(Tier.HOST, names(0, 999)),)
    second = KVEvents("decode-0", 1, 7, names(9001, 500), names(0, 500), told)
    sharing.say(second)
    assert sharing.take(SaveEvents) == [SaveEvents(second)]
    sharing.now += 10.0
    assert sharing.views() == {}
    sharing.say(KVEvents("decode-0", 1, 8, (), (name(600), name(601))))
    sharing.now += 10.0
    assert sharing.views()["decode-0"].seq == 8  # 2,001 of 4,001 blocks
    sharing.say(KVEvents("decode-0", 1, 9, (), (name(602),)))
    sharing.now += 10.0
    assert sharing.views() == {}
    sharing.now += 60.0
    assert sharing.views()["decode-0"].seq == 9  # however little it is


def test_a_snapshot_and_a_new_life_are_written_anew_and_a_lost_worker_is_forgotten() -> None:
    sharing = Sharing()
    sharing.say(IndexWriter(True))
    sharing.up("decode-0", 4)
    sharing.views()
    sharing.now += 10.0
    sharing.say(KVSnapshot("decode-0", 1, 9, names(0, 2)))
    assert sharing.views()["decode-0"].seq == 9
    sharing.now += 10.0
    sharing.up("decode-0", 1, epoch=2, seq=0)
    assert [(v.epoch, v.seq) for v in sharing.views().values()] == [(2, 0)]
    sharing.say(WorkerDown("decode-0", 2, "killed"))
    assert sharing.take(ForgetView) == [ForgetView("decode-0")]


def loaded(worker: str, epoch: int, seq: int, number: int, *more: KVEvents) -> IndexLoaded:
    packed = {Tier.DEVICE: b"".join(names(0, number)), Tier.HOST: name(0)}
    return IndexLoaded((IndexView(worker, epoch, seq, packed),), more)


@pytest.mark.parametrize("is_late", [False, True])
def test_what_was_kept_of_a_living_worker_is_known_at_once(is_late: bool) -> None:
    sharing = Sharing()
    events = [KVEvents("decode-0", 1, seq, (name(100 + seq),), (name(seq),)) for seq in (4, 5, 6)]
    kept = loaded("decode-0", 1, 5, 50, *events)
    if is_late:
        sharing.say(WorkerUp(worker_info("decode-0")), kept)
    else:
        sharing.say(kept, WorkerUp(worker_info("decode-0")))
        assert sharing.asked() == []
    index = sharing.router.index
    assert index.block_hashes("decode-0") == {*names(0, 50), name(106)} - {name(6)}
    assert index.block_hashes("decode-0", Tier.HOST) == {name(0)}
    assert index.in_step
    sharing.say(KVEvents("decode-0", 1, 7, (name(107),), ()))
    assert name(107) in index.block_hashes("decode-0")
    index.check_integrity()


def test_a_gap_in_the_events_that_were_kept_is_asked_about() -> None:
    sharing = Sharing()
    gap = KVEvents("decode-0", 1, 9, (name(100),), ())
    sharing.say(loaded("decode-0", 1, 5, 50, gap), WorkerUp(worker_info("decode-0")))
    assert sharing.asked() == ["decode-0"]
    index = sharing.router.index
    assert index.block_hashes("decode-0") == {*names(0, 50)}
    sharing.say(KVSnapshot("decode-0", 1, 9, names(40, 20)))  # what is stale vanishes
    assert index.block_hashes("decode-0") == {*names(40, 20)}
    assert index.in_step


@pytest.mark.parametrize("epoch", [1, 3])
def test_what_was_kept_of_another_life_means_nothing(epoch: int) -> None:
    sharing = Sharing()
    sharing.say(loaded("decode-0", epoch, 5, 50))
    sharing.say(WorkerUp(worker_info("decode-0", epoch=2)))
    assert sharing.asked() == ["decode-0"]
    assert sharing.router.index.block_hashes("decode-0") == frozenset()


def test_what_was_kept_does_not_undo_what_is_known() -> None:
    sharing = Sharing()
    sharing.up("decode-0", 7, seq=8)
    sharing.say(loaded("decode-0", 1, 5, 50))
    assert sharing.router.index.block_hashes("decode-0") == {*names(0, 7)}
    sharing.say(WorkerDown("decode-0", 1, "killed"))
    assert sharing.router.index.block_hashes("decode-0") == frozenset()


def test_what_tenants_have_here_is_told_and_what_they_have_elsewhere_is_known() -> None:
    sharing = Sharing()
    sharing.tick(0.5)
    assert sharing.take(SaveLoads) == [SaveLoads({})]
    for number, tenant in enumerate(("a", "a", "b")):
        sampling = SamplingParams(max_tokens=4)
        tokens = tuple(range(100 * number, 100 * number + 12))
        sharing.say(Submit(f"r{number}", sampling, "api-0", tokens, 60.0, tenant=tenant))
    sharing.tick(0.5)
    told = {"a": TenantLoad(0, 2), "b": TenantLoad(0, 1)}
    assert sharing.take(SaveLoads) == [SaveLoads(told)]
    sharing.say(WorkerUp(worker_info("decode-0")))
    sharing.tick(0.5)
    running = {"a": TenantLoad(2, 0), "b": TenantLoad(1, 0)}
    assert sharing.take(SaveLoads) == [SaveLoads(running)]
    sharing.say(OthersLoads(told))
    assert sharing.router._requests.queue.elsewhere == told
    assert total_loads([told, running])["a"] == TenantLoad(2, 2)
    rows = [{"a": TenantLoad(3, 4, 2, 1)}, {"a": TenantLoad(1, 1, 0, 1)}]
    assert total_loads(rows) == {"a": TenantLoad(4, 5, 2, 2)}


@pytest.mark.parametrize(
    ("running", "queued", "here"),
    [(0, 0, 4), (1, 0, 3), (3, 0, 1), (9, 0, 1), (0, 6, 2), (3, 6, 1), (0, 600, 1)],
)
def test_a_tenants_limit_is_of_all_routers_together(running: int, queued: int, here: int) -> None:
    sharing = Sharing()
    sharing.say(OthersLoads({"a": TenantLoad(running, queued)}))
    sharing.say(WorkerUp(worker_info("decode-0")))
    share = TenantShare(max_concurrent=4)
    for number in range(6):
        tokens = tuple(range(100 * number, 100 * number + 12))
        sampling = SamplingParams(max_tokens=4)
        sharing.say(Submit(f"r{number}", sampling, "api-0", tokens, 60.0, tenant="a", share=share))
    orders = [send.message for send in sharing.take(Send)]
    assert sum(isinstance(order, Decode) for order in orders) == here
    sharing.say(OthersLoads({}))  # the others have gone, or cannot be heard
    orders = [send.message for send in sharing.take(Send)]
    assert sum(isinstance(order, Decode) for order in orders) == 4 - here


@pytest.mark.parametrize(("priority", "here", "in_queue"), [(0, 3, 3), (50, 1, 0)])
def test_rows_at_other_routers_take_no_place_of_chats(
    priority: int, here: int, in_queue: int
) -> None:
    """Three run and four wait elsewhere, and all but one of them are rows of a batch."""
    sharing = Sharing()
    sharing.say(WorkerUp(worker_info("decode-0")))
    share = TenantShare(max_concurrent=4, max_queued=4)  # one for other callers
    sharing.say(OthersLoads({"a": TenantLoad(3, 4, 2, 4)}))
    for number in range(6):
        tokens, sampling = (number, 2, 3), SamplingParams(max_tokens=4)
        about: dict[str, Any] = {"tenant": "a", "share": share, "priority": priority}
        sharing.say(Submit(f"r{number}", sampling, "api-0", tokens, 60.0, **about))
    sent = [send.message for send in sharing.take(Send)]
    assert sum(isinstance(message, Decode) for message in sent) == here
    assert len(sharing.router._requests.queue) == in_queue


def test_what_a_router_has_of_low_classes_is_told_apart() -> None:
    sharing = Sharing()
    for number, priority in enumerate((0, 10, 50)):
        sampling = SamplingParams(max_tokens=4)
        about: dict[str, Any] = {"tenant": "a", "priority": priority}
        sharing.say(Submit(f"r{number}", sampling, "api-0", (number, 2, 3), 60.0, **about))
    sharing.tick(0.5)
    assert sharing.take(SaveLoads)[-1] == SaveLoads({"a": TenantLoad(0, 3, 0, 2)})


def test_a_tenants_queue_is_bounded_over_all_routers() -> None:
    sharing = Sharing()
    sharing.say(OthersLoads({"a": TenantLoad(0, 2)}))
    for number in range(3):
        sampling, share = SamplingParams(max_tokens=4), TenantShare(max_queued=3)
        sharing.say(
            Submit(f"r{number}", sampling, "api-0", (1, 2, 3), 60.0, tenant="a", share=share)
        )
    failed = [send.message.request_id for send in sharing.take(Send)]
    assert failed == ["r1", "r2"]


def test_a_router_that_shares_nothing_does_not_wake_for_it() -> None:
    assert Router("router-0").start(0.0) == []
