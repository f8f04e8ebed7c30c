"""One server for each state directory, and who it is that has it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.cluster.state.server_lock import LOCK, ServerLock, inherited_locks, with_key
from kvrelay.engine.files import write_private
from kvrelay.engine.settings import OPERATIONS_KEY_FILE

KEY = "ab" * 32
# What a server does that replaces itself: the same process, another program, the lock passed on.
RESTART = """
import fcntl, os, sys
from pathlib import Path
from kvrelay.cluster.state.server_lock import ServerLock, StateInUse, inherited_locks
state = Path(sys.argv[1])
lock = ServerLock.take(state, goes_on="again" in sys.argv)
(number,) = inherited_locks()
if "again" not in sys.argv:
    os.set_inheritable(number, True)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], "again"])
print(os.get_inheritable(number))
"""


@pytest.mark.slow
def test_another_server_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    lock = ServerLock.take(tmp_path / "state")
    holding = (tmp_path / "state" / LOCK).stat()
    command = [sys.executable, "-c", RESTART, str(tmp_path / "state"), "again"]
    other = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = other.stderr.strip().splitlines()[-1]
    assert f"{tmp_path}/state is in use by process {os.getpid()}: end that one, or give" in said
    lock.release()
    assert (tmp_path / "state" / LOCK).stat().st_ino == holding.st_ino  # one file for all
    subprocess.run(command, check=True, timeout=60)


def test_a_server_that_replaces_itself_keeps_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RESTART, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert said.stdout.strip() == "False", said.stderr
    ServerLock.take(tmp_path).release()


def test_a_server_that_died_holds_nothing(tmp_path: Path) -> None:
    pid = os.fork()
    if not pid:
        ServerLock.take(tmp_path)
        os._exit(9)
    os.waitpid(pid, 0)
    ServerLock.take(tmp_path, timeout_s=0.0).release()


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to other users")
@pytest.mark.parametrize("name", [".", LOCK, "sessions.db", "files"])
def test_a_directory_that_another_user_has_prepared_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "files").mkdir()
    for each in (LOCK, "sessions.db"):
        (tmp_path / each).touch(mode=0o600)
    os.chown(tmp_path / name, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to user 12345"):
        ServerLock.take(tmp_path)


def test_the_key_is_for_the_server_at_its_addresses_alone(tmp_path: Path) -> None:
    """Where another listens, as at the other address of localhost, that one is not sent it."""
    lock = ServerLock.take(tmp_path)
    write_private(tmp_path / OPERATIONS_KEY_FILE, KEY.encode())
    lock.tell([("127.0.0.1", 8123), ("0.0.0.0", 8124)])
    for url, at, key in (
        ("http://127.0.0.1:8123", "http://127.0.0.1:8123", KEY),
        ("http://localhost:8123/x", "http://127.0.0.1:8123/x", KEY),
        ("http://127.0.0.2:8123", "http://127.0.0.2:8123", ""),
        ("http://[::1]:8123", "http://[::1]:8123", ""),
        ("http://127.0.0.9:8124", "http://127.0.0.9:8124", KEY),
        ("http://192.0.2.7:8124", "http://192.0.2.7:8124", ""),  # another machine's
        ("http://127.0.0.1:8125", "http://127.0.0.1:8125", ""),
        ("https://localhost:8123", "https://localhost:8123", KEY),  # its certificate is looked at
        ("nonsense", "nonsense", ""),
    ):
        assert with_key(url) == (at, key), url
    lock.release()
    assert with_key("http://127.0.0.1:8123") == ("http://127.0.0.1:8123", "")


def test_a_lock_of_a_child_is_not_ours(tmp_path: Path) -> None:
    """Only the server's own process has it: what it starts is given no such file."""
    num_others = len(inherited_locks())
    lock = ServerLock.take(tmp_path)
    look = "import os; print(sum('server.lock' in os.readlink(f'/proc/self/fd/{n}') "
    look += "for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}')))"
    child = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=60)
    assert child.stdout.strip() == "0", child.stderr
    assert len(inherited_locks()) == num_others + 1
    lock.release()
    with (tmp_path / LOCK).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
