"""The lock of a server on its state directory, and what it tells the commands of its own user.

`server.lock` in the state directory is held by `kvrelay serve` itself for as long as it lives,
whatever stores it uses; its routers and its controller share the directory under that. A server
that replaces itself keeps the open file, and so the lock. The file says who holds it, and where
that one listens: so a command finds the key of operators of a server that this user runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psutil

from kvrelay.engine.files import check_owner, given_folder, lock_within, open_own
from kvrelay.engine.settings import OPERATIONS_KEY_FILE

LOCK = "server.lock"
WAIT_S = 2.0  # for a predecessor that is ending
_MAX_BYTES = 64 * 1024  # in a record
_MADE_KEY = re.compile(r"[0-9a-f]{32,256}")

Address = IPv4Address | IPv6Address


class StateInUse(Exception):
    """One line: who uses the state directory, and what to do."""


class Holder(msgspec.Struct):
    """What the file says of the process that holds it."""

    pid: int = 0
    host: str = ""
    addresses: list[tuple[str, int]] = []  # where its routers listen


class ServerLock:
    """Owned by `kvrelay serve`, from `take` to `release`."""

    def __init__(self, number: int) -> None:
        self._number = number

    @classmethod
    def take(cls, state: Path, timeout_s: float = WAIT_S, *, goes_on: bool = False) -> ServerLock:
        """`goes_on`: the program that this process was before had it. Raises StateInUse where
        another process has it, and OSError."""
        path = given_folder(state) / LOCK
        for each in state.iterdir():
            check_owner(each)
        for number in inherited_locks() if goes_on else ():
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(number), path.stat()):
                    os.set_inheritable(number, False)
                    return cls(number)
        number = open_own(path, os.O_RDWR | os.O_CREAT, private=True)
        try:
            if not lock_within(number, timeout_s):
                holder = _read(number)
                raise StateInUse(
                    f"{state} is in use by process {holder.pid or 'unknown'}"
                    f"{_elsewhere(holder)}: end that one, or give each server its own"
                    " sessions.state_dir"
                )
            lock = cls(number)
            lock.tell([])
        except BaseException:
            os.close(number)
            raise
        return lock

    def tell(self, addresses: list[tuple[str, int]]) -> None:
        """Say where it listens. Raises OSError."""
        text = msgspec.json.encode(Holder(os.getpid(), socket.gethostname(), addresses))
        os.pwrite(self._number, text, 0)
        os.ftruncate(self._number, len(text))

    def release(self) -> None:
        os.close(self._number)


def inherited_locks() -> list[int]:
    """Files of this process, by number, that are such a lock."""
    return [int(Path(link).name) for link, _ in _open_locks("self")]


def with_key(url: str) -> tuple[str, str]:
    """`url` as it is to be called, and the key of operators that was made for the server there,
    where that is a process of this user; "": there is none, or it cannot be read. Nobody else can
    listen where such a process does, so the key goes to no other."""
    wanted = _addresses_of(url)
    for process in psutil.pids() if wanted else ():
        for link, path in _open_locks(str(process)):
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{process}").st_uid != os.getuid():
                    continue
                with open(link, "rb") as file:
                    holder = _read(file.fileno())
                found = [each for each in wanted if _is_at(each, holder)]
                if holder.pid == process and found:
                    return _at(url, *found[0]), _key_in(path.parent)
    return url, ""


def _at(url: str, address: Address, port: int) -> str:
    """A name may stand for several addresses, of which somebody else has one: a certificate tells
    them apart, and in clear text the address has to be named."""
    parts = urlsplit(url)
    if parts.scheme == "https":
        return url
    host = f"[{address}]" if address.version == 6 else str(address)
    return parts._replace(netloc=f"{host}:{port}").geturl()


def _key_in(state: Path) -> str:
    """Reads the key that the server has made. Raises OSError."""
    number = open_own(state / OPERATIONS_KEY_FILE, os.O_RDONLY, private=True)
    with open(number, encoding="ascii", errors="replace") as file:
        text = file.read(_MAX_BYTES).strip()
    return text if _MADE_KEY.fullmatch(text) else ""


def _open_locks(process: str) -> Iterator[tuple[str, Path]]:
    """What a process of this user has open that may be such a lock: as a link, and as a path."""
    try:
        names = os.listdir(f"/proc/{process}/fd")
    except OSError:  # it has ended, or is another user's
        return
    for name in names:
        link = f"/proc/{process}/fd/{name}"
        with contextlib.suppress(OSError):
            path = Path(os.readlink(link))
            if path.name == LOCK:
                yield link, path


def _read(number: int) -> Holder:
    try:
        return msgspec.json.decode(os.pread(number, _MAX_BYTES, 0), type=Holder)
    except (OSError, msgspec.DecodeError):
        return Holder()


def _elsewhere(holder: Holder) -> str:
    is_elsewhere = holder.host and holder.host != socket.gethostname()
    return f" on {holder.host}" if is_elsewhere else ""


def _addresses_of(url: str) -> set[tuple[Address, int]]:
    """All that its name stands for."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"https": 443}.get(parts.scheme, 80)
        found = socket.getaddrinfo(parts.hostname or "", port, type=socket.SOCK_STREAM)
        return {(ip_address(str(each[4][0])), port) for each in found}
    except (OSError, ValueError):
        return set()


def _is_at(wanted: tuple[Address, int], holder: Holder) -> bool:
    address, port = wanted
    for host, its in holder.addresses:
        own = ip_address(host)
        is_any = own.is_unspecified and own.version == address.version and _is_here(address)
        if its == port and (own == address or is_any):
            return True
    return False


def _is_here(address: Address) -> bool:
    """Whether it is one of this machine's."""
    here = {each.address for many in psutil.net_if_addrs().values() for each in many}
    return address.is_loopback or str(address) in here
