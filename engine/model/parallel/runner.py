"""A worker's model over several processes: the leader's side of tensor parallelism.

Life: the follower processes are started and meet; each rank loads its part; then every step is sent
to the followers and run by all ranks at once, and rank 0, in the worker's own process, samples.
Followers end with the leader, whose end closes their connection. A follower that ends by itself is
noticed at once, and the worker is lost with it: its ranks no longer agree on what was computed.

Every rank has the KV of its heads in a pool of its own. What moves and checks it there is the
companion of a follower, which the leader talks to by the same connection.

Followers seen from the leader: how they are started and reached, and what they say.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from msgspec import structs

from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.device import find_device
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.parallel.link import (
    Broken,
    Checksums,
    ForkedRank,
    MakeCompanion,
    RankHost,
    Ready,
    connection_of,
    forked,
    reach,
    start_process,
)
from kvrelay.engine.model.parallel.ops import (
    COLLECTIVE_TIMEOUT_S,
    LOAD_TIMEOUT_S,
    FindModel,
    Meeting,
    RankSetup,
)
from kvrelay.engine.model.parallel.shard import Shard, check_divides
from kvrelay.engine.model.parallel.tables import SentTables
from kvrelay.engine.model.parallel.updates import RankChanged
from kvrelay.engine.model.runner import GREEDY, ModelRunner
from kvrelay.engine.model.sampling.sampler import undrafted
from kvrelay.engine.step import ScheduledSeq, Step, StepDone
from kvrelay.engine.wire.channel import own_version

START_TIMEOUT_S = LOAD_TIMEOUT_S  # for a follower to import, and then to load its weights
STOP_TIMEOUT_S = 5.0

OnMessage = Callable[[int, Any], None]
"""Given a rank and what its companion said; from the thread that watches it."""


def packed(message: Any) -> memoryview:
    """As a follower's connection unpacks it."""
    return ForkingPickler.dumps(message)


class Follower:
    """A process of rank `rank`, seen from the leader. It says Ready after each stage of its start,
    Broken when it cannot go on."""

    def __init__(
        self,
        rank: int,
        connected: socket.socket,
        process: subprocess.Popen[bytes] | ForkedRank | None = None,
    ) -> None:
        """Takes both over. `process`: if it is a child of this one."""
        self.rank = rank
        self.facts: Any = None  # its companion's
        # What it has answered; None: it has ended.
        self.checksums: SimpleQueue[Checksums | None] = SimpleQueue()
        self.changes: SimpleQueue[RankChanged | None] = SimpleQueue()
        self._ours, self._process = connected, process
        self._connection = connection_of(connected)
        self._sending = threading.Lock()
        self._watcher: threading.Thread | None = None

    def send(self, message: memoryview) -> None:
        """What `packed` gives; from any thread. Raises OSError if it has ended."""
        with self._sending:
            self._connection.send_bytes(message)

    def _receive(self) -> Any:
        """Blocks until it says something, or has ended."""
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return Broken("it has ended")

    def wait_ready(self) -> None:
        """Until it has done the next stage. Raises ModelError."""
        answer: Any = Broken(f"no answer for {START_TIMEOUT_S:g} s")
        if self._connection.poll(START_TIMEOUT_S):
            answer = self._receive()
        if not isinstance(answer, Ready):
            raise ModelError(f"rank {self.rank} of this worker did not start: {answer.why}")
        self.facts = answer.facts

    def watch(self, on_end: Callable[[str], None], on_message: OnMessage) -> None:
        """When it ends, `on_end` is called with the reason; `on_message` with what else it says."""

        def run() -> None:
            while True:
                answer = self._receive()
                match answer:
                    case Broken(why):
                        break
                    case Checksums():
                        self.checksums.put(answer)
                    case RankChanged():
                        self.changes.put(answer)
                    case _:
                        on_message(self.rank, answer)
            self.checksums.put(None)
            self.changes.put(None)
            on_end(f"rank {self.rank}: {why}")

        self._watcher = threading.Thread(target=run, name=f"rank-{self.rank}", daemon=True)
        self._watcher.start()

    def checksums_of(self, step_id: int) -> list[int]:
        """Waits for them. Raises OSError."""
        while True:
            try:
                answer = self.checksums.get(timeout=COLLECTIVE_TIMEOUT_S)
            except Empty:
                why = f"rank {self.rank}: no checksums for {COLLECTIVE_TIMEOUT_S:g} s"
                raise TimeoutError(why) from None
            if answer is None:
                raise ConnectionError(f"rank {self.rank} has ended")
            if answer.step_id == step_id:
                return answer.sums

    def changed(self, number: int, until: float) -> str:
        """Waits until it has answered, why it has not done it; "": it has. Raises OSError."""
        while True:
            try:
                answer = self.changes.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                raise TimeoutError(f"rank {self.rank}: its weights do not change") from None
            if answer is None:
                raise ConnectionError(f"rank {self.rank} has ended")
            if answer.number == number:
                return f"rank {self.rank}: {answer.why}" if answer.why else ""

    def stop(self) -> None:
        """It ends as soon as its connection does."""
        with contextlib.suppress(OSError):  # it may have ended
            self._ours.shutdown(socket.SHUT_RDWR)
        if self._watcher is not None:
            self._watcher.join()
        if self._process is not None:
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._connection.close()
        self._ours.close()


