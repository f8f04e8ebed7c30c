"""More comes than can be served: who is refused, when, with which time to come back, and whether
that time is right."""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random
from typing import Any

import pytest

from kvrelay.engine.request import Refusal
from kvrelay.router.admission.admission import IncomingCall
from kvrelay.router.messages import TenantShare
from tests.router.admission.overload import Client, Overload


def waits(clients: list[Client]) -> list[float]:
    """From the last time each was sent to its first token."""
    return [c.first_at - c.sent_at[-1] for c in clients if c.first_at is not None]


def returns(s: Overload) -> tuple[int, int]:
    """Counts those who came back exactly when they should: how many were admitted, and how many
    there were."""
    came = sum(len(client.sent_at) - 1 for client in s.clients)
    again = sum(max(0, len(client.refused) - 1) for client in s.clients)
    return came - again, came


def test_what_would_wait_too_long_is_refused_in_the_message_that_brings_it() -> None:
    s = Overload(max_queue_wait_s=5.0)
    s.offer(10.0, 0.0, 40.0)
    s.run(40.0)
    late = [c for c in s.clients if c.sent_at[0] > 5.0]
    refused = [c.refused[0] for c in late if c.refused]
    assert {failed.reason for failed in refused} == {Refusal.OVERLOADED}
    assert "5 s is the limit" in refused[-1].detail
    assert s.router.status(s.now).num_queued <= 2 * 5.0 * 1.5
    assert max(waits(late)) <= 5.0 * 1.3
    assert s.served() >= 0.97 * 2 * 39  # and no capacity is lost by refusing
    s.drain()


@pytest.mark.slow
def test_by_default_a_burst_waits_and_only_a_full_queue_refuses() -> None:
    """As long as the clients' own timeouts allow: 600 s here."""
    s = Overload(slots=8, max_queue=700)
    s.offer(40.0, 0.0, 20.0)  # five times what can be served
    s.run(20.0)
    assert not any(client.refused for client in s.clients)
    s.offer(40.0, 20.0, 25.0)
    s.run(25.0)
    refused = [client.refused[0] for client in s.clients if client.refused]
    assert {failed.reason for failed in refused} == {Refusal.QUEUE_FULL}
    s.drain()
    assert s.served() == len(s.clients) - len(refused)
    assert max(waits(s.clients)) > 80.0


def test_with_a_limit_waits_are_short_and_in_bursts_who_comes_back_is_served() -> None:
    s = Overload(slots=8, max_queue_wait_s=10.0)
    s.returns = lambda client: len(client.refused) <= 2  # as OpenAI's clients do
    for from_s in (0.0, 40.0, 80.0):
        s.offer(40.0, from_s, from_s + 6.0)  # five times what can be served
    s.run(130.0)
    assert s.served() == len(s.clients) == 3 * 240
    assert 200 < sum(bool(client.refused) for client in s.clients) < 600
    assert max(waits(s.clients)) <= 10.0 * 1.3
    s.drain()


def test_what_is_admitted_meets_its_deadline() -> None:
    s = Overload(max_queue_wait_s=30.0)
    s.offer(10.0, 0.0, 40.0, timeout_s=4.0)
    s.run(40.0)
    s.drain()
    late = [c for c in s.clients if c.sent_at[0] > 5.0]
    served = [c for c in late if c.ended_at is not None]
    reasons = {c.refused[0].reason for c in late if c.refused}
    assert reasons == {Refusal.OVERLOADED}  # nobody was served in vain until the deadline
    at_once = [c for c in late if c.refused and c.refused[0].detail.startswith("it would wait")]
    assert len(served) + len(at_once) >= 0.99 * len(late)
    assert len(served) >= 0.95 * 2 * 33


def test_workers_get_no_more_than_they_can_end_in_time() -> None:
    """They would take a hundred at once, and then none would end before its deadline."""
    s = Overload(slots=100, tokens_per_s=20.0, max_queue_wait_s=30.0)
    s.offer(10.0, 0.0, 60.0, timeout_s=6.0)
    s.run(60.0)
    s.drain()
    late = [c for c in s.clients if c.sent_at[0] > 20.0]
    served = sum(c.ended_at is not None for c in late)
    assert served >= 0.85 * 2 * 40
    in_vain = [c for c in late if c.refused and c.refused[0].reason is Refusal.DEADLINE]
    assert len(in_vain) <= 0.1 * served


