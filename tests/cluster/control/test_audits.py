"""Audits: every worker is asked, nobody is waited for too long, and the sums are checked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from kvrelay.cluster.control import audits
from kvrelay.cluster.control.audits import AuditService, audit_dict, uneven
from kvrelay.engine.stats import Audit, AuditRequest

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


def test_sums_that_do_not_come_out_even_are_told() -> None:
    assert uneven(COUNTS) == []
    assert uneven(audit("d0", device_blank=4).counts) == [
        "device blocks do not add up: 2 in use + 3 evictable + 4 blank, of 10"
    ]
    assert uneven(audit("d0", host_used=5).counts) == [
        "host blocks do not add up: 1 pinned, 5 used, of 4"
    ]


def test_what_is_left_over_counts_only_while_no_request_is_live() -> None:
    held = {"d0": audit("d0", "2 blocks are in use"), "d1": audit("d1")}
    idle, busy = audit_dict(held, 0, ["request r is queued"]), audit_dict(held, 1, [])
    assert idle["left"] == ["request r is queued", "d0: 2 blocks are in use"]
    assert (idle["clean"], busy["clean"]) == (False, True)
    assert idle["workers"][1] == {"worker": "d1", "epoch": 1, "counts": COUNTS}
    silent = audit_dict({"d0": None}, 1, [])
    assert (silent["clean"], silent["wrong"]) == (False, ["d0 did not answer"])


def test_what_a_workers_books_say_of_themselves_is_wrong_under_load_too() -> None:
    broken = Audit("d0", 1, COUNTS, wrong=("blocks do not add up: AssertionError",))
    found = audit_dict({"d0": broken}, 3, [])
    assert (found["clean"], found["wrong"]) == (False, [f"d0: {broken.wrong[0]}"])


def asked(silent: frozenset[str] = frozenset()) -> dict[str, Any]:
    """What r0 answers, whose workers and whose other router answer at once, or not at all."""
    answers = {
        "d0": audit("d0"),
        "d1": audit("d1", "2 blocks are in use"),
        "r1": Audit("r1", 1, {"live": 0}),
    }
    own = Audit("r0", 1, {"live": 0}, ("request r is queued",))

    def send(to: str, message: AuditRequest) -> None:
        assert message == AuditRequest("r0")
        service.receive(audit("nobody"))
        for _ in range(2 * (to not in silent)):  # a repeat changes nothing
            service.receive(answers[to])

    service = AuditService("r0", lambda: (["d0", "d1"], ["r0", "r1"]), lambda: own, send)
    return asyncio.run(service.ask())


def test_workers_and_routers_that_are_up_are_asked() -> None:
    found = asked()
    assert [each["worker"] for each in found["workers"]] == ["d0", "d1"]
    assert found["left"] == ["request r is queued", "d1: 2 blocks are in use"]
    assert (found["clean"], found["live"], found["wrong"]) == (False, 0, [])


def test_who_does_not_answer_in_time_is_named_or_may_serve_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audits, "ANSWER_TIMEOUT_S", 0.05)
    found = asked(frozenset({"d1", "r1"}))
    assert [each["worker"] for each in found["workers"]] == ["d0"]
    assert (found["clean"], found["live"], found["wrong"]) == (False, 1, ["d1 did not answer"])


class SlowAudits(AuditService):
    """Each audit takes a while, and answers or raises what is given."""

    def __init__(self, answers: Iterator[Any]) -> None:
        super().__init__("r0", lambda: ([], []), lambda: audit("r0"), lambda to, message: None)
        self.answers = answers
        self.num_running = 0

    async def _look(self) -> dict[str, Any]:
        self.num_running += 1
        assert self.num_running == 1
        await asyncio.sleep(0.05)
        self.num_running -= 1
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return {"number": answer}


async def _asked_together() -> list[Any]:
    """10 ask at once, 5 more while the first audit runs, 1 after all."""
    shared = SlowAudits(count(1))
    first = [asyncio.create_task(shared.ask()) for _ in range(10)]
    await asyncio.sleep(0.02)
    second = [asyncio.create_task(shared.ask()) for _ in range(5)]
    found = [each["number"] for each in await asyncio.gather(*first, *second)]
    began = asyncio.get_running_loop().time()
    found.append((await shared.ask())["number"])
    assert asyncio.get_running_loop().time() - began > 0.2  # after a pause
    return found


def test_who_asks_together_shares_an_audit_that_begins_after_they_asked() -> None:
    assert asyncio.run(_asked_together()) == [1] * 10 + [2] * 5 + [3]


def test_an_audit_that_fails_fails_for_those_who_share_it_only() -> None:
    async def ask() -> None:
        shared = SlowAudits(iter([RuntimeError("no"), 2]))
        failed = await asyncio.gather(shared.ask(), shared.ask(), return_exceptions=True)
        assert [str(error) for error in failed] == ["no", "no"]
        assert await shared.ask() == {"number": 2}

    asyncio.run(ask())
