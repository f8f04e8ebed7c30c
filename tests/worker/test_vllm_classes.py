"""Classes of service at a worker of vLLM: its scheduler has their priorities, and where a worker is
full those of low classes give way, and go on later with the same tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kvrelay.cluster.roles import ROLES
from kvrelay.decode_worker.vllm.build import build
from kvrelay.decode_worker.vllm.messages import Begin, Generated, Stop, Stopped
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.service_class import ServiceClass
from tests.support import vllm_stand_in
from tests.support.local import LocalCluster
from tests.worker.test_vllm_worker import (
    GREEDY,
    PROMPTS,
    VLLM,
    WORK,
    assert_clean,
    greedy,
    step,
    worker,
)
from tests.worker.test_vllm_worker import model_dir as model_dir

BATCH, DEFAULT = ServiceClass.BATCH.priority, ServiceClass.DEFAULT.priority
SAMPLED = replace(GREEDY, temperature=0.8, seed=3, presence_penalty=0.5)


def of(kind: type, effects: list[Any]) -> list[Any]:
    return [each for each in effects if isinstance(each, kind)]


@pytest.mark.parametrize("service_class", ServiceClass)
def test_vllm_has_the_priority_of_the_class(service_class: ServiceClass) -> None:
    work = replace(WORK, priority=service_class.priority)
    [begin] = of(Begin, worker().receive(0.0, work))
    assert begin.priority == service_class.priority


def test_low_classes_give_way_one_at_a_time_and_equals_do_not() -> None:
    node = worker()  # which runs two
    for name in ("b0", "b1"):
        node.receive(0.0, replace(WORK, request_id=name, priority=BATCH))
    node.receive(0.1, step(Generated("b0/1", (7,)), Generated("b1/1", (8,))))
    [stop] = of(Stop, node.receive(0.2, replace(WORK, request_id="d0")))
    assert not of(Stop, node.receive(0.3, step())), "it is asked for once"
    key = stop.key.removesuffix("/1")
    kept = {"b0": "b1", "b1": "b0"}[key]
    [begin] = of(Begin, node.receive(0.4, Stopped(stop.key)))
    assert begin.key == "d0/1"
    [stop] = of(Stop, node.receive(0.6, replace(WORK, request_id="d1")))
    assert stop.key == f"{kept}/1"
    node.receive(0.7, Stopped(stop.key))
    assert not of(Stop, node.receive(0.8, replace(WORK, request_id="d2")))
    node.receive(0.9, step(Generated("d0/1", (1, 2, 3, 4), finish="length")))
    begun = of(Begin, node.receive(1.0, step(Generated("d1/1", (1, 2, 3, 4), finish="length"))))
    assert {each.key for each in begun} <= {"d2/1", "b0/1/1", "b1/1/1"}


@pytest.fixture
def small(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    """One worker, which runs two."""
    vllm_stand_in.install(monkeypatch)
    monkeypatch.setattr(
        "tests.support.local.build_worker",
        lambda spec, options: build(spec, ROLES, options.make_agent),
    )
    engine = structs.replace(VLLM, max_num_seqs=2)
    with LocalCluster(model_dir, prefill=0, decode=1, engine=engine) as cluster:
        yield cluster
        if vllm_stand_in.LLMEngine.turns is not None:
            vllm_stand_in.LLMEngine.turns.release(100_000)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled with penalties"])
def test_those_that_gave_way_end_with_the_same_tokens(
    small: LocalCluster, sampling: SamplingParams
) -> None:
    expected = [small.submit(each, sampling).result(60.0).tokens for each in PROMPTS[:2]]
    turns = vllm_stand_in.turns(10)
    low = [small.submit(each, sampling, priority=BATCH) for each in PROMPTS[:2]]
    deadline = time.monotonic() + 60
    while small.status().totals.output_tokens < 2 * 60 + 10:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    few = replace(GREEDY, max_tokens=4)
    urgent = small.submit(PROMPTS[2], few)
    for _ in range(12):
        turns.release(1)
        time.sleep(0.02)
    assert urgent.result(30.0).tokens == greedy(PROMPTS[2], 4)
    assert not all(each.done() for each in low)
    turns.release(100_000)
    assert [each.result(60.0).tokens for each in low] == expected
    [node] = [each.node for each in small.workers.values()]
    assert node.core.scheduler.num_preemptions == 1
    assert_clean(small)
