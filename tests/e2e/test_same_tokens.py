"""Greedy tokens are the same, whichever way they are served: float32, the real model.

The reference is the implementation in `transformers`. Short outputs keep it affordable; each way
answers half of the 24 prompts, and nothing may be left over.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.config import EngineSection
from kvrelay.engine.request import Refusal, SamplingParams
from kvrelay.lab.local import Completion, LocalCluster
from kvrelay.router.config import RouterConfig
from tests.e2e.prompts import prompts
from tests.e2e.reference import greedy

pytestmark = pytest.mark.e2e

MAX_TOKENS = 12
HAND_OVER = RouterConfig(policy="round_robin")  # every prompt goes through the prefill worker


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer(smollm2_dir)


@pytest.fixture(scope="module")
def all_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    chosen = prompts(tokenizer)
    (one_token,) = [prompt for prompt in chosen if len(prompt) == 1]
    return [*chosen[::2], one_token]


@pytest.fixture(scope="module")
def sampling(tokenizer: Tokenizer) -> SamplingParams:
    return SamplingParams(
        max_tokens=MAX_TOKENS, temperature=0, stop_token_ids=tuple(tokenizer.eos_token_ids)
    )


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path, all_prompts: list[list[int]]) -> list[list[int]]:
    return greedy(smollm2_dir, torch.float32, all_prompts, MAX_TOKENS)


def check(answers: list[Completion], reference: list[list[int]]) -> None:
    for index, (answer, expected) in enumerate(zip(answers, reference, strict=True)):
        assert answer.failed is None, f"prompt {index}: {answer.failed}"
        assert answer.tokens == expected, f"prompt {index} parts from the reference"


def test_one_request_at_a_time_and_again_from_every_tier(
    smollm2_dir: Path,
    all_prompts: list[list[int]],
    sampling: SamplingParams,
    reference: list[list[int]],
    tmp_path: Path,
) -> None:
    """Computed; evicted and read from host memory; then left on disk to the next process."""
    engine = EngineSection(num_blocks=100)  # the longest prompt, and nothing beside it
    disk: dict[str, Any] = {
        "disk_path": str(tmp_path),
        "disk_bytes": 1 << 30,
        "disk_after_s": 0.0,
    }
    for host_bytes, source in ((1 << 30, "host"), (0, "disk")):
        with LocalCluster(
            smollm2_dir, prefill=0, engine=engine, nixl=True, host_bytes=host_bytes, **disk
        ) as cluster:
            if source == "host":
                check([cluster.submit(p, sampling).result(120) for p in all_prompts], reference)
                wait_until_on_disk(cluster)
                pool = cluster.workers["decode-0"].node.core.kv.pool
                cluster.run(lambda pool=pool: pool.evict(pool.block_hashes()))
            answers = [cluster.submit(p, sampling).result(120) for p in all_prompts]
            check(answers, reference)
            cluster.wait_idle()
            most = sum((len(prompt) - 1) // 16 * 16 for prompt in all_prompts)
            loaded = cluster.status().totals.cached_tokens_by_source[source]
            assert loaded > 0.7 * most, f"{loaded} of {most} tokens"
            wait_until_on_disk(cluster)
            assert cluster.audit()["clean"], cluster.audit()


def wait_until_on_disk(cluster: LocalCluster) -> None:
    node: Any = cluster.workers["decode-0"].node
    deadline = time.monotonic() + 60
    while not cluster.run(lambda: node.exchange.tiers.is_quiet):
        assert time.monotonic() < deadline, "the tiers never come to rest"
        time.sleep(0.05)


def test_one_pool_in_a_batch(
    smollm2_dir: Path,
    all_prompts: list[list[int]],
    sampling: SamplingParams,
    reference: list[list[int]],
) -> None:
    with LocalCluster(smollm2_dir, prefill=0) as cluster:
        check(cluster.generate(all_prompts, sampling), reference)
        cluster.wait_idle()


def test_one_pool_under_preemption(
    smollm2_dir: Path,
    all_prompts: list[list[int]],
    sampling: SamplingParams,
    reference: list[list[int]],
) -> None:
    crowd = [index for index, prompt in enumerate(all_prompts) if len(prompt) < 200]
    small = EngineSection(
        num_blocks=-(-(max(len(all_prompts[i]) for i in crowd) + 40) // 4) * 3 // 2,
        block_size=4,
        max_model_len=8192,
    )
    with LocalCluster(smollm2_dir, prefill=0, engine=small) as cluster:
        answers = cluster.generate([all_prompts[i] for i in crowd], sampling)
        check(answers, [reference[i] for i in crowd])
        too_long = cluster.submit(max(all_prompts, key=len), sampling).result(60).failed
        assert too_long is not None
        assert too_long.reason is Refusal.NEVER_FITS
        assert f"worker has {small.num_blocks}" in too_long.detail
        node = cluster.workers["decode-0"].node
        assert cluster.run(lambda: node.core.scheduler.num_preemptions) > 0
        cluster.wait_idle()


def test_two_pools(
    smollm2_dir: Path,
    all_prompts: list[list[int]],
    sampling: SamplingParams,
    reference: list[list[int]],
) -> None:
    engine = EngineSection(max_num_batched_tokens=64)  # the long prompt comes in many chunks
    with LocalCluster(smollm2_dir, engine=engine, router=HAND_OVER) as cluster:
        check(cluster.generate(all_prompts, sampling), reference)
        counters = cluster.run(lambda: cluster.workers["decode-0"].node.core.counters)
        assert counters["handoffs_done"] == len(all_prompts)
        assert counters.get("handoffs_failed", 0) == 0
        cluster.wait_idle()
