"""A process that `kvrelay serve` has beside it, as the supervisor sees it: started or, by a program
that this process was before, left behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Collection
from typing import Any

from kvrelay.engine.wire.channel import Beat, Channel, ChannelError, command

log = logging.getLogger("kvrelay.serve")

MODULE = "kvrelay.cluster.processes.child"
WATCH_S = 1.0
SILENT_S = 20.0  # a process that says nothing for so long hangs, and is ended
LAST_WORDS_S = 1.0  # for what a process has said before its end
END_S = 20.0  # for a process to end by itself once it was told to
UNKNOWN_CODE = 255  # another part of this process has waited for it


class Inherited:
    """A child of this process that a program which it was before has started."""

    def __init__(self, pid: int) -> None:
        """Raises OSError if it has ended, and was waited for."""
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._handle = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._handle, self._on_end)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)
        try:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # asyncio has waited for it: it was left, and taken up again
            self.returncode = UNKNOWN_CODE
        self._ended.set()


class Child:
    """A process beside the supervisor, from its start to its end."""

    def __init__(
        self, name: str, on_message: Callable[[Any], None], on_end: Callable[[int], None]
    ) -> None:
        """`on_end` gets the exit code, negative for a signal."""
        self.name = name
        self.heard_at = self.started_at = asyncio.get_running_loop().time()
        self._on_message = on_message
        self._on_end = on_end
        self._process: asyncio.subprocess.Process | Inherited | None = None
        self._channel: Channel | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, kind: str, first: Any, fds: tuple[int, ...] = ()) -> None:
        """`kind`: one of `cluster.processes.child`; `first`: what it is to be, None if that comes
        later; `fds`: files that it gets, by number. Raises OSError where there is no process,
        memory or file left for it."""
        mine, its = socket.socketpair()
        try:
            with its:
                self._process = await asyncio.create_subprocess_exec(
                    *command(MODULE, kind, self.name, end=its),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(its.fileno(), *fds),
                    start_new_session=True,  # the terminal's signals are for the supervisor
                )
        except BaseException:
            mine.close()
            raise
        self._begin(await Channel.over(mine))
        if first is not None:
            self.send(first)

    async def resume(self, pid: int, end: socket.socket, unread: bytes) -> None:
        """Go on with a process that was left with `detach`. Raises OSError if it is gone."""
        self._process = Inherited(pid)
        self._begin(await Channel.over(end, unread))

    async def detach(self) -> tuple[int, int, bytes] | None:
        """Leave the process as it is to whoever resumes it: its id, its channel's socket by number
        and what was not read there. None: it cannot be left, and ends."""
        assert self._process is not None
        assert self._channel is not None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            number, messages, unread = await self._channel.detach()
        except (TimeoutError, ChannelError) as error:
            log.warning("%s is started anew: %s", self.name, error or "it reads nothing")
            self.kill()
            return None
        for message in messages:
            if not isinstance(message, Beat):
                self._on_message(message)
        return self._process.pid, number, unread

    def _begin(self, channel: Channel) -> None:
        self._channel = channel
        self._tasks = [
            asyncio.create_task(self._listen(channel)),
            asyncio.create_task(self._await_end()),
        ]

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def send(self, message: Any) -> None:
        if self.is_alive and self._channel is not None:
            self._channel.send(message)

    def kill(self) -> None:
        if self._process is not None and self.is_alive:
            # `Popen.kill` may reap a process that is dead already, and its exit code with it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    async def ended(self, timeout_s: float) -> bool:
        """Whether it ends within so long."""
        assert self._process is not None
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    async def _listen(self, channel: Channel) -> None:
        try:
            while True:
                message = await channel.receive()
                self.heard_at = asyncio.get_running_loop().time()
                if not isinstance(message, Beat):
                    self._on_message(message)
        except EOFError:
            return
        except ChannelError as error:
            log.error("%s is ended: %s", self.name, error)
        except Exception:
            log.exception("%s is ended: what it said leads nowhere", self.name)
        self.kill()

    async def _await_end(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        await asyncio.wait(self._tasks[:1], timeout=LAST_WORDS_S)
        self._on_end(code)


async def end(child: Child, timeout_s: float) -> None:
    """Until it has ended by itself, or by force."""
    if child.is_alive and not await child.ended(timeout_s):
        log.warning("%s does not end and is ended by force", child.name)
        child.kill()
        await child.ended(END_S)


async def end_silent(children: Callable[[], Collection[Child]]) -> None:
    """End what hangs. Time counts in looks: one that was stopped itself has heard nothing."""
    loop = asyncio.get_running_loop()
    last = loop.time()
    while True:
        await asyncio.sleep(WATCH_S)
        now = loop.time()
        was_away, last = now - last > 2 * WATCH_S, now
        for child in children():
            if not child.is_alive:
                continue
            if was_away:
                child.heard_at = max(child.heard_at, now - SILENT_S / 2)
            if now - child.heard_at > SILENT_S:
                log.warning("%s says nothing for %g s and is ended", child.name, SILENT_S)
                child.heard_at = now
                child.kill()


def shown(code: int) -> str:
    """Says an exit code as people know it."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
