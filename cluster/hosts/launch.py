"""`kvrelay up` and `kvrelay down`: HOSTS.toml, which says which machines there are, how they are
reached and what is served on them; and the steps by which a cluster comes up and goes down.

Each step is the same when it is taken again: what runs is left alone. So a launch that failed is
repeated as it is, once its cause is gone.
"""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert

from kvrelay.cluster.config import ConfigError, load_config, read_toml
from kvrelay.cluster.hosts.agent import (
    Answer,
    AnyCommand,
    GiveToken,
    Ping,
    StartRay,
    StartServer,
    StopProcess,
    give_token,
)
from kvrelay.engine.settings import explain_error
from kvrelay.engine.wire.channel import ChannelError, pack, unpack

AGENT = "kvrelay.cluster.hosts.agent"
GRACE_S = 10.0  # beyond the time that a command itself may take
STOP_S = 60.0
TOKEN_BYTES = 32

Port = Annotated[int, Meta(ge=1, le=65_535)]


class HostEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """A machine. The first one has Ray's control plane and the API."""

    name: Annotated[str, Meta(min_length=1)]  # as ssh knows it
    address: str = ""  # by which the other machines reach it; "": `name`
    ray_args: tuple[str, ...] = ()  # for `ray start` there, as "--num-gpus=8"

    @property
    def reached_at(self) -> str:
        return self.address or self.name


class SshSection(Struct, frozen=True, forbid_unknown_fields=True):
    # to run a command on a machine, which is put where it says {host}, or else at its end
    command: Annotated[tuple[str, ...], Meta(min_length=1)] = ("ssh", "-o", "BatchMode=yes")
    python: str = "python3"  # there, of the environment that has KVRelay
    folder: str = "~/.kvrelay"  # there, for logs and what is kept; {host}: the machine's name
    connect_s: Annotated[float, Meta(gt=0.0)] = 15.0  # for a machine to answer


class RaySection(Struct, frozen=True, forbid_unknown_fields=True):
    port: Port = 6379
    start_s: Annotated[float, Meta(gt=0.0)] = 90.0  # for a machine to have joined


class ServeSection(Struct, frozen=True, forbid_unknown_fields=True):
    config: str = ""  # settings of the server, a file beside this one; "": the defaults
    args: tuple[str, ...] = ("--host", "0.0.0.0")  # for `kvrelay serve`
    ready_s: Annotated[float, Meta(gt=0.0)] = 900.0  # models may have to be downloaded


class Hosts(Struct, frozen=True, forbid_unknown_fields=True):
    host: Annotated[tuple[HostEntry, ...], Meta(min_length=1)]
    ssh: SshSection = SshSection()
    ray: RaySection = RaySection()
    serve: ServeSection = ServeSection()

    @property
    def head(self) -> HostEntry:
        return self.host[0]

    @property
    def ray_address(self) -> str:
        return f"{self.head.reached_at}:{self.ray.port}"


def read_hosts(path: Path) -> Hosts:
    """Raises ConfigError, with one line that names the key, its value and what would be right."""
    tables: dict[str, Any] = read_toml(path)
    if not tables.get("host"):
        raise ConfigError(f'{path}: no machines; each is a table, [[host]] with name = "..."')
    try:
        hosts = convert(tables, Hosts)
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain_error(str(error), tables, Hosts)}") from error
    names = [host.name for host in hosts.host]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{path}: {', '.join(twice)} is there more than once")
    return hosts


def settings_text(path: Path, hosts: Hosts) -> str:
    """The server's settings file as text. Raises ConfigError if it cannot be read."""
    if not hosts.serve.config:
        return ""
    file = path.parent / hosts.serve.config
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"serve.config = {hosts.serve.config!r}: {error}") from error


def drain_of(path: Path, hosts: Hosts) -> float:
    """How long the server gives its requests at its end, by its settings. Raises ConfigError."""
    file = path.parent / hosts.serve.config if hosts.serve.config else None
    return load_config(file, {}).cluster.drain_s


@dataclass(frozen=True, slots=True)
class Remote:
    """A machine as it is reached from here: a command goes there by ssh, its answer comes back."""

    host: HostEntry
    ssh: SshSection

    @property
    def folder(self) -> str:
        return self.ssh.folder.replace("{host}", self.host.name)

    def ask(self, command: AnyCommand, timeout_s: float = 0.0) -> Answer:
        """Blocks until it is done, or for `timeout_s` and what it takes to get there. Whatever goes
        wrong is the answer's `error`."""
        limit_s = self.ssh.connect_s + timeout_s + GRACE_S
        try:
            done = subprocess.run(
                self.ssh_command(), input=pack(command), capture_output=True, timeout=limit_s
            )
        except FileNotFoundError as error:
            return Answer(error=f"{error.filename} is not installed here (ssh.command)")
        except subprocess.TimeoutExpired:
            return Answer(error=f"no answer within {limit_s:g} s")
        try:
            answer: Answer = unpack(done.stdout)
        except EOFError:
            return Answer(error=self._why(done))
        except ChannelError as error:
            return Answer(error=str(error))
        return answer

    def ssh_command(self) -> list[str]:
        python = [self.ssh.python, "-m", AGENT]
        placed = [part.replace("{host}", self.host.name) for part in self.ssh.command]
        if placed != list(self.ssh.command):  # no shell of a login in between
            return [*placed, *python]
        return [*placed, self.host.name, shlex.join(python).replace("'~/", "~/'")]

    def _why(self, done: subprocess.CompletedProcess[bytes]) -> str:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        last = said[-1] if said else f"exit code {done.returncode}"
        if "No module named" in last:
            return f"{last}: is KVRelay installed for {self.ssh.python} there (ssh.python)?"
        return last


