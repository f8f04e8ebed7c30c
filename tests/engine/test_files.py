"""Folders, files and locks that another user has prepared are refused, in words."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrelay.engine import files
from kvrelay.engine.files import (
    NotOwn,
    check_owner,
    given_folder,
    held_lock,
    open_own,
    own_folder,
)

STRANGER = 12345
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to other users")


def taken_away(path: Path) -> Path:
    os.lchown(path, STRANGER, STRANGER)
    return path


def test_what_we_make_is_for_us_alone(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "a" / "b")
    assert folder.stat().st_mode & 0o777 == 0o700
    os.close(open_own(folder / "file", os.O_RDWR | os.O_CREAT))
    assert (folder / "file").stat().st_mode & 0o777 == 0o600
    tmp_path.chmod(0o1777)  # as /tmp or a disk for all: ours in it is ours
    own_folder(folder)
    assert given_folder(folder) == folder


@as_root
@pytest.mark.parametrize("use", [own_folder, given_folder, check_owner])
def test_what_another_user_has_prepared_is_refused(
    tmp_path: Path, use: Callable[[Path], object]
) -> None:
    (tmp_path / "theirs").mkdir(mode=0o777)
    with pytest.raises(NotOwn, match=f"theirs: it belongs to user {STRANGER}, and this process"):
        use(taken_away(tmp_path / "theirs"))


@as_root
def test_files_and_links_of_another_user_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"theirs")
    with pytest.raises(NotOwn, match="belongs to user"):
        open_own(taken_away(file), os.O_RDWR)
    assert file.read_bytes() == b"theirs"
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(NotOwn, match="no link to one"):
        open_own(tmp_path / "link", os.O_RDWR | os.O_CREAT)
    assert not (tmp_path / "mine").exists()
    with pytest.raises(NotOwn, match="belongs to user"):
        check_owner(taken_away(tmp_path / "link"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotOwn, match="has to be a file"):  # and nobody waits for its other end
        open_own(tmp_path / "pipe", os.O_RDONLY)


def test_what_others_may_write_is_refused(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "folder")
    folder.chmod(0o777)
    with pytest.raises(NotOwn, match=r"others may change it \(mode 777\): chmod 700 it"):
        own_folder(folder)
    folder.chmod(0o770)  # its group is ours, as with umask 002 and for volumes in Kubernetes
    own_folder(folder)
    with pytest.raises(NotOwn, match="others may read it"):
        own_folder(folder, private=True)


def test_a_lock_is_waited_for_until_its_deadline(tmp_path: Path) -> None:
    began = time.monotonic()
    with (
        held_lock(tmp_path / "lock", 1.0),
        pytest.raises(TimeoutError, match=r"lock: another process has held it for 0\.1 s"),
        held_lock(tmp_path / "lock", 0.1),
    ):
        pass
    assert time.monotonic() - began < 1.0
    with held_lock(tmp_path / "lock", 0.1):
        pass


@as_root
def test_locks_of_this_machine_are_at_one_place_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = files.runtime_folder()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert files.runtime_folder() == place
    assert place.stat().st_mode & 0o077 == 0
