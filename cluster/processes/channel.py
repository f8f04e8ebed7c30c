"""How `kvrelay serve` and the processes that it supervises talk: pickled objects on two pipes.

A process that says nothing for a while hangs, and one that finds its stdin at an end has lost its
supervisor. Both ends are this program, on one machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("kvrelay.serve")

_LENGTH = struct.Struct(">I")
BEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class Beat:
    """From a supervised process, every BEAT_S: its loop turns."""


def frame(message: Any) -> bytes:
    body = pickle.dumps(message)
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """Raises EOFError at the end."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except asyncio.IncompleteReadError:
        raise EOFError from None


class Parent:
    """The supervised process's end: what it is told, and whom it tells."""

    def __init__(self, news_fd: int) -> None:
        self._news_fd = news_fd
        os.set_blocking(news_fd, False)
        self._reader: asyncio.StreamReader | None = None

    async def first(self) -> Any:
        """What the process is to be. Connects stdin."""
        loop = asyncio.get_running_loop()
        self._reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(self._reader)
        await loop.connect_read_pipe(lambda: protocol, sys.stdin)
        loop.call_later(BEAT_S, self._beat)
        return await read_frame(self._reader)

    async def follow(self, on_order: Callable[[Any], None]) -> None:
        """Hand on what comes, until the supervisor is gone."""
        assert self._reader is not None
        try:
            while True:
                on_order(await read_frame(self._reader))
        except EOFError:
            return

    def tell(self, news: Any) -> None:
        """Small: a pipe takes it whole. A supervisor that does not read for minutes misses some."""
        try:
            with contextlib.suppress(BlockingIOError):
                os.write(self._news_fd, frame(news))
        except BrokenPipeError:
            os._exit(1)  # an orphan: the supervisor has died

    def _beat(self) -> None:
        self.tell(Beat())
        asyncio.get_running_loop().call_later(BEAT_S, self._beat)


class Child:
    """The supervisor's end: one process, from its start to its end."""

    def __init__(
        self, name: str, on_news: Callable[[Any], None], on_end: Callable[[int], None]
    ) -> None:
        """`on_end` gets the exit code, negative for a signal."""
        self.name = name
        self.pid = 0
        self.heard_at = asyncio.get_running_loop().time()
        self._on_news = on_news
        self._on_end = on_end
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, kind: str, first: Any, fds: tuple[int, ...] = ()) -> None:
        """`kind`: one of `cluster.processes.child`; `fds`: sockets that it gets, by number."""
        mine, its = os.pipe()
        command = (
            sys.executable,
            "-m",
            "kvrelay.cluster.processes.child",
            kind,
            self.name,
            str(its),
        )
        self._process = process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            pass_fds=(its, *fds),
            start_new_session=True,  # the terminal's signals are for the supervisor
        )
        os.close(its)
        self.pid = process.pid
        reader = asyncio.StreamReader(limit=1 << 20)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(mine, "rb")
        )
        self.order(first)
        self._tasks = [
            asyncio.create_task(self._listen(reader)),
            asyncio.create_task(self._await_end()),
        ]

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def order(self, message: Any) -> None:
        if self.is_alive:
            assert self._process is not None
            assert self._process.stdin is not None
            self._process.stdin.write(frame(message))

    def kill(self) -> None:
        if self.is_alive:
            # `Popen.kill` may reap a process that is dead already, and its exit code with it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def ended(self, timeout_s: float) -> bool:
        """Whether it ends within so long."""
        assert self._process is not None
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                news = await read_frame(reader)
                self.heard_at = asyncio.get_running_loop().time()
                if not isinstance(news, Beat):
                    self._on_news(news)
        except EOFError:
            return
        except Exception:  # what it says is not understood: another version, or a bug here
            log.exception("%s is ended: what it said is not understood", self.name)
            self.kill()

    async def _await_end(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        await asyncio.wait(self._tasks[:1], timeout=1.0)  # its last words
        self._on_end(code)