def test_what_cannot_meet_its_deadline_any_more_is_refused_while_it_waits() -> None:
    s = Overload(slots=1)
    for _ in range(3):
        s.submit()
    s.run(10.0)  # how long a request takes is known now, but not how fast a queue drains
    for _ in range(2):
        s.submit(timeout_s=1.5)
    s.run(11.4)
    late = s.clients[-1]
    assert late.refused[0].reason is Refusal.OVERLOADED
    assert "serving it takes at least 0.9 s" in late.refused[0].detail
    assert s.clients[-2].ended_at is not None
    s.drain()


def test_who_came_before_the_workers_grew_slow_is_told_soon() -> None:
    s = Overload(slots=4, max_queue_wait_s=8.0)
    s.offer(6.8, 0.0, 10.0)
    s.run(10.0)
    assert not any(c.refused for c in s.clients)
    s.slow_down(10.0)
    s.run(30.0)
    shed = [c for c in s.clients if c.refused and c.refused[0].detail.startswith("queued for")]
    assert len(shed) > 5
    assert {c.refused[0].reason for c in shed} == {Refusal.OVERLOADED}
    waiting = [c for c in s.clients if c.first_at is None and not c.refused]
    assert waiting
    assert max(c.sent_at[0] for c in waiting) < min(c.sent_at[0] for c in shed)  # newest first
    s.drain()


def test_while_nothing_is_known_everything_up_to_the_bound_is_admitted() -> None:
    s = Overload(slots=1, max_queue=50, max_queue_wait_s=1.0)
    for _ in range(60):
        s.submit()
    reasons = [c.refused[0].reason for c in s.clients if c.refused]
    assert reasons == [Refusal.QUEUE_FULL] * 9
    after = [c.refused[0].retry_after_s for c in s.clients if c.refused]
    assert len(set(after)) == 9  # not all at once


def test_who_comes_back_when_told_is_admitted_though_others_keep_coming() -> None:
    s = Overload(max_queue_wait_s=5.0)
    s.returns = lambda client: True
    s.offer(10.0, 0.0, 20.0)
    s.run(150.0)
    kept, came = returns(s)
    assert kept >= 0.9 * came > 100
    s.drain()
    assert s.served() == len(s.clients)  # one after the other, all of them


@pytest.mark.slow
def test_promises_are_kept_and_capacity_too_when_only_few_come_back() -> None:
    s = Overload(max_queue_wait_s=5.0)
    s.returns = lambda client: len(s.clients) % 10 == 0
    s.offer(20.0, 0.0, 90.0)
    s.run(90.0)
    kept, came = returns(s)
    assert kept >= 0.9 * came > 25
    assert s.served() >= 0.97 * 2 * 89
    s.drain()


def overload_of_three_tenants(seed: int, slowest: float) -> Overload:
    """Ten times what can be served, for a minute, at workers whose speed jumps every 4 to 20 s: to
    anything from `slowest` to 1 of what it was. One client in five comes back."""
    rng, seconds, rate = Random(seed), 60.0, 40.0
    s = Overload(slots=64, tokens_per_s=rate, max_queue_wait_s=8.0, low_priority_share=0.05)
    s.returns = lambda client: client.submit.tokens[0] % 5 == 0 and s.now < seconds

    def jump() -> None:
        s.tokens_per_s = rate * rng.uniform(slowest, 1.0)
        s.at(s.now + rng.uniform(4.0, 20.0), jump)

    s.at(rng.uniform(4.0, 20.0), jump)
    for tenant, weight, priority in (("gold", 3.0, 0), ("silver", 1.0, 0), ("batch", 1.0, 10)):
        share = TenantShare(weight=weight)
        at = rng.expovariate(rate / 3)
        while at < seconds:
            send = partial(s.submit, tenant, share, timeout_s=20.0, priority=priority)
            s.at(at, send)
            at += rng.expovariate(rate / 3)
    s.run(seconds)
    s.drain()
    return s


@pytest.mark.long
def test_promises_are_kept_though_workers_become_slower_and_faster() -> None:
    kept = came = refused = after_all = 0
    for seed in range(4):
        s = overload_of_three_tenants(seed, slowest=0.55)
        kept, came = (a + b for a, b in zip((kept, came), returns(s), strict=True))
        details = [failed.detail for client in s.clients for failed in client.refused]
        refused += len(details)
        after_all += sum(detail.startswith("queued for") for detail in details)
        reasons = {
            failed.reason
            for client in s.clients
            for failed in client.refused
            if not client.submit.is_low  # others that come later go before those
        }
        assert Refusal.DEADLINE not in reasons  # what was admitted meets it
    assert kept >= 0.9 * came > 500
    assert after_all <= 0.02 * refused


