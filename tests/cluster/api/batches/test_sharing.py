"""What one tenant, one model or one row does to the batches of all others, in virtual time."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cluster.api.batches import due
from kvrelay.cluster.api.batches.batch_run import GRACE_S
from kvrelay.cluster.api.batches.rows import read_row
from kvrelay.cluster.api.batches.store import BatchStore, StoreAway
from kvrelay.cluster.api.batches.windows import Room, Window
from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.errors import ApiError
from kvrelay.cluster.api.limiter import ConcurrencyLimiter
from kvrelay.engine.service_class import ServiceClass
from kvrelay.router.messages import TenantShare
from tests.cluster.api.batches.clusters import (
    Backend,
    Cluster,
    Sent,
    in_memory,
    line,
    no_room,
    no_workers,
    tenant,
)
from tests.support.virtual_loop import run_in_virtual_time

NEAR_S, WINDOW_S = 60, 180  # instead of two hours and a day
RED_AND_BLUE = {"red": tenant("red"), "blue": tenant("blue")}
Script = Callable[[Cluster], Coroutine[Any, Any, None]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a script beside a runner."""
    monkeypatch.setattr(due, "NEAR_S", NEAR_S)

    def run(script: Script, backend: Backend, **options: Any) -> None:
        async def main() -> None:
            store = options.pop("store", None) or in_memory(tmp_path)
            cluster = Cluster(store, backend, **options)
            cluster.window_s = WINDOW_S
            cluster.runner.start()
            await script(cluster)
            await cluster.runner.close()
            assert backend.num_running == 0
            windows = cluster.runner.windows._found.values()
            assert not any(w.num_running or w.num_refused or w.num_left for w in windows)
            assert cluster.runner.shared.budget.num_taken == 0

        run_in_virtual_time(main)

    return run


def test_a_tenant_at_its_rate_or_without_room_stops_no_other(play: Any) -> None:
    """Red may have two rows a second, and has them; green finds no room at all."""

    def refusal(sent: Sent, body: Any) -> None:
        if sent.tenant.name == "green":
            no_room(sent, body)

    backend = Backend(0.5, refusal=refusal)

    async def script(cluster: Cluster) -> None:
        cluster.add("batch_red", 240, "red")
        cluster.add("batch_green", 240, "green")
        cluster.add("batch_blue", 240, "blue")
        assert await cluster.ended("batch_blue", tenant="blue") < 10
        took_s = await cluster.ended("batch_red", tenant="red")
        assert 45 < took_s < 70  # (240 - 120) / 2 a second
        assert cluster.record("batch_red", "red")["request_counts"]["completed"] == 240
        num_sent = Counter(sent.tenant.name for sent in backend.sent)
        assert num_sent["red"] < 2 * 240  # it does not ask again and again
        assert num_sent["green"] < 10 * took_s

    red = tenant("red", requests_per_minute=120)
    play(script, backend, tenants=RED_AND_BLUE | {"red": red, "green": tenant("green")})


def test_a_row_that_is_to_be_sent_again_has_no_place(play: Any) -> None:
    """Four of ten rows are answered 504 each time before their first token."""

    def refusal(sent: Sent, body: Any) -> None:
        if body["i"] < 4:
            code = "deadline_exceeded"
            raise ApiError(504, "queued", type="timeout_error", code=code, retry_after_s=25.0)

    async def script(cluster: Cluster) -> None:
        cluster.add("batch_a", 10)
        counts = {"total": 10, "completed": 6, "failed": 0}
        await cluster.until(lambda: cluster.record("batch_a")["request_counts"] == counts, 15)
        assert len(backend.sent) <= 14
        backend.refusal = lambda sent, body: None
        await cluster.ended("batch_a", most_s=60)
        assert cluster.status("batch_a") == "completed"

    backend = Backend(refusal=refusal)
    play(script, backend)


