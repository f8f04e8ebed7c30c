"""The remote agent: what `kvrelay up` and `kvrelay down` run on each machine.

`python -m kvrelay.cluster.hosts.agent`: one command comes in on standard input, one Answer goes out
on standard output, both as on a channel (`engine.wire.channel`). What is started lives on when this
ends: in a session of its own, with a log and a file that names its process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from kvrelay.engine.files import write_json, write_private
from kvrelay.engine.wire.channel import ChannelError, pack, register, unpack

RAY_IS_UP = "Ray runtime started"
SERVER_IS_UP = "Ready: "
TAIL_LINES = 6
POLL_S = 0.1
KILL_S = 10.0  # for what was asked to end, beyond its own time
MAX_LOG_BYTES = 16 << 20  # beyond it, a log is moved aside at the next start
MAX_SEEN = 1 << 16  # characters of a log that are kept while it is waited for


class Command(Struct, frozen=True):
    """`folder`: on that machine, for logs and what is kept."""

    folder: str


class Ping(Command, frozen=True):
    """Answered with the versions of what is installed there."""


class GiveToken(Command, frozen=True):
    """Have this token for Ray from now on. Where there is another, nothing is changed."""

    token: str


class StartRay(Command, frozen=True):
    """Start Ray with these arguments, unless it runs; answered when it has joined."""

    args: tuple[str, ...]
    timeout_s: float


class StartServer(Command, frozen=True):
    """Start `kvrelay serve`, unless it runs; answered when it is ready. `settings`: its file's
    text. `overrides`: of single settings, in JSON; a file has them, since all users of the machine
    read a command line."""

    settings: str
    args: tuple[str, ...]
    timeout_s: float
    overrides: str = "{}"


class StopProcess(Command, frozen=True):
    """End what was started there: the server first, then Ray."""

    what: str  # "server" or "ray"
    timeout_s: float


AnyCommand = Ping | GiveToken | StartRay | StartServer | StopProcess


class Answer(Struct, frozen=True):
    """`error`: one line; "" if it was done."""

    error: str = ""
    result: str = ""  # for people
    versions: dict[str, str] = {}  # by package


register(Ping, GiveToken, StartRay, StartServer, StopProcess, Answer)


class Running(msgspec.Struct):
    """A process that was started here. Numbers come again: `began` tells it from a later one."""

    pid: int
    began: float
    log_at: int = 0  # where its log had ended before it
    up: str = ""  # what its log said when it was up; logs may be rotated since


def main() -> None:
    os.umask(0o077)  # for what it starts, too
    try:
        answer = handle_command(unpack(sys.stdin.buffer.read()))
    except ChannelError as error:
        answer = Answer(error=str(error))
    except Exception as error:  # whoever asked, far away, gets one line
        answer = Answer(error=f"{type(error).__name__}: {error}".partition("\n")[0])
    sys.stdout.buffer.write(pack(answer))


def handle_command(command: AnyCommand) -> Answer:
    folder = Path(command.folder).expanduser()
    match command:
        case Ping():
            return _versions()
        case GiveToken(_, token):
            return give_token(token)
        case StartRay(_, args, timeout_s):
            ray = [_program("ray"), "start", "--block", *args]
            return _start(folder, "ray", ray, RAY_IS_UP, timeout_s)
        case StartServer(_, settings, args, timeout_s, overrides):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            config = folder / "kvrelay.toml"
            write_private(config, settings.encode())
            more = folder / "overrides.json"
            write_private(more, overrides.encode())
            serve = [_program("kvrelay"), "serve", "--config", str(config), *args]
            serve += ["--set", f"@{more}"]
            return _start(folder, "server", serve, SERVER_IS_UP, timeout_s)
        case StopProcess(_, what, timeout_s):
            return _stop(folder, what, timeout_s)


def _program(name: str) -> str:
    """Where this environment has it, whatever the login shell's path is."""
    return str(Path(sys.executable).parent / name)


