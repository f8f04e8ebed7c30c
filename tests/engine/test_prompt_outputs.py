"""What a prompt gives is taken once, also if its blocks are taken away before it is computed."""

from __future__ import annotations

import pytest
from msgspec import structs

from kvrelay.engine.cost import PROMPT_SHAPE, FittedCost
from kvrelay.engine.kv.cache_manager import KVCacheManager
from kvrelay.engine.request import PromptOutputs, SamplingParams, TokenLogprobs
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.step import Sampled, ScheduledSeq, StepDone
from tests.engine.configs import worker_config
from tests.engine.sequences import sequence

BLOCK, NUM_BLOCKS, LENGTH = 4, 32, 61
WHOLE = tuple(TokenLogprobs(-float(at)) for at in range(LENGTH - 1))


class Computed:
    """A scheduler with one prompt that gives outputs. Each token's are its position, and their sum
    stands for the embedding."""

    def __init__(self) -> None:
        config = worker_config(num_blocks=NUM_BLOCKS, block_size=BLOCK)
        self.kv = KVCacheManager(config.num_blocks, config.block_size)
        self.scheduler = Scheduler(config, self.kv)
        sampling = SamplingParams(max_tokens=4, prompt_logprobs=0)
        self.seq = sequence(list(range(LENGTH)), sampling=sampling, block_size=BLOCK)
        self.scheduler.add(self.seq)
        self.admit()

    def admit(self) -> None:
        self.scheduler.admit_waiting(0.0, lambda seq: False, 0.0)

    def step(self, budget: int) -> int:
        """The first position that is computed. budget: as beside decodes and other prompts."""
        config = self.scheduler.config
        self.scheduler.config = structs.replace(config, max_num_batched_tokens=budget)
        step = self.scheduler.schedule(0.0, lambda _: budget, FittedCost(PROMPT_SHAPE), 0.0)
        assert step is not None
        (share,) = step.seqs
        sampled = [Sampled(7) if share.sample else None]
        prompts = {} if share.outputs_from is None else {0: outputs_of(share)}
        self.scheduler.finish_step(StepDone(step.step_id, sampled, prompts=prompts))
        return share.start

    def preempt(self, *, evict: bool) -> None:
        self.scheduler.preempt(self.seq)
        if evict:  # others need the memory
            blocks = self.kv.pool.allocate(NUM_BLOCKS)
            assert blocks is not None
            self.kv.pool.release(blocks)
        self.admit()


def outputs_of(share: ScheduledSeq) -> PromptOutputs:
    positions = share.output_positions
    if not positions:
        return PromptOutputs((), share.pooled)
    told = [TokenLogprobs(-float(at)) for at in positions if at + 1 < LENGTH]
    total = sum(positions) + int.from_bytes(share.pooled, "little")
    return PromptOutputs(tuple(told), total.to_bytes(4, "little"))


@pytest.mark.parametrize("evict", [False, True])
@pytest.mark.parametrize("before", [8, 30, 60])
@pytest.mark.parametrize("after", [3, 8, 30, 64])
def test_a_prompt_that_is_computed_again_gives_each_output_once(
    before: int, after: int, evict: bool
) -> None:
    computed = Computed()
    assert computed.step(before) == 0
    computed.preempt(evict=evict)
    cached = 0 if evict else before // BLOCK * BLOCK
    assert computed.step(after) == cached
    while not computed.seq.num_output_tokens:
        computed.step(after)
    outputs = computed.seq.prompt_outputs
    assert outputs.logprobs == WHOLE
    assert int.from_bytes(outputs.embedding, "little") == sum(range(LENGTH))
