"""What the tests of the agents share: making agents with known bytes, and reading."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.agent import Agent, AgentError
from kvrelay.kvtransfer.layout import HeadShare
from kvrelay.kvtransfer.movers.nixl import NixlAgent
from tests.kvtransfer.movers.nixl_peer import content

DEADLINE_S = 60.0
NUM_BLOCKS, BLOCK = 64, 4096


@dataclass
class AgentMaker:
    """Makes agents, and the arrays they were made with."""

    agents: list[Agent] = field(default_factory=list)

    def __call__(
        self, name: str, num_blocks: int = NUM_BLOCKS, size: int = BLOCK, seed: int = 0
    ) -> tuple[Agent, np.ndarray]:
        """An agent and its device pool, `[num_blocks, size]`."""
        pool = content(num_blocks, size, seed)
        return self.over(name, pool), pool

    def over(
        self,
        name: str,
        pool: np.ndarray,
        host: np.ndarray | None = None,
        share: HeadShare | None = None,
    ) -> Agent:
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


def settle(agent: Agent, handle: Any) -> None:
    """Poll until done, then release. Raises AgentError if the read failed."""
    deadline = time.monotonic() + DEADLINE_S
    try:
        while not agent.poll(handle):
            assert time.monotonic() < deadline
            time.sleep(0.0005)
    finally:
        while not agent.release(handle):
            assert time.monotonic() < deadline
            time.sleep(0.0005)


def read(
    agent: Agent,
    peer: str,
    src: list[int],
    dst: list[int],
    src_tier: Tier = Tier.DEVICE,
    dst_tier: Tier = Tier.DEVICE,
) -> None:
    settle(agent, agent.post_copy(peer, src, dst, src_tier=src_tier, dst_tier=dst_tier))


def fails(agent: Agent, *args: Any, **tiers: Any) -> str:
    """Says why this read fails."""
    try:
        read(agent, *args, **tiers)
    except AgentError as error:
        return str(error)
    raise AssertionError("it did not fail")
