from __future__ import annotations

import math
import os
import re
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from kvrelay.engine.kv.tier import DiskRecord
from kvrelay.kvtransfer.agent import StoreIndex
from kvrelay.kvtransfer.store import DiskStore, StoreError, places, stale_stores, store_folder
from kvrelay.kvtransfer.store.index import FORMAT_VERSION, VERSION_KEY, _meta_check
from tests.kvtransfer.store.stores import (
    BLOCK,
    COMPATIBILITY,
    FINGERPRINT,
    MAX_BLOCKS,
    SLOT,
    Clock,
    keep,
    name_of,
    open_store,
    record,
    serve,
)

Opener = Callable[..., DiskStore]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return store_folder(tmp_path, FINGERPRINT, "decode-0")


@pytest.fixture
def opened(folder: Path) -> Iterator[Opener]:
    """Opens the store of `folder`; closed at the end."""
    stores: list[DiskStore] = []

    def opener(**changes: Any) -> DiskStore:
        stores.append(open_store(folder, **changes))
        return stores[-1]

    yield opener
    for store in stores:
        store.close()


class TestKeeping:
    def test_a_new_store_is_empty_sparse_and_of_its_full_size(
        self, opened: Opener, folder: Path
    ) -> None:
        store = opened(max_blocks=1000)
        assert store.records == []
        assert store.warnings == []
        blocks = (folder / "blocks.kv").stat()
        assert blocks.st_size == 1000 * SLOT == store.num_bytes
        assert blocks.st_blocks * 512 < SLOT
        assert os.fstat(store.fd).st_ino == blocks.st_ino

    def test_slots_are_whole_pages_apart(self, opened: Opener) -> None:
        store = opened()
        assert [store.offset(slot) for slot in (0, 1, MAX_BLOCKS - 1)] == [0, SLOT, 31 * SLOT]
        assert store.bytes_per_block == BLOCK
        for slot in (-1, MAX_BLOCKS):
            with pytest.raises(AssertionError):
                store.offset(slot)

    def test_what_was_put_is_there_after_a_restart(self, opened: Opener) -> None:
        with closing(opened()) as store:
            keep(store, [3, 0, 31])
        store = opened()
        assert [(r.slot, r.block_hash, r.checksum) for r in store.records] == [
            (r.slot, r.block_hash, r.checksum) for r in (record(s, name_of(s)) for s in (0, 3, 31))
        ]
        assert serve(store) == ({0, 3, 31}, set())
        assert store.counters["loaded"] == 3
        assert store.warnings == []

    def test_checksums_and_names_of_all_bits_come_back(self, opened: Opener) -> None:
        put = (
            DiskRecord(0, b"\xff" * 16, (1 << 64) - 1, 5.0, SLOT),
            DiskRecord(1, b"\0" * 16, 0, 5.0, SLOT),
            DiskRecord(2, b"\0" * 15 + b"\1", 1 << 63, math.inf, SLOT),
        )
        clock = Clock()
        with closing(opened(clock=clock)) as store:
            store.update(StoreIndex(put=put))
        assert opened(clock=clock).records == list(put)

    def test_remove_goes_first_in_an_update(self, opened: Opener) -> None:
        with closing(opened()) as store:
            keep(store, [1, 2])
            store.update(StoreIndex(remove=(1, 2), put=(record(1, name_of(7)),)))
        assert [(r.slot, r.block_hash) for r in opened().records] == [(1, name_of(7))]

    def test_a_record_replaces_the_one_of_its_slot(self, opened: Opener) -> None:
        with closing(opened()) as store:
            for name in (name_of(7), name_of(8)):
                store.update(StoreIndex(put=(record(1, name),)))
        assert [(r.slot, r.block_hash) for r in opened().records] == [(1, name_of(8))]

    def test_a_name_is_listed_once(self, opened: Opener) -> None:
        with closing(opened()) as store:
            store.update(StoreIndex(put=(record(4, name_of(7)), record(2, name_of(7)))))
        with closing(opened()) as store:
            assert [r.slot for r in store.records] == [2]
            assert store.counters["duplicate"] == 1
        assert opened().counters["duplicate"] == 0

    def test_a_record_that_makes_no_sense_is_our_bug(self, opened: Opener) -> None:
        store = opened()
        good = record(1, name_of(1))
        for wrong in (
            record(MAX_BLOCKS, name_of(1)),
            DiskRecord(1, b"short", good.checksum, 1.0),
            DiskRecord(1, good.block_hash, 1 << 64, 1.0),
            DiskRecord(1, good.block_hash, good.checksum, math.nan),
        ):
            with pytest.raises(AssertionError):
                store.update(StoreIndex(put=(wrong,)))

    def test_a_closed_store_says_so(self, opened: Opener) -> None:
        store = opened()
        store.close()
        store.close()
        assert store.fd == -1
        assert store.check() is None
        with pytest.raises(StoreError, match="it is closed"):
            store.update(StoreIndex(remove=(1,)))


