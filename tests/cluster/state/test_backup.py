"""What `kvrelay backup` copies from one machine is found on another after `kvrelay restore`."""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvrelay.cluster.api.responses.store import ResponseStore
from kvrelay.cluster.cli.backup import backup, restore

BLOCK = b"k" * 4096


class Machine:
    """A state directory, a disk tier and a configuration that says where they are."""

    def __init__(self, folder: Path) -> None:
        self.state, self.kv, self.config = folder / "state", folder / "kv", folder / "kvrelay.toml"
        folder.mkdir()
        self.config.write_text(
            f'[sessions]\nstate_dir = "{self.state}"\n[tiers]\ndisk_path = "{self.kv}"\n'
        )

    def run(self, command: object, *args: object) -> Result:
        arguments = [*map(str, args), "--config", str(self.config)]
        return CliRunner().invoke(command, arguments)  # type: ignore[arg-type]

    def write_kv(self) -> Path:
        """A store whose file has a hole of a gigabyte."""
        store = self.kv / ("ab" * 16) / "decode-0"
        store.mkdir(parents=True)
        with closing(sqlite3.connect(store / "index.sqlite")) as index, index:
            index.execute("CREATE TABLE records (slot INTEGER)")
            index.execute("INSERT INTO records VALUES (5)")
        with (store / "blocks.kv").open("wb") as file:
            file.truncate(1 << 30)
            file.seek(5 * 4096)
            file.write(BLOCK)
        return store


@pytest.fixture
def first(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path / "first")
    machine.state.mkdir()
    (machine.state / "salt.secret").write_text("s" * 64)
    (machine.state / "tls").mkdir()
    (machine.state / "tls/ca.pem").write_text("a certificate")
    (machine.state / "running/host-8000").mkdir(parents=True)
    (machine.state / "running/host-8000/life").write_text("a token")
    return machine


@pytest.fixture
def second(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "second")


@contextmanager
def held(path: Path) -> Iterator[None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(handle)


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_a_running_server_has_is_found_on_another_machine(
    first: Machine, second: Machine, tmp_path: Path
) -> None:
    store = ResponseStore(first.state / "responses.db")
    store.put("", "resp_1", b"an answer")
    with held(first.state / "sessions.db.lock"):  # it runs: changes may be in the log alone
        made = first.run(backup, tmp_path / "copy")
    assert made.exit_code == 0, made.output
    assert "3 files" in made.output
    assert all(
        p.stat().st_mode & 0o077 == 0
        for p in [tmp_path / "copy", *(tmp_path / "copy").rglob("state/*")]
    )
    brought = second.run(restore, tmp_path / "copy")
    assert brought.exit_code == 0, brought.output
    assert files_of(second.state) == {"responses.db", "salt.secret", "tls/ca.pem"}
    assert ResponseStore(second.state / "responses.db").get("", "resp_1") == b"an answer"
    assert (second.state / "salt.secret").read_text() == "s" * 64
    assert (second.state / "salt.secret").stat().st_mode & 0o777 == 0o600


def test_the_disk_tier_comes_along_where_it_is_asked_for(
    first: Machine, second: Machine, tmp_path: Path
) -> None:
    store = first.write_kv()
    first.run(backup, tmp_path / "without")
    assert not (tmp_path / "without/kv").exists()
    assert first.run(backup, tmp_path / "with", "--kv").exit_code == 0
    assert second.run(restore, tmp_path / "with", "--kv").exit_code == 0
    found = second.kv / store.relative_to(first.kv)
    assert files_of(found) == {"index.sqlite", "blocks.kv"}
    with closing(sqlite3.connect(found / "index.sqlite")) as index:
        assert index.execute("SELECT slot FROM records").fetchall() == [(5,)]
    with (found / "blocks.kv").open("rb") as file:
        file.seek(5 * 4096)
        assert file.read(4096) == BLOCK
        assert os.fstat(file.fileno()).st_size == 1 << 30
        assert os.fstat(file.fileno()).st_blocks < 1 << 12, "holes stay holes"


def test_nothing_is_written_over_unless_it_is_asked_for(
    first: Machine, second: Machine, tmp_path: Path
) -> None:
    first.run(backup, tmp_path / "copy")
    again = first.run(backup, tmp_path / "copy")
    assert again.exit_code == 1
    assert "is there already" in again.output
    second.state.mkdir()
    (second.state / "salt.secret").write_text("mine")
    refused = second.run(restore, tmp_path / "copy")
    assert refused.exit_code == 1
    assert "salt.secret" in refused.output
    assert "--overwrite" in refused.output
    assert files_of(second.state) == {"salt.secret"}
    assert second.run(restore, tmp_path / "copy", "--overwrite").exit_code == 0
    assert (second.state / "salt.secret").read_text() == "s" * 64


def test_a_state_that_a_server_uses_is_left_alone(
    first: Machine, second: Machine, tmp_path: Path
) -> None:
    first.write_kv()
    first.run(backup, tmp_path / "copy", "--kv")
    second.state.mkdir()
    with held(second.state / "sessions.db.lock"):
        refused = second.run(restore, tmp_path / "copy")
    assert refused.exit_code == 1
    assert "end it first" in refused.output
    store = second.write_kv()
    with held(store / "lock"):
        refused = second.run(restore, tmp_path / "copy", "--kv", "--overwrite")
    assert refused.exit_code == 1
    assert "a worker uses" in refused.output


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2, "kvrelay": "9.9"}, "KVRelay 9.9"),
        ({"files": {"../outside": "00"}}, "leads out of"),
        ({"files": {"gone": "00"}}, "missing or was changed"),
        ({"files": []}, "no manifest"),
    ],
    ids=["newer", "outside", "missing", "malformed"],
)
def test_a_backup_that_cannot_be_trusted_is_refused(
    change: dict[str, object], says: str, first: Machine, second: Machine, tmp_path: Path
) -> None:
    first.run(backup, tmp_path / "copy")
    path = tmp_path / "copy/manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused = second.run(restore, tmp_path / "copy")
    assert refused.exit_code == 1
    assert says in refused.output
    assert not second.state.exists()


def test_a_changed_file_is_noticed_before_anything_is_written(
    first: Machine, second: Machine, tmp_path: Path
) -> None:
    first.run(backup, tmp_path / "copy")
    (tmp_path / "copy/state/tls/ca.pem").write_text("another")
    refused = second.run(restore, tmp_path / "copy")
    assert refused.exit_code == 1
    assert "ca.pem is missing or was changed" in refused.output
    assert not second.state.exists()


def test_nothing_to_keep_and_no_backup_are_said(second: Machine, tmp_path: Path) -> None:
    nothing = second.run(backup, tmp_path / "copy")
    assert nothing.exit_code == 1
    assert "nothing to keep" in nothing.output
    (tmp_path / "empty").mkdir()
    none = second.run(restore, tmp_path / "empty")
    assert none.exit_code == 1
    assert "is no backup" in none.output