def _versions() -> Answer:
    packages = {}
    for name in ("kvrelay", "ray", "torch"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            return Answer(error=f"{name} is not installed for {sys.executable} (ssh.python)")
    memory_gib = psutil.virtual_memory().total / 2**30
    result = f"{os.cpu_count()} cores, {memory_gib:.0f} GiB"
    return Answer(result=result, versions=packages | {"python": platform.python_version()})


def give_token(token: str, home: Path | None = None) -> Answer:
    file = (home or Path.home()) / ".ray" / "auth_token"
    if file.exists():
        if file.read_text(encoding="ascii").strip() != token:
            return Answer(error=f"{file} has another token; remove it, or use that one everywhere")
        file.chmod(0o600)
        return Answer(result="has the token")
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(file, token.encode())
    return Answer(result="got the token")


def _start(folder: Path, name: str, command: Sequence[str], is_up: str, timeout_s: float) -> Answer:
    """Unless it runs. `is_up`: what its log says when it does."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    log, kept = folder / f"{name}.log", folder / f"{name}.running"
    running, known = _find(kept)
    if running is None:
        if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
            log.replace(folder / f"{name}.old.log")
        log.touch(mode=0o600)
        log.chmod(0o600)
        with log.open("ab") as out:
            log_at = out.tell()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd=folder,
                env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"},
            )
        running = psutil.Process(process.pid)
        known = Running(process.pid, running.create_time(), log_at)
        write_json(kept, known)
    deadline, read_to, said = time.monotonic() + timeout_s, known.log_at, ""
    while True:
        lives = _lives(running)  # before its log is read: its last words are to be there
        more, read_to = _read_on(log, read_to)
        said = (said + more)[-MAX_SEEN:]
        if is_up in said and not known.up:
            known.up = next(line for line in said.splitlines() if is_up in line).strip()
            write_json(kept, known)
        if known.up:
            return Answer(result=known.up.removeprefix(is_up) or known.up)
        if not lives:
            kept.unlink(missing_ok=True)
            return Answer(error=f"{name} has ended: {_tail(said)} ({log})")
        if time.monotonic() > deadline:
            return Answer(error=f"{name} is not up after {timeout_s:g} s: {_tail(said)} ({log})")
        time.sleep(POLL_S)


def _read_on(log: Path, at: int) -> tuple[str, int]:
    """What has come since it was read up to `at`, and how far it is read now."""
    with log.open("rb") as file:
        if file.seek(0, os.SEEK_END) < at:  # it was emptied meanwhile
            at = 0
        file.seek(at)
        data = file.read()
    return data.decode("utf-8", "replace"), at + len(data)


def _stop(folder: Path, name: str, timeout_s: float) -> Answer:
    kept = folder / f"{name}.running"
    running, _ = _find(kept)
    if running is None:
        return Answer(result="was not running")
    tree = running.children(recursive=True)
    running.terminate()
    _, alive = psutil.wait_procs([running, *tree], timeout=timeout_s)
    forced = [process for process in alive if process.is_running()]
    for process in forced:
        process.kill()
    psutil.wait_procs(forced, timeout=KILL_S)
    kept.unlink(missing_ok=True)
    return Answer(result=f"ended, {len(forced)} by force" if running in forced else "ended")


def _find(kept: Path) -> tuple[psutil.Process | None, Running]:
    """What the file names, if it still runs, and what it says."""
    try:
        known = msgspec.json.decode(kept.read_bytes(), type=Running)
        process = psutil.Process(known.pid)
    except (OSError, msgspec.DecodeError, psutil.NoSuchProcess):
        return None, Running(0, 0.0)
    lives = process.create_time() == known.began and _lives(process)
    return (process if lives else None), known


def _lives(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def _tail(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return " | ".join(lines[-TAIL_LINES:]) or "it said nothing"


if __name__ == "__main__":
    main()
