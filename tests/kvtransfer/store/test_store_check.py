"""What a store does when its surroundings fail: full or read-only disks, folders that vanish."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvrelay.engine.kv.tier import DiskRecord
from kvrelay.kvtransfer.agent import StoreIndex
from kvrelay.kvtransfer.store import DiskStore, StoreError
from tests.kvtransfer.store.stores import (
    BLOCK,
    MAX_BLOCKS,
    SLOT,
    files_up_to,
    keep,
    name_of,
    open_store,
    serve,
)

MANY = 5000  # rows: some hundred KiB of index
NOBODY = 65534


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    """With blocks in slots 0 to 9."""
    with closing(open_store(tmp_path / "root" / "store")) as store:
        keep(store, range(10))
        assert store.check() is None
        yield store


@contextmanager
def without_rights() -> Iterator[None]:
    """As a user to whom modes of files apply."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


def listed(folder: Path, **changes: int) -> set[int]:
    with closing(open_store(folder, **changes)) as store:
        return {found.slot for found in store.records}


class TestUpdates:
    def test_one_that_fails_changes_nothing_and_a_later_one_succeeds(self, tmp_path: Path) -> None:
        num_blocks = MANY + 10
        with closing(open_store(tmp_path, bytes_per_block=10, max_blocks=num_blocks)) as store:
            few = tuple(DiskRecord(slot, name_of(slot), 1, 60.0) for slot in range(10))
            many = tuple(DiskRecord(10 + n, name_of(10 + n), 1, 60.0) for n in range(MANY))
            store.update(StoreIndex(put=few))
            with (
                files_up_to(100_000),
                pytest.raises(StoreError, match=rf"disk store {tmp_path}: .*; ") as raised,
            ):
                store.update(StoreIndex(remove=(3,), put=many))
            assert "\n" not in str(raised.value)
            assert store.counters["updates_failed"] == 1
            shutil.copytree(tmp_path, tmp_path / "copy")  # as if it were killed now
            shape = {"bytes_per_block": 10, "max_blocks": num_blocks}
            assert listed(tmp_path / "copy", **shape) == set(range(10))
            store.update(StoreIndex(put=many[:1]))  # and removes what the other did not
        assert listed(tmp_path, **shape) == set(range(11)) - {3}

    def test_a_slot_that_could_not_be_removed_can_be_used_again(self, store: DiskStore) -> None:
        log = (store.folder / "index.sqlite-wal").stat().st_size
        with files_up_to(log), pytest.raises(StoreError):
            store.update(StoreIndex(remove=tuple(range(10))))
        keep(store, [3])
        store.close()
        assert listed(store.folder) == {3}