@pytest.mark.slow
def test_a_model_without_a_worker_holds_nothing_up_and_its_batch_begins_when_it_is_due(
    play: Any,
) -> None:
    """As soon as rows have the class of those that workers are started for."""
    due_at: list[float] = []

    def refusal(sent: Sent, body: Any) -> None:
        if body["model"] == "b":
            if sent.tenant.service_class is not ServiceClass.FLEX:
                no_workers(sent, body)
            due_at.append(sent.at)

    async def script(cluster: Cluster) -> None:
        cluster.add("batch_b", 50, model="b")
        mixed = b"".join(line(f"b{i}", "b") for i in range(600))
        cluster.add("batch_mixed", mixed + b"".join(line(i) for i in range(50)))
        cluster.add("batch_a", 50)
        assert await cluster.ended("batch_a") < 20
        counts = {"total": 650, "completed": 50, "failed": 0}
        await cluster.until(lambda: cluster.record("batch_mixed")["request_counts"] == counts, 30)
        cluster.queued["b"] = 3  # for chats, at a model that is nobody else's
        assert await cluster.ended(cluster.add("batch_c", 50)) < 20
        await cluster.ended("batch_b", "batch_mixed")
        assert {cluster.status(name) for name in ("batch_b", "batch_mixed")} == {"completed"}
        assert WINDOW_S - NEAR_S <= due_at[0] < WINDOW_S - NEAR_S + 60

    play(script, Backend(refusal=refusal))


def test_rows_that_wait_in_the_lowest_class_are_sent_anew_when_their_batch_is_due(
    play: Any,
) -> None:
    def seconds(body: Any) -> float:
        is_due = cluster_of[0].loop.time() >= WINDOW_S - NEAR_S
        return 1.0 if is_due else 1e6  # they wait at the router, behind all others

    async def script(cluster: Cluster) -> None:
        cluster_of.append(cluster)
        cluster.add("batch_a", 3)
        await cluster.ended("batch_a")
        assert cluster.status("batch_a") == "completed"
        assert len({sent.name for sent in backend.sent}) == len(backend.sent) == 6

    cluster_of: list[Cluster] = []
    backend = Backend(seconds=seconds)
    play(script, backend, settings=ApiSettings(request_timeout_s=20))


@pytest.mark.slow
def test_a_small_batch_ends_beside_one_of_a_day_and_each_is_checked_at_once(play: Any) -> None:
    """A tenant has 30 batches; 20 tenants have one each beside them."""
    names = [f"t{i}" for i in range(20)]

    async def script(cluster: Cluster) -> None:
        for i in range(30):
            cluster.add(f"batch_{i}", 300, "red")
        cluster.add("batch_wrong", b"{\n", "red")
        for name in names:
            cluster.add(f"batch_{name}", 1, name)
        await asyncio.sleep(5)
        assert {cluster.status(f"batch_{name}", name) for name in names} == {"completed"}
        assert cluster.status("batch_wrong", "red") == "failed"
        assert {cluster.status(f"batch_{i}", "red") for i in range(30)} == {"in_progress"}
        cluster.cancel("batch_29")
        assert await cluster.ended("batch_29", tenant="red") < 3
        assert len(cluster.lines("batch_29", "error", "red")) == 300
        await asyncio.sleep(20)  # so many run side by side that the turn of a small one comes
        done = Counter(sent.custom_id for sent in backend.sent if sent.tenant.name == "red")
        assert min(done[i] for i in range(5)) >= 8
        assert cluster.record("batch_29", "red")["cancelling_at"] is not None
        for i in range(29):
            cluster.cancel(f"batch_{i}")
        await cluster.ended(*(f"batch_{i}" for i in range(29)), tenant="red", most_s=10)

    backend = Backend()
    play(script, backend, tenants=RED_AND_BLUE | {name: tenant(name) for name in names})


