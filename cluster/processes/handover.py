"""How `kvrelay serve` replaces itself: by the program that its own command line starts now.

A trial comes first: that command with `--check`, which imports everything, reads the settings and
finds the model, beside the server that runs. Only then the process becomes the new program (exec:
the process id and the children stay). What crosses is one message in the form of channels, in a
file in memory, whose number is in the environment: sockets that listen, and routers with their
channels. Everything else is in the life's folder, as after a crash.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from kvrelay.cluster.config import Config
from kvrelay.cluster.control.messages import RouterStarted, differing
from kvrelay.cluster.prepare import PreparedModels
from kvrelay.cluster.processes.life import (
    Installed,
    Life,
    LifeRecord,
    changed_settings,
    read_record,
)
from kvrelay.cluster.state.server_lock import inherited_locks
from kvrelay.engine.files import write_private
from kvrelay.engine.installation import PYTHON_PATH, interpreter
from kvrelay.engine.node import NodeId
from kvrelay.engine.wire import channel

log = logging.getLogger("kvrelay.serve")

VARIABLE = "KVRELAY_HANDOVER"
TRIAL_S = 300.0  # imports from a slow disk, and a model that has to be found
SIGNALS = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM}  # wait until the new program takes them
# What is needed only later is found to be there, and to be Python, before anything ends.
MODULES = (
    *(f"kvrelay.cluster.processes.{name}" for name in ("child", "control_process", "worker")),
    *(f"kvrelay.cluster.processes.{name}" for name in ("router_process", "router_api")),
    *("kvrelay.cluster.api.app", "kvrelay.cluster.roles", "kvrelay.worker.rank_host"),
)


class HandoverError(Exception):
    """The server does not replace itself, and goes on; one line."""


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """A router's process that goes on."""

    router: NodeId
    epoch: int
    pid: int
    channel: int  # the number of its socket
    unread: bytes = b""
    started: RouterStarted | None = None  # what it has said; None: nothing yet
    serves: bool = False


@dataclass(frozen=True, slots=True)
class Handover:
    """From a supervisor to the one that it becomes."""

    life: Path  # the folder
    command: tuple[str, ...]  # that the server was started with
    python_path: str = ""  # the environment's, then
    sockets: dict[NodeId, int] = field(default_factory=dict)  # that listen, by number
    routers: tuple[RunningRouter, ...] = ()
    settings: Path | None = None  # to be read in place of the settings' file
    number: int = 0  # restarts so far
    is_rollback: bool = False
    protocol: int = channel.PROTOCOL  # that the routers speak


channel.register(Handover)


def own_command() -> tuple[str, ...]:
    """What started this process. Links stay links: they may lead elsewhere the next time."""
    words, script = sys.orig_argv, sys.argv[0]
    if len(words) > 1 and words[1] == script and os.access(script, os.X_OK):
        return os.path.abspath(script), *sys.argv[1:]  # its first line names the interpreter
    return os.path.abspath(shutil.which(words[0]) or words[0]), *words[1:]


def installed(command: Sequence[str], python_path: str, settings: str | None) -> Installed:
    """What runs as this process, where links led when it started."""
    is_script = command[0] == os.path.abspath(sys.argv[0])
    first = os.path.realpath(command[0]) if is_script else interpreter(command[0])
    parts = [os.path.realpath(part) if part else "" for part in python_path.split(os.pathsep)]
    version = channel.own_version()
    return Installed(version, (first, *command[1:]), os.pathsep.join(parts), settings)


def taken_over() -> Handover | None:
    """What the program that this process was has left; None: it was started in the ordinary way.
    Raises ChannelError."""
    number = os.environ.pop(VARIABLE, "")
    if not number:
        return None
    with open(int(number), "rb") as file:
        file.seek(0)
        handover = channel.unpack(file.read())
    assert isinstance(handover, Handover)
    return handover


def _in_memory(handover: Handover) -> int:
    """A file with it, which a process that is started gets by number."""
    number = os.memfd_create("kvrelay-handover", 0)
    with open(number, "wb", closefd=False) as file:
        file.write(channel.pack(handover))
    return number