class TestOpening:
    def test_a_folder_that_cannot_be_made_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for folder, reason in (
            (tmp_path / "file" / "store", "File exists; choose a folder"),
            (tmp_path / "file", "File exists; choose a folder"),
            (tmp_path / ("n" * 300), "File name too long; choose a folder"),
        ):
            with pytest.raises(StoreError, match=f"disk store {folder}: {reason}"):
                open_store(folder)

    @pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to other users")
    @pytest.mark.parametrize("part", ["", "store", "store/decode-0", "store/decode-0/blocks.kv"])
    def test_what_another_user_has_prepared_is_told_and_not_written(
        self, tmp_path: Path, part: str
    ) -> None:
        """On a disk for all, as /scratch, which takes folders of everybody."""
        root = tmp_path / "root"
        folder = root / "store" / "decode-0"
        keep_slots(folder, range(3))
        root.chmod(0o1777)
        os.chown(root / part, 12345, 12345)
        before = (folder / "blocks.kv").read_bytes()
        with pytest.raises(StoreError, match=r"it belongs to user 12345, and this process is user"):
            open_store(folder)
        assert (folder / "blocks.kv").read_bytes() == before

    def test_a_size_that_the_disk_does_not_take_is_told(self, tmp_path: Path) -> None:
        with files_up_to(1 << 20), pytest.raises(StoreError, match=r"large.*make the store small"):
            open_store(tmp_path, max_blocks=1000)
        open_store(tmp_path).close()

    def test_a_disk_without_room_for_an_index_is_told(self, tmp_path: Path) -> None:
        with files_up_to(0), pytest.raises(StoreError, match=f"disk store {tmp_path}: .*; "):
            open_store(tmp_path)
        with closing(open_store(tmp_path)) as store:
            assert store.warnings == []

    @pytest.mark.parametrize(
        ("code", "advice"),
        [
            (sqlite3.SQLITE_FULL, "free space there"),
            (sqlite3.SQLITE_IOERR_READ, "look for errors of the device"),
            (sqlite3.SQLITE_CANTOPEN, "choose a folder that can be made"),
            (sqlite3.SQLITE_NOMEM, "choose another folder"),
        ],
    )
    def test_an_index_that_cannot_be_read_now_is_not_thrown_away(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, advice: str
    ) -> None:
        def fail(*_: object) -> None:
            error = sqlite3.OperationalError("it happened")
            error.sqlite_errorcode = code
            raise error

        keep_slots(tmp_path, range(3))
        with monkeypatch.context() as patch:
            patch.setattr("kvrelay.kvtransfer.store.index.Index._prepare", fail)
            with pytest.raises(StoreError, match=advice):
                open_store(tmp_path)
        assert listed(tmp_path) == {0, 1, 2}

    def test_a_full_disk_keeps_what_can_be_read(self, tmp_path: Path) -> None:
        now = 1e9
        with closing(open_store(tmp_path, clock=lambda: now)) as store:
            keep(store, range(5))
            keep(store, range(5, 10), keep_s=10.0)
        now += 20
        with files_up_to(0), closing(open_store(tmp_path, clock=lambda: now)) as store:
            assert serve(store) == (set(range(5)), set())
            assert store.counters["expired"] == 5
            assert len(store.warnings) == 1
            assert "\n" not in store.warnings[0]

    def test_a_folder_that_cannot_be_written_is_told(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            keep_slots(folder, range(3))
            folder.chmod(0o555)
            with (
                without_rights(),
                pytest.raises(StoreError, match="Permission denied; make it writable"),
            ):
                open_store(folder)
            folder.chmod(0o700)
            assert listed(folder) == {0, 1, 2}


def keep_slots(folder: Path, slots: range) -> None:
    with closing(open_store(folder)) as store:
        keep(store, slots)


class TestCheck:
    def test_a_store_in_order_is_nothing_to_talk_about(self, store: DiskStore) -> None:
        assert store.check() is None
        assert not store.in_trouble
        assert store.warnings == []

    @pytest.mark.parametrize("what", ["folder", "root", "file", "other file", "other folder"])
    def test_a_store_that_vanished_starts_again_empty(self, store: DiskStore, what: str) -> None:
        folder, fd = store.folder, store.fd
        if what in ("folder", "other folder"):
            shutil.rmtree(folder)
        elif what == "root":
            shutil.rmtree(folder.parent)
        else:
            (folder / "blocks.kv").unlink()
        if what == "other file":
            (folder / "blocks.kv").write_bytes(b"somebody else's")
        if what == "other folder":
            keep_slots(folder, range(20, 30))
        said = store.check()
        assert said is not None
        assert "vanished or was replaced; the store starts empty" in said
        assert store.warnings == [said]
        assert store.counters["recreated"] == 1
        assert not store.in_trouble
        assert store.check() is None
        # Transfers that are in flight use the same descriptor, which is of the new file.
        assert store.fd == fd
        assert os.path.samestat(os.fstat(fd), (folder / "blocks.kv").stat())
        assert os.fstat(fd).st_size == MAX_BLOCKS * SLOT
        assert os.pread(fd, BLOCK, store.offset(3)) == bytes(BLOCK)
        with pytest.raises(StoreError, match=f"process {os.getpid()} has it open"):
            open_store(folder)
        keep(store, [4])
        store.close()
        assert listed(folder) == {4}

    def test_an_index_that_vanished_costs_no_block_of_this_process(self, store: DiskStore) -> None:
        for file in store.folder.glob("index.sqlite*"):
            file.unlink()
        said = store.check()
        assert said is not None
        assert "it vanished or was replaced; blocks written so far are forgotten" in said
        assert os.pread(store.fd, 8, store.offset(3)) != bytes(8)
        keep(store, [4])
        assert store.check() is None
        store.close()
        assert listed(store.folder) == {4}

    def test_a_lock_that_vanished_is_taken_again(self, store: DiskStore) -> None:
        (store.folder / "lock").unlink()
        assert store.check() is None
        with pytest.raises(StoreError, match="has it open"):
            open_store(store.folder)

    def test_a_file_that_was_cut_has_its_size_again(self, store: DiskStore) -> None:
        os.truncate(store.folder / "blocks.kv", 5 * SLOT)
        said = store.check()
        assert said is not None
        assert f"was cut to {5 * SLOT} bytes" in said
        assert os.fstat(store.fd).st_size == MAX_BLOCKS * SLOT
        assert store.check() is None
        store.close()
        with closing(open_store(store.folder)) as store:
            assert serve(store) == (set(range(5)), set(range(5, 10)))

    def test_a_folder_that_another_has_taken_meanwhile_is_left_to_it(
        self, store: DiskStore
    ) -> None:
        shutil.rmtree(store.folder)
        with closing(open_store(store.folder)) as other:
            keep(other, [20])
            said = store.check()
            assert said is not None
            assert "has it open" in said
            assert store.in_trouble
            assert store.check() is None  # said once
            with pytest.raises(StoreError, match="has it open"):
                store.update(StoreIndex(remove=(1,)))
            assert os.pread(store.fd, 8, store.offset(3)) != bytes(8)  # can be read as before
        with closing(open_store(store.folder)) as other:
            assert serve(other) == ({20}, set())
        said = store.check()  # the other one has gone
        assert said is not None
        assert "the store starts empty" in said
        assert not store.in_trouble
        keep(store, [4])

    def test_a_folder_that_cannot_be_made_again_is_told_once_until_it_can(
        self, store: DiskStore
    ) -> None:
        root = store.folder.parent
        shutil.rmtree(root)
        root.touch()
        said = store.check()
        assert said is not None
        assert store.in_trouble
        assert store.check() is None
        with pytest.raises(StoreError):
            store.update(StoreIndex(remove=(1,)))
        root.unlink()
        said = store.check()
        assert said is not None
        assert "the store starts empty" in said
        keep(store, [4])

    def test_a_file_system_that_went_away_is_not_replaced_by_the_one_below(
        self, tmp_path: Path
    ) -> None:
        shared = Path("/dev/shm")
        if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("needs two file systems")
        with tempfile.TemporaryDirectory(dir=shared) as there:
            (tmp_path / "mount").symlink_to(there)
            with closing(open_store(tmp_path / "mount" / "store")) as store:
                (tmp_path / "mount").unlink()
                (tmp_path / "mount").mkdir()
                said = store.check()
                assert said is not None
                assert "its file system is gone; mount it again" in said
                assert list((tmp_path / "mount").iterdir()) == []

    def test_a_folder_that_became_read_only_is_told_once(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            folder.chmod(0o755)
            with closing(open_store(folder)) as store:
                folder.chmod(0o555)
                with without_rights():
                    said = store.check()
                    assert said is not None
                    assert "the folder is read-only" in said
                    assert store.in_trouble
                    assert store.check() is None
                folder.chmod(0o755)
                said = store.check()
                assert said is not None
                assert "in order again" in said
                assert not store.in_trouble
                assert store.check() is None
