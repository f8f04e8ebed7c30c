"""The books of a worker: what was dispatched, what its statistics say, when it is left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.engine.backoff import Backoff
from kvrelay.router.placement.cost import CostModel
from kvrelay.router.placement.endpoint import Endpoint
from kvrelay.router.placement.policy import Fleet
from tests.router.fleet import STATS, ahead_of, endpoint, pending_tokens
from tests.router.script import worker_info, worker_stats


def test_booked_load_counts_at_once_and_statistics_replace_it() -> None:
    e = endpoint("decode-0")
    e.book(1.0, "a", 500, 20)
    e.book(1.0, "b", 300, 10)
    assert (pending_tokens(e), e.num_seqs, e.num_free_blocks) == (800, 2, 970)
    stats = replace(STATS, num_waiting=1, num_running=1, num_free_blocks=970)
    e.on_stats(1.05, replace(stats, pending_prefill_tokens=0, num_free_blocks=1000))
    assert pending_tokens(e) == 800, "sent before the worker can have heard of them"
    assert e.num_free_blocks == 970
    e.on_stats(1.5, replace(stats, pending_prefill_tokens=601))
    assert pending_tokens(e) == 600, "200 tokens of the first one are computed"
    assert (e.num_seqs, e.num_free_blocks) == (2, 970)
    e.start_decoding(1.5, "a")
    assert pending_tokens(e) == 300
    assert e.num_decoding == 1
    assert e.release("a")
    assert not e.release("a")
    assert e.release("b")
    assert (pending_tokens(e), e.num_seqs, e.num_decoding) == (0, 0, 0)
    assert e.check_integrity() == []


def test_load_of_other_routers_is_what_statistics_have_beyond_the_books() -> None:
    e = endpoint("decode-0")
    e.book(0.0, "a", 100, 5)
    e.on_stats(1.0, replace(STATS, num_running=4, pending_prefill_tokens=704))
    assert (pending_tokens(e), e.num_seqs) == (700, 4)
    e.start_decoding(1.0, "a")
    e.release("a")
    assert (pending_tokens(e), e.num_seqs) == (600, 3)


def test_blocks_are_free_only_where_nobody_waits_for_them() -> None:
    e = endpoint("decode-0", num_free_blocks=100, num_wanted_blocks=130)
    assert e.num_free_blocks == -30
    e.book(0.0, "a", 0, 20)
    assert e.num_free_blocks == -50
    e.on_stats(1.0, replace(STATS, num_waiting=1, num_free_blocks=100, num_wanted_blocks=150))
    assert e.num_free_blocks == -50, "the statistics count what was booked"


def test_a_prompt_waits_there_until_its_first_token_comes_or_it_is_given_up() -> None:
    e = endpoint("decode-0")
    e.book(0.0, "a", 500, 20, prefill_s=0.5)
    e.book(0.0, "b", 0, 20)  # computed elsewhere
    e.book(0.0, "c", 900, 20, prefill_s=0.9)
    assert len(e.prompts) == 2
    e.start_decoding(0.4, "a")
    assert len(e.prompts) == 1
    e.start_decoding(0.4, "b")
    assert e.release("c")
    assert len(e.prompts) == 0
    assert e.check_integrity() == []


def test_back_off_grows_to_its_limit_and_success_ends_its_growth() -> None:
    e, fleet = endpoint("decode-0"), Fleet("", CostModel())
    fleet.add(0.0, e)
    waits = []
    for now in (10.0, 11.0, 12.0, 13.0, 14.0):
        e.fail(now, now - 0.1, Backoff(0.5, 3.0))
        waits.append(e.excluded_until - now)
    assert waits == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert not fleet.has_room(16.9, 10)
    assert fleet.has_room(17.0, 10)
    e.succeed()
    e.fail(20.0, 19.0, Backoff(0.5, 3.0))
    assert fleet.has_room(20.5, 10)


def test_prompts_that_a_worker_has_not_computed_are_waited_for_again() -> None:
    """The clock says that the second one is nearly done; the worker has not begun it."""
    worker = Endpoint(worker_info("prefill-0"), 0.0)
    worker.on_stats(0.0, worker_stats("prefill-0"))
    worker.book(0.0, "a", 100, 4, prefill_s=1.0)
    worker.book(0.0, "b", 300, 4, prefill_s=3.0)
    assert ahead_of(worker.prompts, 3.5, 100.0)[0] == pytest.approx(0.5, abs=0.1)
    slow = worker_stats("prefill-0", pending_prefill_tokens=300, prompt_slowdown=2.0)
    worker.on_stats(3.5, slow)
    assert ahead_of(worker.prompts, 3.5, 100.0)[0] == pytest.approx(6.0, abs=0.1)


def test_only_sequences_that_decode_are_typical_for_it() -> None:
    worker = Endpoint(worker_info("decode-0"), 0.0)
    worker.on_stats(0.0, worker_stats("decode-0", num_running=9, num_decoding=2))
    assert 0.0 < worker.typical_decoding < 2.0
