"""A follower: the process of one rank above 0, started by `parallel.runner` with a connection, or
forked with its leader.

Life: receives its setup; joins its group; loads its part, and makes its companion; then runs the
steps that it receives. It ends with the connection, or sends the reason when it is out of step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch

from kvrelay.engine.identity import files_of
from kvrelay.engine.logs import set_up_rank
from kvrelay.engine.model.config import check_unchanged, versions_of
from kvrelay.engine.model.parallel.link import Broken, Checksums, Companion, Ready
from kvrelay.engine.model.parallel.ops import Group, RankSetup
from kvrelay.engine.model.parallel.tables import ReceivedTables, SentStep
from kvrelay.engine.model.parallel.updates import (
    ChangeRank,
    RankUpdates,
    SettleRank,
    is_of_loading,
)
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.step import Launch, Step

MOST_LAUNCHED = 2  # steps: one runs, one waits behind it


class _Leader:
    """The connection to it. Invariant: one thread receives, and one at a time sends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # one thread sends at a time
        self.steps: SimpleQueue[SentStep | ChangeRank | SettleRank] = SimpleQueue()
        self.companion: Companion | None = None
        self.updates: RankUpdates | None = None

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
            if is_of_loading(message):
                assert self.updates is not None, message
                self.updates.load(message)
            elif isinstance(message, SentStep | ChangeRank | SettleRank):
                self.steps.put(message)
            else:
                assert self.companion is not None, message
                self.companion.receive(message)
        if self.companion is not None:
            self.companion.close()
        os._exit(0)

    def lose(self, error: Exception) -> None:
        """Say why this rank cannot go on, and end."""
        self.tell(Broken(f"{type(error).__name__}: {error}"))
        # Without the destructors of a group whose other ranks may be gone.
        os._exit(1)


class _Launched:
    """Waits, on a thread of its own, for the ends of steps that were launched behind one another,
    and tells the checksums of each. Invariant: two are launched at most, as for the leader."""

    def __init__(self, leader: _Leader, device: torch.device) -> None:
        self._leader = leader
        self._places = threading.Semaphore(MOST_LAUNCHED)
        self._waits: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._device = device
        threading.Thread(target=self._run, name="launched", daemon=True).start()

    def launch(self, step: Step, launch: Launch) -> None:
        """Raises what `launch` does; nothing is waited for then."""
        self._places.acquire()
        companion, blocks = self._leader.companion, step.checksum_blocks
        try:
            wait_for_step = launch(step)
            begun = companion.begin_checksums(blocks) if companion and blocks else None
        except BaseException:
            self._places.release()
            raise

        def wait() -> None:
            wait_for_step()
            if begun is not None:
                self._leader.tell(Checksums(step.step_id, begun()))

        self._waits.put(wait)

    def wait_for_all(self) -> None:
        for _ in range(MOST_LAUNCHED):
            self._places.acquire()
        self._places.release(MOST_LAUNCHED)

    def _run(self) -> None:
        if self._device.type == "cuda":  # or each rank makes a context on the first GPU too
            torch.cuda.set_device(self._device)
        while True:
            wait = self._waits.get()
            try:
                wait()
            except Exception as error:
                self._leader.lose(error)
            self._places.release()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader ends us
    connection = Connection(int(sys.argv[1]))
    setup = connection.recv()
    if isinstance(setup, dict):  # it was forked before its leader had all of its environment
        os.environ.update(setup)
        setup = connection.recv()
    assert isinstance(setup, RankSetup)
    set_up_rank(setup.shard.rank)
    leader = _Leader(connection)
    threading.Thread(target=leader.receive, daemon=True).start()
    try:
        leader.tell(Ready())
        member = setup.join()
        path = setup.find_model()
        before = versions_of(files_of(path))  # on a machine of its own perhaps
        runner = ModelRunner(path, setup.model, setup.engine, member=member, read=setup.read)
        if setup.companion is not None:
            leader.companion = setup.companion(runner, setup.shard, leader.tell)
        leader.updates = RankUpdates(runner, leader.tell)
        check_unchanged(before, files_of(path))
        leader.tell(Ready(leader.companion and leader.companion.facts))
        _run(leader, runner, member.group)
    except Exception as error:
        leader.lose(error)


def _run(leader: _Leader, runner: ModelRunner, group: Group) -> None:
    """Raises what puts this rank out of step."""
    launched, companion = _Launched(leader, runner.device), leader.companion
    updates = leader.updates
    assert updates is not None
    tables = ReceivedTables()
    while True:
        given = leader.steps.get()
        if not isinstance(given, SentStep):
            launched.wait_for_all()
            updates.take(given)
            continue
        step = tables.unpack(given)
        group.was_used = False
        try:
            if runner.launch is not None and step.may_be_followed:
                launched.launch(step, runner.launch)
                continue
            launched.wait_for_all()
            runner.execute(step)
        except Exception:
            if group.was_used:
                raise
            # Refused before anything was computed, as by the leader, which says so.
            continue
        if companion is not None and step.checksum_blocks:
            leader.tell(Checksums(step.step_id, companion.checksums(step.checksum_blocks)))


if __name__ == "__main__":
    main()
