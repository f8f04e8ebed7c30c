"""All of a profile, in the order in which it is measured: passes, links and neighbours, serving.

What is served is measured last, because what a request takes beside its passes is what is left when
they are known.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from numpy.typing import NDArray

from kvrelay.cluster.config import Config
from kvrelay.cluster.prepare import PreparedModel, prepare_model
from kvrelay.engine.model.device import find_device
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.lab.profiling.forward import ForwardPasses, Grid, running
from kvrelay.lab.profiling.links import disk_link, memory_links
from kvrelay.lab.profiling.neighbour import NAME
from kvrelay.lab.profiling.pair import Neighbour
from kvrelay.lab.profiling.served import measure_served
from kvrelay.lab.timing.profile import arrays_of, profile_of

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
        passes = ForwardPasses(runner, grid.point_s, engine.max_num_batched_tokens)
        passes.fill_pool()
        grid = grid.within(model.max_model_len, passes.num_blocks, engine.block_size)
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
        passes: ForwardPasses,
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
