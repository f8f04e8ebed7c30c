"""Where a request goes, with all that is known of the workers: room, predictions, books."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvrelay.engine.kv.block_hash import HASH_BYTES
from kvrelay.engine.request import FinishReason, SamplingParams
from kvrelay.router.config import RouterConfig
from kvrelay.router.dispatch import Dispatcher
from kvrelay.router.messages import Cancel, Submit
from kvrelay.router.record import Attempt, RequestRecord, RetainOn
from tests.router.script import BLOCK, CLIENT, Script, worker_info, worker_stats

FULL: dict[str, Any] = {"num_free_blocks": 0, "num_running": 8, "decode_step_s": 1.0}


@pytest.fixture
def s() -> Iterator[Script]:
    script = Script("decode-0", "decode-1")
    yield script
    script.assert_idle()


def places(s: Script, *request_ids: str) -> list[str | None]:
    """The decode worker of each request's only attempt; None: it waits."""
    found = [s.router.explain(request_id) for request_id in request_ids]
    return [decisions[-1].options.best.worker if decisions else None for decisions in found]


# -- room for KV ------------------------------------------------------------------------------


def test_a_request_goes_to_the_worker_that_has_room_though_another_holds_its_prefix(
    s: Script,
) -> None:
    s.tell(worker_stats("decode-0", **FULL))
    s.holds("decode-0", range(80))
    s.submit("a", tokens=range(81))
    assert places(s, "a") == ["decode-1"]
    s.tell(Cancel("a"))


def book_all(s: Script) -> None:
    """Both workers have what another request needs all of their blocks for."""
    for number in range(2):
        s.submit(f"large {number}", tokens=range(1000 * number, 1000 * number + 200))


def test_a_request_waits_where_no_worker_has_room_soon_and_goes_when_one_has() -> None:
    s = Script("decode-0", "decode-1", max_memory_wait_s=0.5)
    book_all(s)
    assert set(places(s, "large 0", "large 1")) == {"decode-0", "decode-1"}
    for worker in ("decode-0", "decode-1"):
        s.now += 0.2
        s.tell(worker_stats(worker, **FULL))
    s.submit("late", tokens=range(5000, 5200))
    assert places(s, "late") == [None]
    first = places(s, "large 0")[0]
    assert first is not None
    s.now += 0.1
    s.delta(first, 200, 999, request_id="large 0", finish=FinishReason.STOP)
    s.tell(worker_stats(first))
    assert places(s, "late") == [first]
    s.tell(Cancel("late"))
    s.tell(Cancel("large 1"))
    s.assert_idle()


def test_a_request_goes_where_room_comes_soon() -> None:
    """The steps are short, so those that are there end before long."""
    s = Script("decode-0", max_memory_wait_s=5.0)
    s.submit("first", tokens=range(200))
    s.now += 0.2
    s.tell(worker_stats("decode-0", num_free_blocks=0, num_running=1, decode_step_s=0.01))
    s.submit("second", tokens=range(1000, 1200))
    assert places(s, "second") == ["decode-0"]
    assert s.router.explain("second")[0].options.best.seconds.memory > 0
    s.tell(Cancel("first"))
    s.tell(Cancel("second"))
    s.assert_idle()


def test_an_empty_worker_is_given_what_fits_into_it_whatever_it_says() -> None:
    """Nothing of this router's is there: waiting would change nothing."""
    s = Script("decode-0", max_memory_wait_s=0.1)
    s.tell(worker_stats("decode-0", **FULL))
    s.submit("a", tokens=range(200))
    assert places(s, "a") == ["decode-0"]
    s.tell(Cancel("a"))
    s.assert_idle()


def test_blocks_that_others_wait_for_there_are_no_room() -> None:
    s = Script("decode-0", "decode-1")
    s.tell(worker_stats("decode-0", num_wanted_blocks=64, decode_step_s=0.01))
    s.tell(worker_stats("decode-1", num_free_blocks=60, decode_step_s=0.01))
    s.submit("a", tokens=range(200))
    assert places(s, "a") == ["decode-1"]
    s.tell(Cancel("a"))
    s.assert_idle()


# -- predictions ------------------------------------------------------------------------------

WEIGHTS = (0.01, 40.96, 0.0, 0.0)  # 10 ms a pass, and 10 ms a token


def test_the_first_token_is_predicted_from_what_waits_there(s: Script) -> None:
    s.down("decode-1")
    s.tell(worker_stats("decode-0", prompt_weights=WEIGHTS))
    s.submit("a", tokens=range(50))
    (alone,) = s.router.explain("a")
    assert alone.predicted_ttft_s == pytest.approx(0.01 + 0.5)
    assert alone.predicted_ttft_s == alone.options.best.seconds.ttft
    s.submit("longer", tokens=range(1000, 1060))
    (behind,) = s.router.explain("longer")
    assert behind.predicted_ttft_s == pytest.approx(0.01 + 0.6 + 0.51)
    s.submit("shorter", tokens=range(2000, 2010))
    (before,) = s.router.explain("shorter")
    assert before.predicted_ttft_s == pytest.approx(0.01 + 0.1)
    for request_id in ("a", "longer", "shorter"):
        s.tell(Cancel(request_id))


