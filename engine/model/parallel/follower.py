"""A follower: the process of one rank above 0, started by `parallel.runner` with a connection.

Life: receives its setup; joins its group; loads its part; then runs the steps that it receives. It
ends with the connection, or sends the reason when it is out of step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue

from engine.model.parallel.ops import RankSetup
from engine.model.runner import ModelRunner
from engine.step import Step


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader ends us
    connection = Connection(int(sys.argv[1]))
    setup = connection.recv()
    assert isinstance(setup, RankSetup)
    steps: SimpleQueue[Step] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, steps), daemon=True).start()
    try:
        _run(setup, steps, connection)
    except Exception as error:
        with contextlib.suppress(OSError):
            connection.send(f"{type(error).__name__}: {error}")
    # Without the destructors of a group whose other ranks may be gone.
    os._exit(1)


def _receive(connection: Connection, steps: SimpleQueue[Step]) -> None:
    while True:
        try:
            steps.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)


def _run(setup: RankSetup, steps: SimpleQueue[Step], connection: Connection) -> None:
    """Raises what puts this rank out of step."""
    connection.send("")
    member = setup.join()
    runner = ModelRunner(setup.model_dir, device=setup.device, member=member, **setup.options)
    connection.send("")
    while True:
        step = steps.get()
        member.group.was_used = False
        try:
            runner.execute(step)
        except Exception:
            if member.group.was_used:
                raise
            # Refused before anything was computed, as by the leader, which says so.


if __name__ == "__main__":
    main()
