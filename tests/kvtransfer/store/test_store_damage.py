"""Stores whose files were altered behind their back: always opened, never a wrong block served.
`KVRELAY_FUZZ=5000` tries more of them."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from kvrelay.kvtransfer.agent import StoreIndex
from kvrelay.kvtransfer.store import StoreError
from tests.kvtransfer.store.stores import SLOT, keep, name_of, open_store, record, serve, write

TRIES = int(os.environ.get("KVRELAY_FUZZ", "240"))
LISTED = 24


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store as kill -9 leaves it, with a log that was not yet moved into the index. Some of its
    slots have held several blocks, so that old rows, in order by themselves, lie about."""
    here = tmp_path_factory.mktemp("killed")
    with closing(open_store(here / "store")) as store:
        keep(store, range(LISTED))
        for slot in range(8):
            store.update(StoreIndex(remove=(slot,)))
            write(store, slot, name_of(100 + slot))
            store.update(StoreIndex(put=(record(slot, name_of(100 + slot)),)))
    with closing(open_store(here / "store")) as store:
        for slot in range(4, 12):
            store.update(StoreIndex(remove=(slot,)))
            write(store, slot, name_of(200 + slot))
            store.update(StoreIndex(put=(record(slot, name_of(200 + slot)),)))
        shutil.copytree(here / "store", here / "copy")
    assert (here / "copy" / "index.sqlite-wal").stat().st_size > 0
    return here / "copy"


@pytest.fixture
def copy(killed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / "store"))


