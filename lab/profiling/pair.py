"""Two workers side by side: what they cost each other, and how fast they reach each other.

Life: the neighbour's process is started and answers where it is; then it is asked, one thing at a
time, and ends with this object.
"""

from __future__ import annotations

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
from kvrelay.engine.host import LoopThread
from kvrelay.engine.kv.events import KVSnapshotRequest
from kvrelay.engine.wire.wire import Wire
from kvrelay.lab.profiling.forward import ForwardPasses, ProfileError
from kvrelay.lab.profiling.neighbour import ASKER, LOOPBACK, NAME, Reachable, Setup

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
            [sys.executable, "-m", "kvrelay.lab.profiling.neighbour"],
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
        self, passes: ForwardPasses, tokens: int, batch: int, context: int, least_s: float
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

    def _decode_for(self, passes: ForwardPasses, decodes: Any, least_s: float) -> float:
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
