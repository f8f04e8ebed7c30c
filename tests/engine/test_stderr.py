"""A log that cannot be written holds nobody up, and is written again as soon as it can be."""

from __future__ import annotations

import logging
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from kvrelay.engine import stderr
from kvrelay.engine.stderr import QueuedStderr, raise_file_limit

Pipe = tuple[int, int]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)


def read_all(fd: int) -> str:
    """Until nothing has come for a moment."""
    found = b""
    while select.select([fd], [], [], 0.3)[0]:
        found += os.read(fd, 1 << 20)
    return found.decode()


def log_to(stream: QueuedStderr) -> logging.Logger:
    log = logging.Logger("kvrelay.test")
    log.addHandler(logging.StreamHandler(stream))
    return log


def test_lines_come_in_their_order(pipe: Pipe) -> None:
    stream = QueuedStderr(pipe[1])
    log = log_to(stream)
    for number in range(100):
        log.warning("line %d", number)
    assert stream.drain()
    assert read_all(pipe[0]) == "".join(f"line {number}\n" for number in range(100))


def test_a_pipe_that_nobody_reads_holds_nobody_up_and_goes_on_later(pipe: Pipe) -> None:
    stream = QueuedStderr(pipe[1])
    log, line = log_to(stream), "x" * 999
    started = time.monotonic()
    for _ in range(3000):
        log.warning(line)
    assert time.monotonic() - started < 5
    assert not stream.drain(0.1)
    assert 1500 < stream.num_dropped < 3000, "the queue has a bound"
    lost = stream.num_dropped
    assert read_all(pipe[0]).count("x" * 999 + "\n") == 3000 - lost
    log.warning("the last")
    assert stream.drain()
    assert read_all(pipe[0]) in (
        "the last\n",
        f"{lost} lines of this log found no room and are lost\nthe last\n",
    )
    assert stream.num_dropped == lost


def test_a_reader_that_is_gone_is_not_the_writers_end(pipe: Pipe) -> None:
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as reader:
        reader.wait()
        assert reader.stdin is not None
        stream = QueuedStderr(reader.stdin.fileno())
        log = log_to(stream)
        log.warning("nobody hears this")
        log.warning("nor this")
        assert stream.drain()
        assert stream.num_dropped == 2


def test_a_full_disk_is_said_when_there_is_room() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        stream = QueuedStderr(full.fileno())
        log = log_to(stream)
        for _ in range(3):
            log.warning("no room")
        assert stream.drain()
        assert stream.num_dropped == 3
        reading, writing = os.pipe()
        os.dup2(writing, full.fileno())
        log.warning("room")
        assert stream.drain()
        assert read_all(reading) == "3 lines of this log found no room and are lost\nroom\n"
        os.close(reading)
        os.close(writing)


def test_what_was_said_last_is_written_before_the_process_ends() -> None:
    program = (
        "import logging, os; from kvrelay.engine.stderr import set_up_process; set_up_process();"
        "logging.basicConfig(format='%(message)s'); logging.critical('the end'); {}"
    )
    for end in ("logging.shutdown(); os._exit(1)", "raise SystemExit(1)"):
        done = subprocess.run(
            [sys.executable, "-c", program.format(end)], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (1, "the end\n")


def test_as_many_files_as_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        monkeypatch.setattr(stderr, "MAX_FILES", 1500)
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(1500, before[1]), before[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1800, before[1]), before[1]))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(1800, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