@pytest.mark.slow
def test_what_began_together_does_not_end_together() -> None:
    s = Overload(slots=64, tokens_per_s=40.0, max_queue_wait_s=8.0)
    s.offer(20.0, 0.0, 90.0, timeout_s=20.0)
    s.run(90.0)
    ended = Counter(int(c.ended_at) for c in s.clients if c.ended_at is not None)
    per_second = [ended[second] for second in range(40, 90)]
    assert min(per_second) >= 2
    assert max(per_second) <= 6  # 4 in the mean
    s.drain()


def test_a_full_queue_promises_places_that_are_there() -> None:
    s = Overload(max_queue=8, max_queue_wait_s=60.0)
    s.returns = lambda client: True
    s.offer(6.0, 0.0, 20.0)
    s.run(100.0)
    assert {f.reason for c in s.clients for f in c.refused} == {Refusal.QUEUE_FULL}
    kept, came = returns(s)
    assert kept >= 0.9 * came > 50
    s.drain()


def test_tenants_get_their_shares_under_overload() -> None:
    s = Overload(max_queue_wait_s=5.0)
    s.offer(8.0, 0.0, 60.0, "red", TenantShare(weight=3.0))
    s.offer(8.0, 0.01, 60.0, "blue")
    s.run(60.0)
    red, blue = s.served(tenant="red"), s.served(tenant="blue")
    assert 2.6 <= red / blue <= 3.4
    assert max(waits([c for c in s.clients if c.sent_at[0] > 5.0])) <= 5.0 * 1.5
    totals = s.router.status(s.now).totals
    assert totals.refused_by_tenant["blue"] > totals.refused_by_tenant["red"] > 0
    assert totals.sent_by_tenant["red"] >= red
    assert totals.queue_seconds_by_tenant["red"] > 0
    assert totals.work_by_tenant["red"] > 2.6 * totals.work_by_tenant["blue"]
    s.drain()


@pytest.mark.parametrize("by", ["tenant", "caller"])
def test_a_flood_leaves_who_is_modest_alone(by: str) -> None:
    s = Overload(max_queue=20, max_queue_wait_s=60.0)
    s.offer(20.0, 0.0, 30.0, **{by: "flood"})  # type: ignore[arg-type]
    s.offer(0.5, 5.0, 30.0, **{by: "modest"})  # type: ignore[arg-type]
    s.run(30.0)
    modest = [c for c in s.clients if getattr(c.submit, by) == "modest"]
    assert not any(c.refused for c in modest)
    assert max(waits(modest)) <= 1.7
    s.drain()


def test_a_tenants_own_bound_is_told_by_name() -> None:
    s = Overload(slots=1)
    for caller in ("one", "one", "other", "third"):
        s.submit("red", TenantShare(max_queued=2), caller=caller)
    failed = s.clients[-1].refused[0]
    assert failed.reason is Refusal.QUEUE_FULL
    assert failed.detail == "2 requests of 'red' are waiting, which is its limit"
    s.submit("blue")
    assert not s.clients[-1].refused
    s.drain()


def test_no_caller_has_all_places_of_its_tenant() -> None:
    s = Overload(slots=1)
    share = TenantShare(max_queued=16)
    for _ in range(20):
        s.submit("red", share, caller="flood")
    refused = [client.refused[0] for client in s.clients if client.refused]
    assert len(refused) == 20 - 1 - 14  # one runs, and an eighth of the places is left
    assert refused[0].reason is Refusal.QUEUE_FULL
    expected = "14 requests of this caller are waiting, its share of the 16 that 'red' may have"
    assert refused[0].detail == expected
    low = s.submit("red", share, caller="flood", priority=50)
    assert low.refused, "those of the classes above count for it too"
    for caller in ("one", "other"):
        assert not s.submit("red", share, caller=caller).refused
    s.drain()


def test_who_would_be_served_soon_is_not_refused_for_what_waits_of_others() -> None:
    s = Overload(max_queue_wait_s=5.0)
    s.offer(20.0, 0.0, 30.0, caller="flood")
    s.run(30.0)
    assert s.router.refuse(s.now, call(caller="flood")) is not None
    assert s.router.refuse(s.now, call(caller="modest")) is None
    s.drain()