OnStep = Callable[[str, str, Answer | None], None]
"""Gets the host, the step, and its answer (None: it has begun)."""


class LaunchError(Exception):
    """It has one line for each machine that could not do it."""


class Launch:
    """What one command does; it owns the launch."""

    def __init__(self, hosts: Hosts, on_step: OnStep, home: Path | None = None) -> None:
        """`home`: where this machine's token is; None: the user's."""
        self._hosts = hosts
        self._on_step = on_step
        self._home = home
        self._remotes = [Remote(host, hosts.ssh) for host in hosts.host]
        self.left_out: list[str] = []  # machines that could not do a step, and why

    def up(self, settings: str, overrides: Mapping[str, Any] | None = None) -> str:
        """`overrides`: for the server, beside its file. Returns where the API is, as the server
        says it. A machine that fails is `left_out`. Raises LaunchError if it is the first one, or
        if versions differ."""
        hosts, head = self._hosts, self._remotes[0]
        reached = self._those(self._remotes, "reach", lambda remote: Ping(remote.folder))
        self._check_versions(reached)
        token = self._token()
        given = self._those([*reached], "token", lambda remote: GiveToken(remote.folder, token))
        start_s = hosts.ray.start_s
        mine = ("--head", f"--port={hosts.ray.port}", "--include-dashboard=0")
        self._each([head], "ray", lambda remote: _ray(remote, mine, start_s), start_s)
        join = (f"--address={hosts.ray_address}",)
        others = [remote for remote in given if remote is not head]
        self._those(others, "ray", lambda remote: _ray(remote, join, start_s), start_s)
        more = json.dumps(dict(overrides or {}))
        args = ("--address", hosts.ray_address, *hosts.serve.args)
        ready_s = hosts.serve.ready_s
        (served,) = self._each(
            [head], "serve", lambda r: StartServer(r.folder, settings, args, ready_s, more), ready_s
        )
        return served.result

    def down(self, drain_s: float) -> None:
        """The server first, so that its workers end with it; its requests have `drain_s`. Raises
        LaunchError when all that can be ended has been."""
        head, *others = self._remotes
        problems = []
        for remotes, what in (([head], "server"), (others, "ray"), ([head], "ray")):
            try:
                self._end(remotes, what, STOP_S + drain_s * (what == "server"))
            except LaunchError as error:
                problems.append(str(error))
        if problems:
            raise LaunchError("\n".join(problems))

    def _end(self, remotes: list[Remote], what: str, stop_s: float) -> None:
        self._each(remotes, f"end {what}", lambda r: StopProcess(r.folder, what, stop_s), stop_s)

    def _those(
        self,
        remotes: Iterable[Remote],
        step: str,
        command: Callable[[Remote], AnyCommand],
        timeout_s: float = 0.0,
    ) -> dict[Remote, Answer]:
        """Which could do it. Raises LaunchError if the first machine could not."""
        answers = self._ask_all(remotes, step, command, timeout_s)
        self.left_out += _problems(step, answers)
        if any(answer.error for remote, answer in answers.items() if remote is self._remotes[0]):
            raise LaunchError("\n".join(self.left_out))
        return {remote: answer for remote, answer in answers.items() if not answer.error}

    def _each(
        self,
        remotes: Iterable[Remote],
        step: str,
        command: Callable[[Remote], AnyCommand],
        timeout_s: float,
    ) -> list[Answer]:
        """On all at once. Raises LaunchError when all have answered, and one could not."""
        answers = self._ask_all(remotes, step, command, timeout_s)
        if failed := _problems(step, answers):
            raise LaunchError("\n".join(failed))
        return [*answers.values()]

    def _ask_all(
        self,
        remotes: Iterable[Remote],
        step: str,
        command: Callable[[Remote], AnyCommand],
        timeout_s: float,
    ) -> dict[Remote, Answer]:
        def ask(remote: Remote) -> Answer:
            self._on_step(remote.host.name, step, None)
            answer = remote.ask(command(remote), timeout_s)
            self._on_step(remote.host.name, step, answer)
            return answer

        remotes = list(remotes)
        if not remotes:
            return {}
        with ThreadPoolExecutor(len(remotes)) as pool:
            return dict(zip(remotes, pool.map(ask, remotes), strict=True))

    def _check_versions(self, answers: Mapping[Remote, Answer]) -> None:
        """Frames and KV are only understood by the same version."""
        names = [remote.host.name for remote in answers]
        first = next(iter(answers.values())).versions
        for name, answer in zip(names, answers.values(), strict=True):
            for what, found in answer.versions.items():
                if found != first.get(what):
                    wanted = f"{names[0]} has {what} {first.get(what)}, and {name} has {found}"
                    raise LaunchError(f"{wanted}; install the same on all machines")

    def _token(self) -> str:
        """This machine's, which is made if there is none."""
        file = (self._home or Path.home()) / ".ray" / "auth_token"
        if not file.exists():
            give_token(secrets.token_hex(TOKEN_BYTES), self._home)
        return file.read_text(encoding="ascii").strip()


def _problems(step: str, answers: Mapping[Remote, Answer]) -> list[str]:
    return [
        f"{remote.host.name}: {step}: {answer.error}"
        for remote, answer in answers.items()
        if answer.error
    ]


def _ray(remote: Remote, where: tuple[str, ...], timeout_s: float) -> StartRay:
    host: HostEntry = remote.host
    args = (*where, f"--node-ip-address={host.reached_at}", *host.ray_args)
    return StartRay(remote.folder, args, timeout_s)
