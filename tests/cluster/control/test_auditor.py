"""Audits: every worker is asked, nobody is waited for too long, and the sums are checked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.control.auditor import MAX_PENDING, AuditAll, Auditor, AuditReport
from cluster.control.audits import AuditDesk, SharedAudit, audit_dict, uneven
from cluster.runtime.host import NodeHost
from engine.node import Effect, Note, Send, Wake, Woken
from engine.stats import Audit, AuditRequest

COUNTS = {
    "device.blocks": 10,
    "device.in_use": 2,
    "device.evictable": 3,
    "device.blank": 5,
    "host.blocks": 4,
    "host.used": 3,
    "host.pinned": 1,
    "transfers": 0,
    "leases": 0,
}


def audit(worker: str, *left: str, **changes: int) -> Audit:
    counts = COUNTS | {name.replace("_", ".", 1): n for name, n in changes.items()}
    return Audit(worker, 1, counts, left)


@pytest.fixture
def auditor() -> Auditor:
    return Auditor("auditor")


def ask(auditor: Auditor, audit_id: str = "a1", *workers: str) -> list[Effect]:
    return auditor.receive(0.0, AuditAll(audit_id, workers or ("d0", "d1"), 5.0))


def test_an_audit_ends_when_all_have_answered(auditor: Auditor) -> None:
    request = AuditRequest("auditor")
    assert ask(auditor) == [Send("d0", request), Send("d1", request), Wake(5.0, "a1")]
    assert auditor.receive(0.1, audit("d1")) == []
    assert auditor.receive(0.2, audit("stranger")) == []
    assert auditor.receive(0.3, audit("d1", "a repeat")) == []
    report = AuditReport("a1", (audit("d0"), audit("d1")), ())
    assert auditor.receive(0.4, audit("d0")) == [report]
    assert auditor.receive(5.0, Woken("a1")) == []
    assert auditor.check_idle() == []


def test_who_does_not_answer_in_time_is_named(auditor: Auditor) -> None:
    ask(auditor)
    auditor.receive(0.1, audit("d1"))
    assert auditor.check_idle() == ["audit a1 is under way"]
    assert auditor.receive(5.0, Woken("a1")) == [AuditReport("a1", (audit("d1"),), ("d0",))]
    assert auditor.receive(5.1, audit("d0")) == []


def test_two_audits_at_once_share_an_answer(auditor: Auditor) -> None:
    ask(auditor, "a1", "d0")
    ask(auditor, "a2", "d0", "d1")
    assert auditor.receive(0.1, audit("d0")) == [AuditReport("a1", (audit("d0"),), ())]
    (report,) = auditor.receive(0.2, audit("d1"))
    assert report == AuditReport("a2", (audit("d0"), audit("d1")), ())


def test_an_audit_of_nobody_or_one_too_many_ends_at_once(auditor: Auditor) -> None:
    assert auditor.receive(0.0, AuditAll("none", (), 5.0)) == [AuditReport("none", (), ())]
    for number in range(MAX_PENDING):
        assert len(ask(auditor, f"a{number}", "d0")) == 2
    assert ask(auditor, "more", "d0") == [AuditReport("more", (), ("d0",))]


def test_an_unexpected_message_is_noted(auditor: Auditor) -> None:
    assert auditor.receive(0.0, object()) == [Note("warning", "unexpected_message", "object")]


def test_sums_that_do_not_come_out_even_are_told() -> None:
    assert uneven(COUNTS) == []
    assert uneven(audit("d0", device_blank=4).counts) == [
        "device blocks do not add up: 2 in use + 3 evictable + 4 blank, of 10"
    ]
    assert uneven(audit("d0", host_used=5).counts) == [
        "host blocks do not add up: 1 pinned, 5 used, of 4"
    ]


def test_what_is_left_over_counts_only_while_no_request_is_live() -> None:
    report = AuditReport("a1", (audit("d0", "2 blocks are in use"), audit("d1")), ())
    idle, busy = audit_dict(report, 0, ["request r is queued"]), audit_dict(report, 1, [])
    assert idle["left"] == ["request r is queued", "d0: 2 blocks are in use"]
    assert (idle["clean"], busy["clean"]) == (False, True)
    assert idle["workers"][1] == {"worker": "d1", "epoch": 1, "counts": COUNTS}
    silent = audit_dict(AuditReport("a1", (), ("d0",)), 1, [])
    assert (silent["clean"], silent["wrong"]) == (False, ["d0 did not answer"])


class Worker:
    """Answers audits, or does not."""

    def __init__(self, node_id: str, hangs: bool = False) -> None:
        self.node_id = node_id
        self.hangs = hangs

    def start(self, now: float) -> list[Effect]:
        return []

    def receive(self, now: float, message: Any) -> list[Effect]:
        assert isinstance(message, AuditRequest)
        return [] if self.hangs else [Send(message.reply_to, audit(self.node_id))]


def test_a_coroutine_gets_its_report() -> None:
    async def scenario() -> None:
        host = NodeHost(asyncio.get_running_loop())
        desk = AuditDesk(host, Auditor("auditor"))
        for worker in (Worker("d0"), Worker("d1"), Worker("d2", hangs=True)):
            host.add(worker)
        reports = await asyncio.gather(desk.ask(["d0", "d1"]), desk.ask(["d1"]), desk.ask([]))
        assert [[a.worker for a in report.audits] for report in reports] == [
            ["d0", "d1"],
            ["d1"],
            [],
        ]
        report = await desk.ask(["d2", "d0"], timeout_s=0.05)
        assert report.silent == ("d2",)
        assert [a.worker for a in report.audits] == ["d0"]

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_what_a_workers_books_say_of_themselves_is_wrong_under_load_too() -> None:
    broken = Audit("d0", 1, COUNTS, wrong=("blocks do not add up: AssertionError",))
    found = audit_dict(AuditReport("a1", (broken,), ()), 3, [])
    assert (found["clean"], found["wrong"]) == (False, [f"d0: {broken.wrong[0]}"])


async def _asked_together() -> tuple[list[Any], int]:
    """10 ask at once, 5 more while the first audit runs, 1 after all."""
    num_begun = num_running = 0

    async def look() -> dict[str, Any]:
        nonlocal num_begun, num_running
        num_begun += 1
        number = num_begun
        num_running += 1
        assert num_running == 1
        await asyncio.sleep(0.05)
        num_running -= 1
        return {"number": number}

    shared = SharedAudit(look)
    first = [asyncio.create_task(shared.ask()) for _ in range(10)]
    await asyncio.sleep(0.02)
    second = [asyncio.create_task(shared.ask()) for _ in range(5)]
    found = [each["number"] for each in await asyncio.gather(*first, *second)]
    began = asyncio.get_running_loop().time()
    found.append((await shared.ask())["number"])
    assert asyncio.get_running_loop().time() - began > 0.2  # after a pause
    return found, num_begun


def test_who_asks_together_shares_an_audit_that_begins_after_they_asked() -> None:
    found, num_begun = asyncio.run(_asked_together())
    assert found == [1] * 10 + [2] * 5 + [3]
    assert num_begun == 3


def test_an_audit_that_fails_fails_for_those_who_share_it_only() -> None:
    async def ask() -> None:
        answers: list[Any] = [RuntimeError("no"), {"clean": True}]

        async def look() -> dict[str, Any]:
            answer: Any = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return dict(answer)

        shared = SharedAudit(look)
        failed = await asyncio.gather(shared.ask(), shared.ask(), return_exceptions=True)
        assert [str(error) for error in failed] == ["no", "no"]
        assert await shared.ask() == {"clean": True}

    asyncio.run(ask())
