"""All of a profile, in the order in which it is measured: passes, links and neighbours, serving.

What is served is measured last, because what a request takes beside its passes is what is left when
they are known.

How fast KV moves (between two processes, between host memory and the device, from the disk) is
measured as a worker does it, by its transfer thread and with the checksums of what has
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from kvrelay.cluster.config import Config
from kvrelay.cluster.prepare import PreparedModel, prepare_model
from kvrelay.engine.config import TiersSection, WorkerConfig
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.model.device import find_device
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.stats import Role
from kvrelay.kvtransfer.agent import (
    AgentError,
    ConnectPeer,
    CopyBlocks,
    CopyDone,
    MoveId,
    PeerConnected,
)
from kvrelay.kvtransfer.executor import TransferExecutor
from kvrelay.kvtransfer.movers.disk_tier import open_tier
from kvrelay.kvtransfer.movers.nixl import NixlAgent
from kvrelay.kvtransfer.movers.opening import TierSettings
from kvrelay.kvtransfer.movers.pool import block_bytes, is_on_gpu, make_host_arena
from kvrelay.kvtransfer.store import StoreError
from kvrelay.kvtransfer.transfer_loop import Answer, TransferLoop
from kvrelay.lab.profiling.forward import Grid, PassRunner, ProfileError, running
from kvrelay.lab.profiling.pair import NAME, Neighbour
from kvrelay.lab.profiling.served import measure_served
from kvrelay.lab.timing.profile import arrays_of, profile_of

OWN, EPOCH = "profile", 1
COUNTS = (1, 4, 16, 48)  # blocks of a transfer
REPEATS = 7
TIMEOUT_S = 20.0
FINGERPRINT = b"measured by kvrelay profile"

Pool = object


class Transfers:
    """Transfers of one worker, one after the other. Owns its loop, and by it mover and store."""

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
    transfers = Transfers(TransferExecutor(OWN, EPOCH, agent, pools), TransferLoop)
    try:
        transfers.connect(peer, peer_blocks, metadata)
        transfer_s, peer_rate = _fit(
            bytes_per_block, lambda count: transfers.seconds(peer, count, Tier.DEVICE, Tier.DEVICE)
        )
        _, host_rate = _fit(
            bytes_per_block, lambda count: transfers.seconds(OWN, count, Tier.HOST, Tier.DEVICE)
        )
    finally:
        transfers.close()
    return {
        "peer_bytes_per_s": peer_rate,
        "host_bytes_per_s": host_rate,
        "transfer_s": transfer_s,
    }


def disk_link(pool: Pool, bytes_per_block: int, block_size: int, folder: Path) -> dict[str, float]:
    """`disk_bytes_per_s`, read with an empty page cache; nothing where no disk tier can be had."""
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix="kvrelay-profile-") as name,
        _disk_transfers(pool, bytes_per_block, block_size, Path(name)) as transfers,
    ):
        if transfers is None:
            return {}
        transfers.seconds(OWN, max(COUNTS), Tier.DEVICE, Tier.DISK)

        def read(count: int) -> float:
            drop_page_cache(Path(name))
            return transfers.seconds(OWN, count, Tier.DISK, Tier.DEVICE)

        _, rate = _fit(bytes_per_block, read)
    return {"disk_bytes_per_s": rate}


@contextmanager
def _disk_transfers(
    pool: Pool, bytes_per_block: int, block_size: int, folder: Path
) -> Iterator[Transfers | None]:
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
    tiers = TiersSection(disk_path=str(folder))
    try:
        tier = open_tier(TierSettings(config, {Tier.DEVICE: pool}, tiers=tiers))
    except (AgentError, StoreError):
        yield None
        return
    executor = TransferExecutor(OWN, EPOCH, tier.mover, pools)
    transfers = Transfers(executor, lambda *args: TransferLoop(*args, store=tier.store))
    try:
        yield transfers
    finally:
        transfers.close()


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


CONTENTION_PROMPT = 256
CONTENTION_BATCH, CONTENTION_CONTEXT = 4, 256
MIXED = ((64, 4, 256), (128, 4, 256), (64, 8, 512))  # tokens of a prompt, decodes, their context

Tell = Callable[[str, int, int], None]  # what is measured next, how much is done, of how much


@dataclass(frozen=True, slots=True)
class Measured:
    """A profile's arrays, and what an operator should know of it, one line each."""

    arrays: dict[str, NDArray[Any]]
    notices: tuple[str, ...]


