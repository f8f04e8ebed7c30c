"""Classes of service at a worker: whose prompts and rows are in a step, and who gives way."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Any
from zlib import crc32

import pytest

from kvrelay.engine.cost import MIN_SAMPLES, StepTiming
from kvrelay.engine.kv.block_hash import BlockChain
from kvrelay.engine.kv.block_pool import LEFT_S, LOW_SHARE
from kvrelay.engine.kv.scope import UNSALTED
from kvrelay.engine.scheduling.selection import taking_part
from kvrelay.engine.sequence import SeqState
from kvrelay.engine.service_class import ServiceClass
from kvrelay.engine.step import AbandonStep, Execute, Step, StepDone
from tests.engine.configs import worker_config
from tests.engine.sequences import sequence
from tests.worker.world import BLOCK_SIZE, World, reference

BATCH, FLEX, DEFAULT, PRIORITY = ServiceClass


class Steps(World):
    """Remembers who was in each step of `decode`, and with how many tokens."""

    def __init__(self, **limits: Any) -> None:
        self.steps: list[dict[str, int]] = []
        self.may_be_followed: list[bool] = []
        self.abandoned: list[int] = []
        super().__init__(**limits)

    def perform(self, node: str, effects: list[Any]) -> None:
        for effect in effects:
            if node == "decode" and isinstance(effect, Execute):
                self.may_be_followed.append(effect.step.may_be_followed)
                shares = effect.step.seqs
                self.steps.append({s.request_id.split("#")[0]: len(s.tokens) for s in shares})
            if isinstance(effect, AbandonStep):
                self.abandoned.append(effect.step_id)
                self.queue = deque((to, self._void(each, effect)) for to, each in self.queue)
        super().perform(node, effects)

    @staticmethod
    def _void(message: Any, abandon: AbandonStep) -> Any:
        if not isinstance(message, StepDone) or message.step_id != abandon.step_id:
            return message
        again = [None] * len(message.sampled)
        return StepDone(message.step_id, [*again], waiting=frozenset(range(len(again))))

    def while_a_step_runs(self) -> None:
        """All that has come is there before its end."""
        ends = [each for each in self.queue if isinstance(each[1], StepDone)]
        self.queue = deque(each for each in self.queue if each not in ends)
        while self.queue:
            self.step()
        self.queue.extend(ends)

    def ask(self, name: str, num_tokens: int, max_tokens: int, of: ServiceClass) -> list[int]:
        prompt = [2 + crc32(f"{name} {i}".encode()) % 90 for i in range(num_tokens)]
        self.submit(name, prompt, max_tokens, remote=False, priority=of.priority)
        return prompt

    def until_in_step(self, name: str) -> None:
        while not any(name in step for step in self.steps):
            assert self.step(), f"{name} is in no step"


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_higher_class_takes_the_memory_of_a_lower_one_which_goes_on_later(
    steps_ahead: int,
) -> None:
    world = Steps(num_blocks=16, steps_ahead=steps_ahead)
    low = world.ask("low", 8 * BLOCK_SIZE, 20, BATCH)
    world.until_in_step("low")
    for _ in range(6):
        world.step()
    high = world.ask("high", 8 * BLOCK_SIZE, 20, DEFAULT)
    world.until_in_step("high")
    core = world.decode.core
    assert core.seqs[("low", 0)].state is SeqState.WAITING
    world.drain()
    if not steps_ahead:  # the tiny model computes no token from one that is not known yet
        assert world.output("high", high) == reference(high, 20)
        assert world.output("low", low) == reference(low, 20)
    assert core.scheduler.num_preemptions == 1
    world.assert_idle()


def test_where_a_row_needs_a_block_the_lowest_class_is_preempted_though_it_streams() -> None:
    world = Steps(num_blocks=15)
    prompts = {
        name: world.ask(name, 3 * BLOCK_SIZE, 14, of)
        for name, of in (("low", FLEX), ("one", DEFAULT), ("two", DEFAULT))
    }
    lost = set[str]()
    while world.step():
        lost |= {seq.request_id for seq in world.decode.core.seqs.values() if seq.num_preemptions}
    assert lost == {"low"}
    for name, prompt in prompts.items():
        assert world.output(name, prompt) == reference(prompt, 14)
    world.assert_idle()


@pytest.mark.parametrize("num_tokens", [BLOCK_SIZE, 6 * BLOCK_SIZE], ids=["decodes", "a prompt"])
def test_a_step_of_low_classes_alone_ends_for_one_that_comes_meanwhile(num_tokens: int) -> None:
    world = Steps(num_blocks=64, max_num_batched_tokens=2 * BLOCK_SIZE)
    low = world.ask("low", num_tokens, 8, BATCH)
    world.until_in_step("low")
    if num_tokens == BLOCK_SIZE:
        while world.steps[-1] != {"low": 1}:
            world.step()
    running = world.decode.core.scheduler.in_flight[0].step.step_id
    more = world.ask("more", BLOCK_SIZE, 2, FLEX)
    world.while_a_step_runs()
    assert world.abandoned == [], "nobody goes before it"
    high = world.ask("high", BLOCK_SIZE, 8, DEFAULT)
    world.while_a_step_runs()
    world.ask("higher", BLOCK_SIZE, 8, PRIORITY)
    world.while_a_step_runs()
    assert world.abandoned == [running], "once"
    num_steps = len(world.steps)
    world.step()
    assert "low" not in world.steps[num_steps]
    world.drain()
    for name, prompt, count in (("low", low, 8), ("more", more, 2), ("high", high, 8)):
        assert world.output(name, prompt) == reference(prompt, count)
    world.assert_idle()


@pytest.mark.parametrize(
    ("first", "limits"),
    [(DEFAULT, {}), (BATCH, {"steps_ahead": 1})],
    ids=["an interactive one is in it", "one runs behind it"],
)
def test_other_steps_go_on(first: ServiceClass, limits: dict[str, Any]) -> None:
    world = Steps(num_blocks=64, **limits)
    world.ask("first", BLOCK_SIZE, 8, first)
    world.until_in_step("first")
    world.ask("high", BLOCK_SIZE, 2, PRIORITY)
    world.while_a_step_runs()
    assert world.abandoned == []
    world.drain()


def test_prompts_of_a_higher_class_are_computed_first_and_alone() -> None:
    world = Steps(max_num_batched_tokens=8)
    for name, of in (("batch", BATCH), ("flex", FLEX), ("default", DEFAULT), ("first", PRIORITY)):
        world.ask(name, 16, 1, of)
    world.drain()
    assert list(world.steps[0]) == ["batch"], "nobody else was there"
    order = list(dict.fromkeys(name for step in world.steps[1:] for name in step))
    assert order == ["first", "default", "flex", "batch"]
    assert not any({"flex", "batch"} & {*step} and len(step) > 1 for step in world.steps)


def test_one_that_waits_for_memory_is_not_passed_by_lower_classes() -> None:
    world = Steps(num_blocks=16)
    world.ask("stream", 8 * BLOCK_SIZE, 20, DEFAULT)
    world.until_in_step("stream")
    world.ask("large", 10 * BLOCK_SIZE, 4, DEFAULT)
    world.ask("small", BLOCK_SIZE, 4, BATCH)
    world.drain()
    order = list(dict.fromkeys(name for step in world.steps for name in step))
    assert order == ["stream", "large", "small"]


def test_a_prompt_does_not_wait_for_blocks_that_are_computed_for_a_lower_class() -> None:
    world = Steps(num_blocks=64, max_num_batched_tokens=BLOCK_SIZE)
    prompt = [5] * 6 * BLOCK_SIZE
    world.submit("low", prompt, 2, remote=False, priority=BATCH.priority)
    world.until_in_step("low")
    world.submit("other", [8] * 12 * BLOCK_SIZE, 2, remote=False)
    world.until_in_step("other")
    world.submit("same", prompt, 2, remote=False)
    world.drain()
    first = next(i for i, step in enumerate(world.steps) if "same" in step)
    last = {name: i for i, step in enumerate(world.steps) for name in step}
    assert first < last["other"] < last["low"]
    assert world.output("same", prompt) == world.output("low", prompt) == reference(prompt, 2)


def timing(itl_target_ms: float) -> StepTiming:
    """Steps take 10 ms and 2 ms for each row; a prompt's token 1 ms."""
    found = StepTiming(worker_config(num_blocks=1 << 20, block_size=4, itl_target_ms=itl_target_ms))
    for count in (*range(1, MIN_SAMPLES), 30, 40):
        found.on_step(step_of(count * [1]), 0.010 + 0.002 * count, 1)
    found.on_step(step_of([100]), 0.1, 1)
    return found


