"""The disk of a worker as a tier: a store, opened, and what copies blocks to and from it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.native import NativeBuildError
from kvrelay.kvtransfer.agent import AgentError, Mover
from kvrelay.kvtransfer.codec import Codec, open_codec
from kvrelay.kvtransfer.executor import StoreExecutor
from kvrelay.kvtransfer.movers.coded import CodedMover, open_coded
from kvrelay.kvtransfer.movers.disk import DiskMover
from kvrelay.kvtransfer.movers.opening import NoHostMemory, Storage, TierSettings
from kvrelay.kvtransfer.movers.staged import StagedMover
from kvrelay.kvtransfer.store import DiskStore, first_free, places, stale_stores
from kvrelay.kvtransfer.store.folder import default_folder
from kvrelay.kvtransfer.store.index import NO_CODEC


def open_tier(settings: TierSettings) -> Storage:
    """Opens the disk. Raises StoreError, AgentError, NoHostMemory."""
    config, folder = settings.config, settings.tiers.disk_path
    root = (Path(folder).expanduser() if folder else default_folder()) / settings.part
    try:
        codec = open_codec(config.disk_codec)
    except NativeBuildError as error:
        raise AgentError(f"{error}; with tiers.disk_codec = none there is one") from error
    store = open_store(root, config, codec)
    try:
        mover = _open_mover(settings, store, codec)
    except BaseException:
        store.close()
        raise
    notices = *store.warnings, *_unused(root, config.fingerprint)
    return Storage(mover, StoreExecutor(store), tuple(store.records), notices)


def open_store(root: Path, config: WorkerConfig, codec: Codec | None) -> DiskStore:
    """In the first place that no other process has. Raises StoreError."""
    open_at = partial(
        DiskStore.open,
        fingerprint=config.fingerprint,
        compatibility=config.compatibility,
        bytes_per_block=config.bytes_per_block,
        max_blocks=config.num_disk_blocks,
        room_bytes=config.disk_bytes,
        codec=codec.name if codec is not None else NO_CODEC,
    )
    return first_free(places(root, config.fingerprint, config.node_id), open_at)


def _open_mover(settings: TierSettings, store: DiskStore, codec: Codec | None) -> Mover:
    name, memory = settings.config.node_id, settings.memory
    disk: DiskMover | CodedMover
    if codec is None:
        disk = DiskMover(name, memory, store)
    else:
        disk = open_coded(name, memory, store, codec, settings.share, settings.quantizer)
    if disk.can_reach_device:
        return disk
    if Tier.HOST not in memory:
        disk.close()
        raise NoHostMemory(
            f"tiers.disk_gib without tiers.host_gib: {name} has a GPU, whose KV reaches the disk by"
            " host memory (no GPUDirect Storage, or a codec); set tiers.host_gib as well"
        )
    device, host = memory[Tier.DEVICE], memory[Tier.HOST]
    return StagedMover(disk, device, host, settings.config.num_host_blocks)


def _unused(root: Path, fingerprint: bytes) -> list[str]:
    """Stores under `root` of other models, which take room there, as notices."""
    stale = stale_stores(root, fingerprint)
    if not stale:
        return []
    size_gib = sum(store.num_bytes for store in stale) / 2**30
    return [
        f"{len(stale)} disk store(s) of other models or formats in {root} take {size_gib:.1f} GiB;"
        f" what is not needed any more can be removed, the oldest is {stale[0].path}"
    ]
