"""What a router can say of a request that has ended: phases that add up, attempts, predictions."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.engine.request import FinishReason, Refusal
from kvrelay.router.explain import Explanation, Prediction, reason, seconds_text
from kvrelay.router.messages import Cancel
from tests.router.script import Script

STOP = FinishReason.STOP


def explained(s: Script, request_id: str = "r") -> Explanation:
    """Its explanation, which adds up."""
    found = s.router.explanations.get(request_id)
    assert found is not None
    assert sum(p.seconds for p in found.phases) == pytest.approx(found.e2e_s)
    before = [p for p in found.phases if p.to_first]
    assert before == list(found.phases[: len(before)]), "the first token comes once"
    if found.ttft_s is not None:
        assert sum(p.seconds for p in before) == pytest.approx(found.ttft_s)
    return found


def shown(found: Explanation) -> list[tuple[Any, ...]]:
    return [(p.name, round(p.seconds, 6), p.worker, p.to_first) for p in found.phases]


def after(s: Script, seconds: float, worker: str, position: int, *tokens: int, **more: Any) -> None:
    s.now += seconds
    s.delta(worker, position, *tokens, **more)


def test_a_handoff_is_explained_by_both_workers_and_messages_are_what_is_left() -> None:
    s = Script("prefill-0", "decode-0")
    s.submit(tokens=range(40))
    told = {"worker_queue": 0.1, "prefill": 0.35}
    after(s, 0.5, "prefill-0", 40, 7, phases=told)
    told = {"worker_queue": 0.0, "prefill_wait": 0.44, "transfer": 0.02, "first_decode": 0.03}
    after(s, 0.06, "decode-0", 40, 7, 8, phases=told)
    after(s, 0.44, "decode-0", 42, 999, finish=STOP, phases=told)
    assert shown(explained(s)) == [
        ("queue", 0.0, "", True),
        ("messages", 0.05, "", True),
        ("worker_queue", 0.1, "prefill-0", True),
        ("prefill", 0.35, "prefill-0", True),
        ("messages", 0.01, "", False),
        ("transfer", 0.02, "decode-0", False),
        ("first_decode", 0.03, "decode-0", False),
        ("decode", 0.44, "decode-0", False),
    ]


def test_a_decode_worker_that_found_room_late_shows_it_after_the_first_token() -> None:
    s = Script("prefill-0", "decode-0")
    s.submit(tokens=range(40))
    after(s, 0.5, "prefill-0", 40, 7, phases={"worker_queue": 0.0, "prefill": 0.5})
    told = {"worker_queue": 0.7, "prefill_wait": 0.0, "transfer": 0.1, "first_decode": 0.1}
    after(s, 0.4, "decode-0", 41, 999, finish=STOP, phases=told)
    names = [(p.name, round(p.seconds, 6)) for p in explained(s).phases if not p.to_first]
    assert names == [
        ("worker_queue", 0.2),
        ("transfer", 0.1),
        ("first_decode", 0.1),
        ("decode", 0.0),
    ]


def test_the_decode_worker_may_be_first_to_bring_the_first_token() -> None:
    s = Script("prefill-0", "decode-0")
    s.submit(tokens=range(40))
    told = {"worker_queue": 0.1, "prefill_wait": 0.4, "transfer": 0.1, "first_decode": 0.2}
    after(s, 0.9, "decode-0", 40, 7, 999, finish=STOP, phases=told)
    before = [(p.name, p.worker) for p in explained(s).phases if p.to_first]
    assert before == [
        ("queue", ""),
        ("messages", ""),
        *((name, "decode-0") for name in told),
    ]


def test_the_decision_counts_by_the_clock_that_the_host_gives() -> None:
    s = Script("decode-0")
    times = iter(range(100))
    s.router._requests._clock = lambda: next(times) / 1000
    s.submit()
    told = {"worker_queue": 0.0, "load": 0.3, "prefill": 0.1}
    after(s, 0.5, "decode-0", 10, 999, finish=STOP, phases=told)
    found = explained(s)
    assert [p.name for p in found.phases] == [
        "queue",
        "route",
        "messages",
        "load",
        "prefill",
        "decode",
    ]
    assert found.phases[1].seconds == pytest.approx(0.001)


def test_a_worker_that_claims_more_than_was_measured_is_cut_to_it() -> None:
    s = Script("decode-0")
    s.submit()
    after(s, 0.5, "decode-0", 10, 999, finish=STOP, phases={"worker_queue": 9.0, "prefill": 0.4})
    assert [(p.name, round(p.seconds, 6)) for p in explained(s).phases] == [
        ("queue", 0.0),
        ("worker_queue", 0.1),
        ("prefill", 0.4),
        ("decode", 0.0),
    ]


def test_every_attempt_shows_with_what_was_lost_in_it() -> None:
    s = Script("decode-0", "decode-1")
    s.submit()
    first, _, _ = s.dispatched()
    s.now += 2.0
    s.down(first)
    second, _, _ = s.dispatched()
    after(s, 0.5, second, 10, 5, attempt=2, phases={"worker_queue": 0.1, "prefill": 0.4})
    after(s, 0.3, second, 11, 6, attempt=2)
    s.up("decode-2")
    s.now += 4.0
    s.down(second)
    third, _, _ = s.dispatched()
    assert third == "decode-2"
    after(s, 0.2, third, 12, 999, attempt=3, finish=STOP, phases={"prefill": 0.2})
    found = explained(s)
    assert [(p.name, round(p.seconds, 6), p.attempt, p.to_first) for p in found.phases] == [
        ("queue", 0.0, 0, True),
        ("lost", 2.0, 1, True),
        ("queue", 0.0, 0, True),
        ("worker_queue", 0.1, 2, True),
        ("prefill", 0.4, 2, True),
        ("decode", 0.3, 2, False),
        ("lost", 4.0, 2, False),
        ("queue", 0.0, 0, False),
        ("prefill", 0.2, 3, False),
        ("decode", 0.0, 3, False),
    ]
    assert [(a.number, a.decode.worker, a.cause) for a in found.attempts] == [
        (1, first, "worker_down"),
        (2, second, "worker_down"),
        (3, third, ""),
    ]
    assert all(
        a.decision is not None and a.decision.options.best.worker == a.decode.worker
        for a in found.attempts
    )


def test_the_queue_is_counted_until_a_worker_is_there_or_time_is_over() -> None:
    s = Script()
    s.submit("served")
    s.submit("late", timeout_s=5.0)
    s.submit("left")
    s.pass_time(5.25)
    s.tell(Cancel("left"))
    s.up("decode-0")
    told = {"worker_queue": 0.0, "prefill": 1.0}
    after(s, 1.0, "decode-0", 10, 999, request_id="served", finish=STOP, phases=told)
    assert shown(explained(s, "served"))[0] == ("queue", 5.25, "", True)
    late = explained(s, "late")
    assert (late.outcome, late.ttft_s, late.attempts) == (Refusal.NO_WORKERS, None, [])
    assert [p.name for p in late.phases] == ["queue"]
    assert explained(s, "left").outcome is Refusal.CANCELLED


def test_a_cancelled_request_shows_how_far_it_came() -> None:
    s = Script("decode-0")
    s.submit()
    after(s, 0.5, "decode-0", 10, 5, phases={"worker_queue": 0.1, "prefill": 0.4})
    s.now += 0.7
    s.tell(Cancel("r"))
    assert shown(explained(s))[-1] == ("decode", 0.7, "decode-0", False)


def test_what_was_predicted_stands_beside_what_came() -> None:
    s = Script("decode-0")
    assert s.router.status(s.now).prediction_error is None
    for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 4.0)):
        s.submit(name, tokens=range(100))
        (decision,) = s.router.explain(name)
        after(s, seconds, "decode-0", 100, 999, request_id=name, finish=STOP)
        found = explained(s, name)
        assert found.prediction == Prediction(decision.predicted_ttft_s, pytest.approx(seconds))
        assert found.attempts[0].decision is decision
    errors = sorted(e.prediction.error for e in s.router.explanations.recent() if e.prediction)
    assert s.router.status(s.now).prediction_error == errors[1]
    assert Prediction(0.9, 1.2).error == pytest.approx(0.25)


def test_only_the_last_ones_are_kept() -> None:
    s = Script("decode-0", max_decisions=2)
    for name in "abc":
        s.submit(name)
        after(s, 0.1, "decode-0", 10, 999, request_id=name, finish=STOP)
    assert s.router.explanations.get("a") is None
    assert [e.request_id for e in s.router.explanations.recent()] == ["c", "b"]


def test_the_reason_names_what_the_winner_holds_and_the_next_best() -> None:
    s = Script("decode-0", "decode-1")
    s.holds("decode-1", device=range(64), host=range(80))
    s.submit(tokens=range(100))
    assert s.dispatched()[0] == "decode-1"
    (decision,) = s.router.explain("r")
    text = reason(decision)
    best, other = decision.options.decodes[:2]
    assert text.startswith("decode-1 holds 64 of 100 tokens in device memory, 16 in host memory; ")
    assert f"computing the rest takes {seconds_text(best.seconds.prefill)}; " in text
    assert text.endswith(f"next best decode-0: {seconds_text(other.seconds.total)}")


def test_the_reason_of_a_handoff_is_that_of_the_prefill_worker() -> None:
    s = Script("prefill-0", "decode-0", policy="round_robin")
    s.submit(tokens=range(40))
    text = reason(s.router.explain("r")[0])
    assert text.startswith("prefill-0 holds none of 40 tokens; computing the rest takes ")
    assert "; handing over to decode-0 " in text
    assert text.endswith("; chosen by round_robin, whatever it costs")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (2e-6, "2.0 µs"), (0.0123, "12.3 ms"), (0.41, "0.410 s"), (12.0, "12.00 s")],
)
def test_seconds_are_short_and_never_nothing(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_tokens_that_were_computed_for_want_of_a_state_are_told() -> None:
    s = Script("prefill-0", "decode-0")
    s.submit(tokens=range(40))
    after(s, 0.5, "prefill-0", 40, 7, num_cached_tokens=8, recomputed={"state": 24})
    after(s, 0.1, "decode-0", 41, 999, finish=STOP)
    assert explained(s).recomputed == {"state": 24}
