"""What is kept of a worker whose step hangs: the stacks of its threads, and the state of its GPU.

CUDA's driver writes a GPU's state to a file when it is asked to, by whatever is written to a pipe
that it makes for each process. The environment says so before the first call of CUDA, and covers
the processes of all ranks.

Life: `prepare` when the process starts. When it gives up, `write_stacks` comes first, since the
driver may end the process after its dump; then `dump_gpus`, which waits for the driver. All is over
before the controller, which hears nothing any more, ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import socket
import threading
import time
from collections.abc import MutableMapping
from pathlib import Path

import psutil

from kvrelay.engine.node import NodeId

TAKE_S = 4.0
"""For the dumps. A second less than `cluster.silent_grace_s` is by default."""
SETTLED_S = 1.0  # a dump that has not grown for so long is complete
POLL_S = 0.05
KEPT = 8  # files of each kind, in the folder
STACKS, CORE, PIPE = "stacks", "gpu-core", "gpu-pipe"
TRIGGER = bytes(1 << 14)  # any bytes do; a few may wait in a buffer of the driver's reader

# The driver's switches: %h is the host, %p the process, %t the time. No memory is dumped, which may
# be 80 GB, and the process goes on: it has to say why it ends.
SWITCHES = {
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
    "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1",
    "CUDA_ENABLE_LIGHTWEIGHT_COREDUMP": "1",
    "CUDA_COREDUMP_GENERATION_FLAGS": "skip_nonrelocated_elf_images,skip_global_memory,"
    "skip_shared_memory,skip_local_memory,skip_abort",
}
PLACES = {"CUDA_COREDUMP_PIPE": f"{PIPE}.%h.%p", "CUDA_COREDUMP_FILE": f"{CORE}.%h.%p.%t"}

log = logging.getLogger("kvrelay.core_dumps")

Written = dict[Path, tuple[int, int]]  # bytes, and when it was changed


class CoreDumps:
    """Owned by a worker's process. Never raises: what cannot be written is only logged."""

    def __init__(self, folder: str, worker: NodeId, *, on_gpu: bool) -> None:
        """`folder`: "" if nothing is to be kept."""
        self._folder = Path(folder).expanduser() if folder else None
        self._worker = worker
        self._on_gpu = on_gpu

    def prepare(self, environment: MutableMapping[str, str]) -> None:
        """Before the first call of CUDA. Switches that the operator has set stand."""
        folder = self._folder
        if folder is None:
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._tidy(folder)
        except OSError as error:
            log.warning("engine.core_dumps = %s: %s; nothing is kept", folder, error.strerror)
            self._folder = None
            return
        if self._on_gpu:
            for name, value in SWITCHES.items():
                environment.setdefault(name, value)
            for name, value in PLACES.items():
                environment[name] = str(folder / value)

    def write_stacks(self, why: str) -> Path | None:
        """Writes those of all threads to a file, and returns it; None: nothing is kept."""
        folder = self._folder
        if folder is None:
            return None
        now = time.localtime()
        host, pid = socket.gethostname(), os.getpid()
        path = folder / f"{STACKS}.{self._worker}.{host}.{pid}.{time.strftime('%H%M%S', now)}"
        when = time.strftime("%Y-%m-%d %H:%M:%S", now)
        try:
            with path.open("w") as file:
                file.write(f"{self._worker}, process {pid} at {host}, {when}: {why}\n")
                for thread in threading.enumerate():  # Python gives their numbers only
                    file.write(f"Thread 0x{thread.ident or 0:016x} is {thread.name}\n")
                file.write("\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            self._tidy(folder)
        except OSError as error:
            log.warning("engine.core_dumps = %s: %s", folder, error.strerror)
            return None
        log.error("%s hangs: the stacks of its threads are in %s", self._worker, path)
        return path

    def dump_gpus(self, timeout_s: float = TAKE_S) -> list[Path]:
        """Dumps those of this process and of its other ranks, which it may wait for. Returns
        the dumps that are complete within `timeout_s`."""
        folder, deadline = self._folder, time.monotonic() + timeout_s
        if folder is None or not self._on_gpu:
            return []
        try:
            pids = [os.getpid(), *(each.pid for each in psutil.Process().children(recursive=True))]
            before = {pid: _written(folder, pid) for pid in pids}
            asked = [pid for pid in pids if any(map(_trigger, folder.glob(f"{PIPE}.*.{pid}")))]
            if not asked:
                log.warning("%s: no CUDA driver reads a pipe in %s", self._worker, folder)
            of_asked = {pid: before[pid] for pid in asked}
            found, missing = _wait_for_dumps(folder, of_asked, deadline)
            self._tidy(folder)
        except (OSError, psutil.Error) as error:
            log.warning("engine.core_dumps = %s: %s", folder, error)
            return []
        for path in found:
            log.error("%s hangs: the state of its GPU is in %s", self._worker, path)
        if missing:
            log.warning("%s: no complete dump of processes %s in time", self._worker, missing)
        return found

    def _tidy(self, folder: Path) -> None:
        """Keep the newest files, and the pipes of processes that live."""
        for kind in (STACKS, CORE):
            for path in sorted(folder.glob(f"{kind}.*"), key=_age_s)[KEPT:]:
                path.unlink(missing_ok=True)
        for path in folder.glob(f"{PIPE}.{socket.gethostname()}.*"):
            pid = path.name.rpartition(".")[2]
            if pid.isdigit() and not psutil.pid_exists(int(pid)):
                path.unlink(missing_ok=True)


def _trigger(pipe: Path) -> bool:
    """Whether there was a driver at the other end, which dumps now."""
    try:
        opened = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # ENXIO: there is no reader
        return False
    try:
        with contextlib.suppress(OSError):
            os.write(opened, TRIGGER)
    finally:
        os.close(opened)
    return True


def _wait_for_dumps(
    folder: Path, asked: dict[int, Written], deadline: float
) -> tuple[list[Path], list[int]]:
    """(the dumps that are complete, the processes without one). `asked`: by process, what it had
    written before: a driver gives all dumps of a process one name."""
    seen: dict[int, tuple[Written, float]] = {}  # by process, and since when it is so
    complete: dict[int, Written] = {}
    while len(complete) < len(asked) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        for pid in asked.keys() - complete.keys():
            written, now = _written(folder, pid), time.monotonic()
            if pid not in seen or seen[pid][0] != written:
                seen[pid] = written, now
            elif written != asked[pid] and now - seen[pid][1] >= SETTLED_S:
                complete[pid] = written
    new = (dict(now.items() - asked[pid].items()) for pid, now in complete.items())
    paths = sorted(path for written in new for path in written)
    return paths, sorted(asked.keys() - complete.keys())


def _written(folder: Path, pid: int) -> Written:
    """The dumps of a process, as far as they are written."""
    found = {}
    for path in folder.glob(f"{CORE}.*.{pid}.*"):
        with contextlib.suppress(FileNotFoundError):
            now = path.stat()
            found[path] = (now.st_size, now.st_mtime_ns)
    return found


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:  # another worker has removed it
        return 0.0
