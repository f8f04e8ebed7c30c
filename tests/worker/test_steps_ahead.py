"""Steps that are handed out before the tokens of the last are known: the same tokens, names and
ends. The executor runs a step only when its end is delivered, so what writes late is seen."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from kvrelay.engine.messages import Abort
from kvrelay.engine.request import FinishReason, Refusal
from kvrelay.engine.step import Execute, Step, StepDone
from tests.engine.test_repeats import LENGTHS, PROMPTS, cached, ends, serve
from tests.worker.layers import Layered
from tests.worker.test_windows import MOST_BLOCKS, WINDOW
from tests.worker.world import BLOCK_SIZE, World, reference


class Ahead(World):
    """`num_waiting`: how many steps waited behind another, by what the node knew then."""

    def __init__(self, *layout: Any, **options: Any) -> None:
        self.waiting: dict[str, deque[Step]] = {}
        self.sampled: dict[str, list[int | None]] = {}  # by the last step of each node
        self.num_waiting = 0
        self.error: str | None = None  # the next step's
        super().__init__(*layout, steps_ahead=1, **options)

    def perform(self, node: str, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Execute):
                steps = self.waiting.setdefault(node, deque())
                self.num_waiting += bool(steps)
                assert len(steps) < 2
                assert effect.step.repeats == 1
                steps.append(effect.step)
                self.queue.append((node, effect.step.step_id))
        super().perform(node, [effect for effect in effects if not isinstance(effect, Execute)])

    def deliver(self, node: str, message: Any) -> None:
        if isinstance(message, int):
            message = self.finish(node, self.waiting[node].popleft())
        super().deliver(node, message)

    def finish(self, node: str, step: Step) -> StepDone:
        """Tables are those of when the step was handed out, or lists that have not changed."""
        seqs = []
        for seq in step.seqs:
            if seq.follows is not None:
                token = self.sampled[node][seq.follows]
                assert token is not None
                seq = replace(seq, tokens=[token])
            seqs.append(seq)
        done = self.run(node, replace(step, seqs=seqs))
        self.sampled[node] = [None if each is None else each.token for each in done.sampled]
        if self.error is not None and not step.is_health_check:
            done = StepDone(step.step_id, [None] * len(seqs), error=self.error)
        return done


@pytest.mark.parametrize("remote", [False, True])
def test_steps_ahead_give_the_tokens_names_and_ends_of_single_steps(remote: bool) -> None:
    single = serve(World(num_blocks=100), remote=remote)
    ahead = serve(Ahead(num_blocks=100), remote=remote)
    for name, prompt in PROMPTS.items():
        assert ahead.output(name, prompt) == reference(prompt, LENGTHS[name])
    assert cached(ahead) == cached(single)
    assert ends(ahead) == dict.fromkeys(PROMPTS, FinishReason.LENGTH)
    # The longest is alone for a while: each of its steps but the first waited behind another.
    assert ahead.num_waiting > max(LENGTHS.values()) - 8
    computed = ahead.decode.core.counters["tokens_scheduled"]
    single_computed = single.decode.core.counters["tokens_scheduled"]
    assert computed == single_computed, "nothing is computed after a last token that was foreseen"


def test_what_is_computed_after_a_stop_token_is_thrown_away() -> None:
    stops = {"stop_token_ids": tuple(range(2, 12))}
    single = serve(World(num_blocks=100), remote=False, **stops)
    ahead = serve(Ahead(num_blocks=100), remote=False, **stops)
    assert set(ends(ahead).values()) == {FinishReason.STOP, FinishReason.LENGTH}
    assert ends(ahead) == ends(single)
    for name, prompt in PROMPTS.items():
        assert ahead.output(name, prompt) == single.output(name, prompt)
    assert cached(ahead) == cached(single)


def run_at_random(seed: int) -> tuple[int, int]:
    """Steps that waited behind another, and preemptions."""
    rng = Random(seed)
    world = Ahead(
        num_blocks=rng.choice((14, 40)),
        prefill_blocks=10,
        num_speculative_tokens=rng.choice((0, 0, 3)),
        guard=rng.random() < 0.5,
    )
    prompts = {f"r{i}": [i + 1] * rng.randint(3, 12) for i in range(8)}
    stops = tuple(range(2, 2 + rng.choice((0, 4))))
    aborted = set()
    for name, prompt in prompts.items():
        chosen = {"stop_token_ids": stops, "min_tokens": rng.choice((0, 0, 5))}
        world.submit(name, prompt, 12, remote=rng.random() < 0.3, sampling=chosen)
        for _ in range(rng.randint(0, 6)):
            world.step()
        if rng.random() < 0.2:
            gone = rng.choice(list(prompts)[: len(aborted) + 3])
            aborted.add(gone)
            world.queue.append(("decode", Abort(gone, 0)))
            world.queue.append(("prefill", Abort(gone, 0)))
    world.drain()
    for name, prompt in prompts.items():
        want = reference(prompt, 12)
        got = world.output(name, prompt)
        assert got == want[: len(got)]
        if name not in aborted:
            assert len(got) == 12 or got[-1] in stops
    for _ in range(9):  # leases of what was aborted
        world.tick(10.0)
        world.drain()
    world.assert_idle()
    return world.num_waiting, world.decode.core.scheduler.num_preemptions


def test_with_preemption_drafts_stops_and_aborts_all_tokens_are_right() -> None:
    found = [run_at_random(seed) for seed in range(120)]
    assert sum(waiting for waiting, _ in found) > 1000
    assert sum(preempted for _, preempted in found) > 20


def test_a_step_waits_for_tokens_that_the_host_has_to_know() -> None:
    for changed in ({"logprobs": 1}, {"logit_bias": {3: 0.5}}, {"grammar": "x"}):
        world = Ahead(num_blocks=100)
        world.submit("a", [1] * 4, 20, remote=False, sampling=changed)
        world.submit("b", [2] * 4, 9, remote=False)
        world.drain()
        assert world.num_waiting == 0, changed


def test_a_penalty_is_the_devices() -> None:
    world = Ahead(num_blocks=100)
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.1}
    world.submit("a", [1] * 4, 20, remote=False, sampling=penalties)
    world.drain()
    assert world.num_waiting > 15


def test_a_request_that_has_its_kv_joins_the_step_ahead() -> None:
    world = Ahead(num_blocks=100)
    world.submit("a", [1] * 4, 40, remote=False)
    while world.num_waiting < 5:
        world.step()
    world.submit("b", [2] * 8, 10, remote=True)
    before, joined = world.num_waiting, False
    while not joined:
        world.step()
        if world.reads:
            world.settle_read()
        joined = any(len(step.seqs) == 2 for step in world.waiting["decode"])
    assert world.num_waiting > before
    assert [seq.follows for seq in world.waiting["decode"][-1].seqs] == [0, None]
    world.assert_finishes("b", [2] * 8, 10)


def test_after_a_step_that_failed_the_one_behind_it_ends_before_blocks_are_free() -> None:
    world = Ahead(num_blocks=100, max_failed_steps=99)
    world.submit("a", [1] * 6, 40, remote=False)
    while world.num_waiting < 5:
        world.step()
    world.error = "the device has failed"
    world.step()
    world.deliver("decode", Abort("a", 0))
    pool = world.decode.core.kv.pool
    assert not pool.is_idle(), "the second step still writes to its blocks"
    world.drain()
    world.error = None
    world.assert_idle()


def test_who_fails_steps_ahead_is_tried_alone_and_refused_once() -> None:
    world = Ahead(num_blocks=100)
    world.submit("a", [1] * 6, 40, remote=False)
    while world.num_waiting < 5:
        world.step()
    world.error = "the device has failed"
    world.drain()
    assert [refused.reason for refused in world.refused()] == [Refusal.EXECUTION]
    world.error = None
    world.submit("b", [2] * 6, 4, remote=False)
    world.assert_finishes("b", [2] * 6, 4)
    world.assert_idle()


def test_a_last_block_that_is_full_is_grown_ahead_and_not_if_there_is_none() -> None:
    """With no block left the step ahead is not made, and nothing is preempted for it."""
    world = Ahead(num_blocks=4)
    world.submit("a", [1] * 6, 4 * BLOCK_SIZE - 6, remote=False)
    world.assert_finishes("a", [1] * 6, 4 * BLOCK_SIZE - 6)
    assert world.decode.core.scheduler.num_preemptions == 0


class Sliding(Ahead, Layered):
    """Has a model with a window: what a step reads must not be given back before it."""


def test_blocks_before_a_window_are_given_back_only_once_no_step_reads_them() -> None:
    world = Sliding((WINDOW,), num_blocks=MOST_BLOCKS * 3, max_model_len=4000)
    for name, length in (("a", 3), ("b", 21), ("c", 6)):
        world.submit(name, [5, 6, 7] * length, 300, remote=name == "b")
    world.drain(20_000)
    for name, length in (("a", 3), ("b", 21), ("c", 6)):
        assert world.output(name, [5, 6, 7] * length) == world.reference([5, 6, 7] * length, 300)
    assert world.num_waiting > 250
    world.assert_idle()
