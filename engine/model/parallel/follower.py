"""A follower: the process of one rank above 0, started by `parallel.runner` with a connection.

Life: receives its setup; joins its group; loads its part, and makes its companion; then runs the
steps that it receives. It ends with the connection, or sends the reason when it is out of step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from engine.model.parallel.companion import Broken, Checksums, Companion, Ready
from engine.model.parallel.ops import RankSetup
from engine.model.runner import ModelRunner
from engine.step import Step


class _Leader:
    """The connection to it. Invariant: one thread receives, and one at a time sends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # of sending
        self.steps: SimpleQueue[Step] = SimpleQueue()
        self.companion: Companion | None = None

    def tell(self, message: Any) -> None:
        with contextlib.suppress(OSError), self._lock:  # when it is gone, so are we
            self._connection.send(message)

    def receive(self) -> None:
        """Until it ends, and this process with it."""
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                break
            if isinstance(message, Step):
                self.steps.put(message)
            else:
                assert self.companion is not None, message
                self.companion.receive(message)
        if self.companion is not None:
            self.companion.close()
        os._exit(0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader ends us
    connection = Connection(int(sys.argv[1]))
    setup = connection.recv()
    assert isinstance(setup, RankSetup)
    leader = _Leader(connection)
    threading.Thread(target=leader.receive, daemon=True).start()
    try:
        _run(setup, leader)
    except Exception as error:
        leader.tell(Broken(f"{type(error).__name__}: {error}"))
    # Without the destructors of a group whose other ranks may be gone.
    os._exit(1)


def _run(setup: RankSetup, leader: _Leader) -> None:
    """Raises what puts this rank out of step."""
    leader.tell(Ready())
    member = setup.join()
    runner = ModelRunner(setup.model_dir, device=setup.device, member=member, **setup.options)
    if setup.companion is not None:
        leader.companion = setup.companion(runner, setup.shard, leader.tell)
    companion = leader.companion
    leader.tell(Ready(companion and companion.facts))
    while True:
        step = leader.steps.get()
        member.group.was_used = False
        try:
            runner.execute(step)
        except Exception:
            if member.group.was_used:
                raise
            # Refused before anything was computed, as by the leader, which says so.
            continue
        if companion is not None and step.checksum_blocks:
            leader.tell(Checksums(step.step_id, companion.checksums(step.checksum_blocks)))


if __name__ == "__main__":
    main()
