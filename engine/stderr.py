"""What a process says goes to stderr without ever holding it up: by a thread, through a queue.

A disk that is full, a pipe that nobody reads and a file on a server that is away are the log's
trouble alone: who logs goes on, and what found no room is dropped, counted, and said once there is
room again. As many files as may be open, too: every process takes both in hand before all else.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import resource
import sys
import threading
import time
from collections import deque

from kvrelay.engine.installation import pin_installation

MAX_QUEUED = 1 << 20  # characters that wait to be written
DRAIN_S = 1.0  # for what waits, at the end of the process
MAX_FILES = 1 << 17  # more cost memory in the kernel, and in libraries that ask for the limit


class QueuedStderr(io.TextIOBase):
    """Writes to a file descriptor on a thread of its own. `write` never blocks and never fails."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._is_tty = os.isatty(fd)
        self._queue: deque[str] = deque()
        self._size = 0
        self._changed = threading.Condition(threading.RLock())  # a signal handler may log, too
        self._is_idle = True
        self._writer: threading.Thread | None = None  # from the first line: threads do not fork
        self.num_dropped = 0
        self._num_reported = 0
        self._at_end = _AtEnd(self)

    encoding = "utf-8"

    def isatty(self) -> bool:
        return self._is_tty

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._changed:
            if self._size + len(text) > MAX_QUEUED:
                self.num_dropped += 1
                return len(text)
            self._queue.append(text)
            self._size += len(text)
            self._is_idle = False
            if self._writer is None:
                writer = threading.Thread(target=self._run, name="stderr", daemon=True)
                with contextlib.suppress(RuntimeError):  # no thread to be had: with a later line
                    writer.start()
                    self._writer = writer
            self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Does not wait: a handler of `logging` flushes after each line. See `drain`."""

    def drain(self, timeout_s: float = DRAIN_S) -> bool:
        """Wait until all is written; whether it is."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._is_idle:
                if (left_s := deadline - time.monotonic()) <= 0:
                    return False
                self._changed.wait(left_s)
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_idle = not self._queue
                self._changed.notify_all()
                while not self._queue:
                    self._changed.wait()
                text = self._queue.popleft()
                self._size -= len(text)
            if self.num_dropped > self._num_reported:
                lost = self.num_dropped - self._num_reported
                text = f"{lost} lines of this log found no room and are lost\n{text}"
            if self._write_all(text):
                self._num_reported = self.num_dropped
            else:
                self.num_dropped += 1

    def _write_all(self, text: str) -> bool:
        data = memoryview(text.encode("utf-8", "replace"))
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except BlockingIOError:  # somebody has set the file to that: it is not a reason to spin
            time.sleep(0.1)
            return False
        except OSError:
            return False
        return True


class _AtEnd(logging.Handler):
    """Has `logging.shutdown`, which is called before a process ends, write what waits."""

    def __init__(self, stream: QueuedStderr) -> None:
        super().__init__()
        self._stream = stream

    def flush(self) -> None:
        self._stream.drain()


def set_up_process() -> None:
    """Queue what goes to stderr, raise the limit of files, and stay with the installed version.
    Call it before logging is set up, and after a fork."""
    if not isinstance(sys.stderr, QueuedStderr):
        sys.stderr = QueuedStderr(2)
    raise_file_limit()
    pin_installation()


def lines_dropped() -> int:
    """Lines of this process's log that found no room so far, at stderr or in its file."""
    at_stderr = sys.stderr.num_dropped if isinstance(sys.stderr, QueuedStderr) else 0
    return at_stderr + sum(getattr(each, "num_dropped", 0) for each in logging.getLogger().handlers)


def raise_file_limit() -> None:
    """To what the system allows: a login shell gives 1,024, which are 512 clients of a router."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def num_open_files() -> int | None:
    """Counts what this process has open; None: no file is left to look with."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # but the one that it looks with
    except OSError:
        return None