def step_of(counts: list[int]) -> Step:
    scheduler_share = World(num_blocks=8).decode.core.scheduler._share
    shares = []
    for count in counts:
        seq = sequence([1] * count)
        shares.append(scheduler_share(seq, count))
    return Step(0, shares)


@pytest.mark.parametrize(("target_ms", "num_rows"), [(50, 19), (0, 1), (12, 0)])
def test_rows_of_low_classes_join_as_far_as_the_measured_step_allows(
    target_ms: float, num_rows: int
) -> None:
    room = timing(target_ms).low_class_room
    count, num_tokens = room(1, 0, 32, 0, 0.0)
    assert (count, 0 <= num_tokens <= 2) == (num_rows, True)
    assert room(1, 0, 4, 0, 0.0)[0] == min(4, num_rows)


def test_low_classes_alone_have_short_steps_where_interactive_requests_come() -> None:
    room = timing(0).low_class_room
    assert room(0, 0, 32, 0, inf) == (32, 100), "of prompts what is computed in 0.1 s"
    count, num_tokens = room(0, 0, 32, 0, 1.0)
    assert (count, num_tokens <= 2) == (5, True), "20 ms are 5 rows"
    count, num_tokens = room(0, 0, 2, 0, 1.0)
    assert (count, 4 <= num_tokens <= 6) == (2, True), "and what is left is for prompts"
    assert room(0, 0, 0, 0, 1.0) == (0, 64), "no pass is for less"