class TestRetention:
    def test_what_is_left_of_it_is_listed_and_what_is_over_is_removed(self, opened: Opener) -> None:
        clock = Clock()
        with closing(opened(clock=clock)) as store:
            store.update(StoreIndex(put=(record(0, name_of(0), 100.0), record(1, name_of(1), 60))))
        clock.now += 60
        with closing(opened(clock=clock)) as store:
            assert [(r.slot, r.keep_s) for r in store.records] == [(0, 40.0)]
            assert store.counters["expired"] == 1
        clock.now -= 60  # gone for good, whatever the clock says later
        assert [r.slot for r in opened(clock=clock).records] == [0]


class TestSize:
    def test_a_smaller_store_drops_what_lies_beyond_and_gives_the_space_back(
        self, opened: Opener, folder: Path
    ) -> None:
        with closing(opened()) as store:
            keep(store, range(10))
        with closing(opened(max_blocks=6)) as store:
            assert serve(store) == (set(range(6)), set())
            assert store.counters["outside"] == 4
            assert (folder / "blocks.kv").stat().st_size == 6 * SLOT
        assert serve(opened()) == (set(range(6)), set())

    def test_a_larger_store_keeps_all(self, opened: Opener, folder: Path) -> None:
        with closing(opened()) as store:
            keep(store, range(10))
        with closing(opened(max_blocks=64)) as store:
            assert serve(store) == (set(range(10)), set())
            keep(store, [63])
            assert (folder / "blocks.kv").stat().st_size == 64 * SLOT
        assert serve(opened(max_blocks=64))[0] == {*range(10), 63}

    def test_a_disk_that_is_too_small_is_told_at_once(self, opened: Opener, folder: Path) -> None:
        folder.mkdir(parents=True)
        system = os.statvfs(folder)
        free_blocks = system.f_bavail * system.f_frsize // SLOT
        try:
            store = opened(max_blocks=free_blocks * 2)
        except StoreError:
            pytest.skip("no file may be that large here")
        assert re.search(r"may grow by .* GiB, and .* GiB are free", store.warnings[0])


