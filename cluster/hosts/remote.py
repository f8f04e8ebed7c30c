"""A machine as it is reached from here: an order goes there by ssh, and its answer comes back."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import dataclass

import msgspec

from kvrelay.cluster.hosts.orders import Answer, AnyOrder, decode_answer, encode
from kvrelay.cluster.hosts.settings import HostEntry, SshSection

GRACE_S = 10.0  # beyond the time that an order itself may take


@dataclass(frozen=True, slots=True)
class Remote:
    """One machine."""

    host: HostEntry
    ssh: SshSection

    @property
    def folder(self) -> str:
        return self.ssh.folder.replace("{host}", self.host.name)

    def ask(self, order: AnyOrder, timeout_s: float = 0.0) -> Answer:
        """Blocks until it is done, or for `timeout_s` and what it takes to get there. Whatever goes
        wrong is the answer's `error`."""
        limit_s = self.ssh.connect_s + timeout_s + GRACE_S
        try:
            done = subprocess.run(
                self.command(), input=encode(order), capture_output=True, timeout=limit_s
            )
        except FileNotFoundError as error:
            return Answer(error=f"{error.filename} is not installed here (ssh.command)")
        except subprocess.TimeoutExpired:
            return Answer(error=f"no answer within {limit_s:g} s")
        try:
            return decode_answer(done.stdout)
        except msgspec.DecodeError:
            return Answer(error=self._why(done))

    def command(self) -> list[str]:
        python = [self.ssh.python, "-m", "kvrelay.cluster.hosts.there"]
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
