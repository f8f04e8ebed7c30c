"""What some tests need that pip does not bring: `make setup-all` installs it where it may.

`python -m tests.needs` installs missing commands by apt-get, as root on Debian, and says what else
is missing and which tests are skipped for it. It never fails: what cannot be had is skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Need:
    """A command, Debian's package that has it, and the tests that are skipped without it."""

    command: str
    package: str
    skipped: str


NEEDS = (
    Need("chromium", "chromium", "the console in a browser, pages of others that call a server"),
    Need("promtool", "prometheus", "alerts and dashboards against a real Prometheus"),
    Need("ip", "iproute2", "several hosts, in network namespaces"),
    Need("nft", "nftables", "hosts that lose each other"),
    Need("mkfs.ext4", "e2fsprogs", "disks that are full or hang"),
    Need("openssl", "openssl", "certificates of a CA of one's own"),
)


def missing() -> list[Need]:
    return [need for need in NEEDS if shutil.which(need.command) is None]


def install(needs: list[Need]) -> str:
    """By apt-get. Returns why it could not; "": it could."""
    if os.geteuid() != 0:
        return "only root installs packages"
    if shutil.which("apt-get") is None:
        return "there is no apt-get"
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    packages = [need.package for need in needs]
    for words in (
        ["update", "-qq"],
        ["install", "-y", "-qq", "--no-install-recommends", *packages],
    ):
        try:
            done = subprocess.run(
                ["apt-get", *words], env=env, capture_output=True, text=True, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return f"apt-get {words[0]} took more than {TIMEOUT_S:.0f} s"
        if done.returncode:
            return f"apt-get {words[0]}: {(done.stderr or done.stdout).strip()[-300:]}"
    return ""


def main() -> None:
    console = Console()
    why = install(needs) if (needs := missing()) else ""
    table = Table("command", "Debian's package", "tests that are skipped without it")
    for need in (left := missing()):
        table.add_row(need.command, need.package, need.skipped)
    if left:
        console.print(table)
        console.print(f"not installed: {why or 'apt-get brought other commands'}", markup=False)
    else:
        console.print("Every command that tests need is here.")


if __name__ == "__main__":
    main()
