"""A worker that is about to go: nothing new comes, what decodes there moves, and the rest stays."""

from __future__ import annotations

from kvrelay.engine.request import FinishReason
from kvrelay.router.messages import DrainReport, WorkerDraining
from tests.router.script import Script
from tests.router.test_migration_books import begun


def test_a_draining_worker_gets_no_requests() -> None:
    s = Script("decode-0", "decode-1")
    s.tell(WorkerDraining("decode-0", 1))
    for number in range(4):
        s.submit(f"r{number}", tokens=range(10 + number))
        assert s.dispatched()[0] == "decode-1"
    status = {each.worker: each.state for each in s.router.status(s.now).workers}
    assert status == {"decode-0": "draining", "decode-1": "up"}


def test_what_decodes_on_a_draining_worker_moves() -> None:
    s, decode, prefill = begun("prefill-0", "decode-0", "decode-1")
    s.tell(WorkerDraining(decode, 1))
    new, _, _ = s.dispatched()
    assert new not in (decode,)
    assert prefill == "prefill-0"


def test_what_finds_no_room_elsewhere_ends_where_it_is() -> None:
    s = Script("decode-0")
    s.submit(tokens=range(10))
    s.dispatched()
    s.delta("decode-0", 10, 5)
    s.tell(WorkerDraining("decode-0", 1))
    s.delta("decode-0", 11, 6)
    assert s.streamed() == [5, 6]


def test_the_controller_hears_how_many_requests_still_need_it() -> None:
    s = Script("decode-0")

    def told(worker: str) -> int:
        s.tell(WorkerDraining(worker, 1))
        report = s.one(DrainReport, "controller")
        assert (report.router, report.worker, report.epoch) == ("router-0", worker, 1)
        return report.num_requests

    s.submit(tokens=range(10))
    s.dispatched()
    assert told("decode-0") == 1
    s.delta("decode-0", 10, 5, finish=FinishReason.STOP)
    assert told("decode-0") == 0
    assert told("decode-9") == 0  # it never knew of this one


def test_one_that_is_announced_again_stays_after_all() -> None:
    s = Script("decode-0")
    s.tell(WorkerDraining("decode-0", 1))
    s.up("decode-0")
    s.submit(tokens=range(10))
    assert s.dispatched()[0] == "decode-0"


def test_an_older_epoch_does_not_drain() -> None:
    s = Script("decode-0")
    s.tell(WorkerDraining("decode-0", 0))
    s.submit(tokens=range(10))
    assert s.dispatched()[0] == "decode-0"


def test_an_older_life_does_not_end_the_draining() -> None:
    s = Script("decode-1")
    s.up("decode-0", epoch=2)
    s.tell(WorkerDraining("decode-0", 2))
    s.up("decode-0", epoch=1)
    s.submit("r1", tokens=range(10))
    assert s.dispatched()[0] == "decode-1"
    s.delta("decode-1", 10, 999, request_id="r1", finish=FinishReason.STOP)
    s.up("decode-0", epoch=2)  # it stays after all
    s.tell(WorkerDraining("decode-1", 1))
    s.submit("r2", tokens=range(10))
    assert s.dispatched()[0] == "decode-0"
