"""In which order prompts are computed, and how those that wait share a step."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.engine.cost import PROMPT_SHAPE, TOKENS_UNIT, FittedCost
from kvrelay.engine.kv.cache_manager import KVCacheManager
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.sequence import SeqState, Sequence
from kvrelay.engine.step import Sampled, StepDone
from tests.engine.configs import worker_config
from tests.engine.sequences import sequence

BUDGET = 64


def priced(pass_s: float = 0.0, token_s: float = 0.0) -> FittedCost:
    """What is known of prompts: each pass takes `pass_s`, and `token_s` more for each token."""
    cost = FittedCost(PROMPT_SHAPE)
    cost.weights = [pass_s, token_s * TOKENS_UNIT, 0.0, 0.0]
    return cost


UNKNOWN = priced()
PER_TOKEN = priced(token_s=0.01)


class Prompts:
    """A scheduler and the clock; steps are done as soon as they are planned."""

    def __init__(self, *lengths: int, **limits: Any) -> None:
        limits = {"max_num_batched_tokens": BUDGET, **limits}
        config = worker_config(num_blocks=1024, block_size=4, **limits)
        self.now = 0.0
        self.scheduler = Scheduler(config, KVCacheManager(config.num_blocks, config.block_size))
        self.seqs: list[Sequence] = []
        for length in lengths:
            self.come(length)

    def come(self, length: int, max_tokens: int = 50) -> Sequence:
        number = len(self.seqs)
        seq = sequence(
            [number * 10_000 + i for i in range(length)],
            request_id=f"r{number}",
            sampling=SamplingParams(max_tokens=max_tokens),
            arrived_at=self.now,
        )
        self.seqs.append(seq)
        self.scheduler.add(seq)
        return seq

    def step(
        self,
        cost: FittedCost = UNKNOWN,
        prompt_budget: int = BUDGET,
        decode_s: float = 0.0,
        apart: bool = False,
    ) -> dict[str, int]:
        """Counts the scheduled tokens by request."""
        token_s = cost.weights[1] / TOKENS_UNIT
        self.scheduler.admit_waiting(self.now, lambda seq: False, token_s)
        planned = self.scheduler.schedule(
            self.now, lambda _: prompt_budget, cost, decode_s, (), token_s, lambda *_: apart
        )
        assert planned is not None
        sampled = [Sampled(7) if share.sample else None for share in planned.seqs]
        for seq, _ in self.scheduler.finish_step(StepDone(planned.step_id, sampled)):
            if seq.num_output_tokens >= seq.sampling.max_tokens:
                self.scheduler.remove(seq)
        return {share.request_id.split("#")[0]: len(share.tokens) for share in planned.seqs}


def test_while_nothing_is_measured_prompts_go_in_the_order_in_which_they_came() -> None:
    prompts = Prompts(100, 20, 3)
    assert prompts.step() == {"r0": 64}
    assert prompts.step() == {"r0": 36, "r1": 20, "r2": 3}


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one() -> None:
    prompts = Prompts(400)
    assert prompts.step(PER_TOKEN) == {"r0": 64}
    prompts.come(20)
    assert "r1" in prompts.step(PER_TOKEN)


def test_the_shortest_prompt_goes_first_and_what_is_left_counts() -> None:
    prompts = Prompts(50, 20, 30)
    order = []
    while any(seq.num_missing > 1 for seq in prompts.seqs):
        order += [name for name, count in prompts.step(PER_TOKEN).items() if count > 1]
    assert order == ["r1", "r2", "r0"]
    prompts = Prompts(100)
    prompts.step(PER_TOKEN)  # 36 are left
    prompts.come(40)
    assert list(prompts.step(PER_TOKEN)) == ["r0"]


def test_a_long_prompt_is_not_held_up_for_ever_by_short_ones() -> None:
    prompts = Prompts(600)
    long = prompts.seqs[0]
    own_s = 600 * 0.01
    while long.num_missing > 1:
        prompts.come(30, max_tokens=1)  # as many as are computed
        fed = prompts.step(PER_TOKEN)
        prompts.now += sum(fed.values()) * 0.01
        assert prompts.now < 12 * own_s, "it starves"
    assert prompts.now > 2 * own_s, "the short ones went first"


def test_a_stream_that_has_begun_elsewhere_goes_before_prompts_that_have_not() -> None:
    prompts = Prompts(20)
    resumed = prompts.come(60)
    resumed.num_prompt_tokens = 40  # the rest are tokens that a worker that died has sent
    prompts.come(10)
    order = []
    while any(seq.num_missing > 1 for seq in prompts.seqs):
        order += [name for name, count in prompts.step(PER_TOKEN).items() if count > 1]
    assert order == ["r1", "r2", "r0"]


def test_short_prompts_go_first_whatever_a_fit_says_of_a_token() -> None:
    """Where all passes have equally many tokens, it cannot tell a token from a pass."""
    prompts = Prompts(400, 20)
    prompts.scheduler.admit_waiting(0.0, lambda seq: False, 0.01)
    planned = prompts.scheduler.schedule(0.0, lambda _: BUDGET, priced(pass_s=0.6), 0.0, (), 0.01)
    assert planned is not None
    assert planned.seqs[0].request_id == "r1#1"


def test_of_equal_prompts_the_one_that_has_waited_longer_goes_first() -> None:
    prompts = Prompts(64)
    prompts.now += 0.5
    prompts.come(64)
    prompts.scheduler.running.reverse()
    assert list(prompts.step(PER_TOKEN)) == ["r0"]


@pytest.mark.parametrize(("pass_s", "together"), [(0.0, False), (10.0, True)])
def test_prompts_share_a_pass_where_a_pass_costs_more_than_waiting_for_each_other(
    pass_s: float, together: bool
) -> None:
    prompts = Prompts(20, 20, 20)
    fed = prompts.step(priced(pass_s, token_s=0.01))
    assert fed == ({"r0": 20, "r1": 20, "r2": 20} if together else {"r0": 20})


@pytest.mark.parametrize(("decode_s", "together"), [(0.0, False), (10.0, True)])
def test_a_pass_beside_decodes_costs_what_they_take(decode_s: float, together: bool) -> None:
    """Else prompts that come at once beside a decode are fed one a step."""
    prompts = Prompts(4)
    prompts.step()
    for _ in range(3):
        prompts.come(20)
    fed = prompts.step(PER_TOKEN, decode_s=decode_s)
    assert fed == {"r0": 1, "r1": 20} | ({"r2": 20, "r3": 20} if together else {})


def test_what_joins_a_pass_gets_no_more_than_the_budget_leaves() -> None:
    prompts = Prompts(20, 30, 40)
    assert prompts.step(priced(10.0, token_s=0.01)) == {"r0": 20, "r1": 30, "r2": 14}


@pytest.mark.parametrize("cost", [UNKNOWN, PER_TOKEN, priced(10.0, 0.01)])
def test_prompts_beside_decodes_share_the_smaller_budget(cost: FittedCost) -> None:
    prompts = Prompts(4)
    assert prompts.step(cost) == {"r0": 4}
    prompts.come(300)
    assert prompts.step(cost, prompt_budget=16) == {"r0": 1, "r1": 16}
    assert prompts.step(cost, prompt_budget=1000) == {"r0": 1, "r1": BUDGET - 1}


@pytest.mark.parametrize("cost", [UNKNOWN, priced(1e6, 1e-9)])
def test_the_budget_is_never_exceeded_and_always_used(cost: FittedCost) -> None:
    prompts = Prompts(100, 90, 3, 200, 17)
    while any(seq.num_missing > 1 for seq in prompts.seqs):
        left = sum(seq.num_missing for seq in prompts.seqs)
        assert sum(prompts.step(cost).values()) == min(BUDGET, left)


def test_decodes_are_in_every_step_whatever_prompts_there_are() -> None:
    prompts = Prompts(3, 5)
    prompts.step()
    prompts.come(500)
    while prompts.seqs[2].num_missing > 1:
        fed = prompts.step(PER_TOKEN)
        assert (fed["r0"], fed["r1"]) == (1, 1)
    assert all(seq.state is SeqState.RUNNING for seq in prompts.seqs)


def streaming(**limits: Any) -> Prompts:
    """The stream r0, and a prompt of three passes beside it."""
    prompts = Prompts(3, **limits)
    prompts.step()
    prompts.come(150)
    return prompts


def test_prompts_are_computed_without_the_decodes_where_that_is_better() -> None:
    prompts = streaming()
    assert [prompts.step(apart=True) for _ in range(3)] == [{"r1": 64}, {"r1": 64}, {"r1": 22}]
    assert prompts.step(apart=True) == {"r0": 1, "r1": 1}


def test_decodes_are_left_out_for_half_a_second_at_most() -> None:
    prompts = streaming()
    assert prompts.step(apart=True) == {"r1": 64}
    prompts.now += 0.6
    assert prompts.step(apart=True) == {"r0": 1, "r1": 63}
    assert prompts.step(apart=True) == {"r1": 23}


def test_where_a_time_between_tokens_is_aimed_at_they_are_left_out_of_one_step_in_a_row() -> None:
    prompts = streaming(itl_target_ms=50.0)
    fed = [prompts.step(prompt_budget=40, apart=True) for _ in range(3)]
    assert fed == [{"r1": 40}, {"r0": 1, "r1": 40}, {"r1": 40}]


def test_a_prompt_of_which_one_token_is_missing_is_not_left_out() -> None:
    prompts = Prompts(3)
    prompts.step()
    prompts.come(1)
    prompts.come(150)
    assert prompts.step(apart=True) == {"r1": 1, "r2": 63}
