"""Running requests that move between workers are answered as if they had stayed: real nodes over a
real (tiny, random) model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.backoff import Backoff
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.node import NodeId
from kvrelay.engine.request import FinishReason, SamplingParams
from kvrelay.engine.stats import Role
from kvrelay.engine.step import Step, StepDone
from kvrelay.router.messages import RoleChanged
from kvrelay.router.record import Cause
from tests.local.test_local import PROMPTS, REMOTE, VOCAB, small
from tests.local.test_local import model_dir as model_dir
from tests.support.local import ROUTER, Completion, LocalCluster

DEADLINE_S = 60.0
GREEDY = SamplingParams(max_tokens=300, temperature=0.0)
SEEDED = SamplingParams(max_tokens=300, temperature=0.9, top_p=0.9, seed=11)
EDITED = replace(SEEDED, max_tokens=100)
KINDS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "penalties": replace(
        EDITED, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3
    ),
    "logprobs": replace(GREEDY, max_tokens=100, logprobs=3),
    "logit_bias": replace(EDITED, logit_bias={3: 4.0, 77: 4.0, 200: -100.0}, logprobs=0),
    "min_tokens": replace(EDITED, min_tokens=80, stop_token_ids=tuple(range(0, VOCAB, 4))),
}
CROWD = [[(11 * i + 5 * j + j * j) % VOCAB for j in range(5 + 13 * i)] for i in range(12)]

Requests = Sequence[tuple[list[int], SamplingParams]]
CASES: dict[str, Requests] = {
    name: [(prompt, sampling) for prompt in PROMPTS] for name, sampling in KINDS.items()
}
CASES["several"] = [
    (prompt, replace(sampling, max_tokens=100, seed=i))
    for i, (prompt, sampling) in enumerate(zip(CROWD, cycle(KINDS.values()), strict=False))
]


@pytest.fixture(scope="module")
def answers_at_rest(model_dir: Path) -> Iterator[Callable[[str], list[Completion]]]:
    """What two workers answer to a case that nothing disturbs."""
    kept: dict[str, list[Completion]] = {}
    with LocalCluster(model_dir, prefill=0, decode=2, engine=small()) as cluster:

        def answer(case: str) -> list[Completion]:
            if case not in kept:
                futures = [cluster.submit(*request) for request in CASES[case]]
                kept[case] = [future.result(DEADLINE_S) for future in futures]
            return kept[case]

        yield answer
        assert cluster.status().totals.migrations == 0
        cluster.wait_idle()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may move again as soon as it has arrived: those of the tiny model end too soon to
    move twice otherwise."""
    monkeypatch.setattr("kvrelay.router.router.PAUSE", Backoff(0.0, 0.0))


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take as long as those of a larger model: requests are still running when they are to
    move, however fast this machine computes the tiny one."""
    execute = ModelRunner.execute

    def slowly(self: ModelRunner, step: Step) -> StepDone:
        time.sleep(0.01)
        return execute(self, step)

    monkeypatch.setattr(ModelRunner, "execute", slowly)


def chase(
    cluster: LocalCluster, futures: list[Future[Completion]], deadline_s: float = DEADLINE_S
) -> list[Completion]:
    """Let one worker after the other be the only one that is to decode, the next one after every
    few tokens, until all is answered."""
    deadline = time.monotonic() + deadline_s
    workers = sorted(cluster.workers)
    turns, num_seen = cycle(workers), 0
    while not all(future.done() for future in futures):
        assert time.monotonic() < deadline, "the requests never end"
        num_output = cluster.status().totals.output_tokens
        if num_output < num_seen + 8 * len(futures):
            continue
        num_seen, only = num_output, next(turns)
        cluster.run(partial(appoint, cluster, only, workers))
    return [future.result() for future in futures]


def appoint(cluster: LocalCluster, only: NodeId, workers: list[NodeId]) -> None:
    cluster.host.deliver(ROUTER, RoleChanged(only, 1, Role.DECODE))
    for worker in workers:
        if worker != only:
            cluster.host.deliver(ROUTER, RoleChanged(worker, 1, Role.PREFILL))


def num_taken_over(cluster: LocalCluster) -> int:
    """Attempts that have taken a running request over from another worker."""
    ended = cluster.run(lambda: list(cluster.router.explanations.recent()))
    return sum(attempt.cause == Cause.MIGRATED for each in ended for attempt in each.attempts)


def assert_same(answers: list[Completion], expected: list[Completion]) -> None:
    for answer, known in zip(answers, expected, strict=True):
        assert answer.failed is None
        assert (answer.tokens, answer.finish) == (known.tokens, known.finish)
        assert len(answer.logprobs) == len(known.logprobs)
        for got, wanted in zip(answer.logprobs, known.logprobs, strict=True):
            assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert [token for token, _ in got.top] == [token for token, _ in wanted.top]
            assert [p for _, p in got.top] == pytest.approx([p for _, p in wanted.top], abs=1e-4)


def assert_clean(cluster: LocalCluster) -> None:
    cluster.check()
    cluster.wait_idle()
    report = cluster.audit()
    assert report["clean"], report
    assert not cluster.status().totals.retries


@pytest.mark.slow
@pytest.mark.parametrize("prefill", [1, 0])
@pytest.mark.parametrize("case", CASES)
def test_answers_are_the_same_however_often_their_requests_move(
    model_dir: Path,
    answers_at_rest: Callable[[str], list[Completion]],
    at_once: None,
    unhurried: None,
    case: str,
    prefill: int,
) -> None:
    options: dict[str, Any] = {"prefill": prefill, "decode": 2, "engine": small()}
    with LocalCluster(model_dir, **options) as cluster:
        futures = [cluster.submit(*request) for request in CASES[case]]
        answers = chase(cluster, futures)
        assert_clean(cluster)
        assert cluster.status().totals.migrations > 0
        assert num_taken_over(cluster) >= len(futures)
    assert_same(answers, answers_at_rest(case))


def test_the_cases_are_what_they_say(answers_at_rest: Callable[[str], list[Completion]]) -> None:
    tokens = {name: [answer.tokens for answer in answers_at_rest(name)] for name in KINDS}
    assert tokens["logprobs"] == [each[:100] for each in tokens["greedy"]]
    first = {str([each[:60] for each in tokens[name]]) for name in KINDS}
    assert len(first) == len(KINDS) - 1, "a kind changes nothing"
    assert all(len(each.top) == 3 for a in answers_at_rest("logprobs") for each in a.logprobs)
    for answer in answers_at_rest("min_tokens"):
        assert answer.finish is FinishReason.STOP
        assert 80 <= len(answer.tokens) < 100


def test_requests_that_lose_their_memory_go_on_where_there_is_some(
    model_dir: Path, answers_at_rest: Callable[[str], list[Completion]]
) -> None:
    context = {"max_model_len": 512}
    engines = {Role.DECODE: small(num_blocks=32, **context), Role.PREFILL: small(**context)}
    with LocalCluster(model_dir, engines=engines, router=REMOTE) as cluster:
        futures = [cluster.submit(*request) for request in CASES["several"]]
        answers = [future.result(DEADLINE_S) for future in futures]
        assert_clean(cluster)
        node: Any = cluster.workers["decode-0"].node
        assert cluster.run(lambda: node.core.scheduler.num_preemptions) > 0
        assert cluster.status().totals.migrations > 0
        assert num_taken_over(cluster) > 0
    assert_same(answers, answers_at_rest("several"))
