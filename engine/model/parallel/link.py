"""The processes of followers, what they say, and their connections to leaders on other machines.

A companion does what a rank does beside the model, such as moving the KV of its heads.

On other machines each end proves to the other that it knows a secret, made for this worker alone,
before anything is unpickled. Like KV, what follows is not encrypted. A machine that is gone without
a word is noticed after `SILENT_S`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from kvrelay.engine.model.parallel.shard import Shard


FOLLOWER = "kvrelay.engine.model.parallel.follower"
PROVE_S = 10.0  # for the other end to prove itself
PROBE_S, NUM_PROBES = 3, 3
SILENT_S = PROBE_S * (NUM_PROBES + 1)


@dataclass(frozen=True, slots=True)
class RankHost:
    """A process on another machine that starts ranks of a worker, one for each connection."""

    host: str
    port: int
    num_ranks: int
    secret: bytes = field(repr=False)
    package: str = "of an older version"  # its kvrelay: a worker's ranks are all of one version


def start_process(connected: socket.socket) -> subprocess.Popen[bytes]:
    """A follower whose leader is at the other end of `connected`, which it gets a copy of."""
    root = str(Path(__file__).parents[4])  # where `kvrelay` is
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", FOLLOWER, str(connected.fileno())],
        pass_fds=[connected.fileno()],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )


@dataclass(frozen=True, slots=True)
class ForkedRank:
    """A follower's process that was forked from this one, and waits: first for an environment, then
    for a setup, as one that is started does."""

    connected: socket.socket
    pid: int

    def wait(self, timeout: float | None = None) -> None:
        """Until it has ended. Raises subprocess.TimeoutExpired."""
        handle = os.pidfd_open(self.pid)
        try:
            if not select.select([handle], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(FOLLOWER, timeout or 0.0)
            os.waitpid(self.pid, 0)
        finally:
            os.close(handle)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


forked: list[ForkedRank] = []  # with this process, by what it was itself forked from


def reach(place: RankHost) -> socket.socket:
    """Connect to one of its ranks. Raises OSError."""
    where = (place.host, place.port)
    connected = socket.create_connection(where, timeout=PROVE_S)
    _prove(connected, place.secret, begins=False)
    return connected


def admit(connected: socket.socket, secret: bytes) -> None:
    """The other end of `reach`. Raises OSError."""
    _prove(connected, secret, begins=True)


def connection_of(connected: socket.socket) -> Connection:
    """Over a copy of the socket, which is the caller's still."""
    return Connection(os.dup(connected.fileno()))


def _prove(connected: socket.socket, secret: bytes, *, begins: bool) -> None:
    _set_options(connected)
    _limit(connected, PROVE_S)
    connection = connection_of(connected)
    try:
        for asks in (begins, not begins):
            (deliver_challenge if asks else answer_challenge)(connection, secret)
    except (AuthenticationError, AssertionError, EOFError, OSError) as error:
        connected.close()
        why = str(error) or "it said nothing"
        raise ConnectionError(f"the other end did not prove itself: {why}") from error
    finally:
        connection.close()
    _limit(connected, 0.0)


def _set_options(connected: socket.socket) -> None:
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_PROBES)
    # Bounds what was sent and not acknowledged, where no probes are sent.
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_S)


def _limit(connected: socket.socket, seconds: float) -> None:
    """Each read and write of its file descriptor fails after so long; 0: never."""
    timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, timeval)


class Companion(Protocol):
    """Made in a follower's process once its model is loaded, and owned by it."""

    facts: Any  # what the leader has to know of it; can be pickled

    def receive(self, message: Any) -> None:
        """Something that the leader sent. Must not block: steps come behind it."""
        ...

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """Sums its heads of these blocks of the pool, which are complete."""
        ...

    def begin_checksums(self, block_ids: Sequence[int]) -> Callable[[], list[int]]:
        """Sums once what this thread has launched is done, which the call that is returned waits
        for; it may come from another thread."""
        ...

    def close(self) -> None:
        """It has to end within seconds."""
        ...


Tell = Callable[[Any], None]
"""Send something to the leader; from any thread."""

MakeCompanion = Callable[[Any, "Shard", Tell], Companion]
"""Given the rank's ModelRunner. Can be pickled."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A follower has done the next stage of its start: it can meet the others; it serves."""

    facts: Any = None  # its companion's


@dataclass(frozen=True, slots=True)
class Broken:
    """A follower cannot go on."""

    why: str


@dataclass(frozen=True, slots=True)
class Checksums:
    """Sums `Step.checksum_blocks`, as far as the rank's heads go."""

    step_id: int
    sums: list[int] = field(default_factory=list)