class TestOtherBlocks:
    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"fingerprint": b"\xaa" * 16}, f"fingerprint is {FINGERPRINT.hex()}, wanted aaaa"),
            ({"bytes_per_block": 4999}, "bytes_per_block is 5000, wanted 4999"),
            ({"bytes_per_block": 50}, "slot_bytes is 8192, wanted 4096"),
            (
                {"compatibility": (COMPATIBILITY[0], ("dtype", "float32"))},
                "compatibility.dtype is bfloat16, wanted float32",
            ),
            (
                {"compatibility": (*COMPATIBILITY, ("rope", "linear"))},
                "compatibility.rope is missing, wanted linear",
            ),
            ({"compatibility": COMPATIBILITY[:1]}, "compatibility.dtype is bfloat16, wanted none"),
            ({"codec": "exponents-9"}, "codec is none, wanted exponents-9"),
        ],
    )
    def test_a_store_of_other_blocks_is_emptied_and_the_field_named(
        self, opened: Opener, folder: Path, changes: dict[str, Any], told: str
    ) -> None:
        with closing(opened()) as store:
            keep(store, range(10))
        with closing(opened(**changes)) as store:
            assert store.records == []
            (warning,) = store.warnings
            assert told in warning
            assert "the store starts empty" in warning
            assert (folder / "blocks.kv").stat().st_blocks == 0
            assert store.counters["emptied"] == 1
        again = opened(**changes)
        assert again.warnings == []
        assert again.records == []

    def test_the_order_of_compatibility_does_not_matter(self, opened: Opener) -> None:
        with closing(opened()) as store:
            keep(store, [1])
        assert len(opened(compatibility=COMPATIBILITY[::-1]).records) == 1

    def test_a_newer_version_is_refused_and_left_alone(self, opened: Opener, folder: Path) -> None:
        with closing(opened()) as store:
            keep(store, [1, 2])
        set_version(folder, str(FORMAT_VERSION + 1))
        with pytest.raises(StoreError, match=f"format version {FORMAT_VERSION + 1}.*newer program"):
            opened()
        set_version(folder, str(FORMAT_VERSION))
        assert serve(opened()) == ({1, 2}, set())

    @pytest.mark.parametrize("version", ["0", "none"])
    def test_an_older_version_is_emptied(self, opened: Opener, folder: Path, version: str) -> None:
        with closing(opened()) as store:
            keep(store, [1, 2])
        set_version(folder, version)
        store = opened()
        assert store.records == []
        assert f"format_version is {version}, wanted {FORMAT_VERSION}" in store.warnings[0]

    def test_the_version_before_is_read_and_kept(self, opened: Opener, folder: Path) -> None:
        """Its blocks are as they were computed, which any codec lets be."""
        with closing(opened()) as store:
            keep(store, range(6))
        make_first_version(folder)
        with closing(opened(codec="exponents-9")) as store:
            assert store.warnings == []
            assert serve(store) == ({0, 1, 2, 3, 4}, set()), "but the row that was altered"
            assert {found.num_bytes for found in store.records} == {SLOT}
            keep(store, [9])
        assert serve(opened(codec="exponents-9")) == ({0, 1, 2, 3, 4, 9}, set())

    def test_the_version_before_of_other_blocks_is_emptied(
        self, opened: Opener, folder: Path
    ) -> None:
        with closing(opened()) as store:
            keep(store, [1, 2])
        make_first_version(folder)
        store = opened(fingerprint=b"\xaa" * 16)
        assert store.records == []
        assert f"fingerprint is {FINGERPRINT.hex()}, wanted aaaa" in store.warnings[0]

    def test_no_more_blocks_are_listed_than_there_is_room_for(self, opened: Opener) -> None:
        with closing(opened(room_bytes=10 * SLOT)) as store:
            store.resize(7, 4096)
            keep(store, [1, 2, 7])
        with closing(opened(room_bytes=2 * SLOT - 1)) as store:
            assert {(each.slot, each.num_bytes) for each in store.records} == {(1, SLOT), (7, 4096)}
            assert store.counters["outside"] == 1
        assert len(opened().records) == 2


def make_first_version(folder: Path) -> None:
    """Rewrites the index as version 1 was, the last row of it with another checksum."""
    with closing(sqlite3.connect(folder / "index.sqlite")) as db, db:
        meta = dict(db.execute("SELECT name, value FROM meta")) | {VERSION_KEY: "1"}
        del meta["codec"]
        identity = {name: value for name, value in meta.items() if name != VERSION_KEY}
        seed = xxh3_64_intdigest(repr(sorted(identity.items())).encode())
        rows = db.execute("SELECT slot, name, checksum, expires_at FROM records ORDER BY slot")
        found = rows.fetchall()
        db.execute("DROP TABLE meta")
        db.execute("DROP TABLE records")
        db.execute("CREATE TABLE meta (name TEXT, value TEXT, check_sum INTEGER)")
        db.execute(
            "CREATE TABLE records (slot INTEGER PRIMARY KEY, name BLOB, checksum INTEGER,"
            " expires_at REAL, check_sum INTEGER)"
        )
        for name, value in meta.items():
            row = (name, value, _meta_check(name, value))
            db.execute("INSERT INTO meta VALUES (?, ?, ?)", row)
        for row in found:
            check_sum = xxh3_64_intdigest(struct.pack("<q16sqd", *row), seed)
            check_sum -= (1 << 64) if check_sum >= 1 << 63 else 0
            db.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?)", (*row, check_sum))
        db.execute("UPDATE records SET checksum = 5 WHERE slot = ?", (found[-1][0],))


def set_version(folder: Path, version: str) -> None:
    with closing(sqlite3.connect(folder / "index.sqlite")) as db, db:
        db.execute(
            "UPDATE meta SET value = ?, check_sum = ? WHERE name = ?",
            (version, _meta_check(VERSION_KEY, version), VERSION_KEY),
        )


