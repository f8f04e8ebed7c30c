"""How fast KV moves here: between two processes, between host memory and the device, from the disk.

Each is measured as a worker does it, by its transfer thread and with the checksums of what has
come: for several numbers of blocks, of which the slope is the rate and the rest the overhead.
"""

from __future__ import annotations

import itertools
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.stats import Role
from kvrelay.kvtransfer.agent import ConnectPeer, CopyBlocks, CopyDone, MoveId, PeerConnected
from kvrelay.kvtransfer.agents.nixl import NixlAgent
from kvrelay.kvtransfer.agents.pool import block_bytes, is_on_gpu, make_host_arena
from kvrelay.kvtransfer.executor import TransferExecutor
from kvrelay.kvtransfer.transfer_loop import Answer, TransferLoop
from kvrelay.lab.profiling.forward import ProfileError
from kvrelay.worker.disk_tier import open_disk_tier

OWN, EPOCH = "profile", 1
COUNTS = (1, 4, 16, 48)  # blocks of a transfer
REPEATS = 7
TIMEOUT_S = 20.0
FINGERPRINT = b"measured by kvrelay profile"

Pool = object


class Mover:
    """Transfers of one worker, one after the other. Owns its loop, and by it agent and store."""

    def __init__(self, executor: TransferExecutor, loop: Callable[..., TransferLoop]) -> None:
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._loop = loop(executor, self._answers.put)
        self._ids = map(MoveId, itertools.count())

    def connect(self, peer: str, num_blocks: int, metadata: bytes) -> None:
        self._loop.submit(ConnectPeer(peer, EPOCH, num_blocks, metadata))
        answer = self._answer()
        if not isinstance(answer, PeerConnected) or answer.error is not None:
            raise ProfileError(f"cannot connect to {peer}: {answer}")

    def seconds(self, peer: str, count: int, src: Tier, dst: Tier) -> float:
        """Times one transfer of `count` blocks, from its effect to its answer."""
        blocks = tuple(range(count))
        request = CopyBlocks(next(self._ids), peer, EPOCH, blocks, blocks, TIMEOUT_S, src, dst)
        started = time.perf_counter()
        self._loop.submit(request)
        answer = self._answer()
        elapsed_s = time.perf_counter() - started
        if not isinstance(answer, CopyDone) or answer.error is not None:
            raise ProfileError(f"{count} blocks from {peer}, {src} to {dst}: {answer}")
        return elapsed_s

    def close(self) -> None:
        self._loop.close()

    def _answer(self) -> Answer:
        try:
            return self._answers.get(timeout=2 * TIMEOUT_S)
        except queue.Empty:
            raise ProfileError(f"no answer to a transfer in {2 * TIMEOUT_S:g} s") from None


def memory_links(
    pool: Pool, bytes_per_block: int, peer: str, peer_blocks: int, metadata: bytes
) -> dict[str, float]:
    """`peer_bytes_per_s` and `host_bytes_per_s` into `pool`, and `transfer_s`."""
    arena = make_host_arena(max(COUNTS), bytes_per_block, pinned=is_on_gpu(pool))
    arena[:] = 1
    agent = NixlAgent(OWN, pool, host=arena)
    pools = {Tier.DEVICE: block_bytes(pool), Tier.HOST: block_bytes(arena)}
    mover = Mover(TransferExecutor(OWN, EPOCH, agent, pools), TransferLoop)
    try:
        mover.connect(peer, peer_blocks, metadata)
        transfer_s, peer_rate = _fit(
            bytes_per_block, lambda count: mover.seconds(peer, count, Tier.DEVICE, Tier.DEVICE)
        )
        _, host_rate = _fit(
            bytes_per_block, lambda count: mover.seconds(OWN, count, Tier.HOST, Tier.DEVICE)
        )
    finally:
        mover.close()
    return {
        "peer_bytes_per_s": peer_rate,
        "host_bytes_per_s": host_rate,
        "transfer_s": transfer_s,
    }


def disk_link(pool: Pool, bytes_per_block: int, block_size: int, folder: Path) -> dict[str, float]:
    """`disk_bytes_per_s`, read with an empty page cache; nothing where no disk tier can be had."""
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix="kvrelay-profile-") as name,
        _disk_mover(pool, bytes_per_block, block_size, Path(name)) as mover,
    ):
        if mover is None:
            return {}
        mover.seconds(OWN, max(COUNTS), Tier.DEVICE, Tier.DISK)

        def read(count: int) -> float:
            drop_page_cache(Path(name))
            return mover.seconds(OWN, count, Tier.DISK, Tier.DEVICE)

        _, rate = _fit(bytes_per_block, read)
    return {"disk_bytes_per_s": rate}


@contextmanager
def _disk_mover(
    pool: Pool, bytes_per_block: int, block_size: int, folder: Path
) -> Iterator[Mover | None]:
    memory = {Tier.DEVICE: pool}
    pools = {Tier.DEVICE: block_bytes(pool)}
    if is_on_gpu(pool):
        yield None  # its disk goes by host memory: the rate is that of the slower of the two
        return
    config = WorkerConfig(
        node_id=OWN,
        role=Role.DECODE,
        epoch=EPOCH,
        num_blocks=pools[Tier.DEVICE].shape[0],
        block_size=block_size,
        bytes_per_block=bytes_per_block,
        max_model_len=1,
        fingerprint=FINGERPRINT,
        num_disk_blocks=max(COUNTS),
    )
    tier, _ = open_disk_tier(config, str(folder), memory, pools)
    if tier is None:
        yield None
        return
    mover = Mover(tier.copies, lambda *args: TransferLoop(*args, store=tier.store))
    try:
        yield mover
    finally:
        mover.close()


def drop_page_cache(folder: Path) -> None:
    """Drops that of every file under `folder`, as far as the system does so."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            try:
                os.fsync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)


def _fit(bytes_per_block: int, seconds: Callable[[int], float]) -> tuple[float, float]:
    """(seconds of any transfer, bytes per second): a line through the medians."""
    seconds(max(COUNTS))  # the first touches its memory
    medians = [statistics.median(seconds(count) for _ in range(REPEATS)) for count in COUNTS]
    return fit_line([count * bytes_per_block for count in COUNTS], medians)


def fit_line(num_bytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(seconds at no bytes, bytes per second). Where noise hides the slope, the rate is that of
    the largest transfer."""
    slope, start = (float(each) for each in np.polyfit(num_bytes, seconds, 1))
    least = seconds[-1] / num_bytes[-1]
    if slope <= 0 or start < 0:
        return 0.0, 1.0 / least
    return start, 1.0 / slope