def flip_bits(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 2, 20))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def overwrite(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    run = rng.choice((8, 100, 4096))
    data[start : start + run] = rng.randbytes(len(data[start : start + run]))


def cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def swap(data: bytearray, rng: random.Random) -> None:
    """Two places of the file change places, as in a write that went astray."""
    size = rng.choice((16, 60, 4096))
    if len(data) >= 2 * size:
        a, b = (rng.randrange(len(data) // size) * size for _ in range(2))
        data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


@pytest.mark.parametrize("file", ["index.sqlite", "index.sqlite-wal", "blocks.kv"])
@pytest.mark.parametrize("damage", [flip_bits, overwrite, cut, swap])
def test_no_damage_keeps_a_store_from_opening_or_serves_a_wrong_block(
    killed: Path, tmp_path: Path, file: str, damage
) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(-(-TRIES // 12)):
        folder = Path(shutil.copytree(killed, tmp_path / f"{seed}"))
        data = bytearray((folder / file).read_bytes())
        damage(data, random.Random(f"{file} {damage.__name__} {seed}"))
        (folder / file).write_bytes(data)
        with closing(open_store(folder)) as store:
            good, refused = serve(store)
            outcomes["served"] += len(good)
            outcomes["refused"] += len(refused)
            # The store works on, and what it keeps now can be read.
            keep(store, [30])
        with closing(open_store(folder)) as store:
            assert 30 in serve(store)[0]
            assert store.warnings == []
        shutil.rmtree(folder)
    assert outcomes["served"], "nothing was served, so nothing was tested"
    if file == "blocks.kv" and damage is not cut:
        assert outcomes["refused"], "no block was hit, so nothing was tested"


def test_the_undamaged_copy_serves_everything(copy: Path) -> None:
    with closing(open_store(copy)) as store:
        assert serve(store) == (set(range(LISTED)), set())
        assert store.warnings == []


def alter(copy: Path, old: bytes, new: bytes) -> None:
    """In the index itself, once its log has been moved into it."""
    with closing(open_store(copy)):
        pass
    data = (copy / "index.sqlite").read_bytes()
    assert data.count(old) == 1, data.count(old)
    (copy / "index.sqlite").write_bytes(data.replace(old, new))


class TestRows:
    def test_a_row_with_another_name_is_dropped_and_counted(self, copy: Path) -> None:
        alter(copy, name_of(20), name_of(500))
        with closing(open_store(copy)) as store:
            assert serve(store) == (set(range(LISTED)) - {20}, set())
            assert store.counters["damaged"] == 1
            assert "1 of 24 records of the index were altered" in store.warnings[0]
        with closing(open_store(copy)) as store:
            assert store.counters["damaged"] == 0
            assert store.warnings == []

    def test_a_row_with_another_checksum_is_dropped(self, copy: Path) -> None:
        checksum = record(20, name_of(20)).checksum.to_bytes(8, "big")
        alter(copy, checksum, checksum[:-1] + bytes([checksum[-1] ^ 1]))
        with closing(open_store(copy)) as store:
            assert 20 not in {r.slot for r in store.records}
            assert store.counters["damaged"] == 1


class TestIndex:
    @pytest.mark.parametrize("garbage", [b"", b"not a database", bytes(8192), os.urandom(20_000)])
    def test_garbage_is_replaced_by_an_empty_index_with_a_warning(
        self, copy: Path, garbage: bytes
    ) -> None:
        (copy / "index.sqlite").write_bytes(garbage)
        with closing(open_store(copy)) as store:
            assert store.records == []
            assert "index.sqlite is new and empty: it " in store.warnings[0]
            assert store.counters["emptied"] == 1
            keep(store, [1])
        with closing(open_store(copy)) as store:
            assert serve(store) == ({1}, set())
            assert store.warnings == []

    @pytest.mark.parametrize(
        ("place", "byte"),
        [(19, 9), (39, 7), (59, 2)],
        ids=["format", "free pages", "text encoding"],
    )
    def test_a_header_that_was_altered_is_noticed_at_once(
        self, copy: Path, place: int, byte: int
    ) -> None:
        with closing(open_store(copy)):
            pass
        with (copy / "index.sqlite").open("r+b") as file:
            file.seek(place)
            file.write(bytes([byte]))
        with closing(open_store(copy)) as store:
            assert store.records == []
            assert "it is damaged" in store.warnings[0]
            keep(store, [1])
        assert len(store.warnings) == 1

    def test_a_table_that_was_altered_is_noticed_at_once(self, copy: Path) -> None:
        alter(copy, b"expires_at REAL", b"expires_at REAM")
        with closing(open_store(copy)) as store:
            assert store.records == []
            assert "it is damaged (table records)" in store.warnings[0]

    def test_an_index_that_another_program_has_open_is_left_alone(self, copy: Path) -> None:
        with closing(sqlite3.connect(copy / "index.sqlite")) as db:
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("SELECT * FROM records").fetchall()
            with pytest.raises(StoreError, match=r"is locked; another program .* end it"):
                open_store(copy)
        with closing(open_store(copy)) as store:
            assert serve(store) == (set(range(LISTED)), set())

    def test_a_missing_index_empties_the_store(self, copy: Path) -> None:
        for file in copy.glob("index.sqlite*"):
            file.unlink()
        with closing(open_store(copy)) as store:
            assert store.records == []
            assert "it was missing; the store starts empty" in store.warnings[0]
            assert (copy / "blocks.kv").stat().st_blocks == 0

    def test_damage_that_an_update_meets_costs_the_index_alone(self, tmp_path: Path) -> None:
        num_blocks = 60_000  # more rows than SQLite keeps in memory
        with closing(open_store(tmp_path, max_blocks=num_blocks)) as store:
            rows = [record(0, name_of(0))] * num_blocks
            put = tuple(
                type(row)(slot, name_of(slot), row.checksum, row.keep_s)
                for slot, row in enumerate(rows)
            )
            store.update(StoreIndex(put=put))
        with closing(open_store(tmp_path, max_blocks=num_blocks)) as store:
            size = (tmp_path / "index.sqlite").stat().st_size
            (tmp_path / "index.sqlite").write_bytes(os.urandom(size))
            keep(store, [7, 50_000])
            (warning,) = store.warnings
            assert "index.sqlite is new and empty: it is damaged" in warning
            assert "are forgotten when the worker ends" in warning
        with closing(open_store(tmp_path, max_blocks=num_blocks)) as store:
            assert serve(store) == ({7, 50_000}, set())


class TestBlocksFile:
    def test_records_beyond_a_file_that_was_cut_are_dropped(self, copy: Path) -> None:
        os.truncate(copy / "blocks.kv", 10 * SLOT + 4999)
        with closing(open_store(copy)) as store:
            assert serve(store) == (set(range(10)), set())
            assert store.counters["outside"] == LISTED - 10
            assert f"blocks.kv is missing or was cut to {10 * SLOT + 4999}" in store.warnings[0]

    def test_a_missing_file_drops_every_record(self, copy: Path) -> None:
        (copy / "blocks.kv").unlink()
        with closing(open_store(copy)) as store:
            assert store.records == []
            assert f"{LISTED} blocks are lost" in store.warnings[0]
            keep(store, [3])
        with closing(open_store(copy)) as store:
            assert serve(store) == ({3}, set())
            assert store.warnings == []
