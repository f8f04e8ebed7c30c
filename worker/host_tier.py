"""Host memory of a worker for KV, as it is opened and as it is given back.

Memory lies where it outlives the worker, if there is room: the next worker of the machine finds it
warm, and until then the others read it. Where there is none it is the process's own, and ends with
it; that is no reason not to serve.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Any

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.kv.spec import KVSpec
from kvrelay.engine.native import NativeBuildError
from kvrelay.engine.node import NodeId
from kvrelay.kvtransfer.kivi import Quantizer, why_exact
from kvrelay.kvtransfer.layout import HeadShare
from kvrelay.kvtransfer.movers.packed import FOLDER
from kvrelay.kvtransfer.store import StoreError
from kvrelay.kvtransfer.store.arena import (
    HostArena,
    arena_form,
    arena_root,
    open_arena,
    remove_arena,
    superseded_arenas,
)
from kvrelay.kvtransfer.store.folder import BLOCKS, LOCK

log = logging.getLogger("kvrelay.build")
NOTICE = "host memory for KV ends with this worker"


@dataclass(frozen=True, slots=True)
class HostMemory:
    blocks: Any  # [num_slots, bytes_per_block]
    arena: HostArena | None  # None: it ends with the process
    notices: tuple[str, ...] = ()


def open_host_memory(
    config: WorkerConfig, part: str, num_slots: int, *, pinned: bool
) -> HostMemory:
    """`config`: of the rank; `part`: of the machine's shared memory, for this cluster, and for a
    rank of several. Raises AgentError where there is no memory."""
    from kvrelay.kvtransfer.movers.pool import make_host_arena, pin

    try:
        arena = open_arena(arena_root() / part, config, num_slots)
    except StoreError as error:
        blocks = make_host_arena(num_slots, config.bytes_per_block, pinned)
        return HostMemory(blocks, None, (f"{NOTICE}: {error}",))
    try:
        if pinned:
            arena.reserve([num_slots - 1])
            pin(arena.memory)
    except BaseException:
        arena.close()
        raise
    return HostMemory(arena.memory, arena)


def open_quantizer(spec: KVSpec, share: HeadShare) -> Quantizer | None:
    """None: KV stays exact, by its shape or for want of a C compiler."""
    try:
        return None if why_exact(spec) else Quantizer(spec, len(share.heads))
    except NativeBuildError:
        return None


def kept_bytes(cluster: str, worker: NodeId) -> tuple[int, int]:
    """Measures host memory that a worker of this name has left on this machine: the size of what it
    had last, without that in four bits, and how much it has taken, in any form, from what the
    machine has available, and gives back or uses again."""
    try:
        root = arena_root() / cluster
    except StoreError:
        return 0, 0
    sizes: dict[tuple[str, str], int] = {}
    last = 0.0, ("", "")
    taken_bytes = 0
    for blocks in root.rglob(f"{worker}/{BLOCKS}"):
        folder = blocks.parent
        taken_bytes += blocks.stat().st_blocks * 512
        if FOLDER not in folder.parts:
            form = arena_form(folder)
            sizes[form] = sizes.get(form, 0) + blocks.stat().st_size
            last = max(last, ((folder / LOCK).stat().st_mtime, form))  # written when it is taken
    return sizes.get(last[1], 0), taken_bytes


def free_other_forms(cluster: str, config: WorkerConfig, num_ranks: int) -> None:
    """Give back host memory whose blocks nobody of the cluster can read on this machine, since what
    its workers compute, or the form of its KV, has changed. `config`: of a worker that starts."""
    own = config.fingerprint.hex(), str(num_ranks) if num_ranks > 1 else ""
    with contextlib.suppress(StoreError):
        for folder in superseded_arenas(arena_root() / cluster, config.node_id):
            if arena_form(folder) != own and remove_arena(folder):
                log.info("host memory of another form is given back: %s", folder)
