"""How prompts that are computed at the same time share a step."""

from __future__ import annotations

from engine.block_hash import UNSALTED, BlockChain
from engine.config import WorkerConfig
from engine.kv_cache_manager import KVCacheManager
from engine.request import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.stats import Role
from engine.step import Sampled, StepDone
from engine.tier import DEFAULT_RETENTION

BUDGET = 64


def make(*lengths: int) -> tuple[Scheduler, list[Sequence]]:
    config = WorkerConfig(
        "w", Role.DECODE, 1, 256, 4, 32, 1024, b"f", max_num_batched_tokens=BUDGET
    )
    scheduler = Scheduler(config, KVCacheManager(config.num_blocks, config.block_size))
    seqs = []
    for number, length in enumerate(lengths):
        tokens = [number * 1000 + i for i in range(length)]
        chain = BlockChain(b"f", UNSALTED, 4)
        sampling = SamplingParams(max_tokens=50)
        seqs.append(
            Sequence(
                f"r{number}",
                1,
                "router",
                tokens,
                length,
                sampling,
                1e9,
                0.0,
                chain,
                DEFAULT_RETENTION,
            )
        )
        scheduler.add(seqs[-1])
    scheduler.admit_waiting(0.0, lambda seq: False)
    return scheduler, seqs


def step(scheduler: Scheduler, prompt_budget: int = BUDGET) -> dict[str, int]:
    """Tokens fed, by request; the step is done."""
    planned = scheduler.schedule(prompt_budget)
    assert planned is not None
    sampled = [Sampled(7) if share.sample else None for share in planned.seqs]
    scheduler.finish_step(StepDone(planned.step_id, sampled))
    return {share.request_id.split("#")[0]: len(share.tokens) for share in planned.seqs}


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one() -> None:
    scheduler, _ = make(400, 20)
    assert step(scheduler) == {"r0": 44, "r1": 20}


def test_the_oldest_prompt_goes_on_however_many_short_ones_come() -> None:
    scheduler, _ = make(400, 30, 30, 30)
    assert step(scheduler) == {"r0": 32, "r1": 30, "r2": 2}
    assert step(scheduler)["r0"] == 32  # r1 decodes; half of the other 63


def test_prompts_beside_decodes_share_the_smaller_budget() -> None:
    scheduler, _ = make(4, 300, 6)
    assert step(scheduler) == {"r0": 4, "r1": 54, "r2": 6}
    assert step(scheduler, prompt_budget=16) == {"r0": 1, "r2": 1, "r1": 16}


def test_the_budget_is_never_exceeded_and_always_used() -> None:
    scheduler, seqs = make(100, 90, 3, 200, 17)
    while any(len(s.tokens) - s.num_computed > 1 for s in seqs):
        left = sum(len(s.tokens) - s.num_computed for s in seqs)
        assert sum(step(scheduler).values()) == min(BUDGET, left)
