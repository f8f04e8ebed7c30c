"""Greedy tokens are the same, whichever way they are served: float32, the real models.

The reference is the implementation in `transformers`. Short outputs keep it affordable; each way
answers half of the 24 prompts, and nothing may be left over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.engine.config import EngineSection
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.request import Refusal, SamplingParams
from kvrelay.router.config import RouterConfig
from tests.e2e.prompts import blocks_for, greedy, prompts, tokenizer_of
from tests.e2e.serving import wait_until
from tests.kvtransfer.tiers.quiet import is_quiet
from tests.local.test_local_tiers import load_all
from tests.local.test_migration import appoint, chase
from tests.local.test_migration import at_once as at_once
from tests.support.local import Completion, LocalCluster

# On a machine that does much beside it, the reference alone takes minutes.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MAX_TOKENS = 12
ROUNDS = 8  # whether two of the crowd meet in a step depends on how fast the machine is
HAND_OVER = RouterConfig(policy="round_robin")  # every prompt goes through the prefill worker


@dataclass(frozen=True)
class Asked:
    prompts: list[list[int]]
    sampling: SamplingParams
    expected: list[list[int]]

    def check(self, answers: list[Completion]) -> None:
        for index, (answer, expected) in enumerate(zip(answers, self.expected, strict=True)):
            assert answer.failed is None, f"prompt {index}: {answer.failed}"
            assert answer.tokens == expected, f"prompt {index} parts from the reference"


@pytest.fixture(scope="module")
def asked(real_model_dir: Path) -> Asked:
    tokenizer = tokenizer_of(real_model_dir)
    every = prompts(tokenizer)
    chosen = [*every[::2], *(prompt for prompt in every if len(prompt) == 1)]
    ends = tuple(tokenizer.eos_token_ids)
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, stop_token_ids=ends)
    return Asked(chosen, sampling, greedy(real_model_dir, torch.float32, chosen, MAX_TOKENS))


def test_one_request_at_a_time_and_again_from_every_tier(
    real_model_dir: Path, asked: Asked, tmp_path: Path
) -> None:
    """Computed; evicted and read from host memory; then left on disk to the next process."""
    # The longest prompt, and nothing beside it.
    engine = EngineSection(num_blocks=blocks_for(real_model_dir, 1600))
    disk: dict[str, Any] = {
        "disk_path": str(tmp_path),
        "disk_bytes": 1 << 30,
        "disk_after_s": 0.0,
    }
    for host_bytes, source in ((1 << 30, "host"), (0, "disk")):
        with LocalCluster(
            real_model_dir, prefill=0, engine=engine, host_bytes=host_bytes, **disk
        ) as cluster:
            load_all(cluster)  # a stall of the first read would let it compute all others
            if source == "host":
                answers = []
                for prompt in asked.prompts:  # each is copied down before it can be evicted
                    answers.append(cluster.submit(prompt, asked.sampling).result(120))
                    wait_until_on_disk(cluster)
                asked.check(answers)
                pool = cluster.workers["decode-0"].node.core.kv.pool
                cluster.run(lambda pool=pool: pool.evict(pool.block_hashes()))
            answers = [cluster.submit(p, asked.sampling).result(120) for p in asked.prompts]
            asked.check(answers)
            cluster.wait_idle()
            most = sum((len(prompt) - 1) // 16 * 16 for prompt in asked.prompts)
            loaded = cluster.status().totals.cached_tokens_by_source[source]
            assert loaded > 0.7 * most, f"{loaded} of {most} tokens"
            wait_until_on_disk(cluster)
            assert cluster.audit()["clean"], cluster.audit()


def wait_until_on_disk(cluster: LocalCluster) -> None:
    node: Any = cluster.workers["decode-0"].node
    wait_until(
        lambda: cluster.run(lambda: is_quiet(node.exchange.tiers, node.core.now)),
        60,
        "they never rest",
    )


def test_one_pool_in_a_batch(real_model_dir: Path, asked: Asked) -> None:
    with LocalCluster(real_model_dir, prefill=0) as cluster:
        asked.check(cluster.generate(asked.prompts, asked.sampling))
        cluster.wait_idle()


def test_one_pool_under_preemption(real_model_dir: Path, asked: Asked) -> None:
    crowd = [index for index, prompt in enumerate(asked.prompts) if len(prompt) < 200]
    groups = len(read_config(real_model_dir).kv_groups())
    small = EngineSection(
        num_blocks=-(-(max(len(asked.prompts[i]) for i in crowd) + 40) // 4) * 3 // 2 * groups,
        block_size=4,
        max_model_len=8192,
    )
    with LocalCluster(real_model_dir, prefill=0, engine=small) as cluster:
        node = cluster.workers["decode-0"].node
        for _ in range(ROUNDS):
            answers = cluster.generate([asked.prompts[i] for i in crowd], asked.sampling)
            replace(asked, expected=[asked.expected[i] for i in crowd]).check(answers)
            if cluster.run(lambda: node.core.scheduler.num_preemptions):
                break
        else:
            pytest.fail(f"nothing was preempted in {ROUNDS} rounds")
        too_long = cluster.submit(max(asked.prompts, key=len), asked.sampling).result(60).failed
        assert too_long is not None
        assert too_long.reason is Refusal.NEVER_FITS
        assert f"worker has {small.num_blocks}" in too_long.detail
        cluster.wait_idle()


def test_two_pools(real_model_dir: Path, asked: Asked) -> None:
    engine = EngineSection(max_num_batched_tokens=64)  # the long prompt comes in many chunks
    with LocalCluster(real_model_dir, engine=engine, router=HAND_OVER) as cluster:
        asked.check(cluster.generate(asked.prompts, asked.sampling))
        counters = cluster.run(lambda: cluster.workers["decode-0"].node.core.counters)
        assert counters["handoffs_done"] == len(asked.prompts)
        assert counters.get("handoffs_failed", 0) == 0
        cluster.wait_idle()


def test_requests_that_move_between_workers_and_outlive_one(
    real_model_dir: Path, asked: Asked, at_once: None
) -> None:
    """They are as at rest, greedy and drawn; they are longer than others, to move several times."""
    chosen = [index for index, prompt in enumerate(asked.prompts) if len(prompt) < 200][:6]
    kinds = [
        replace(asked.sampling, max_tokens=60, temperature=heat, seed=3, stop_token_ids=())
        for heat in (0.0, 0.8)
    ]
    requests = [(asked.prompts[index], kind) for index in chosen for kind in kinds]
    with LocalCluster(real_model_dir, prefill=0, decode=2) as cluster:
        at_rest = [each.result(120) for each in [cluster.submit(*each) for each in requests]]
        moved = chase(cluster, [cluster.submit(*each) for each in requests], 120.0)
        assert cluster.status().totals.migrations >= len(requests)
        cluster.wait_idle()
        cluster.run(partial(appoint, cluster, "decode-0", sorted(cluster.workers)))
        futures = [cluster.submit(*each) for each in requests]
        begun = cluster.status().totals.output_tokens + 5 * len(requests)
        wait_until(lambda: cluster.status().totals.output_tokens >= begun)
        cluster.kill("decode-0")
        left = [each.result(120) for each in futures]
        assert cluster.status().totals.retries
        cluster.wait_idle()
    assert [answer.failed for answer in [*at_rest, *moved, *left]] == [None] * 3 * len(requests)
    for others in (moved, left):
        assert [answer.tokens for answer in others] == [answer.tokens for answer in at_rest]
    for index, answer in zip(chosen, at_rest[::2], strict=True):
        expected = asked.expected[index]
        assert answer.tokens[: len(expected)] == expected
