"""Two models in one cluster, with real workers: every request is served by its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from kvrelay.engine.request import FinishReason, SamplingParams
from tests.engine.model.tiny import make_checkpoint
from tests.local.test_local import REMOTE, VOCAB, small
from tests.local.test_local import model_dir as model_dir
from tests.support.local import Completion, LocalCluster

OTHER = "other"
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
PROMPTS = [[(7 * i + 3 * j) % VOCAB for j in range(10 + 5 * i)] for i in range(20)]


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its family, and so the layout of its KV, is not that of `model_dir`."""
    path = tmp_path_factory.mktemp("other")
    make_checkpoint("qwen3", path, {"vocab_size": VOCAB})
    return path


@pytest.fixture(scope="module")
def expected(model_dir: Path, other_dir: Path) -> dict[str, list[list[int]]]:
    """What each model says when it is alone."""
    found = {}
    for model, path in (("", model_dir), (OTHER, other_dir)):
        with LocalCluster(path, prefill=0, engine=small()) as cluster:
            found[model] = [answer.tokens for answer in cluster.generate(PROMPTS, GREEDY)]
    assert all(a != b for a, b in zip(found[""], found[OTHER], strict=True))
    return found


@pytest.fixture
def cluster(model_dir: Path, other_dir: Path) -> Iterator[LocalCluster]:
    """Two and two workers; every prompt is handed over."""
    options = {"engine": small(num_blocks=256), "router": REMOTE, "further": {OTHER: other_dir}}
    with LocalCluster(model_dir, **options) as running:
        yield running
        running.wait_idle()


def submit(cluster: LocalCluster, number: int) -> Future[Completion]:
    """Request `number`, of one of the models."""
    prompt, name = PROMPTS[number // 2 % len(PROMPTS)], f"r{number}"
    return cluster.submit(prompt, GREEDY, request_id=name, model=model_of(number))


def model_of(number: int) -> str:
    return ("", OTHER)[number % 2]


def check(answers: dict[int, Completion], expected: dict[str, list[list[int]]]) -> None:
    for number, answer in answers.items():
        assert answer.finish is FinishReason.LENGTH, answer.failed
        assert answer.tokens == expected[model_of(number)][number // 2 % len(PROMPTS)], number


@pytest.mark.slow
def test_of_a_thousand_mixed_requests_none_is_on_a_worker_of_the_other_model(
    cluster: LocalCluster, expected: dict[str, list[list[int]]]
) -> None:
    answers: dict[int, Completion] = {}
    for begin in range(0, 1000, 100):  # more wait than fit
        futures = {number: submit(cluster, number) for number in range(begin, begin + 100)}
        answers |= {number: future.result(120) for number, future in futures.items()}
        cluster.check()
        for number in futures:
            model = model_of(number)
            (decision,) = cluster.decided(f"r{number}", model)
            named = f"-{model}-" if model else "-"
            workers = (
                decision.options.best.worker,
                decision.options.best.prefill_from or "",
                decision.options.best.fetch_from or "",
            )
            assert {w for w in workers if w} <= {f"prefill{named}0", f"decode{named}0"}
    check(answers, expected)


@pytest.mark.parametrize("killed", ["", OTHER])
def test_one_models_worker_dies_and_its_requests_go_on_at_its_other_one(
    cluster: LocalCluster, expected: dict[str, list[list[int]]], killed: str
) -> None:
    worker = f"decode-{killed and f'{killed}-'}0"
    futures = {number: submit(cluster, number) for number in range(100)}
    futures[0].result(120)  # they run
    cluster.kill(worker)
    answers = {number: future.result(120) for number, future in futures.items()}
    cluster.check()
    check(answers, expected)
    later = {number: submit(cluster, number) for number in range(100, 140)}
    check({number: future.result(120) for number, future in later.items()}, expected)
    for number in later:
        for decision in cluster.decided(f"r{number}", model_of(number)):
            assert decision.options.best.worker != worker
