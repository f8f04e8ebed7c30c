"""What the tests of the agents share: making agents with known bytes, and reading."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.agent import AgentError, CopyBlocks, CopyDone, MoveId, Mover, PeerAgent
from kvrelay.kvtransfer.layout import HeadShare
from kvrelay.kvtransfer.movers.nixl import NixlAgent
from tests.kvtransfer.movers.nixl_peer import content

DEADLINE_S = 60.0
NUM_BLOCKS, BLOCK = 64, 4096


@dataclass
class AgentMaker:
    """Makes agents, and the arrays they were made with."""

    agents: list[PeerAgent] = field(default_factory=list)

    def __call__(
        self, name: str, num_blocks: int = NUM_BLOCKS, size: int = BLOCK, seed: int = 0
    ) -> tuple[PeerAgent, np.ndarray]:
        """An agent and its device pool, `[num_blocks, size]`."""
        pool = content(num_blocks, size, seed)
        return self.over(name, pool), pool

    def over(
        self,
        name: str,
        pool: np.ndarray,
        host: np.ndarray | None = None,
        share: HeadShare | None = None,
    ) -> PeerAgent:
        agent = NixlAgent(name, torch.from_numpy(pool), host=host, share=share)
        self.agents.append(agent)
        return agent


@contextmanager
def agent_maker() -> Iterator[AgentMaker]:
    """Closes all agents at the end."""
    maker = AgentMaker()
    try:
        yield maker
    finally:
        for agent in maker.agents:
            agent.close()


def copy_of(
    peer: str,
    src: Sequence[int],
    dst: Sequence[int],
    src_tier: Tier = Tier.DEVICE,
    dst_tier: Tier = Tier.DEVICE,
    **more: Any,
) -> CopyBlocks:
    ways = tuple(src), tuple(dst), 5.0, src_tier, dst_tier
    return CopyBlocks(MoveId(1), peer, 1, *ways, **more)


def begin(mover: Mover, *args: Any, **more: Any) -> Any:
    """A copy, as `copy_of` makes it; its handle."""
    return mover.copy(copy_of(*args, **more))


def ended(mover: Mover, handle: Any) -> CopyDone:
    """How it has settled, good or bad."""
    deadline = time.monotonic() + DEADLINE_S
    while (done := mover.poll(handle)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    return done


def settle(mover: Mover, handle: Any) -> CopyDone:
    """Wait for a good end. Raises AgentError if it fails, once it has settled."""
    try:
        done = ended(mover, handle)
    except AgentError:
        mover.cancel(handle)
        ended(mover, handle)
        raise
    if done.error is not None:
        raise AgentError(done.error)
    return done


def read(mover: Mover, *args: Any, **more: Any) -> CopyDone:
    return settle(mover, begin(mover, *args, **more))


def fails(mover: Mover, *args: Any, **tiers: Any) -> str:
    """Says why this read fails."""
    try:
        read(mover, *args, **tiers)
    except AgentError as error:
        return str(error)
    raise AssertionError("it did not fail")
