"""Who is sent to which KV: workers that load their own, and workers that fetch a peer's."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.kv.tier import Retention
from kvrelay.engine.messages import Preempted
from kvrelay.engine.request import FinishReason, Refusal, SamplingParams
from kvrelay.engine.stats import Role
from kvrelay.prefill_worker.messages import Prefill
from kvrelay.router.config import POLICIES
from kvrelay.router.index.prefix_index import Held
from kvrelay.router.messages import Cancel, RoleChanged, Submit, WorkerDraining
from tests.router.fleet import pending_tokens
from tests.router.script import CLIENT, Script, worker_stats

PREFIX = tuple(range(200))
BASELINES = [policy for policy in POLICIES if policy != "prefix"]
BUSY = {"pending_prefill_tokens": 5000, "num_waiting": 5}


def placed(s: Script, request_id: str = "r") -> tuple[str, str | None, str | None]:
    """Decode worker, prefill worker and source of the attempt that was just sent."""
    prefills = [m for _, m in s.sent if isinstance(m, Prefill)]
    decode, prefill, order = s.dispatched()
    assert order.request_id == request_id
    if prefills:
        assert order.fetch_from is None, "it reads from the prefill worker"
        return decode, prefill, prefills[0].fetch_from
    return decode, prefill, order.fetch_from


def tell_all(s: Script, *workers: str, **busy: dict[str, Any]) -> None:
    """Statistics of `workers`; `busy` ones by name, with what is different of them."""
    for worker in workers:
        s.tell(worker_stats(worker, **busy.get(worker.replace("-", "_"), {})))


# -- a worker's own tiers ---------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_request_goes_to_the_worker_that_has_its_prefix_in_whatever_tier(tier: str) -> None:
    s = Script("decode-0", "decode-1", "decode-2")
    s.holds("decode-1", **{tier: PREFIX})
    s.submit(tokens=(*PREFIX, 1, 2))
    assert placed(s) == ("decode-1", None, None)
    (decision,) = s.router.explain("r")
    best = decision.options.decodes[0]
    assert best.held == Held(**{tier: 200}, said=200)
    assert (best.seconds.load > 0) == (tier != "device")


def test_the_worker_with_the_prefix_on_its_host_is_worth_some_queue_there() -> None:
    names = ("decode-0", "decode-1")
    for pending, expected in ((100, "decode-1"), (1000, "decode-0")):
        s = Script(*names)
        tell_all(s, *names, decode_1={"pending_prefill_tokens": pending, "num_waiting": 1})
        s.holds("decode-1", host=PREFIX)
        s.tell(worker_stats("decode-0", read_bytes_per_s=1e5))  # too slow to fetch it
        s.submit(tokens=(*PREFIX, 1, 2))
        assert placed(s) == (expected, None, None)


def test_of_idle_workers_that_could_fetch_it_the_one_that_has_it_is_chosen() -> None:
    s = Script("decode-0", "decode-1", "decode-2")
    tell_all(s, "decode-0", "decode-1", "decode-2")
    s.holds("decode-2", disk=PREFIX)
    for turn in range(3):
        s.submit(f"turn {turn}", tokens=(*PREFIX, turn))
        assert placed(s, f"turn {turn}") == ("decode-2", None, None)
        s.tell(Cancel(f"turn {turn}"))
        s.sent.clear()


# -- fetching from a peer ---------------------------------------------------------------------


def test_a_hot_prefix_spreads_from_its_overloaded_holder() -> None:
    names = ("decode-0", "decode-1", "decode-2")
    s = Script(*names)
    tell_all(s, *names, decode_0=BUSY)
    s.holds("decode-0", PREFIX)
    s.submit("a", tokens=(*PREFIX, 1))
    second, prefill, source = placed(s, "a")
    assert (prefill, source) == (None, "decode-0")
    (third,) = {"decode-1", "decode-2"} - {second}
    (decision,) = s.router.explain("a")
    assert decision.options.best.fetch_from == decision.options.decodes[0].fetch_from == "decode-0"
    # 200 tokens of 1 KB, at 1 GB/s.
    assert decision.options.best.seconds.fetch == pytest.approx(0.01 + 200 * 1024 / 1e9)
    assert decision.options.best.seconds.prefill == pytest.approx(0.001)
    assert s.router.status(s.now).totals.fetches == 1
    # The copy counts at once; when it is overloaded too, the next worker fetches.
    s.submit("b", tokens=(*PREFIX, 2))
    assert placed(s, "b") == (second, None, None)
    s.now += 1.0
    tell_all(s, *names, **{"decode_0": BUSY, second.replace("-", "_"): BUSY})
    s.holds(second, PREFIX)
    s.submit("c", tokens=(*PREFIX, 3))
    decode, prefill, source = placed(s, "c")
    assert (decode, prefill) == (third, None)
    assert source in ("decode-0", second), "both have it, and are as busy"


def test_of_equal_holders_the_least_busy_is_fetched_from() -> None:
    names = ("decode-0", "decode-1", "decode-2")
    s = Script(*names)
    more = {"pending_prefill_tokens": 9000, "num_waiting": 9}
    tell_all(s, *names, decode_0=more, decode_1=BUSY)
    s.holds("decode-0", PREFIX)
    s.holds("decode-1", host=PREFIX)
    s.submit(tokens=(*PREFIX, 1))
    assert placed(s) == ("decode-2", None, "decode-1")


def test_longer_copies_on_slow_disks_do_not_hide_the_one_in_memory() -> None:
    on_disk = [f"decode-{n}" for n in range(3)]
    s = Script(*on_disk, "decode-6", "decode-7")
    for worker in on_disk:
        s.tell(worker_stats(worker, disk_read_bytes_per_s=5e5, **BUSY))
        s.holds(worker, disk=PREFIX)
    s.tell(worker_stats("decode-6", **BUSY))
    s.holds("decode-6", PREFIX[:180])
    s.submit(tokens=(*PREFIX, 1))
    assert placed(s) == ("decode-7", None, "decode-6")


def test_a_worker_with_no_room_for_the_request_is_still_fetched_from() -> None:
    s = Script("decode-0", "decode-1", max_inflight_per_worker=1)
    s.holds("decode-0", PREFIX)
    s.submit("first", tokens=(*PREFIX, 1))
    assert placed(s, "first")[0] == "decode-0"
    s.submit("second", tokens=(*PREFIX, 2))
    assert placed(s, "second") == ("decode-1", None, "decode-0")


def test_what_was_routed_to_a_worker_but_is_not_there_yet_is_not_fetched() -> None:
    s = Script("decode-0", "decode-1", max_inflight_per_worker=1)
    s.submit("first", tokens=(*PREFIX, 1))
    assert placed(s, "first")[0] == "decode-0"
    s.submit("second", tokens=(*PREFIX, 2))
    assert placed(s, "second") == ("decode-1", None, None)


def test_a_worker_that_backs_off_is_not_fetched_from() -> None:
    s = Script("decode-0", backoff_s=5.0)
    s.holds("decode-0", PREFIX)
    s.submit("other")
    s.refuse("decode-0", Refusal.QUEUE_FULL, request_id="other")
    s.tell(Cancel("other"))
    s.up("decode-1")
    s.sent.clear()
    s.submit(tokens=(*PREFIX, 1))
    assert placed(s) == ("decode-1", None, None)


def overloaded_holder(**config: float) -> Script:
    s = Script("decode-0", "decode-1", **config)
    tell_all(s, "decode-0", "decode-1", decode_0=BUSY)
    s.holds("decode-0", PREFIX)
    return s


def test_a_silent_worker_is_not_fetched_from() -> None:
    s = overloaded_holder(probe_after_s=5.0)
    s.now += 6.0
    s.tell(worker_stats("decode-1"))
    s.submit(tokens=(*PREFIX, 1))
    assert placed(s) == ("decode-1", None, None)


def test_a_dead_worker_is_not_fetched_from() -> None:
    s = overloaded_holder()
    s.down("decode-0")
    s.submit(tokens=(*PREFIX, 1))
    assert placed(s) == ("decode-1", None, None)


def test_the_death_of_the_source_ends_no_attempt() -> None:
    s = overloaded_holder()
    s.submit(tokens=(*PREFIX, 1))
    assert placed(s) == ("decode-1", None, "decode-0")
    s.down("decode-0")
    assert s.take(Decode) == []
    s.delta("decode-1", 201, 999, finish=FinishReason.STOP)
    s.assert_idle()


# -- prefill workers --------------------------------------------------------------------------


def test_a_prefill_worker_fetches_from_the_decode_worker_that_goes_on() -> None:
    """The last turn's answer was decoded on D; P computes the next turn's long prompt."""
    s = Script("prefill-0", "decode-0")
    tell_all(s, "prefill-0", "decode-0", decode_0={"num_running": 20})
    s.holds("decode-0", PREFIX)
    s.submit(tokens=(*PREFIX, *range(500, 540)))
    assert placed(s) == ("decode-0", "prefill-0", "decode-0")
    (decision,) = s.router.explain("r")
    assert (decision.options.best.prefill_from, decision.options.best.fetch_from) == (
        "prefill-0",
        "decode-0",
    )
    assert decision.options.prefills[0].fetch_from == "decode-0"


def test_a_decode_worker_fetches_from_a_prefill_worker() -> None:
    s = Script("prefill-0", "decode-0")
    tell_all(s, "prefill-0", "decode-0", prefill_0=BUSY)
    s.holds("prefill-0", PREFIX)
    s.submit(tokens=(*PREFIX, 1))
    assert placed(s) == ("decode-0", None, "prefill-0")


def test_only_what_is_computed_is_booked_as_prompt() -> None:
    s = overloaded_holder()
    s.submit(tokens=(*PREFIX, 1))
    s.holds("decode-1", host=range(900, 1000))
    s.submit("own", tokens=range(900, 1003))
    pending = {e.worker: pending_tokens(e) for e in s.router._dispatcher.endpoints}
    assert pending["decode-1"] == 1 + 3
    assert s.take(Decode, "decode-1")[0].fetch_from == "decode-0"


def test_another_model_is_not_fetched_from() -> None:
    s = Script("decode-0")
    s.up("decode-1", fingerprint=b"another")
    s.sent.clear()
    s.tell(worker_stats("decode-0", **BUSY))
    s.holds("decode-0", PREFIX)
    s.submit(tokens=(*PREFIX, 1))
    assert placed(s) == ("decode-1", None, None)


# -- baselines --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", BASELINES)
def test_baselines_never_fetch(policy: str) -> None:
    s = Script("prefill-0", "prefill-1", "decode-0", "decode-1", policy=policy)
    for worker in ("prefill-0", "decode-0"):
        s.holds(worker, PREFIX)
    for n in range(4):
        s.submit(f"r{n}", tokens=(*PREFIX, n))
        assert placed(s, f"r{n}")[2] is None


@pytest.mark.parametrize("policy", BASELINES)
def test_baselines_keep_the_kv_wherever_it_is(policy: str) -> None:
    """They know nothing of what is where, so no copy is spare."""
    s = Script("prefill-0", "decode-0", policy=policy)
    kept = Retention(60.0)
    params = SamplingParams(max_tokens=8)
    s.tell(Submit("r", params, CLIENT, PREFIX, 60.0, retention=kept))
    assert [m.retention for _, m in s.sent if isinstance(m, Prefill | Decode)] == [kept, kept]


# -- a request that moves ---------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["role", "drain", "memory"])
def test_a_request_that_moves_takes_its_kv_along(reason: str) -> None:
    """The worker that it leaves gets nothing new, and is who holds its blocks."""
    s = Script("decode-0", "decode-1")
    s.submit(tokens=(*PREFIX, 1, 2))
    old, _, _ = placed(s)
    s.delta(old, 202, 7)
    s.holds(old, device=PREFIX)
    match reason:
        case "role":
            s.tell(RoleChanged(old, 1, Role.PREFILL))
        case "drain":
            s.tell(WorkerDraining(old, 1))
        case "memory":
            s.tell(Preempted(old, 1, "r", 1, awaits_prefill=False))
    (new,) = {"decode-0", "decode-1"} - {old}
    assert placed(s) == (new, None, old)


def test_a_worker_that_failed_it_is_not_asked_for_its_kv() -> None:
    s = Script("decode-0", "decode-1")
    s.submit(tokens=(*PREFIX, 1, 2))
    old, _, _ = placed(s)
    s.delta(old, 202, 7)
    s.holds(old, device=PREFIX)
    s.refuse(old, Refusal.WORKER_FAILED)
    (new,) = {"decode-0", "decode-1"} - {old}
    assert placed(s) == (new, None, None)
