"""Who starts a worker's process on its machine, tells of its end, and ends it by force; and, where
a worker has ranks on other machines, the process there that has them.

Runs in the actor that Ray places. The worker's process outlives its guardian, and with it Ray: a
process of an older epoch that is still there when the next one starts is ended first.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from typing import IO, TYPE_CHECKING, Any

import psutil

from kvrelay.engine.node import NodeId
from kvrelay.worker.messages import StartFailed, WorkerStarted
from kvrelay.worker.process import Listening
from kvrelay.worker.processes import (
    MODULE,
    RANKS_MODULE,
    kill_all,
    kill_workers,
    name_of,
)

if TYPE_CHECKING:
    from kvrelay.engine.model.parallel.link import RankHost
    from kvrelay.worker.rank_host import RankHostSpec
    from kvrelay.worker.spec import WorkerSpec

LAST_WORDS_S = 0.5  # for the news of why a process ended to leave its guardian


class WorkerGuardian:
    """What runs in the actor; each pool has a class of its own, so that `ray list actors` shows
    both. The constructor does nothing, so that the actor is up at once and its death is noticed
    from then on."""

    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._news: IO[bytes] | None = None
        self._pid = 0
        self._why = "its process has ended"
        self._has_ended = threading.Event()

    def __repr__(self) -> str:  # before each line that it logs
        return self._node

    def start(self, spec: WorkerSpec, listening: Listening) -> WorkerStarted | StartFailed:
        """Blocks until the worker listens, or cannot."""
        answer: WorkerStarted | StartFailed = self._run(MODULE, spec, (spec, listening))
        return answer

    def start_ranks(self, spec: RankHostSpec) -> RankHost | StartFailed:
        """Blocks until the worker can connect, or cannot."""
        answer: RankHost | StartFailed = self._run(RANKS_MODULE, spec, spec)
        return answer

    def _run(self, module: str, spec: WorkerSpec | RankHostSpec, given: Any) -> Any:
        kill_workers(spec.cluster, spec.worker, spec.epoch - 1)
        mine, its = os.pipe()
        name = name_of(spec.cluster, spec.worker, spec.epoch)
        command = [sys.executable, "-m", module, name, str(its)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(its,)) as process:
            os.close(its)
            assert process.stdin is not None
            pickle.dump(given, process.stdin)
            process.stdin.close()
        self._news = news = os.fdopen(mine, "rb")
        try:
            self._pid = pickle.load(news)
            answer = pickle.load(news)
        except (EOFError, pickle.UnpicklingError):
            return StartFailed(spec.worker, spec.epoch, "its process ended while it started", False)
        if not isinstance(answer, StartFailed):
            threading.Thread(target=self._watch, args=(news,), daemon=True).start()
        return answer

    def _watch(self, news: IO[bytes]) -> None:
        with contextlib.suppress(EOFError, pickle.UnpicklingError):
            self._why = pickle.load(news)
        with contextlib.suppress(EOFError, pickle.UnpicklingError):
            pickle.load(news)  # to the end of the process
        self._has_ended.set()
        ending = threading.Timer(LAST_WORDS_S, os._exit, (1,))
        ending.daemon = True
        ending.start()

    def wait(self) -> str:
        """Blocks while the process lives; then says why it ended."""
        self._has_ended.wait()
        return self._why

    def end(self) -> None:
        """The worker's process, by force; then this one ends."""
        if self._pid and not self._has_ended.is_set():
            with contextlib.suppress(psutil.Error):
                kill_all(psutil.Process(self._pid))
            self._has_ended.wait(LAST_WORDS_S)
        os._exit(0)