def _environment(python_path: str, number: int) -> dict[str, str]:
    env = {**os.environ, VARIABLE: str(number), PYTHON_PATH: python_path}
    return env if python_path else {k: v for k, v in env.items() if k != PYTHON_PATH}


async def try_out(command: Sequence[str], python_path: str, handover: Handover) -> str:
    """Have `command` look whether it could take over; returns what it says. Raises
    HandoverError, with its reason."""
    number = _in_memory(handover)
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            "--check",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(number,),
            env=_environment(python_path, number),
        )
    except OSError as error:
        raise HandoverError(f"{command[0]} cannot be started: {error.strerror}") from error
    finally:
        os.close(number)
    try:
        async with asyncio.timeout(TRIAL_S):
            said, complaint = await process.communicate()
    except BaseException as error:
        process.kill()
        await process.wait()
        if isinstance(error, TimeoutError):
            text = f"{command[0]} is not done with its check after {TRIAL_S:g} s"
            raise HandoverError(text) from None
        raise
    lines = complaint.decode(errors="replace").strip().splitlines()
    if process.returncode:
        why = lines[-1].removeprefix("error: ") if lines else f"exit code {process.returncode}"
        raise HandoverError(f"what is installed cannot take over: {why}")
    return said.decode(errors="replace").strip()


def go_back(life: Life, running: Installed, own: Handover, file: Path | None) -> Handover:
    """What served well before: its command, unless that is gone (then that of `own`), and
    `settings` where `file` has others now. Raises HandoverError."""
    earlier = life.earlier(running)
    if earlier is None:
        raise HandoverError("nothing else has served here: there is nothing to go back to")
    settings = None
    if earlier.settings is not None and earlier.settings != _text(file):
        settings = life.path / f"settings-{own.number}"
        try:
            write_private(settings, earlier.settings.encode())
        except OSError as error:
            raise HandoverError(f"{settings} cannot be written: {error.strerror}") from error
    if os.access(earlier.command[0], os.X_OK):
        return replace(
            own, command=earlier.command, python_path=earlier.python_path, settings=settings
        )
    log.warning("%s is gone: only the settings go back", earlier.command[0])
    return replace(own, settings=settings)


def _text(file: Path | None) -> str | None:
    """What a restart would read. None: there is no such file."""
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def become(command: Sequence[str], python_path: str, handover: Handover) -> NoReturn:
    """Become that program. Raises OSError; then this one goes on, with copies of the channels."""
    number = _in_memory(handover)
    passed = [number, *handover.sockets.values(), *(each.channel for each in handover.routers)]
    passed += inherited_locks()  # nobody else gets the state directory meanwhile
    for each in passed:
        os.set_inheritable(each, True)
    logging.shutdown()  # lines that wait for their file
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        os.execve(command[0], list(command), _environment(python_path, number))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.close(number)
        for each in passed[1:]:
            os.set_inheritable(each, False)


def check(config: Config, models: PreparedModels, found: Handover | None) -> None:
    """Whether the program of this process could serve `config`, also in place of the server that
    `found` comes from. Raises HandoverError."""
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise HandoverError(f"{name}: {type(error).__name__}: {error}") from error
    if found is None:
        return
    if found.protocol != channel.PROTOCOL:
        raise HandoverError(
            f"routers that run speak protocol {found.protocol}, and this version "
            f"{channel.PROTOCOL}: use `kvrelay drain`, then start it"
        )
    record = read_record(found.life / "life", LifeRecord)
    if record is None:
        raise HandoverError(f"{found.life} does not say what runs: use `kvrelay drain`, start anew")
    changed = changed_settings(record, config)
    if not changed:
        names = differing(record.checkpoints, models.checkpoints)
        changed = [f"the files or engine.arguments of {models.paths[name]}" for name in names]
    if changed:
        raise HandoverError(
            f"{', '.join(changed)}: changed, which a server that runs cannot follow: use `kvrelay "
            "drain`, then start it"
        )
