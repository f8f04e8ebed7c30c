"""How deltas fit to the log, when a log is complete, and what its blocks are called."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.engine.kv.block_hash import hash_blocks
from kvrelay.engine.kv.scope import UNSALTED, CacheScope
from kvrelay.engine.request import FinishReason, SamplingParams, TokenDelta
from kvrelay.router.messages import Submit
from kvrelay.router.placement.endpoint import Endpoint
from kvrelay.router.record import CLEARED_TOKENS, Attempt, DeltaFit, RequestRecord
from tests.router.script import BLOCK, worker_info

PROMPT = tuple(range(10))


def record_of(*output: int, scope: CacheScope = UNSALTED, **sampling: object) -> RequestRecord:
    params = SamplingParams(**{"max_tokens": 8, "stop_token_ids": (999,), **sampling})  # type: ignore[arg-type]
    submit = Submit("r", params, "api", PROMPT, 60.0, scope=scope)
    record = RequestRecord(submit, params, 1, 0.0, 60.0, 0.0)
    record.tokens += output
    return record


def delta(position: int, *tokens: int, finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta("r", 1, position, tokens, finish=finish)


@pytest.mark.parametrize(
    ("sent", "verdict", "output"),
    [
        (delta(12, 22, 23), DeltaFit.NEXT, (20, 21, 22, 23)),
        (delta(12), DeltaFit.NEXT, (20, 21)),
        (delta(10), DeltaFit.NEXT, (20, 21)),
        (delta(10, 20, 21), DeltaFit.NEXT, (20, 21)),
        (delta(11, 21, 22), DeltaFit.NEXT, (20, 21, 22)),
        (delta(8, 8, 9, 20, 21, 22), DeltaFit.NEXT, (20, 21, 22)),
        (delta(13, 23), DeltaFit.GAP, (20, 21)),
        (delta(13), DeltaFit.GAP, (20, 21)),
        (delta(11, 5), DeltaFit.DIVERGED, (20, 21)),
        (delta(11, 5, 22), DeltaFit.DIVERGED, (20, 21)),
        (delta(8, 9, 9), DeltaFit.DIVERGED, (20, 21)),
        (delta(-2, 8), DeltaFit.DIVERGED, (20, 21)),
        (delta(11, 21, finish=FinishReason.STOP), DeltaFit.NEXT, (20, 21)),
        (delta(12, finish=FinishReason.STOP), DeltaFit.NEXT, (20, 21)),
        (delta(10, 20, finish=FinishReason.STOP), DeltaFit.DIVERGED, (20, 21)),
    ],
)
def test_a_delta_is_next_a_gap_or_a_contradiction(
    sent: TokenDelta, verdict: DeltaFit, output: tuple[int, ...]
) -> None:
    record = record_of(20, 21)
    assert record.accept(sent) is verdict
    assert tuple(record.tokens) == PROMPT + output


@pytest.mark.parametrize(
    ("output", "sampling", "reason"),
    [
        ((), {}, None),
        ((), {"max_tokens": 0}, FinishReason.LENGTH),
        ((5, 6), {}, None),
        ((5, 999), {}, FinishReason.STOP),
        ((5, 999), {"min_tokens": 3}, None),
        ((5, 999), {"min_tokens": 2}, FinishReason.STOP),
        ((5, 999), {"min_tokens": 3, "grammar": "it has ended"}, FinishReason.STOP),
        ((5, 6), {"min_tokens": 3, "grammar": "it goes on"}, None),
        ((999, 5), {}, None),
        ((5, 6), {"max_tokens": 2}, FinishReason.LENGTH),
        ((5, 999), {"max_tokens": 2}, FinishReason.STOP),
        ((5, 999), {"stop_token_ids": ()}, None),
    ],
)
def test_a_log_knows_when_it_is_complete(
    output: tuple[int, ...], sampling: dict[str, object], reason: FinishReason | None
) -> None:
    assert record_of(*output, **sampling).complete() is reason


def test_a_stop_token_at_the_end_of_the_prompt_ends_nothing() -> None:
    assert record_of(stop_token_ids=(9,)).complete() is None


def test_block_names_grow_with_the_log_and_are_those_of_the_engine() -> None:
    info = worker_info("decode-0")
    record = record_of(scope=CacheScope(b"tenant"))
    scope = CacheScope(b"tenant")
    assert record.block_hashes(info) == hash_blocks(info.fingerprint, scope, PROMPT, BLOCK)
    record.tokens += range(50, 59)
    assert record.block_hashes(info) == hash_blocks(info.fingerprint, scope, record.tokens, BLOCK)
    other = replace(info, fingerprint=b"another", block_size=8)
    assert record.block_hashes(other) == hash_blocks(b"another", scope, record.tokens, 8)
    assert record_of().block_hashes(info)[0] != record.block_hashes(info)[0]


@pytest.mark.parametrize(
    ("num_cached", "by_source", "expected"),
    [
        (8, {"device": 4, "host": 4}, {"device": 4, "host": 4}),
        (12, {"peer": 4, "disk": 4, "device": 4}, {"device": 4, "disk": 4, "peer": 2}),
        (4, {}, {}),
        (4, {"device": 4, "host": 0, "the moon": 3}, {"device": 4}),
        (0, {"device": 4}, {}),
    ],
)
def test_cached_tokens_are_those_of_the_prompt_from_known_sources(
    num_cached: int, by_source: dict[str, int], expected: dict[str, int]
) -> None:
    record = record_of(20, 21)
    record.note_cached(num_cached, by_source)
    assert record.num_cached_tokens == min(num_cached, len(PROMPT))
    assert record.cached_by_source == expected


@pytest.mark.parametrize(
    ("known", "first", "expected"),
    [
        ([(0, "a")], 10, [(0, "a")]),
        ([(0, "a"), (11, "b")], 10, [(0, "a"), (1, "b")]),
        ([(0, "a"), (11, "b")], 11, [(1, "b")]),  # none of these tokens is by the first
        ([(0, "a"), (12, "b")], 10, [(0, "a")]),  # the second has computed none yet
        ([(0, "a"), (11, "a")], 10, [(0, "a")]),
    ],
)
def test_positions_are_noted_from_which_other_weights_computed(
    known: list[tuple[int, str]], first: int, expected: list[tuple[int, str]]
) -> None:
    record = record_of(20, 21)
    record.note_weights(tuple(known), first)
    record.note_weights(tuple(known[-1:]), first)
    assert record.weights == expected


@pytest.mark.parametrize(("num_tokens", "in_a_row"), [(CLEARED_TOKENS - 1, 2), (CLEARED_TOKENS, 1)])
def test_a_lost_worker_counts_in_a_row_unless_it_had_brought_tokens(
    num_tokens: int, in_a_row: int
) -> None:
    record, endpoint = record_of(), Endpoint(worker_info("decode-0"), 0.0)
    for number, tokens in enumerate((1, num_tokens)):
        attempt = Attempt(number, endpoint, None, 0.0, num_tokens=len(record.tokens))
        record.tokens += [20] * tokens
        record.on_lost_worker(attempt)
    assert (record.lost_workers, record.lost_in_a_row) == (2, in_a_row)
    assert record.is_suspect == (in_a_row == 2)


@pytest.mark.parametrize(
    ("output", "temperature", "repeats_draws", "redraws"),
    [
        ((20,), 0.5, False, True),
        ((), 0.5, False, False),
        ((20,), 0.0, False, False),
        ((20,), 0.5, True, False),
    ],
)
def test_an_attempt_draws_anew_where_its_worker_does_not_repeat_what_was_drawn(
    output: tuple[int, ...], temperature: float, repeats_draws: bool, redraws: bool
) -> None:
    record = record_of(*output, temperature=temperature)
    info = worker_info("decode-0", repeats_draws=repeats_draws)
    assert record.dispatch(0.0, Endpoint(info, 0.0), None).redraws == redraws
