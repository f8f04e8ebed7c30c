"""Workers of a model whose layers attend to windows, or keep states, over the in-memory runtime."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from kvrelay.engine.kv.spec import STATE_WINDOW
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.kv.window import Windows
from kvrelay.engine.step import Sampled, Step, StepDone
from tests.worker.world import BLOCK_SIZE, World, checksum, next_token

NUM_SINKS = 3
OFFSET = 1000  # a group's blocks hold tokens plus this times its number


def prompt_of(rng: Random, length: int) -> list[int]:
    return [rng.randint(2, 90) for _ in range(length)]


def visible(window: int, end: int) -> list[int]:
    """Positions that the last of `end` tokens attends to in layers of `window`."""
    first = max(0, end - window) if window else 0
    return [*range(min(NUM_SINKS, first)), *range(first, end)]


class Layered(World):
    """Its model reads of each group what its window shows; that has to be in the group's blocks. A
    block of one of the `num_states` groups after those of `layout` holds what all tokens up to the
    last one that was written have left, and the next one has to be that after it.

    Checks, after each message, who holds which blocks."""

    def __init__(self, layout: tuple[int, ...], num_states: int = 0, **options: Any) -> None:
        self.layout, self.num_states = layout, num_states
        sizes = (*layout, *(STATE_WINDOW,) * num_states)
        shape = {"group_windows": sizes} if len(sizes) > 1 else {"window": sizes[0]}
        super().__init__(**{**shape, "sinks": NUM_SINKS, "has_states": num_states > 0, **options})
        self.windows = Windows.of(BLOCK_SIZE, sizes, NUM_SINKS)
        self.waits: Callable[[Step], frozenset[int]] = lambda _: frozenset()
        self.most_held = 0  # by one sequence that decodes
        rates = self.decode.exchange.connector.rates
        rates.load_s = lambda tier: 0.0  # type: ignore[method-assign]

    def draw(self, context: list[int], end: int) -> int:
        seen = [context[p] for window in self.layout for p in visible(window, end)]
        return next_token([*seen, checksum(context[:end])] if self.num_states else seen)

    def reference(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self.draw(tokens, len(tokens)))
        return tokens[len(prompt) :]

    def run(self, node: str, step: Step) -> StepDone:
        slots, error = self.slots[node], self.fault(step)
        sampled: list[Sampled | None] = []
        for seq in step.seqs:
            drawn, context = [], [*seq.context, *seq.draft_tokens]
            for position in range(seq.start, seq.end):
                self._write(slots, seq.block_ids, context, position)
                drawn.append(self.draw(context, position + 1))
            found = seq.verify(drawn[len(seq.tokens) - 1 :]) if seq.sample else None
            sampled.append(found)
            last = seq.start + len(seq.tokens) + len(found.more if found else ())
            self._write_states(slots, seq.block_ids, [] if error else context, last - 1)
        if error is not None:
            return StepDone(step.step_id, [None] * len(sampled), [], 0.01, error)
        waiting = self.waits(step)
        sampled = [None if index in waiting else each for index, each in enumerate(sampled)]
        checksums = [checksum(slots[block]) for block in step.checksum_blocks]
        return StepDone(step.step_id, sampled, checksums, 0.01, waiting=waiting)

    def _write(
        self, slots: list[list[int]], table: list[int], context: list[int], position: int
    ) -> None:
        """After a look at what is read."""
        for group, window in enumerate(self.layout):
            block = self.block(table, position, group)
            slots[block][position % BLOCK_SIZE] = context[position] + OFFSET * group
            for p in visible(window, position + 1):
                held = slots[self.block(table, p, group)][p % BLOCK_SIZE]
                assert held == context[p] + OFFSET * group, f"{p} for {position}"
        for group in range(len(self.layout), self.windows.count if position else 0):
            held = slots[self.block(table, position - 1, group)][0]
            assert held == checksum(context[:position]) + OFFSET * group, (
                f"the state for {position}"
            )
        self._write_states(slots, table, context, position)

    def _write_states(
        self, slots: list[list[int]], table: list[int], context: list[int], position: int
    ) -> None:
        for group in range(len(self.layout), self.windows.count):
            state = checksum(context[: position + 1]) + OFFSET * group
            slots[self.block(table, position, group)][:] = [state] * BLOCK_SIZE

    def block(self, table: list[int], position: int, group: int) -> int:
        block = table[position // BLOCK_SIZE * self.windows.count + group]
        assert block >= 0, f"the block of position {position}, group {group} was given back"
        return block

    def deliver(self, node: str, message: Any) -> None:
        super().deliver(node, message)
        core, exchange = self.workers[node].core, self.workers[node].exchange
        moves = [m for m in exchange.tiers._moves.live.values() if Tier.DEVICE in m.way]
        others = sum(len(move.blocks) for move in moves)
        others += sum(len(export.blocks) for export in exchange.producer.exports)
        others += exchange.unsettled.num_blocks
        core.kv.check_integrity(others)
        for seq in core.seqs.values():
            held = sum(block >= 0 for block in seq.block_ids)
            assert held <= core.kv.windows.max_blocks(len(seq.tokens) + 1), seq.request_id
            if seq.num_output_tokens > 0 and seq.is_decoding:
                assert held <= self.most_blocks(len(seq.tokens)), seq.request_id
                self.most_held = max(self.most_held, held)

    def most_blocks(self, num_tokens: int) -> int:
        """A decode holds so many: one in each window is taken before another one is given back."""
        rows = -(-(num_tokens + 1) // BLOCK_SIZE)
        return sum(min(rows, w.num_blocks + 1) if w.size else rows for w in self.windows.groups)
