"""Opens the tiers below a worker's memory, as the registry names them.

A tier that cannot be opened is no reason not to serve: the worker runs without it, and says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvrelay.engine.config import TiersSection, WorkerConfig
from kvrelay.engine.kv.tier import DiskRecord, Tier
from kvrelay.engine.native import NativeBuildError
from kvrelay.kvtransfer.agent import AgentError, Mover
from kvrelay.kvtransfer.executor import Store
from kvrelay.kvtransfer.layout import HeadShare
from kvrelay.kvtransfer.store.errors import StoreError
from kvrelay.kvtransfer.tiers.registry import TIERS

if TYPE_CHECKING:
    from kvrelay.kvtransfer.kivi import Quantizer
    from kvrelay.kvtransfer.store.arena import HostArena


@dataclass(frozen=True, slots=True)
class TierSettings:
    """What the tiers of one rank of a worker are opened with."""

    config: WorkerConfig  # with the rank's part of what the worker has
    memory: Mapping[Tier, Any]  # the worker's own, `[num_blocks, ...]` each, contiguous
    share: HeadShare | None = None  # the heads that blocks hold there
    quantizer: Quantizer | None = None  # for approximate blocks
    tiers: TiersSection = field(default_factory=TiersSection)  # the machine's
    cluster: str = ""
    rank: int = 0
    num_ranks: int = 1
    arena: HostArena | None = None  # host memory, where that outlives the worker

    @property
    def part(self) -> str:
        """A folder below those that all ranks have; "": there is one rank."""
        return f"rank-{self.rank}-of-{self.num_ranks}" if self.num_ranks > 1 else ""

    @property
    def lists(self) -> bool:
        """Whether it says for all ranks what storage that has keys holds."""
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class Storage:
    """A tier, opened: what its thread will own, and what it held."""

    mover: Mover
    store: Store
    records: tuple[DiskRecord, ...] = ()
    notices: tuple[str, ...] = ()  # for an operator
    arena: HostArena | None = None  # where it is memory that outlives the worker


class NoHostMemory(Exception):
    """The disk reaches the device by host memory only, and there is none for KV."""


def open_storage(settings: TierSettings) -> tuple[dict[Tier, Storage], list[str]]:
    """The tiers that the worker is to have and that can be had, and what an operator should know.
    Raises NoHostMemory."""
    opened: dict[Tier, Storage] = {}
    notices: list[str] = []
    for tier, spec in TIERS.items():
        if not spec.opened_by or (spec.field and not spec.num_blocks(settings.config)):
            continue
        try:
            opened[tier] = import_module(spec.opened_by).open_tier(settings)
        except (AgentError, NativeBuildError, StoreError) as error:
            if spec.field:  # else nobody has asked for it
                notices.append(f"serving without the {tier} tier: {error}")
        else:
            notices += opened[tier].notices
    return opened, notices
