"""The blocks that `benchmarks.router.routing` fills indexes with, and the prompts it asks about.

Needs nothing but Python, so that another interpreter can make the same ones. Names are random: what
a name is made of is nothing to an index.

One prefix of 750 blocks is held by every worker. The rest are sessions of 250 to 7,500 blocks;
every second one is held by two workers, as after a handover from prefill to decode.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

NAME_BYTES = 16
HOT_BLOCKS = 750
SESSION_BLOCKS = (7500, 750, 250, 750, 2000)
PROMPT_BLOCKS = (750, 7500)  # prompts of 12,000 and 120,000 tokens, 16 to a block
KINDS = {
    "hit": "all of it held by one worker or two",
    "half": "the first half held, the rest new",
    "hot": "begins with what every worker holds",
    "miss": "nobody holds any of it",
}


@dataclass(frozen=True, slots=True)
class Session:
    number: int
    num_blocks: int
    holders: tuple[int, ...]  # numbers of workers


@dataclass(frozen=True, slots=True)
class RoutingLoad:
    """Equal arguments make equal blocks in the same order."""

    num_workers: int
    num_blocks: int  # different ones; the last session may go beyond
    seed: int = 1

    @property
    def hot(self) -> bytes:
        return self._names("hot", HOT_BLOCKS)

    def sessions(self) -> Iterator[Session]:
        """Worker by worker in turn, so that the first ones are spread over all workers too."""
        number, total = 0, HOT_BLOCKS
        while total < self.num_blocks:
            worker, turn = number % self.num_workers, number // self.num_workers
            length = SESSION_BLOCKS[(worker + turn) % len(SESSION_BLOCKS)]
            others = ((worker + 1) % self.num_workers,) if number % 2 else ()
            yield Session(number, length, (worker, *others))
            number += 1
            total += length

    def names(self, session: Session) -> bytes:
        """Returns its hashes, packed into one."""
        return self._names(session.number, session.num_blocks)

    def prompts(
        self, kind: str, num_blocks: int, count: int, known: list[Session]
    ) -> Iterator[bytes]:
        """Names of the blocks of `count` prompts, whose sessions are among `known`."""
        rng = random.Random(f"{self.seed} {kind} {num_blocks}")
        fitting = [session for session in known if session.num_blocks >= num_blocks]
        if not fitting:
            raise ValueError(
                f"{len(known)} sessions, none with {num_blocks} blocks: expected more --blocks"
            )
        size, hot = num_blocks * NAME_BYTES, self.hot
        for _ in range(count):
            held = b""
            if kind == "hit":
                held = self.names(rng.choice(fitting))[:size]
            elif kind == "half":
                held = self.names(rng.choice(fitting))[: num_blocks // 2 * NAME_BYTES]
            elif kind == "hot":
                held = hot[:size]
            yield held + rng.randbytes(size - len(held))

    def _names(self, what: object, num_blocks: int) -> bytes:
        return random.Random(f"{self.seed} {what}").randbytes(num_blocks * NAME_BYTES)