def test_a_row_may_take_all_of_its_window_and_is_not_tried_without_end(play: Any) -> None:
    """Rows of 700 s, beside one that no window is long enough for."""

    async def script(cluster: Cluster) -> None:
        cluster.window_s = 2000
        cluster.add("batch_a", 4)
        assert await cluster.ended("batch_a") < 702
        assert cluster.record("batch_a")["request_counts"]["completed"] == 4
        assert len(backend.sent) == 4
        assert {round(sent.at + sent.timeout_s) for sent in backend.sent} == {2000}
        cluster.add("batch_b", 1)
        backend.seconds, backend.sent = None, []
        backend.refusal = late
        await cluster.ended("batch_b", most_s=60)
        assert len(backend.sent) == 3
        (error,) = cluster.lines("batch_b", "error")
        assert error["response"]["status_code"] == 504

    def late(sent: Sent, body: Any) -> None:
        backend.row_s = sent.timeout_s + 1
        sent_timeout.append(sent.timeout_s)
        raise LateError

    class LateError(ApiError):
        def __init__(self) -> None:
            code = "deadline_exceeded"
            super().__init__(504, "its time is over", type="timeout_error", code=code)

    sent_timeout: list[float] = []
    backend = Backend(700.0)
    real = backend.__class__.__call__

    async def call(self: Backend, scope: Any, receive: Any, send: Any) -> None:
        try:
            await real(self, scope, receive, send)
        except LateError:
            scope["state"]["num_output_tokens"] = 5
            raise

    backend.__class__ = type("Late", (Backend,), {"__call__": call})
    play(script, backend)


def test_a_row_that_fails_here_is_an_error_of_its_own(play: Any, tmp_path: Path) -> None:
    """A line is longer than lines may be since; an endpoint has a bug; an answer is none."""
    settings = ApiSettings(max_body_bytes=3000)
    rows = b"".join((line(0), line(1), line(2, filler="x" * 2000), line(3), line(4)))

    def refusal(sent: Sent, body: Any) -> None:
        if body["i"] == 1:
            raise RuntimeError("a bug")
        if body["i"] == 3:
            raise ApiError(500, "", code="\ud800")  # an answer that cannot be written

    async def script(cluster: Cluster) -> None:
        cluster.queued["a"] = 1
        cluster.add("batch_a", rows)
        await cluster.until(lambda: cluster.status("batch_a") == "in_progress")
        cluster.ctx.settings = ApiSettings(max_body_bytes=1000)
        cluster.queued["a"] = 0
        await cluster.ended("batch_a", most_s=30)
        counts = {"total": 5, "completed": 2, "failed": 3}
        assert (cluster.status("batch_a"), cluster.record("batch_a")["request_counts"]) == (
            "completed",
            counts,
        )
        errors = {each["custom_id"]: each for each in cluster.lines("batch_a", "error")}
        assert errors["r1"]["response"]["body"]["error"]["code"] == "internal_error"
        assert errors["r2"]["error"]["code"] == "request_too_large"
        assert "more than 1000 bytes" in errors["r2"]["error"]["message"]
        assert Counter(sent.custom_id for sent in backend.sent)[1] == 3

    backend = Backend(refusal=refusal)
    play(script, backend, settings=settings)


