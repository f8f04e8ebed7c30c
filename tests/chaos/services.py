"""Commands that are started again whenever they end, as systemd would."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

RESTART_S = 0.5


def kill_tree(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (*process.children(recursive=True), process):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


class Service:
    """Owns the processes of one command, from `start` to `stop`."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._command = list(command)
        self._env = dict(env)
        self._log = log
        self._is_over = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, says: str, timeout_s: float = 60.0, tries: int = 1) -> None:
        """Until its log says this; `tries`: how often it is begun, each time for `timeout_s`, where
        a busy machine may be why it ends. Raises RuntimeError."""
        while not self._begins(says, timeout_s):
            tries -= 1
            if not tries:
                raise RuntimeError(self._log.read_text(errors="replace")[-2000:])
        self._keeper.start()

    def _begins(self, says: str, timeout_s: float) -> bool:
        self._begin()
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while says not in self._log.read_text(errors="replace"):
            if time.monotonic() > deadline or self._process.poll() is not None:
                kill_tree(self._process.pid)
                return False
            time.sleep(0.1)
        return True

    def stop(self) -> None:
        self._is_over.set()
        if self._process is not None:
            kill_tree(self._process.pid)
            self._process.wait(20)

    def _begin(self) -> None:
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )

    def _keep(self) -> None:
        """What a command leaves behind when it is killed ends before it is started again."""
        while True:
            assert self._process is not None
            tree: dict[int, psutil.Process] = {}
            while self._process.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found = psutil.Process(self.pid).children(recursive=True)
                    tree = {each.pid: each for each in found}
                time.sleep(0.2)
            for each in tree.values():
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            if self._is_over.wait(RESTART_S):
                return
            self._begin()
