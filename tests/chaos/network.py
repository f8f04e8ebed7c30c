"""Several hosts on one machine: network namespaces on a bridge, whose links can be cut and made
lossy. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from typing import Self

NETWORK = "10.213.7"


def what_is_missing() -> str:
    """Says what hosts need and lack; empty: nothing."""
    if os.geteuid() != 0:
        return "root, for network namespaces"
    missing = [name for name in ("ip", "nft") if shutil.which(name) is None]
    return f"the commands {' and '.join(missing)} (iproute2, nftables)" if missing else ""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


class Hosts:
    """`count` namespaces, from `with` to its end; host i has the address NETWORK.(i + 1)."""

    def __init__(self, count: int) -> None:
        self._mark = f"kvc{os.getpid() % 100_000}"
        self._bridge = f"{self._mark}b"
        self.names = [f"{self._mark}n{i}" for i in range(count)]

    def __enter__(self) -> Self:
        try:
            run("ip", "link", "add", self._bridge, "type", "bridge")
            run("ip", "addr", "add", f"{NETWORK}.254/24", "dev", self._bridge)
            run("ip", "link", "set", self._bridge, "up")
            for number, name in enumerate(self.names):
                self._add(number, name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for number, name in enumerate(self.names):
            self.kill(number)
            # A namespace goes when the kernel has time, and its end of the link with it.
            link = ("ip", "link", "del", self._outer(number))
            subprocess.run(link, capture_output=True, check=False)
            subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)
        subprocess.run(("ip", "link", "del", self._bridge), capture_output=True, check=False)

    def address(self, number: int) -> str:
        return f"{NETWORK}.{number + 1}"

    def inside(self, number: int) -> list[str]:
        """What a command begins with that runs on this host."""
        return ["ip", "netns", "exec", self.names[number]]

    def kill(self, number: int) -> int:
        """All that runs on this host; how many processes that were."""
        pids = ("ip", "netns", "pids", self.names[number])
        found = subprocess.run(pids, capture_output=True, text=True, check=False).stdout.split()
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        return len(found)

    def cut(self, number: int, is_cut: bool) -> None:
        run("ip", "link", "set", self._outer(number), "down" if is_cut else "up")

    def lose(self, number: int, is_lossy: bool) -> None:
        """A tenth of the packets that leave the host is lost, or none any more."""
        nft = (*self.inside(number), "nft")
        run(*nft, "add table inet chaos")
        run(*nft, "delete table inet chaos")
        if is_lossy:
            run(*nft, "add table inet chaos")
            run(*nft, "add chain inet chaos out { type filter hook output priority 0; }")
            run(*nft, "add rule inet chaos out numgen random mod 100 < 10 drop")

    def _outer(self, number: int) -> str:
        return f"{self._mark}v{number}"

    def _add(self, number: int, name: str) -> None:
        outer, inner = self._outer(number), f"{self._mark}w{number}"
        run("ip", "netns", "add", name)
        run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner)
        run("ip", "link", "set", inner, "netns", name)
        run("ip", "link", "set", outer, "master", self._bridge, "up")
        inside = ("ip", "netns", "exec", name)
        run(*inside, "ip", "addr", "add", f"{self.address(number)}/24", "dev", inner)
        run(*inside, "ip", "link", "set", inner, "up")
        run(*inside, "ip", "link", "set", "lo", "up")
