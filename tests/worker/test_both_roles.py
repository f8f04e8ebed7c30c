"""One worker computes prompts for others and decodes requests of its own, whatever its role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.messages import Preempted
from kvrelay.engine.request import Refusal, SamplingParams
from kvrelay.engine.sequence import SeqState
from kvrelay.engine.step import Step, StepDone
from kvrelay.kvtransfer.messages import KVReady
from kvrelay.prefill_worker.messages import Prefill
from kvrelay.worker.node import MEMORY_WAIT_S
from tests.worker.world import World, reference

PROMPT = list(range(1, 23))  # five full blocks and a partial one
LONG = list(range(30, 90))
TIMEOUT_S = 60.0


class Both(World):
    """Keeps the steps of every worker, and checks when routers are told of preemptions."""

    def __init__(self, **options: Any) -> None:
        self.steps: list[tuple[str, Step]] = []
        self.told: list[tuple[str, str]] = []  # (worker, request) of every Preempted
        super().__init__(**{"num_decode": 2, **options})

    def run(self, node: str, step: Step) -> StepDone:
        self.steps.append((node, step))
        return super().run(node, step)

    def perform(self, node: str, effects: list[Any]) -> None:
        num_before = len(self.to_router)
        super().perform(node, effects)
        for message in self.to_router[num_before:]:
            if isinstance(message, Preempted):
                assert (message.worker, message.epoch, message.attempt) == (node, 1, 0)
                seq = self.workers[node].core.seqs[message.request_id, 0]
                assert seq.state is SeqState.WAITING
                assert seq.block_ids == []
                self.told.append((node, message.request_id))

    def hand_over(
        self, name: str, prompt: list[int], max_tokens: int, *, computes: str, decodes: str
    ) -> None:
        """The prompt is computed by one worker and the output by another."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        work = (name, params, 0, "router", tuple(prompt), len(prompt), TIMEOUT_S)
        self.queue.append((computes, Prefill(*work, decode_to=decodes)))
        self.queue.append((decodes, Decode(*work, prefill_from=computes)))

    def decode_at(self, worker: str, name: str, prompt: list[int], max_tokens: int) -> None:
        """All of it is computed there."""
        self.submit(name, prompt, max_tokens, remote=False, decode=worker)

    def seqs_of(self, node: str) -> list[tuple[set[str], bool]]:
        """The requests in each step of a worker, and whether it has low priority."""
        return [
            ({seq.request_id.partition("#")[0] for seq in step.seqs}, step.low_priority)
            for where, step in self.steps
            if where == node
        ]

    def num_preemptions(self, node: str) -> int:
        return self.workers[node].core.scheduler.num_preemptions


def finished(world: Both) -> Both:
    """All that was asked for is done, and nothing is left."""
    world.drain()
    world.assert_idle()
    return world


@pytest.fixture
def world() -> Iterator[Both]:
    """Prompts come in several chunks."""
    world = Both(num_blocks=64, prefill_blocks=64, max_num_batched_tokens=8)
    yield world
    finished(world)


@pytest.mark.parametrize("worker", ["prefill", "decode"])
def test_a_worker_of_either_role_does_both_at_once(world: Both, worker: str) -> None:
    world.decode_at(worker, "own", PROMPT, 30)
    world.hand_over("other", LONG, 9, computes=worker, decodes="decode-1")
    finished(world)
    assert world.output("own", PROMPT) == reference(PROMPT, 30)
    assert world.output("other", LONG) == reference(LONG, 9)
    assert {"own", "other"} in [names for names, _ in world.seqs_of(worker)]
    other = world.workers["decode-1"].core.counters
    assert (other["handoffs_done"], other["tokens_scheduled"]) == (1, 8)


def test_two_workers_compute_for_each_other_and_decode_their_own(world: Both) -> None:
    names = ("decode", "decode-1")
    for here, there in (names, names[::-1]):
        world.decode_at(here, f"own of {here}", PROMPT, 20)
        world.hand_over(f"for {there}", LONG, 20, computes=here, decodes=there)
    finished(world)
    for each in names:
        assert world.output(f"own of {each}", PROMPT) == reference(PROMPT, 20)
        assert world.output(f"for {each}", LONG) == reference(LONG, 20)
        assert world.workers[each].core.counters["handoffs_done"] == 1


def test_small_pools_in_which_both_kinds_compete_finish_right() -> None:
    world = Both(num_blocks=14)
    prompts = {f"r{i}": [i + 1] * (5 + i) for i in range(9)}
    workers = ("decode", "decode-1")
    for i, (name, prompt) in enumerate(prompts.items()):
        here, there = workers[i % 2], workers[1 - i % 2]
        if i % 3:
            world.hand_over(name, prompt, 12, computes=here, decodes=there)
        else:
            world.decode_at(here, name, prompt, 12)
    finished(world)
    for name, prompt in prompts.items():
        assert world.output(name, prompt) == reference(prompt, 12)
    assert sum(world.num_preemptions(each) for each in workers) > 0