def test_lines_that_cannot_be_read_any_more_do_not_keep_a_batch_from_its_end(play: Any) -> None:
    async def script(cluster: Cluster) -> None:
        cluster.queued["a"] = 1
        names = [cluster.add(f"batch_{i}", 3) for i in range(3)]
        await cluster.until(lambda: {cluster.status(each) for each in names} == {"in_progress"})
        text = line(0) + b'{"custom_id": "r1", "body": ' + b"[" * 100_000 + b"\n" + b"\xff\n"
        cluster.store.path("file-batch_0").write_bytes(text)
        cluster.store.path("file-batch_1").unlink()
        cluster.ctx.settings = ApiSettings(max_body_bytes=10)
        cluster.cancel("batch_0")
        cluster.cancel("batch_1")
        await cluster.ended("batch_0", "batch_1", most_s=5)
        ids = [each["custom_id"] for each in cluster.lines("batch_0", "error")]
        assert ids == ["r0", "r1", ""]
        assert cluster.status("batch_1") == "cancelled"
        await cluster.ended("batch_2")
        codes = {each["error"]["code"] for each in cluster.lines("batch_2", "error")}
        assert (cluster.status("batch_2"), codes) == ("completed", {"request_too_large"})

    play(script, Backend())


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_a_batch_whose_answers_find_no_room_ends_and_says_so(
    play: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Nothing can be written but the end itself."""
    full = OSError(errno.ENOSPC, "No space left on device")

    def refuse(self: Any, *args: Any) -> None:
        raise full

    async def script(cluster: Cluster) -> None:
        cluster.add("batch_a", 5)
        await asyncio.sleep(30)
        assert cluster.status("batch_a") == "in_progress"
        if how == "cancelled":
            cluster.cancel("batch_a")
            await cluster.ended("batch_a", most_s=3)
        else:
            await asyncio.sleep(WINDOW_S + 3 - cluster.loop.time())
        assert cluster.status("batch_a") == how
        (error,) = cluster.record("batch_a")["errors"]["data"]
        assert error["code"] == "insufficient_storage"
        monkeypatch.undo()

    monkeypatch.setattr(BatchStore, "put_results", refuse)
    monkeypatch.setattr(BatchStore, "write_results", refuse)
    backend = Backend()
    play(script, backend)


def test_an_answer_that_found_no_room_is_told_from_a_row_that_was_not_sent(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = BatchStore.put_results

    def refuse(self: Any, batch: str, results: Any) -> None:
        if not all(each.is_error for each in results):
            raise OSError(errno.ENOSPC, "files and results have all")
        put(self, batch, results)

    async def script(cluster: Cluster) -> None:
        cluster.add("batch_a", 100)
        await asyncio.sleep(20)
        assert len(backend.sent) == 64  # so many answers wait, and no more
        cluster.cancel("batch_a")
        await cluster.ended("batch_a", most_s=3)
        codes = Counter(each["error"]["code"] for each in cluster.lines("batch_a", "error"))
        assert codes == {"insufficient_storage": 64, "batch_cancelled": 36}

    monkeypatch.setattr(BatchStore, "put_results", refuse)
    backend = Backend()
    play(script, backend)


def test_answers_of_a_late_batch_wait_a_while_for_room(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is `expired` all the same, though all of its rows have a result since the first try."""

    def refuse(self: Any, *args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def script(cluster: Cluster) -> None:
        with monkeypatch.context() as disk:
            disk.setattr(BatchStore, "write_results", refuse)
            cluster.add("batch_a", 8)
            await asyncio.sleep(WINDOW_S + GRACE_S - 20)
            assert cluster.record("batch_a")["request_counts"]["failed"] == 4
        await cluster.ended("batch_a", most_s=15)
        counts = {"total": 8, "completed": 4, "failed": 4}
        assert (cluster.status("batch_a"), cluster.record("batch_a")["request_counts"]) == (
            "expired",
            counts,
        )

    play(script, Backend(seconds=lambda body: 1.0 if body["i"] < 4 else 1e6))


def test_large_rows_are_in_memory_by_their_bytes(play: Any) -> None:
    """25 rows of about what a line may have: of one tenant three at once, and small ones go on."""
    settings = ApiSettings(max_body_bytes=160_000)
    large = b"".join(line(i, filler="x" * 140_000) for i in range(25))

    async def script(cluster: Cluster) -> None:
        cluster.add("batch_large", large, "red")
        await asyncio.sleep(20)
        assert backend.most_running == 3
        cluster.add("batch_small", 200, "red")
        cluster.add("batch_blue", 200, "blue")
        assert await cluster.ended("batch_blue", tenant="blue") < 15
        assert await cluster.ended("batch_small", tenant="red") < 15
        await cluster.ended("batch_large", tenant="red", most_s=150)

    backend = Backend(10.0, lambda body: 10.0 if "filler" in body else 1.0)
    play(script, backend, tenants=RED_AND_BLUE, settings=settings)


@pytest.mark.slow
def test_rows_leave_places_to_chats_and_to_tenants_that_come_later(play: Any) -> None:
    """Rows have 20 of the 40 places of the API at most, and one tenant half of these."""
    red = tenant("red", share=TenantShare(max_concurrent=8))

    async def script(cluster: Cluster) -> None:
        cluster.window_s = 80_000
        cluster.add("batch_green", 100, "green")
        await asyncio.sleep(30)
        assert backend.num_running == 10
        cluster.add("batch_red", 100, "red")
        await asyncio.sleep(30)
        assert backend.num_running <= 17
        assert await cluster.ended(cluster.add("batch_blue", 1, "blue"), tenant="blue") < 702
        cluster.runner.windows._rooms["a"].live._shares.num_taken += 20  # chats
        num_sent = len(backend.sent)
        await asyncio.sleep(2000)
        assert len(backend.sent) == num_sent
        cluster.runner.windows._rooms["a"].live._shares.num_taken -= 20
        await asyncio.sleep(1500)
        running = Counter(each.tenant.name for each in backend.sent if each.at > 3000)
        assert 0 < running["red"] <= 16

    backend = Backend(700.0)
    tenants = {"red": red, "green": tenant("green"), "blue": tenant("blue")}
    play(script, backend, tenants=tenants, max_live=40)


def test_a_server_that_drains_gives_its_batches_back_and_names_are_by_claim(play: Any) -> None:
    async def script(cluster: Cluster) -> None:
        other = cluster.another()
        cluster.add("batch_a", 30)
        await cluster.until(lambda: backend.num_running >= 4)
        cluster.ctx.operations.draining = True
        await cluster.until(lambda: backend.num_running == 0, 3)
        cluster.ctx.operations.draining = False
        for runner in (other, cluster.runner):  # it claims it again
            first = {sent.name for sent in backend.sent}
            backend.sent.clear()
            await runner.tick()
            await cluster.until(lambda: len(backend.sent) >= 4, 5)
            assert not first & {sent.name for sent in backend.sent}
            await runner._give_back()
        await cluster.ended("batch_a")

    backend = Backend(10.0)
    play(script, backend)


def test_a_runner_closes_while_its_store_is_away(tmp_path: Path) -> None:
    async def main() -> None:
        cluster = Cluster(in_memory(tmp_path), Backend())
        cluster.runner.start()
        cluster.add("batch_a", 5)
        await asyncio.sleep(1)
        cluster.store.release = away
        await cluster.runner.close()

    def away(owner: str) -> None:
        raise StoreAway("Redis has not done it")

    run_in_virtual_time(main)


def test_marks_of_utf_8_are_skipped_and_half_a_surrogate_pair_is_named(play: Any) -> None:
    async def script(cluster: Cluster) -> None:
        cluster.add("batch_a", b"\xef\xbb\xbf" + line(0) + line(1))
        cluster.add("batch_b", line(0) + line(1, text="\\ud83d\ude00 \ud83d x"))
        await cluster.ended("batch_a", "batch_b", most_s=10)
        assert cluster.record("batch_a")["request_counts"]["completed"] == 2
        (error,) = cluster.record("batch_b")["errors"]["data"]
        assert error["line"] == 2
        assert "\\ud83d at byte" in error["message"]
        assert "half of a surrogate pair" in error["message"]

    play(script, Backend())
    assert read_row(line(0, text="\U0001f600 \\ud83d"))


def test_a_window_follows_what_is_answered_and_refused() -> None:
    async def main() -> None:
        window = Window("", 6, Room(ConcurrencyLimiter(100), 0))
        assert window.size == 4.0
        for _ in range(9):
            window.answered()
        assert window.size == 6.0
        for _ in range(9):
            window.refused()
        assert window.size == 1.0
        window.limited(1.0)
        assert window.size == 1.0

    asyncio.run(main())


def test_a_batch_is_due_by_the_rows_and_the_rate_of_this_process(play: Any) -> None:
    """One row a second: 400 of them take as many, and twice that is kept."""

    async def script(cluster: Cluster) -> None:
        cluster.window_s = 1000
        cluster.add("batch_a", 400)
        await cluster.until(lambda: len(backend.sent) >= 50)
        (run, _) = cluster.runner._runs["batch_a"]
        assert not run.is_due
        window = run.windows[0]
        assert 300 < window.needed_s < 400
        window.num_left += 200
        await asyncio.sleep(2)
        assert run.is_due
        window.num_left -= 200
        cluster.cancel("batch_a")
        await cluster.ended("batch_a")

    backend = Backend()
    play(script, backend, settings=ApiSettings(max_batch_rows_at_once=1))