def test_a_step_of_low_classes_is_followed_by_one_ahead_unless_interactive_ones_come() -> None:
    world = Steps(num_blocks=64, steps_ahead=1)
    world.ask("low", 8, 100, BATCH)
    world.until_in_step("low")
    world.step()
    assert world.may_be_followed[-1]
    world.ask("chat", 8, 4, DEFAULT)
    world.until_in_step("chat")
    while ("chat", 0) in world.decode.core.seqs:
        world.step()
    for _ in range(5):
        world.step()
    assert list(world.steps[-1]) == ["low"]
    assert not world.may_be_followed[-1]


def test_before_steps_are_measured_nothing_joins_interactive_rows() -> None:
    room = StepTiming(worker_config(num_blocks=64, block_size=4)).low_class_room
    assert room(1, 10, 5, 50, 0.0) == (0, 0)
    assert room(0, 0, 5, 50, 0.0)[0] == 5


def test_of_low_classes_flex_joins_before_batch_and_prompts_last() -> None:
    def row(name: str, of: ServiceClass, num_missing: int = 1) -> Any:
        about = {"request_id": name, "priority": of.priority}
        return sequence([1] * 8, num_computed=8 - num_missing, **about)

    batch, flex, chat = row("batch", BATCH), row("flex", FLEX), row("chat", DEFAULT)
    prompt, low = row("prompt", DEFAULT, 8), row("low", FLEX, 8)
    assert taking_part([batch, flex, chat], lambda *_: (1, 0), 0.0) == ([chat, flex], 0)
    assert taking_part([batch, low, chat], lambda *_: (1, 5), 0.0) == ([chat, batch, low], 5)
    assert taking_part([batch, prompt, chat], lambda *_: (1, 5), 0.0) == ([prompt, chat], None)
    assert taking_part([prompt, chat], lambda *_: (0, 0), 0.0) == ([prompt, chat], None)


def cached(world: World, prompt: list[int]) -> int:
    """Blocks of `prompt` that are in device memory."""
    core = world.decode.core
    seq = sequence(prompt, block_size=BLOCK_SIZE, chain=BlockChain(b"tiny", UNSALTED, BLOCK_SIZE))
    return len(core.kv.pool.lookup(seq.block_hashes))


def test_rows_of_a_low_class_evict_little_of_what_others_left_until_that_is_old() -> None:
    world = Steps(num_blocks=32, max_num_seqs=64)
    chats = [world.ask(f"c{i}", 7 * BLOCK_SIZE, 4, DEFAULT) for i in range(4)]
    world.drain()
    held = sum(cached(world, chat) for chat in chats)
    for i in range(24):
        world.ask(f"b{i}", 2 * BLOCK_SIZE, 8, BATCH)
    world.drain()
    assert held - sum(cached(world, chat) for chat in chats) <= 32 * LOW_SHARE
    assert len({name for step in world.steps for name in step}) == 28, "all were served"
    world.now += LEFT_S + 1
    for i in range(24):
        world.ask(f"d{i}", 7 * BLOCK_SIZE, 8, BATCH)
    world.drain()
    assert sum(cached(world, chat) for chat in chats) == 0
    assert not world.refused()


def test_one_request_of_a_low_class_may_evict_as_much_as_it_needs() -> None:
    world = Steps(num_blocks=16)
    world.ask("chat", 13 * BLOCK_SIZE, 4, DEFAULT)
    world.drain()
    low = world.ask("low", 10 * BLOCK_SIZE, 16, BATCH)
    world.drain()
    assert world.output("low", low) == reference(low, 16)
    assert world.decode.core.scheduler.num_preemptions == 0


def test_what_an_interactive_request_has_used_is_not_evicted_first() -> None:
    world = Steps(num_blocks=16)
    shared = world.ask("a", 6 * BLOCK_SIZE, 2, BATCH)
    world.drain()
    world.submit("b", [*shared, 7], 2, remote=False)
    world.drain()
    world.ask("c", 6 * BLOCK_SIZE, 2, BATCH)
    world.drain()
    world.ask("d", 8 * BLOCK_SIZE, 2, DEFAULT)
    world.drain()
    assert cached(world, shared) == 6
