"""The storage of a worker below its memory: a store, opened, and what copies blocks to and from it.
The disk is the only kind there is.

A store that cannot be opened is no reason not to serve: the worker runs without it, and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.engine.cache_dir import default_cache_dir
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.kv.tier import DiskRecord, Tier
from kvrelay.engine.native import NativeBuildError
from kvrelay.kvtransfer.agent import Agent, AgentError
from kvrelay.kvtransfer.executor import Store, StoreExecutor, TransferExecutor
from kvrelay.kvtransfer.layout import HeadShare
from kvrelay.kvtransfer.store.index import NO_CODEC

if TYPE_CHECKING:
    from kvrelay.kvtransfer.codec import Codec
    from kvrelay.kvtransfer.kivi import Quantizer
    from kvrelay.kvtransfer.store import DiskStore


MakeCopies = Callable[..., TransferExecutor]
"""A TransferExecutor over the worker's memory, given the agent, and options of its own."""


@dataclass(frozen=True, slots=True)
class Storage:
    """What the thread of one tier will own."""

    copies: TransferExecutor
    store: Store
    records: tuple[DiskRecord, ...]  # what the store held when it was opened


class NoHostMemory(Exception):
    """The disk reaches the device by host memory only, and there is none for KV."""


def default_folder() -> Path:
    return default_cache_dir() / "kv"


def open_disk_tier(
    config: WorkerConfig,
    folder: str,
    memory: Mapping[Tier, Any],
    make_copies: MakeCopies,
    share: HeadShare | None = None,
    quantizer: Quantizer | None = None,
    part: str = "",
) -> tuple[Storage | None, list[str]]:
    """The tier, if `config` has one and it can be opened, and what an operator should know.

    `folder`: of the machine; "": in the user's cache. `memory`: the worker's pools; `share`: the
    heads that are there; `quantizer`: of approximate blocks. `part`: of the folder, for a rank of
    several. Raises NoHostMemory."""
    from kvrelay.kvtransfer.codec import open_codec
    from kvrelay.kvtransfer.movers.coded import CodedAgent, open_coded
    from kvrelay.kvtransfer.movers.disk import DiskAgent
    from kvrelay.kvtransfer.movers.staged import StagedAgent
    from kvrelay.kvtransfer.store import StoreError

    if not config.num_disk_blocks:
        return None, []
    root = (Path(folder).expanduser() if folder else default_folder()) / part
    try:
        codec = open_codec(config.disk_codec)
        store = _open_store(root, config, codec)
    except NativeBuildError as error:
        return None, [f"serving without a disk tier, unless tiers.disk_codec is none: {error}"]
    except StoreError as error:
        return None, [f"serving without a disk tier: {error}"]
    try:
        if codec is None:
            disk: DiskAgent | CodedAgent = DiskAgent(config.node_id, memory, store)
        else:
            disk = open_coded(config.node_id, memory, store, codec, share, quantizer)
    except AgentError as error:
        store.close()
        return None, [f"serving without a disk tier: {error}"]
    agent: Agent = disk
    if not disk.can_reach_device:
        if Tier.HOST not in memory:
            disk.close()
            store.close()
            raise NoHostMemory
        arena = memory[Tier.HOST]
        agent = StagedAgent(disk, memory[Tier.DEVICE], arena, config.num_host_blocks)
    results = disk.results if isinstance(disk, CodedAgent) else None
    changed = disk.changed if isinstance(disk, CodedAgent) else None
    copies = make_copies(agent, results=results, changed=changed)
    storage = Storage(copies, StoreExecutor(store), tuple(store.records))
    return storage, [*store.warnings, *_unused(root, config.fingerprint)]


def _open_store(root: Path, config: WorkerConfig, codec: Codec | None) -> DiskStore:
    """The first place that no other process has. Raises StoreError."""
    from kvrelay.kvtransfer.store import DiskStore, StoreInUse, places

    in_use: StoreInUse | None = None
    for folder in places(root, config.fingerprint, config.node_id):
        try:
            return DiskStore.open(
                folder,
                fingerprint=config.fingerprint,
                compatibility=config.compatibility,
                bytes_per_block=config.bytes_per_block,
                max_blocks=config.num_disk_blocks,
                room_bytes=config.disk_bytes,
                codec=codec.name if codec is not None else NO_CODEC,
            )
        except StoreInUse as error:
            in_use = error
    assert in_use is not None
    raise in_use


def _unused(root: Path, fingerprint: bytes) -> list[str]:
    """Stores under `root` of other models, which take room there, as notices."""
    from kvrelay.kvtransfer.store import stale_stores

    stale = stale_stores(root, fingerprint)
    if not stale:
        return []
    size_gib = sum(store.num_bytes for store in stale) / 2**30
    return [
        f"{len(stale)} disk store(s) of other models or formats in {root} take {size_gib:.1f} GiB;"
        f" what is not needed any more can be removed, the oldest is {stale[0].path}"
    ]
