"""Two workers side by side: what they cost each other, and how fast they reach each other.

The neighbour is a process of its own, that ends with its `Pair`, or with its stdin. Life: it reads
its setup from stdin, builds its runner as a prefill worker has it, and answers with where it can be
reached; then, for each number that it reads, it computes prompts of so many tokens until the next
line comes, and answers with how long each pass took.
"""

from __future__ import annotations

import os
import queue
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec

from kvrelay.cluster.config import Config
from kvrelay.cluster.prepare import prepare_model
from kvrelay.engine.host import LoopThread
from kvrelay.engine.kv.events import KVSnapshotRequest
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.priority import NICENESS
from kvrelay.engine.wire.wire import Wire
from kvrelay.kvtransfer.movers.nixl import NixlAgent
from kvrelay.lab.profiling.forward import PassRunner, ProfileError, running

NAME, ASKER = "profile-neighbour", "profile"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Setup:
    config: Config
    threads: int
    on_cpu: bool
    token: bytes
    host: str  # where the wire of whoever asks is
    port: int


@dataclass(frozen=True, slots=True)
class Reachable:
    """What a neighbour answers to its setup."""

    metadata: bytes
    num_blocks: int
    host: str
    port: int


def main() -> None:
    setup = msgspec.json.decode(sys.stdin.readline(), type=Setup)
    if setup.on_cpu:
        os.nice(NICENESS)
    model = prepare_model(setup.config, 0, lambda _: None)
    with running(setup.config, model, setup.threads) as runner:
        _serve(setup, runner)


def _serve(setup: Setup, runner: ModelRunner) -> None:
    engine = setup.config.engine.sized(gpu=not setup.on_cpu)
    passes = PassRunner(runner, 0.0, engine.max_num_batched_tokens)
    passes.fill_pool()
    agent = NixlAgent(NAME, runner.kv_pool)
    loop = LoopThread(NAME)
    host, port = loop.submit(_echo(setup)).result(30.0)
    _answer(Reachable(agent.metadata(), passes.num_blocks, host, port))
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_into, args=(lines,), daemon=True).start()
    try:
        while line := lines.get():
            _answer(_compute(passes, int(line), lines))
            if not lines.get():
                break
    finally:
        agent.close()
        loop.close()


def _read_into(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    lines.put("")  # twice: one may end a computation
    lines.put("")


async def _echo(setup: Setup) -> tuple[str, int]:
    """A wire that sends back what it is asked."""

    def answer(_to: str, message: object) -> None:
        assert isinstance(message, KVSnapshotRequest)
        wire.send(ASKER, message)

    wire = Wire(NAME, setup.token, answer)
    wire.set_address(ASKER, setup.host, setup.port, 1)
    return await wire.listen(LOOPBACK)


def _compute(passes: PassRunner, num_tokens: int, lines: queue.SimpleQueue[str]) -> list[float]:
    """Seconds of each pass of so many tokens, until there is a line."""
    found: list[float] = []
    while not found or lines.empty():
        found.append(passes.run(passes.chunk(0, num_tokens)))
    return found


def _answer(value: object) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()


T = TypeVar("T")

START_TIMEOUT_S = 180.0
ANSWER_TIMEOUT_S = 60.0
NUM_PINGS = 200
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Slowed:
    """How many times as long passes take while the other worker computes."""

    prefill: float
    decode: float


class Neighbour:
    """Owns the process from `with` to its end."""

    def __init__(self, config: Config, threads: int, on_cpu: bool) -> None:
        self._loop = LoopThread("profile")
        self._pongs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        token = secrets.token_bytes(32)
        self._wire = Wire(ASKER, token, lambda _, message: self._pongs.put(message))
        host, port = self._loop.submit(self._wire.listen(LOOPBACK)).result(30.0)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvrelay.lab.profiling.pair"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._ask(Setup(config, threads, on_cpu, token, host, port))
        self.reachable: Reachable

    def __enter__(self) -> Neighbour:
        try:
            self.reachable = self._answer(Reachable, START_TIMEOUT_S)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def message_s(self) -> float:
        """From one process to the other: half of there and back."""

        def connect() -> None:
            self._wire.set_address(NAME, self.reachable.host, self.reachable.port, 1)

        self._loop.call(connect)
        found = []
        for _ in range(NUM_PINGS):
            started = time.perf_counter()
            self._loop.loop.call_soon_threadsafe(self._wire.send, NAME, KVSnapshotRequest(ASKER))
            try:
                self._pongs.get(timeout=ANSWER_TIMEOUT_S)
            except queue.Empty:
                raise ProfileError("the other process does not answer") from None
            found.append((time.perf_counter() - started) / 2)
        return statistics.median(found)

    def slowed(
        self, passes: PassRunner, tokens: int, batch: int, context: int, least_s: float
    ) -> Slowed:
        """Prompts of `tokens` there, decodes here: apart, then at once. In rounds, so that what
        else goes on here slows both alike."""
        decodes = passes.decodes(batch, context)
        prefill, decode = [], []
        for _ in range(ROUNDS):
            alone_s = self._decode_for(passes, decodes, least_s)
            _, prompt_s = self._compute_while(tokens, lambda: time.sleep(least_s))
            both_s = max(least_s, 3 * prompt_s)
            beside_s, slowed_prompt_s = self._compute_while(
                tokens, partial(self._decode_for, passes, decodes, both_s)
            )
            prefill.append(slowed_prompt_s / prompt_s)
            decode.append(beside_s / alone_s)
        return Slowed(max(1.0, statistics.median(prefill)), max(1.0, statistics.median(decode)))

    def _decode_for(self, passes: PassRunner, decodes: Any, least_s: float) -> float:
        """Mean seconds of a step: what others cost it comes in lumps."""
        found: list[float] = []
        while len(found) < 3 or sum(found) < least_s:
            found.append(passes.run(decodes))
        return statistics.fmean(found)

    def _compute_while(self, tokens: int, act: Callable[[], T]) -> tuple[T, float]:
        """What `act` returns, and mean seconds of the neighbour's passes meanwhile."""
        self._ask(tokens)
        result = act()
        self._ask(0)  # any line ends it, when a pass is done
        found = self._answer(list[float], ANSWER_TIMEOUT_S)
        return result, statistics.fmean(found)

    def _ask(self, value: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(value).decode() + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ProfileError(f"the other worker's process has ended: {error}") from error

    def _answer(self, kind: type[T], timeout_s: float) -> T:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise ProfileError(f"no answer of the other worker in {timeout_s:g} s") from None
        if not line:
            raise ProfileError("the other worker's process has ended; what it said is above")
        return msgspec.json.decode(line, type=kind)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._reader.join(5)
        self._loop.submit(self._wire.close()).result(10.0)
        self._loop.close()
