"""Steps by which a cluster comes up and goes down, machine by machine.

Each step is the same when it is taken again: what runs is left alone. So a launch that failed is
repeated as it is, once its cause is gone.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvrelay.cluster.hosts.orders import (
    Answer,
    AnyOrder,
    GiveToken,
    Hello,
    StartRay,
    StartServer,
    Stop,
)
from kvrelay.cluster.hosts.remote import Remote
from kvrelay.cluster.hosts.settings import HostEntry, Hosts
from kvrelay.cluster.hosts.there import give_token

STOP_S = 60.0
TOKEN_BYTES = 32

Tell = Callable[[str, str, Answer | None], None]
"""host, step, its answer (None: it has begun)."""


class LaunchError(Exception):
    """One line for each machine that could not do it."""


class Launch:
    """Owned by one command."""

    def __init__(self, hosts: Hosts, tell: Tell, home: Path | None = None) -> None:
        """`home`: where this machine's token is; None: the user's."""
        self._hosts = hosts
        self._tell = tell
        self._home = home
        self._remotes = [Remote(host, hosts.ssh) for host in hosts.host]

    def up(self, settings: str) -> str:
        """Returns where the API is, as the server says it. Raises LaunchError."""
        hosts = self._hosts
        self._check_versions(self._all("reach", lambda remote: Hello(remote.folder)))
        token = self._token()
        self._all("token", lambda remote: GiveToken(remote.folder, token))
        head, *others = self._remotes
        start_s = hosts.ray.start_s
        mine = ("--head", f"--port={hosts.ray.port}", "--include-dashboard=0")
        self._each([head], "ray", lambda remote: _ray(remote, mine, start_s), start_s)
        join = (f"--address={hosts.ray_address}",)
        self._each(others, "ray", lambda remote: _ray(remote, join, start_s), start_s)
        args, ready_s = ("--address", hosts.ray_address, *hosts.serve.args), hosts.serve.ready_s
        (served,) = self._each(
            [head], "serve", lambda r: StartServer(r.folder, settings, args, ready_s), ready_s
        )
        return served.news

    def down(self) -> None:
        """The server first, so that its workers end with it. Raises LaunchError when all that can
        be ended has been."""
        head, *others = self._remotes
        problems = []
        for remotes, what in (([head], "server"), (others, "ray"), ([head], "ray")):
            try:
                self._end(remotes, what)
            except LaunchError as error:
                problems.append(str(error))
        if problems:
            raise LaunchError("\n".join(problems))

    def _end(self, remotes: list[Remote], what: str) -> None:
        self._each(remotes, f"end {what}", lambda r: Stop(r.folder, what, STOP_S), STOP_S)

    def _all(self, step: str, order: Callable[[Remote], AnyOrder]) -> list[Answer]:
        return self._each(self._remotes, step, order, 0.0)

    def _each(
        self,
        remotes: Iterable[Remote],
        step: str,
        order: Callable[[Remote], AnyOrder],
        timeout_s: float,
    ) -> list[Answer]:
        """On all at once. Raises LaunchError when all have answered, and one could not."""

        def ask(remote: Remote) -> Answer:
            self._tell(remote.host.name, step, None)
            answer = remote.ask(order(remote), timeout_s)
            self._tell(remote.host.name, step, answer)
            return answer

        remotes = list(remotes)
        if not remotes:
            return []
        with ThreadPoolExecutor(len(remotes)) as pool:
            answers = list(pool.map(ask, remotes))
        failed = [
            f"{remote.host.name}: {step}: {answer.error}"
            for remote, answer in zip(remotes, answers, strict=True)
            if answer.error
        ]
        if failed:
            raise LaunchError("\n".join(failed))
        return answers

    def _check_versions(self, answers: list[Answer]) -> None:
        """Frames and KV are only understood by the same version."""
        first, names = answers[0].facts, [host.name for host in self._hosts.host]
        for name, answer in zip(names, answers, strict=True):
            for what, found in answer.facts.items():
                if found != first.get(what):
                    wanted = f"{names[0]} has {what} {first.get(what)}, and {name} has {found}"
                    raise LaunchError(f"{wanted}; install the same on all machines")

    def _token(self) -> str:
        """This machine's, which is made if there is none."""
        file = (self._home or Path.home()) / ".ray" / "auth_token"
        if not file.exists():
            give_token(secrets.token_hex(TOKEN_BYTES), self._home)
        return file.read_text(encoding="ascii").strip()


def _ray(remote: Remote, where: tuple[str, ...], timeout_s: float) -> StartRay:
    host: HostEntry = remote.host
    args = (*where, f"--node-ip-address={host.reached_at}", *host.ray_args)
    return StartRay(remote.folder, args, timeout_s)