def start_here(rank: int) -> Follower:
    """Starts it on the leader's machine. Raises OSError."""
    if forked:
        waiting = forked.pop()
        follower = Follower(rank, waiting.connected, waiting)
        follower.send(packed(dict(os.environ)))
        return follower
    ours, theirs = socket.socketpair()
    with theirs:
        return Follower(rank, ours, start_process(theirs))


def start_at(rank: int, place: RankHost) -> Follower:
    """On another machine. Raises ModelError."""
    where = f"{place.host}:{place.port}"
    if place.package != own_version():
        raise ModelError(
            f"rank {rank} of this worker, at {where}, has kvrelay {place.package}, and its leader"
            f" {own_version()}: install one version on all machines of a worker"
        )
    try:
        return Follower(rank, reach(place))
    except OSError as error:
        raise ModelError(f"rank {rank} of this worker is not at {where}: {error}") from error


log = logging.getLogger("kvrelay.parallel")

T = TypeVar("T")
OnLost = Callable[[Exception], None]


class RanksLost(Exception):
    """The processes of a worker are no longer in step; it cannot go on."""


class ParallelRunner:
    """As ModelRunner, over processes: of this machine, or, where `further` names others, an
    even part on each. Owns the followers till `close`.

    Invariant: between steps all ranks have run the same ones, or the worker is lost."""

    def __init__(
        self,
        model_dir: Path,
        model: ModelSection,
        engine: EngineSection,
        *,
        progress: Callable[[str], None] = lambda _: None,
        companion: MakeCompanion | None = None,
        host: str = "",
        further: Sequence[RankHost] = (),
        find_model: FindModel | None = None,
        read: Callable[[Any], Any] | None = None,
    ) -> None:
        """As ModelRunner, but that `engine.threads` are for all ranks of a machine together.
        companion: of each follower, not of rank 0. With `further`: `host` is where this machine is
        reached by those, and `find_model` finds the checkpoint there. read: it
        can be pickled. Raises ModelError."""
        size = engine.tensor_parallel_size
        check_divides(read_config(model_dir), size)
        kind = find_device(model.device).type
        here = size - sum(place.num_ranks for place in further)
        _check_devices(kind, here)
        threads = max(1, (engine.threads or torch.get_num_threads()) // here)
        engine = structs.replace(engine, threads=threads)
        self._on_message: OnMessage = _unexpected
        self._lost: Exception | None = None
        self._on_lost: OnLost | None = None
        self._closing = False
        self._lock = threading.Lock()  # guards the three above
        self._followers: list[Follower] = []
        self._folder = tempfile.TemporaryDirectory(prefix="kvrelay-ranks-")
        meeting = Meeting(str(Path(self._folder.name) / "meeting"))
        if further:
            meeting = Meeting.over_network(host)
        places: list[tuple[RankHost | None, int]] = [(None, number) for number in range(here)]
        places += [(place, number) for place in further for number in range(place.num_ranks)]
        setups = [
            RankSetup(
                Shard(rank, size),
                meeting.seen_from(place.host if place else meeting.own_host) if rank else meeting,
                f"cuda:{number}" if kind == "cuda" else kind,
                find_model or partial(Path, model_dir),
                model,
                engine,
                companion,
                read,
            )
            for rank, (place, number) in enumerate(places)
        ]
        try:
            own = setups[0]
            self._start_followers(setups[1:], [place for place, _ in places[1:]])
            member = own.join()
            self._group = member.group
            given = model_dir, model, engine
            self._runner = ModelRunner(*given, member=member, progress=progress, read=read)
            self._tables = SentTables(self._runner.kv_spec.block_size)
            for follower in self._followers:
                follower.wait_ready()
        except BaseException:
            self.close()
            raise
        if kind != "cuda":
            self._folder.cleanup()  # NCCL meets again when it first computes, Gloo does not
        self.launch = None if self._runner.launch is None else self._launch
        self.facts = [follower.facts for follower in self._followers]
        for follower in self._followers:
            follower.watch(self._lose, lambda rank, message: self._on_message(rank, message))

    def __getattr__(self, name: str) -> Any:
        """Attributes of the runner of rank 0: its pool, its dtype, its notices."""
        if name == "_runner":
            raise AttributeError(name)  # it was not made
        return getattr(self._runner, name)

    def execute(self, step: Step) -> StepDone:
        """As ModelRunner. Raises RanksLost if a rank has failed."""
        prepared = self._runner.prepare(step)
        return self._on_all(prepared.step, partial(self._runner.execute, prepared=prepared))

    def _launch(self, step: Step) -> Callable[[], StepDone]:
        """As `ModelRunner.launch`, and errors as `execute`."""
        assert self._runner.launch is not None
        wait = self._on_all(step, self._runner.launch)

        def done() -> StepDone:
            try:
                return wait()
            except Exception as error:  # all ranks were in it
                self._lose(f"step {step.step_id}: {error}")
                raise

        return done

    def _on_all(self, step: Step, call: Callable[[Step], T]) -> T:
        if self._lost is not None:
            raise self._lost
        # What is sampled is known to rank 0 only, and so is what makes a token not plain.
        step = replace(step, repeats=1, seqs=undrafted(step.seqs))
        lean = replace(step, seqs=[_lean(seq) for seq in step.seqs])
        self._group.was_used = False
        try:
            self._send(self._tables.pack(lean))
            return call(step)
        except Exception as error:
            # Before the first collective all ranks refuse a step for the same reason.
            if isinstance(error, OSError) or self._group.was_used:
                self._lose(f"step {step.step_id}: {error}")
            raise

    def checksums(self, step: Step) -> list[list[int]]:
        """Lists each follower's sums of `step.checksum_blocks`, which was executed. Raises
        OSError."""
        try:
            return [follower.checksums_of(step.step_id) for follower in self._followers]
        except OSError as error:
            self._lose(str(error))
            raise

    def changed(self, number: int, timeout_s: float) -> list[str]:
        """Lists what all followers have answered to a `ChangeRank`. Raises OSError: one does not,
        and the worker is lost."""
        until = time.monotonic() + timeout_s
        try:
            return [follower.changed(number, until) for follower in self._followers]
        except OSError as error:
            self._lose(str(error))
            raise

    def tell(self, message: Any) -> None:
        """Send `message` to every follower, most often for its companion; from any thread."""
        try:
            self._send(message)
        except OSError as error:
            self._lose(str(error))

    def on_companion_message(self, call: OnMessage) -> None:
        """What companions say goes to `call`. To be set before anything is sent to them."""
        self._on_message = call

    def _send(self, message: Any) -> None:
        data = packed(message)  # once for all
        for follower in self._followers:
            follower.send(data)

    def when_lost(self, call: OnLost) -> None:
        """`call` is called once, from any thread, when the worker cannot go on."""
        with self._lock:
            self._on_lost = call
            lost = self._lost
        if lost is not None:
            call(lost)

    def close(self) -> None:
        """End the followers and wait for them."""
        with self._lock:
            self._closing = True
        for follower in self._followers:
            follower.stop()
        self._followers = []
        self._folder.cleanup()

    def _start_followers(self, setups: list[RankSetup], places: Sequence[RankHost | None]) -> None:
        """`places`: None: here. Returns when all are about to join their group."""
        for setup, place in zip(setups, places, strict=True):
            rank = setup.shard.rank
            self._followers.append(start_at(rank, place) if place else start_here(rank))
        for follower, setup in zip(self._followers, setups, strict=True):
            try:
                follower.send(packed(setup))
            except OSError as error:
                raise ModelError(f"rank {follower.rank} did not start: {error}") from error
        for follower in self._followers:
            follower.wait_ready()

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._lost is not None or self._closing:
                return
            self._lost = lost = RanksLost(reason)
            call = self._on_lost
        log.error("the ranks of this worker are no longer in step: %s", reason)
        if call is not None:
            call(lost)


def _check_devices(kind: str, size: int) -> None:
    """Raises ModelError if there are too few."""
    count = torch.cuda.device_count()
    if kind == "cuda" and count < size:
        raise ModelError(f"tensor_parallel_size = {size} needs as many GPUs, {count} are here")


def _lean(seq: ScheduledSeq) -> ScheduledSeq:
    """What ranks need whose tokens do not count: they compute the logits of the same rows."""
    wanted, seq = seq.sampling, replace(seq, images=None)
    if not wanted.reads_prompt:
        return replace(seq, sampling=GREEDY, context=[], num_prompt_tokens=0, kept={})
    sampling = replace(GREEDY, prompt_logprobs=wanted.prompt_logprobs, pooling=wanted.pooling)
    return replace(seq, sampling=sampling, kept={})


def _unexpected(rank: int, message: Any) -> None:
    log.error("rank %d: unexpected message %s", rank, type(message).__name__)
