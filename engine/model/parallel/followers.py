"""Followers seen from the leader: how they are started and reached, and what they say."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from queue import Empty, SimpleQueue
from typing import Any

from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.parallel.companion import Broken, Checksums, Ready
from kvrelay.engine.model.parallel.link import RankHost, connection_of, reach, start_process
from kvrelay.engine.model.parallel.ops import COLLECTIVE_TIMEOUT_S, LOAD_TIMEOUT_S

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
        self, rank: int, connected: socket.socket, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        """Takes both over. `process`: if it is a child of this one."""
        self.rank = rank
        self.facts: Any = None  # its companion's
        self.checksums: SimpleQueue[Checksums | None] = SimpleQueue()  # None: it has ended
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
                    case _:
                        on_message(self.rank, answer)
            self.checksums.put(None)
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
    """Starts it on the leader's machine."""
    ours, theirs = socket.socketpair()
    with theirs:
        return Follower(rank, ours, start_process(theirs))


def start_at(rank: int, place: RankHost) -> Follower:
    """On another machine. Raises ModelError."""
    try:
        return Follower(rank, reach(place))
    except OSError as error:
        where = f"{place.host}:{place.port}"
        raise ModelError(f"rank {rank} of this worker is not at {where}: {error}") from error