def measure(config: Config, grid: Grid, tell: Tell, *, with_serving: bool = True) -> Measured:
    """Takes some minutes, in which nothing else should run here. Raises ProfileError, BuildError,
    ModelError, AgentError."""
    model = prepare_model(config, 2, lambda _: None)
    engine = config.engine.sized(gpu=find_device(config.model.device).type == "cuda")
    config = replace(config, engine=engine)
    threads = engine.threads or os.cpu_count() or 1
    with running(config, model, threads) as runner:
        passes = PassRunner(runner, grid.point_s, engine.max_num_batched_tokens)
        passes.fill_pool()
        grid = grid.within(model.max_model_len, *passes.rows)
        work = _Work(config, model, runner, passes, grid, tell, int(with_serving))
        prefill, decode, extra = work.run(threads)
    if with_serving:
        del runner, passes, work.runner, work.passes  # its memory is wanted by the workers
        work.next("a served cluster")
        timing = profile_of(arrays_of(prefill, decode, extra), "measured", "this machine")
        # Workers on GPUs have one each, and one pool has no other to share with.
        shares_cores = "decode_slowdown" in extra and config.cluster.prefill > 0
        overheads = measure_served(config, timing, shares_cores=shares_cores)
        extra |= asdict(overheads)
    return Measured(arrays_of(prefill, decode, extra), tuple(work.notices))


class _Work:
    """One measurement under way. Owned by `measure`."""

    def __init__(
        self,
        config: Config,
        model: PreparedModel,
        runner: ModelRunner,
        passes: PassRunner,
        grid: Grid,
        tell: Tell,
        num_more: int,
    ) -> None:
        """`num_more`: parts that `run` does not measure."""
        self.config = config
        self.model = model
        self.runner = runner
        self.passes = passes
        self.grid = grid
        self.tell = tell
        self.notices: list[str] = list(runner.notices)
        self._points = [
            (batch, context)
            for context in grid.contexts
            for batch in grid.batches
            if passes.fits(batch, context) and batch <= config.engine.max_num_seqs
        ]
        self._total = len(grid.prompts) + len(self._points) + len(MIXED) + 4 + num_more
        self._done = 0

    def run(
        self, threads: int
    ) -> tuple[dict[int, float], dict[tuple[int, int], float], dict[str, float]]:
        passes = self.passes
        prefill = {}
        for tokens in self.grid.prompts:
            self.next(f"a prompt of {tokens} tokens")
            prefill[tokens] = passes.prompt_ms(tokens)
        decode = {}
        for batch, context in self._points:
            self.next(f"{batch} decodes after {context} tokens")
            decode[batch, context] = passes.decodes_ms(batch, context)
        extra = {"mixed_saved_ms": self._mixed_saved_ms()}
        extra["bytes_per_token"] = float(self.runner.kv_spec.bytes_per_token)
        self.next("the disk")
        extra |= self._disk()
        self.next("another worker")
        on_cpu = self.runner.device.type == "cpu"
        with Neighbour(self.config, threads, on_cpu) as neighbour:
            self.next("links to it")
            extra["message_s"] = neighbour.message_s()
            reachable = neighbour.reachable
            extra |= memory_links(
                self.runner.kv_pool,
                self.runner.kv_spec.bytes_per_block,
                NAME,
                reachable.num_blocks,
                reachable.metadata,
            )
            if on_cpu:  # workers on GPUs have one each
                self.next("both at once")
                extra |= self._contention(neighbour)
        return prefill, decode, extra

    def _mixed_saved_ms(self) -> float:
        """Prompts and decodes in one pass, compared with a pass each."""
        passes, found = self.passes, []
        for tokens, batch, context in MIXED:
            self.next(f"a prompt of {tokens} tokens with {batch} decodes")
            if passes.fits(batch, context, tokens) and tokens <= self.grid.prompts[-1]:
                decodes_ms = passes.decodes_ms(batch, context)
                apart_ms = passes.chunk_ms(0, tokens) + decodes_ms
                saved_ms = apart_ms - passes.mixed_ms(tokens, batch, context)
                found.append(min(saved_ms, decodes_ms))  # weights are read once less, at most
        return max(0.0, statistics.median(found)) if found else 0.0

    def _contention(self, neighbour: Neighbour) -> dict[str, float]:
        tokens = min(CONTENTION_PROMPT, self.grid.prompts[-1])
        context = min(CONTENTION_CONTEXT, self.grid.contexts[-1])
        least_s = 4 * self.grid.point_s
        slowed = neighbour.slowed(self.passes, tokens, CONTENTION_BATCH, context, least_s)
        return {"prefill_slowdown": slowed.prefill, "decode_slowdown": slowed.decode}

    def _disk(self) -> dict[str, float]:
        section = self.config.tiers
        folder = Path(section.disk_path).expanduser() if section.disk_path else None
        if folder is None or not folder.is_dir():
            folder = Path(tempfile.gettempdir())
        spec = self.runner.kv_spec
        found = disk_link(self.runner.kv_pool, spec.bytes_per_block, spec.block_size, folder)
        if not found:
            self.notices.append(f"no disk tier in {folder}: its rate was not measured")
        return found

    def next(self, what: str) -> None:
        self.tell(what, self._done, self._total)
        self._done += 1
