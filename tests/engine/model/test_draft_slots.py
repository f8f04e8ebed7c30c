"""When slots of a drafter are made, and of what: by a drafter that only notes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvrelay.engine.model.draft_slots import FORGOTTEN_AFTER, Part, Slots
from kvrelay.engine.step import Sampled, ScheduledSeq
from tests.engine.model.tiny import scheduled

SIZE, BLOCKS = 4, 12


def state(token: int) -> float:
    return 1000.0 + token


@dataclass
class World:
    """One sequence whose token at position p is p; what a slot is made of is written into the
    drafter's part of its block: the token, and the state before it."""

    slots: Slots = field(init=False)
    parts: list[Part] = field(default_factory=list)
    end: int = 0  # positions that are computed

    def __post_init__(self) -> None:
        self.region = np.full((BLOCKS, 32), 7, np.uint8)
        self.slots = Slots(self, self.region, SIZE)
        self.table: Any = SimpleNamespace(blocks=np.arange(BLOCKS)[np.newaxis])

    def keep(self, parts: list[Part]) -> None:
        self.parts += parts
        for part in parts:
            held = self.region.view(np.float32).reshape(BLOCKS, SIZE, 2)
            outputs = part.outputs[0, :, 0].tolist()
            assert len(outputs) == len(part.tokens) + part.has_before
            before = [outputs.pop(0) if part.has_before else state(part.start - 1), *outputs]
            assert outputs == [state(token) for token in part.tokens]
            for at, token in enumerate(part.tokens):
                place = part.start + at
                held[part.table.blocks[0, place // SIZE], place % SIZE] = token, before[at]

    def seq(self, count: int = 1, prompt: int = 3) -> ScheduledSeq:
        tokens = [*range(self.end, self.end + count)]
        return scheduled(tokens, self.end, [*range(BLOCKS)], num_prompt_tokens=prompt)

    def compute(self, count: int = 1, more: int = 0, *, fills: bool = True) -> None:
        """A chunk of the prompt, or a decode of which `more` draft tokens are accepted."""
        seq = self.seq(count)
        drawn = tuple(range(self.end + count + 1, self.end + count + 1 + more))
        sampled = Sampled(self.end + count, more=drawn)
        count += more
        outputs = torch.tensor([state(self.end + at) for at in range(count)]).view(1, count, 1)
        self.slots.after([seq], [sampled], [self.table], outputs, fills=fills)
        self.end += count

    def ask(self) -> None:
        self.slots.catch_up([self.seq()], [self.table])

    def made(self) -> list[int]:
        """Positions that have their slots."""
        held = self.region.view(np.float32).reshape(BLOCKS * SIZE, 2)[: self.end]
        return [
            at for at, (token, before) in enumerate(held) if (token, before) == (at, state(at - 1))
        ]


def test_prompts_are_made_at_once_and_decodes_when_the_drafter_is_asked() -> None:
    world = World()
    world.compute(3)
    assert world.made() == [0, 1, 2]
    world.compute()
    assert world.made() == [0, 1, 2, 3], "its block is full"
    world.compute()
    world.compute(more=1)
    assert len(world.parts) == 2
    world.ask()
    assert world.made() == [*range(7)]
    world.ask()
    assert [len(part.tokens) for part in world.parts] == [3, 1, 3, 0], "nothing is made twice"


def test_a_block_is_whole_before_it_is_sealed() -> None:
    world = World()
    world.compute(3)
    for more in (1, 0, 3, 2, 0, 0, 3, 1):
        world.compute(more=more)
        full = world.end - world.end % SIZE
        assert set(range(full)) <= set(world.made())


def test_as_long_as_it_is_not_asked_nothing_is_made_and_full_blocks_have_zeros() -> None:
    world = World()
    world.compute(3)
    for _ in range(30):
        world.compute(fills=False)
    assert len(world.parts) == 1, "the prompt alone"
    assert not world.region[1 : world.end // SIZE].any(), "nobody else's are left there"
    waiting = next(iter(world.slots._waiting.values()))
    assert len(waiting.outputs) <= SIZE + 1


def test_asked_again_it_goes_on_in_the_block_that_is_not_sealed() -> None:
    for count in range(9, 14):
        world = World()
        world.compute(3)
        while world.end < count:
            world.compute(fills=False)
        world.ask()
        first = world.end - world.end % SIZE
        assert world.made() == [*range(3), *range(first, world.end)]
        known = world.parts[-1]
        assert known.start == first
        assert known.has_before, "what is before it was sealed without"
        for _ in range(6):
            world.compute()
            world.ask()
        assert set(range(first, world.end)) <= set(world.made())


def test_an_attempt_that_was_computed_again_begins_anew() -> None:
    world = World()
    world.compute(3)
    world.compute()
    world.compute()
    world.end = 0  # it was preempted
    world.compute(5)
    world.compute()
    world.ask()
    assert world.made() == [*range(6)]


def test_sequences_that_have_ended_are_forgotten() -> None:
    world = World()
    for number in range(3 * FORGOTTEN_AFTER):
        seq = scheduled([9], 9, [*range(BLOCKS)], num_prompt_tokens=3, request_id=f"r{number}")
        rows = torch.full((1, 1, 1), state(9))
        world.slots.after([seq], [None], [world.table], rows, fills=False)
    assert len(world.slots._waiting) <= 2 * FORGOTTEN_AFTER
