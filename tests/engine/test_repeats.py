"""Decode steps in a row that a worker hands out as one: the same tokens, blocks and ends."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.kv.events import KVEvents
from kvrelay.engine.messages import Abort, TokenDeltas
from kvrelay.engine.request import FinishReason, SamplingParams
from kvrelay.engine.scheduling.selection import followers
from kvrelay.engine.step import Sampled, Step, StepDone
from kvrelay.prefill_worker.messages import Prefill
from tests.engine.configs import worker_config
from tests.engine.sequences import sequence
from tests.worker.world import BLOCK_SIZE, World, next_token, reference

PROMPTS = {f"r{i}": [i + 1] * (5 + 3 * i) for i in range(5)}
LENGTHS = {"r0": 30, "r1": 3, "r2": 17, "r3": 2, "r4": 22}


class Repeating(World):
    """Its executor runs up to `most` passes of a step in a row; `passes`: how many it ran."""

    def __init__(self, most: int = 1000, **options: Any) -> None:
        self.most = most
        self.passes: list[int] = []
        super().__init__(**options)

    def run(self, node: str, step: Step) -> StepDone:
        done = super().run(node, step)
        limit = min(step.repeats, self.most)
        more: list[list[int]] = [[] for _ in step.seqs]
        self.check(step)
        while len(more[0]) + 1 < limit and not self.stopped(step, done, more):
            for seq, sampled, tokens in zip(step.seqs, done.sampled, more, strict=True):
                assert sampled is not None
                last = tokens[-1] if tokens else sampled.token
                self.write(node, seq.block_ids, seq.start + 1 + len(tokens), last)
                tokens.append(next_token([*seq.context, sampled.token, *tokens]))
        self.passes.append(len(more[0]) + 1)
        sampled = [
            None if first is None else Sampled(first.token, None, tuple(tokens))
            for first, tokens in zip(done.sampled, more, strict=True)
        ]
        return StepDone(done.step_id, sampled, done.checksums, 0.01 * self.passes[-1])

    def stopped(self, step: Step, done: StepDone, more: list[list[int]]) -> bool:
        last = [t[-1] if t else s.token for s, t in zip(done.sampled, more, strict=True) if s]
        return any(
            token in seq.sampling.stop_token_ids for seq, token in zip(step.seqs, last, strict=True)
        )

    def write(self, node: str, block_ids: list[int], position: int, token: int) -> None:
        self.slots[node][block_ids[position // BLOCK_SIZE]][position % BLOCK_SIZE] = token

    def check(self, step: Step) -> None:
        """What a step that may be repeated promises."""
        assert step.repeats >= 1
        if step.repeats == 1:
            return
        assert step.checksum_blocks == []
        for seq in step.seqs:
            assert (len(seq.tokens), seq.sample) == (1, True)
            end = seq.start + step.repeats
            assert end // BLOCK_SIZE == seq.start // BLOCK_SIZE, "it would fill a block"
            assert len(seq.block_ids) * BLOCK_SIZE > end, "its last token has no place"
            num_output = len(seq.context) - seq.num_prompt_tokens
            assert num_output + step.repeats <= seq.sampling.max_tokens


def serve(world: World, *, remote: bool, **sampling: Any) -> World:
    for name, prompt in PROMPTS.items():
        world.submit(name, prompt, LENGTHS[name], remote=remote, sampling=sampling)
    world.drain()
    world.assert_idle()
    return world


def cached(world: World) -> dict[str, set[bytes]]:
    return {name: set(worker.core.kv.pool.block_hashes()) for name, worker in world.workers.items()}


def ends(world: World) -> dict[str, FinishReason]:
    deltas = [d for m in world.to_router if isinstance(m, TokenDeltas) for d in m.deltas]
    found = [(d.request_id, d.finish) for d in deltas if d.finish is not None]
    assert len(found) == len(dict(found)), "a request ended twice"
    return dict(found)


def totals(world: World) -> Counter[str]:
    names = ("steps", "tokens_scheduled")
    return Counter({name: world.decode.core.counters[name] for name in names})


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("most", [2, 3, 1000])
def test_repeats_give_the_same_tokens_names_and_ends_as_single_steps(
    remote: bool, most: int
) -> None:
    single = serve(World(num_blocks=100), remote=remote)
    many = serve(Repeating(most, num_blocks=100), remote=remote)
    assert max(many.passes) == min(most, BLOCK_SIZE - 1)
    for name, prompt in PROMPTS.items():
        assert many.output(name, prompt) == reference(prompt, LENGTHS[name])
    assert cached(many) == cached(single)
    assert ends(many) == ends(single) == dict.fromkeys(PROMPTS, FinishReason.LENGTH)
    assert totals(many)["tokens_scheduled"] == totals(single)["tokens_scheduled"]


def test_a_repeat_ends_with_the_first_stop_token_of_anybody() -> None:
    stops = {"stop_token_ids": tuple(range(2, 12))}
    single = serve(World(num_blocks=100), remote=False, **stops)
    many = serve(Repeating(num_blocks=100), remote=False, **stops)
    assert max(many.passes) > 1
    assert set(ends(many).values()) == {FinishReason.STOP, FinishReason.LENGTH}
    assert ends(many) == ends(single)
    for name, prompt in PROMPTS.items():
        assert many.output(name, prompt) == single.output(name, prompt)
    assert cached(many) == cached(single)


@pytest.mark.parametrize(
    ("sampling", "is_repeated"), [({"repetition_penalty": 1.05}, True), ({"logprobs": 1}, False)]
)
def test_what_the_kernels_draw_is_repeated_with_penalties_too(sampling, is_repeated) -> None:
    world = Repeating(num_blocks=100)
    world.submit("plain", [1] * BLOCK_SIZE, 12, remote=False)
    world.submit("other", [2] * BLOCK_SIZE, 12, remote=False, sampling=sampling)
    world.step()
    world.drain()
    assert (max(world.passes) > 1) == is_repeated
    assert world.output("other", [2] * BLOCK_SIZE) == reference([2] * BLOCK_SIZE, 12)


def test_what_the_executor_keeps_of_a_sequence_is_in_all_its_steps() -> None:
    """Whatever becomes of its blocks."""
    steps = Counter[str]()

    class Keeping(World):
        def run(self, node: str, step: Step) -> StepDone:
            for seq in step.seqs:
                steps[seq.request_id + node] += 1
                seq.kept["steps"] = seq.kept.get("steps", 0) + 1
                assert seq.kept["steps"] == steps[seq.request_id + node]
            return super().run(node, step)

    world = Keeping(num_blocks=14, prefill_blocks=10)
    for number in range(8):
        world.submit(f"r{number}", [number + 1] * 9, 12, remote=number % 3 == 0)
    world.drain()
    assert world.decode.core.scheduler.num_preemptions > 0
    assert max(steps.values()) == 12


class Fickle(Repeating):
    """Its executor runs as many of the passes as it likes."""

    def __init__(self, rng: Random, **options: Any) -> None:
        self.rng = rng
        super().__init__(**options)

    def run(self, node: str, step: Step) -> StepDone:
        self.most = self.rng.randint(1, 4)
        return super().run(node, step)


def test_repeats_of_any_length_in_a_small_pool_are_preempted_and_finish_right() -> None:
    assert sum(num_preemptions(seed) for seed in range(8)) > 0


def num_preemptions(seed: int) -> int:
    rng = Random(seed)
    world = Fickle(rng, num_blocks=14, prefill_blocks=10)
    prompts = {f"r{i}": [i + 1] * rng.randint(3, 12) for i in range(8)}
    for name, prompt in prompts.items():
        world.submit(name, prompt, 12, remote=rng.random() < 0.3)
        for _ in range(rng.randint(0, 6)):
            world.step()
    world.drain()
    assert max(world.passes) > 1
    for name, prompt in prompts.items():
        assert world.output(name, prompt) == reference(prompt, 12)
    world.assert_idle()
    return world.decode.core.scheduler.num_preemptions


def test_a_step_with_a_prompt_in_it_is_not_repeated() -> None:
    world = Repeating(num_blocks=100, max_num_batched_tokens=8)
    world.submit("a", [1] * 4, 30, remote=False)
    world.step()
    world.step()
    world.submit("b", [2] * 40, 4, remote=False)
    world.passes.clear()
    while world.output("b", [2] * 40) == []:
        world.step()
    assert set(world.passes) <= {1, 2, 3}
    assert world.passes[-5:] == [1] * 5, "its chunks, a decode beside each"
    world.drain()
    world.assert_idle()


def test_a_first_token_is_told_before_any_that_follow_it() -> None:
    """All of the prompt but one token is cached, so that its first pass looks like a decode."""
    world = Repeating(num_blocks=100)
    prompt = [3] * (2 * BLOCK_SIZE + 1)
    world.submit("a", prompt, 2, remote=False)
    world.drain()
    world.submit("b", prompt, 12, remote=False)
    world.passes.clear()
    while world.output("b", prompt) == []:
        assert world.step()
    assert world.output("b", prompt) == reference(prompt, 1)
    world.drain()
    assert max(world.passes) > 1
    world.assert_idle()


def test_a_prefill_worker_samples_one_token_however_much_of_the_prompt_it_has() -> None:
    """It is asked to go on with an answer, all but the last token of which it has the KV of."""
    world = Repeating(num_blocks=100)
    prompt = [3] * (2 * BLOCK_SIZE)
    tokens = [*prompt, *reference(prompt, 1)]
    world.submit("a", tokens, 2, remote=True)
    world.drain()
    params = SamplingParams(max_tokens=12, temperature=0)
    work = ("b", params, 2, "router", tuple(tokens), len(prompt), 60.0)
    world.queue.append(("prefill", Prefill(*work, decode_to="decode")))
    world.queue.append(("decode", Decode(*work, prefill_from="prefill")))
    world.assert_finishes("b", tokens, 11)
    world.assert_idle()


def test_nothing_is_sealed_within_a_repeat_and_everything_at_its_end() -> None:
    world = Repeating(num_blocks=100)
    prompt = [3] * (2 * BLOCK_SIZE + 1)
    world.submit("a", prompt, 12, remote=False)
    sealed: list[int] = []
    world.workers["decode"].core.publisher.routers.append("router")
    while world.step():
        events = [m for m in world.to_router if isinstance(m, KVEvents)]
        sealed.append(sum(len(event.stored) for event in events))
    num_tokens = len(prompt) + 12 - 1  # the KV of the last token is never computed
    assert sealed[-1] == num_tokens // BLOCK_SIZE
    assert all(later - sooner <= 1 for sooner, later in pairwise(sealed[1:]))
    world.assert_idle()


def test_what_is_aborted_while_it_is_repeated_gives_its_blocks_back_after_it() -> None:
    world = Repeating(num_blocks=100)
    world.submit("a", [1] * 5, 30, remote=False)
    world.submit("b", [2] * 5, 30, remote=False)
    while max(world.passes, default=0) < 2:
        assert world.step()
    world.deliver("decode", Abort("a", 0))
    assert not world.decode.core.kv.pool.is_idle()
    world.assert_finishes("b", [2] * 5, 30)
    world.assert_idle()


def test_the_context_ends_a_repeat_where_it_ends_the_request() -> None:
    limit = 10 * BLOCK_SIZE - 1
    world = Repeating(num_blocks=100, max_model_len=limit)
    prompt = [5] * (limit - 3)
    tokens, sampling = tuple(prompt), SamplingParams(max_tokens=50, temperature=0)
    world.deliver("decode", Decode("a", sampling, 0, "router", tokens, len(prompt), 60.0))
    world.assert_finishes("a", prompt, 3)
    assert ends(world) == {"a": FinishReason.LENGTH}
    world.assert_idle()


@pytest.mark.parametrize(
    ("min_tokens", "is_in_step", "is_followed"),
    [
        (2, True, True),
        (2, False, False),
        (1, False, True),
        (3, True, False),
    ],
)
def test_a_decode_may_follow_a_step_by_the_tokens_that_it_will_have(
    min_tokens: int, is_in_step: bool, is_followed: bool
) -> None:
    """While it may not stop, its logits are edited, which the host does."""
    params = SamplingParams(max_tokens=8, stop_token_ids=(9,), min_tokens=min_tokens)
    seq = sequence([1, 2, 3, 4], sampling=params, num_prompt_tokens=3, reserve_growth=True)
    seq.num_computed = 3
    step, in_step = Step(1, [], may_be_followed=True), [seq] if is_in_step else []
    found = followers(step, in_step, [seq], worker_config())
    assert found == ([(seq, 0 if is_in_step else None)] if is_followed else None)