class TestLock:
    def test_a_second_opener_is_told_who_has_it(self, opened: Opener, folder: Path) -> None:
        store = opened()
        keep(store, [1])
        with pytest.raises(StoreError, match=f"{folder}: process {os.getpid()} has it open"):
            opened()
        keep(store, [2])
        store.close()
        assert serve(opened()) == ({1, 2}, set())

    def test_the_lock_goes_with_the_process(self, opened: Opener, folder: Path) -> None:
        folder.mkdir(parents=True)
        holder = subprocess.Popen(
            [sys.executable, "-m", "tests.kvtransfer.store.store_writer", str(folder), "1"],
            stdout=subprocess.PIPE,
        )
        assert holder.stdout is not None
        with holder.stdout:
            assert holder.stdout.readline().startswith(b"begin")
            with pytest.raises(StoreError, match=f"process {holder.pid} has it open"):
                opened()
            started = time.monotonic()
            with pytest.raises(StoreError):
                opened(lock_timeout_s=0.2)
            assert time.monotonic() - started >= 0.2
            holder.kill()
            opened(lock_timeout_s=30.0)  # waits for the end of the process
            holder.wait(30)

    def test_an_open_that_fails_does_not_keep_the_lock(self, opened: Opener, folder: Path) -> None:
        (folder / "blocks.kv").mkdir(parents=True)
        with pytest.raises(StoreError, match="Is a directory; choose a folder"):
            opened()
        (folder / "blocks.kv").rmdir()
        opened()


class TestFolders:
    def test_a_folder_is_of_one_fingerprint_and_one_owner(self, tmp_path: Path) -> None:
        assert store_folder(tmp_path, b"\x01" * 16, "decode-0") == (
            tmp_path / ("01" * 16) / "decode-0"
        )
        names = ["a/b", "a%2Fb", "a:b", "../a", "a"]
        folders = {store_folder(tmp_path, FINGERPRINT, name) for name in names}
        assert len(folders) == len(names)
        assert {folder.parent for folder in folders} == {tmp_path / FINGERPRINT.hex()}
        for wrong in ("", ".", ".."):
            with pytest.raises(AssertionError):
                store_folder(tmp_path, FINGERPRINT, wrong)

    def test_a_worker_goes_on_in_its_own_store_or_in_what_others_have_left(
        self, tmp_path: Path
    ) -> None:
        first = lambda name: next(places(tmp_path, FINGERPRINT, name))  # noqa: E731
        own = store_folder(tmp_path, FINGERPRINT, "decode-0")
        assert first("decode-0") == own
        with closing(open_store(own)) as store:
            keep(store, [1, 2])
            assert first("decode-0") == own  # whoever has it: a predecessor that is ending
            assert first("decode-1") == store_folder(tmp_path, FINGERPRINT, "decode-1")
        assert first("decode-1") == own
        with closing(open_store(first("decode-1"))) as adopted:
            assert {record.slot for record in adopted.records} == {1, 2}
            beside = list(places(tmp_path, FINGERPRINT, "decode-0"))
            assert [each.name for each in beside[:2]] == ["decode-0", "decode-0~2"]
        later = store_folder(tmp_path, FINGERPRINT, "decode-5")
        with closing(open_store(later)) as store:
            keep(store, [3])
        for folder, at in ((own, 1000), (later, 2000)):
            for file in folder.iterdir():
                os.utime(file, (0, at))
        found = places(tmp_path, FINGERPRINT, "decode-9")
        assert [each.name for each in islice(found, 3)] == ["decode-5", "decode-0", "decode-9"]

    def test_stale_stores_are_those_of_other_fingerprints_that_nobody_has_open(
        self, tmp_path: Path
    ) -> None:
        old, older, kept, busy = (bytes([n]) * 16 for n in range(4))
        for number, fingerprint in enumerate((old, older, kept)):
            path = store_folder(tmp_path, fingerprint, "decode-0")
            with closing(open_store(path, fingerprint=fingerprint)) as store:
                keep(store, range(10))
            for file in path.iterdir():
                os.utime(file, (0, 1000 - 100 * number))
        in_use = open_store(store_folder(tmp_path, busy, "d"), fingerprint=busy)
        (tmp_path / "somebody's").mkdir()
        (tmp_path / old.hex() / "empty").mkdir()
        with closing(in_use):
            found = stale_stores(tmp_path, keep=kept)
        assert [(store.path.parent.name, store.last_use) for store in found] == [
            (older.hex(), 900.0),
            (old.hex(), 1000.0),
        ]
        assert all(store.num_bytes >= 10 * BLOCK for store in found)
        assert all((store.path / "blocks.kv").exists() for store in found)

    def test_no_root_has_no_stale_stores(self, tmp_path: Path) -> None:
        assert stale_stores(tmp_path / "none", keep=FINGERPRINT) == []