def test_where_each_caller_asks_once_they_wait_for_each_other() -> None:
    s = Overload(max_queue_wait_s=5.0)
    for number in range(600):
        s.at(number / 20.0, lambda number=number: s.submit(caller=f"caller-{number}"))
    s.run(30.0)
    assert any(client.refused for client in s.clients)
    served = [client for client in s.clients if client.first_at is not None]
    assert max(waits(served)) <= 5.0 * 1.5
    s.drain()


def test_a_limit_on_what_runs_at_once_is_reckoned_with() -> None:
    s = Overload(slots=4, max_queue_wait_s=5.0)
    s.offer(4.0, 0.0, 30.0, "red", TenantShare(max_concurrent=1))
    s.offer(3.0, 0.0, 30.0, "blue")
    s.run(30.0)
    red = [c for c in s.clients if c.submit.tenant == "red" and c.sent_at[0] > 5.0]
    assert max(waits(red)) <= 5.0 * 1.5
    assert 0.9 * 30 <= s.served(tenant="red") <= 31
    assert s.served(tenant="blue") >= 0.8 * 3 * 30
    s.drain()


def test_higher_priorities_go_first_and_lower_ones_keep_a_small_share() -> None:
    s = Overload(max_queue_wait_s=5.0, low_priority_share=0.1)
    s.offer(8.0, 0.0, 100.0, priority=0)
    s.offer(4.0, 0.01, 100.0, priority=10)
    s.run(100.0)
    assert 0.05 <= s.served(priority=10) / s.served() <= 0.15
    s.drain()


def test_a_high_priority_below_capacity_is_never_refused() -> None:
    s = Overload(max_queue=30, max_queue_wait_s=5.0)
    s.offer(16.0, 0.0, 30.0, priority=5)
    s.offer(1.0, 2.0, 30.0, priority=0)
    s.run(30.0)
    high = [c for c in s.clients if c.submit.priority == 0]
    assert not any(c.refused for c in high)
    assert max(waits(high)) <= 1.7
    s.drain()


@pytest.mark.parametrize("began_s", [0.0, 60.0])
def test_a_burst_of_a_high_priority_is_no_reason_to_refuse_others(began_s: float) -> None:
    """All is served within 60 s of the 600 that each has."""
    s = Overload()
    s.run(began_s)
    for _ in range(8):
        s.submit(priority=-10)
    for _ in range(100):
        s.submit()
    s.submit(priority=50)
    s.drain()
    assert [each for client in s.clients for each in client.refused] == []


def call(**changes: Any) -> IncomingCall:
    values = {
        "name": b"call",
        "tenant": "",
        "priority": 0,
        "num_prompt_tokens": 5,
        "max_tokens": 10,
        "timeout_s": 600.0,
    }
    return IncomingCall(**{**values, **changes})


def test_a_call_is_refused_before_it_is_submitted_only_where_it_would_be_anyway() -> None:
    s = Overload(max_queue_wait_s=5.0)
    assert s.router.refuse(0.0, call()) is None
    s.offer(10.0, 0.0, 20.0)
    s.run(20.0)
    num_refused = s.router.status(s.now).totals.refused_by_tenant[""]
    failed = s.router.refuse(s.now, call())
    assert failed is not None
    assert failed.reason is Refusal.OVERLOADED
    assert s.router.status(s.now).totals.refused_by_tenant[""] == num_refused + 1
    assert s.router.refuse(s.now, call(tenant="new")) is None  # nothing of it waits
    assert s.router.refuse(s.now, call(priority=-1)) is None
    s.drain()
    assert s.router.refuse(s.now, call()) is None


@pytest.mark.parametrize("num_choices", [1, 3])
def test_who_was_refused_early_is_expected_back_with_all_choices_of_its_call(
    num_choices: int,
) -> None:
    s = Overload(max_queue_wait_s=5.0)
    s.offer(10.0, 0.0, 60.0)
    s.run(20.0)
    failed = s.router.refuse(s.now, call(name=b"mine"))
    assert failed is not None
    assert failed.retry_after_s is not None
    s.run(s.now + failed.retry_after_s)
    assert s.router.refuse(s.now, call(name=b"other")) is not None
    assert s.router.refuse(s.now, call(name=b"mine")) is None
    mine = [s.submit(call=b"mine") for _ in range(num_choices)]
    assert not any(client.refused for client in mine)
    s.drain()