def test_a_first_token_that_has_come_holds_no_prompt_up(s: Script) -> None:
    s.down("decode-1")
    s.tell(worker_stats("decode-0", prompt_weights=WEIGHTS))
    s.submit("a", tokens=range(50))
    s.now += 0.1
    s.delta("decode-0", 50, 5, request_id="a")
    s.submit("b", tokens=range(1000, 1060))
    assert s.router.explain("b")[0].options.best.seconds.queue == 0.0
    s.tell(Cancel("a"))
    s.tell(Cancel("b"))


def test_predictions_learn_from_first_tokens_that_come_late(s: Script) -> None:
    s.down("decode-1")
    s.tell(worker_stats("decode-0", prompt_weights=WEIGHTS))
    for number in range(200):
        name = f"r{number}"
        s.submit(name, tokens=range(1000 * number, 1000 * number + 50))
        (decision,) = s.router.explain(name)
        s.now += 0.51 + 0.08
        s.tell(worker_stats("decode-0", prompt_weights=WEIGHTS))
        s.delta("decode-0", 50, 999, request_id=name, finish=FinishReason.STOP)
        s.sent.clear()
    assert decision.predicted_ttft_s == pytest.approx(0.59, rel=0.02)
    assert decision.options.best.seconds.ttft == pytest.approx(0.51), (
        "what each part costs is not changed"
    )


# -- the books --------------------------------------------------------------------------------


def recorded(request_id: str, tokens: range, now: float) -> RequestRecord:
    sampling = SamplingParams(max_tokens=8)
    submit = Submit(request_id, sampling, CLIENT, tuple(tokens), 60.0)
    return RequestRecord(submit, sampling, 1, now, now + 60.0, now)


def dispatcher(*workers: str, **config: Any) -> Dispatcher:
    made = Dispatcher(RouterConfig(**config), "router-0")
    for worker in workers:
        made.on_worker_up(0.0, worker_info(worker))
    return made


def place(fleet: Dispatcher, record: RequestRecord) -> Attempt:
    attempt = fleet.place(1.0, record)
    assert isinstance(attempt, Attempt)
    return attempt


def test_what_is_booked_for_an_attempt_ends_with_it() -> None:
    fleet = dispatcher("decode-0", "prefill-0", policy="least_loaded")
    attempt = place(fleet, recorded("a", range(50), 1.0))
    decode, prefill = attempt.decode, attempt.prefill
    assert prefill is not None
    assert (len(decode.bookings), len(prefill.bookings)) == (1, 1)
    assert (len(decode.prompts), len(prefill.prompts)) == (0, 1), "it is computed there"
    assert decode.num_free_blocks == 64 - (50 + 8 + BLOCK - 1) // BLOCK
    fleet.on_first_token(2.0, attempt, "a")
    assert (len(decode.bookings), len(prefill.bookings), len(prefill.prompts)) == (1, 0, 0)
    assert decode.num_decoding == 1
    fleet.release(attempt, "a")
    assert decode.bookings == {}
    assert decode.num_free_blocks == 64


def test_load_that_is_booked_counts_for_the_next_choice() -> None:
    fleet = dispatcher(*(f"decode-{n}" for n in range(4)), policy="least_loaded")
    records = [recorded(f"r{n}", range(50 * n, 50 * n + 50), 1.0) for n in range(8)]
    attempts = [place(fleet, record) for record in records]
    taken = [attempt.decode.worker for attempt in attempts]
    assert all(taken.count(f"decode-{n}") == 2 for n in range(4)), taken


@pytest.mark.parametrize(
    ("num_blocks", "held"),
    [(3, 3), (16, 16), (40, 40), (64, 64), (65, 48), (100, 48), (3000, 62), (8000, 16)],
)
def test_the_beginning_of_what_was_placed_counts_as_cached(num_blocks: int, held: int) -> None:
    """As far as the last of the first 64 blocks that a lookup of the same prompt asks about: the
    first 16, one at every stride, and the last."""
    fleet = Dispatcher(RouterConfig())
    fleet.on_worker_up(0.0, worker_info("decode-0", num_blocks=9000, max_model_len=10**6))
    record = recorded("a", range(num_blocks * BLOCK + 1), 1.0)
    place(fleet, record)
    names = record.packed_hashes(worker_info("decode-0"))
    assert fleet.index.lookup(0.0, names).held("decode-0").device == held
    other = names[: 2 * HASH_BYTES] + bytes(20 * HASH_BYTES)
    assert fleet.index.lookup(0.0, other).held("decode-0").device == min(2, num_blocks)


def test_of_a_run_of_handoffs_one_copy_each_is_kept() -> None:
    fleet = dispatcher("decode-0", "prefill-0")
    for worker in ("decode-0", "prefill-0"):
        fleet.on_stats(0.0, worker_stats(worker, num_running=9 if worker == "decode-0" else 0))
    chosen = []
    for number in range(20):
        record = recorded(f"r{number}", range(1000 * number, 1000 * number + 200), 1.0)
        attempt = place(fleet, record)
        chosen.append((attempt.prefill is not None, attempt.retain_on))
        fleet.release(attempt, record.request_id)
    assert all(is_handed_over for is_handed_over, _ in chosen)
    kept_by = [retain_on for _, retain_on in chosen]
    assert set(kept_by) == {RetainOn.DECODE, RetainOn.PREFILL}
    assert 8 <= kept_by.count(RetainOn.PREFILL) <= 12, "there is as much room here as there"
