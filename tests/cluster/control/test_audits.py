"""Audits: every worker is asked, nobody is waited for too long, and the sums are checked."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.cluster.control.audits import SharedAudit, audit_dict, uneven
from kvrelay.cluster.control.lifecycle import DesiredProcess, ProcessState
from kvrelay.cluster.processes import operators_desk
from kvrelay.cluster.processes.operators_desk import OperatorsDesk
from kvrelay.engine.stats import Audit, AuditRequest

pytestmark = pytest.mark.anyio
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
    audits = {"d0": audit("d0", "2 blocks are in use"), "d1": audit("d1")}
    idle, busy = audit_dict(audits, 0, ["request r is queued"]), audit_dict(audits, 1, [])
    assert idle["left"] == ["request r is queued", "d0: 2 blocks are in use"]
    assert (idle["clean"], busy["clean"]) == (False, True)
    assert idle["workers"][1] == {"worker": "d1", "epoch": 1, "counts": COUNTS}
    silent = audit_dict({"d0": None}, 1, [])
    assert (silent["clean"], silent["wrong"]) == (False, ["d0 did not answer"])


def test_what_a_workers_books_say_of_themselves_is_wrong_under_load_too() -> None:
    broken = Audit("d0", 1, COUNTS, wrong=("blocks do not add up: AssertionError",))
    found = audit_dict({"d0": broken}, 3, [])
    assert (found["clean"], found["wrong"]) == (False, [f"d0: {broken.wrong[0]}"])


class Control:
    """A controller's process whose workers and routers answer at once, or not at all."""

    def __init__(self, silent: frozenset[str] = frozenset()) -> None:
        self.answers = {
            "d0": audit("d0"),
            "d1": audit("d1", "2 blocks are in use"),
            "r0": Audit("r0", 1, {"live": 0}, ("request r is queued",)),
            "r1": Audit("r1", 1, {"live": 0}),
        }
        workers = {
            name: DesiredProcess(name, state=state)
            for name, state in (
                ("d0", ProcessState.UP),
                ("d1", ProcessState.UP),
                ("d2", ProcessState.STARTING),
            )
        }
        routers = {
            name: DesiredProcess(name, state=state)
            for name, state in (
                ("r0", ProcessState.UP),
                ("r1", ProcessState.UP),
                ("r2", ProcessState.STARTING),
            )
        }
        self.controller = SimpleNamespace(workers=workers, routers=routers)
        self.wire = self
        self.silent = silent
        self.desk = OperatorsDesk(self)  # type: ignore[arg-type]

    def send(self, to: str, message: Any) -> None:
        assert message == AuditRequest("controller")
        self.desk.receive(audit("nobody"))
        for _ in range(2 * (to not in self.silent)):  # a repeat changes nothing
            self.desk.receive(self.answers[to])


async def test_workers_and_routers_that_are_up_are_asked() -> None:
    found = await Control().desk.audit()
    assert [each["worker"] for each in found["workers"]] == ["d0", "d1"]
    assert found["left"] == ["request r is queued", "d1: 2 blocks are in use"]
    assert (found["clean"], found["live"], found["wrong"]) == (False, 0, [])


async def test_who_does_not_answer_in_time_is_named_or_may_serve_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operators_desk, "ANSWER_TIMEOUT_S", 0.05)
    found = await Control(frozenset({"d1", "r0"})).desk.audit()
    assert [each["worker"] for each in found["workers"]] == ["d0"]
    assert (found["clean"], found["live"], found["wrong"]) == (False, 1, ["d1 did not answer"])


async def test_who_asks_together_shares_an_audit_that_begins_after_they_asked() -> None:
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
    assert found == [1] * 10 + [2] * 5 + [3]
    assert num_begun == 3


async def test_an_audit_that_fails_fails_for_those_who_share_it_only() -> None:
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