def test_a_step_of_prompts_for_others_has_low_priority_and_one_with_an_own_request_has_not(
    world: Both,
) -> None:
    world.hand_over("a", PROMPT, 4, computes="decode", decodes="decode-1")
    world.hand_over("b", LONG, 4, computes="decode", decodes="decode-1")
    finished(world)
    assert [low_priority for _, low_priority in world.seqs_of("decode")] == [True] * 11  # 82 tokens
    assert not any(low_priority for _, low_priority in world.seqs_of("decode-1"))  # they decode

    world.steps.clear()
    world.decode_at("decode", "own", [7] * 30, 20)
    world.hand_over("c", [*range(50, 80)], 4, computes="decode", decodes="decode-1")
    finished(world)
    steps = world.seqs_of("decode")
    assert steps[0] == ({"own"}, False)  # the prompt of an own request
    assert ({"own", "c"}, False) in steps
    assert all(low_priority == (names == {"c"}) for names, low_priority in steps)


def test_routers_are_told_once_of_each_preemption_when_it_happens() -> None:
    world = Both(num_blocks=14)
    prompts = {f"r{i}": [i + 1] * (5 + i) for i in range(6)}
    for name, prompt in prompts.items():
        world.decode_at("decode", name, prompt, 12)
    while world.step():
        assert len(world.told) == world.num_preemptions("decode")
    finished(world)
    assert len(world.told) > 0
    for name, prompt in prompts.items():
        assert world.output(name, prompt) == reference(prompt, 12)


def test_those_that_still_wait_for_memory_are_told_of_again_and_no_others() -> None:
    world = Both(num_blocks=14)
    for i in range(6):
        world.decode_at("decode", f"r{i}", [i + 1] * (5 + i), 12)
    seqs = world.decode.core.seqs
    again = 0
    while world.step():
        lost = [seq for seq in seqs.values() if seq.num_preemptions]
        num_told = len(world.told)
        world.tick(0.0)
        waiting = [seq.request_id for seq in lost if seq.state is SeqState.WAITING]
        assert sorted(world.told[num_told:]) == [("decode", name) for name in sorted(waiting)]
        again += len(waiting) < len(lost)
    assert again > 0, "none was admitted again before a tick"
    finished(world)


def test_a_prompt_for_another_worker_that_loses_its_memory_is_not_reported() -> None:
    world = Both(num_blocks=16, max_num_batched_tokens=8)
    world.decode_at("decode", "own", PROMPT, 40)
    while not world.output("own", PROMPT):
        world.step()
    world.hand_over("other", LONG[:36], 4, computes="decode", decodes="decode-1")
    finished(world)
    assert world.num_preemptions("decode") == 1
    assert world.told == []
    assert world.output("own", PROMPT) == reference(PROMPT, 40)
    assert world.output("other", LONG[:36]) == reference(LONG[:36], 4)


@pytest.mark.parametrize("worker", ["prefill", "decode"])
def test_what_a_deadline_has_ended_is_told_by_what_was_asked_for(world: Both, worker: str) -> None:
    world.lost = (KVReady,)
    world.decode_at(worker, "own", PROMPT, 30)
    world.hand_over("other", LONG, 9, computes=worker, decodes="decode-1")
    for _ in range(5):
        world.step()
    assert set(world.workers[worker].core.seqs) == {("own", 0), ("other", 0)}
    world.tick(TIMEOUT_S)
    finished(world)
    told = {(each.worker, each.request_id): each for each in world.refused()}
    assert {each.reason for each in told.values()} == {Refusal.DEADLINE}
    assert {key: each.detail for key, each in told.items()} == {
        (worker, "own"): f"not finished by {worker} before the deadline",
        (worker, "other"): f"not computed by {worker} before the deadline",
        ("decode-1", "other"): "not finished by decode-1 before the deadline",
    }
    assert Counter(each.request_id for each in world.refused()) == {"own": 1, "other": 2}


def test_one_that_has_waited_for_its_first_blocks_is_told_of_too() -> None:
    world = Both(num_blocks=14)
    world.decode_at("decode", "large", LONG[:40], 8)  # 12 of the blocks at its end
    world.decode_at("decode", "next", PROMPT, 4)
    while len(world.decode.core.seqs) < 2:
        world.step()
    world.tick(MEMORY_WAIT_S / 2)
    assert world.told == []
    world.tick(MEMORY_WAIT_S)
    assert world.told == [("decode", "next")]
    finished(world)
    assert world.output("next", PROMPT) == reference(PROMPT, 4)
