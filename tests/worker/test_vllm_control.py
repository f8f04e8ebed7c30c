"""What a controller asks of a worker of vLLM beside requests: to pause, and what scaling reads."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from kvrelay.cluster.scaling.observations import Costs
from kvrelay.decode_worker.vllm.messages import Begin, Generated, Held, Hold
from kvrelay.engine.messages import TokenDeltas
from kvrelay.engine.node import Exit, Woken
from kvrelay.engine.stats import WorkerStats
from kvrelay.engine.weights import PauseMode, PauseWorker
from tests.support import vllm_stand_in
from tests.support.local import LocalCluster
from tests.worker.test_vllm_worker import (
    CONFIG,
    GREEDY,
    PROMPTS,
    WORK,
    assert_clean,
    greedy,
    sent,
    step,
    ticks,
    worker,
)
from tests.worker.test_vllm_worker import cluster as cluster
from tests.worker.test_vllm_worker import model_dir as model_dir


def test_a_pause_stops_what_runs_at_vllm_and_it_goes_on_later(cluster: LocalCluster) -> None:
    turns = vllm_stand_in.turns(10)
    futures = [cluster.submit(prompt, GREEDY) for prompt in PROMPTS[:2]]
    deadline = time.monotonic() + 60
    while not cluster.status().totals.output_tokens:
        assert time.monotonic() < deadline
        time.sleep(0.005)

    def order(mode: PauseMode | None) -> None:
        for name in cluster.workers:
            cluster.host.deliver(name, PauseWorker(mode))

    cluster.run(lambda: order(PauseMode.KEEP))
    late = cluster.submit(PROMPTS[2], GREEDY)
    turns.release(100_000)
    time.sleep(0.3)  # a hundred steps
    before = cluster.status().totals.output_tokens
    time.sleep(0.3)
    assert cluster.status().totals.output_tokens == before < 120
    assert not any(each.done() for each in (*futures, late))
    cluster.run(lambda: order(None))
    answers = [each.result(60.0).tokens for each in (*futures, late)]
    assert answers == [greedy(prompt, 60) for prompt in PROMPTS[:3]]
    assert_clean(cluster)


def test_a_step_that_was_held_back_is_no_step_that_hangs() -> None:
    node = worker()
    node.receive(0.0, replace(WORK, timeout_s=300.0))
    node.receive(0.1, step(Generated("r/1", (7,))))
    effects = node.receive(0.2, PauseWorker(PauseMode.KEEP))
    assert [each for each in effects if isinstance(each, Hold)] == [Hold(True)]
    node.receive(0.2, Held())
    late = node.receive(0.3, replace(WORK, request_id="late", timeout_s=300.0))
    assert not [each for each in late if isinstance(each, Begin)]
    assert not [each for each in ticks(node, 0.3, 60.0) if isinstance(each, Exit)]
    effects = node.receive(60.5, PauseWorker(None))
    assert Hold(False) in effects
    assert [each.key for each in effects if isinstance(each, Begin)] == ["late/1"]
    [frame] = sent(node.receive(60.6, step(Generated("r/1", (8,)))), TokenDeltas)
    assert frame.deltas[0].tokens == (8,)
    assert [each for each in ticks(node, 60.6, 12.0) if isinstance(each, Exit)], "this one hangs"


def test_scaling_knows_what_a_step_takes_by_how_many_it_has() -> None:
    node = worker()
    for number in range(2):
        node.receive(0.0, replace(WORK, request_id=f"r{number}", tokens=(1, 2, 3), num_held=0))
    now = 0.1
    for number in range(60):
        both = [Generated(f"r{i}/1", ()) for i in range(1 + number % 2)]
        if number < 2:
            both = [Generated(f"r{i}/1", (5,)) for i in range(2)]
        made = step(*both, num_running=2, used=0.1 * len(both))
        node.receive(now, replace(made, elapsed_s=0.010 + 0.004 * len(both)))
        now += 0.01
    [stats] = sent(node.receive(now, Woken("tick")), WorkerStats)
    assert stats.decode_weights
    costs = Costs(
        prompt_weights=(),
        decode_weights=stats.decode_weights,
        prefill_tokens_per_s=1000.0,
        decode_step_s=stats.decode_step_s,
        pool_tokens=CONFIG.num_blocks * CONFIG.block_size,
        max_num_seqs=2,
        max_num_batched_tokens=64,
    )
    pool = CONFIG.num_blocks * CONFIG.block_size
    assert costs.step_s(1, 0.1 * pool) == pytest.approx(0.014, rel=0.2)
    assert costs.step_s(2, 0.1 * pool) == pytest.approx(0.018, rel=0.2)
