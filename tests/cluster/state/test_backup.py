"""What `kvrelay backup` copies from one machine is found on another after `kvrelay restore`."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvrelay.cluster.api.batches.store import BatchStore
from kvrelay.cluster.api.responses.store import ResponseStore
from kvrelay.cluster.cli.backup import backup, restore
from kvrelay.cluster.state import backup as backup_module
from kvrelay.cluster.state.server_lock import ServerLock

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
    for name in ("logs/0/router-0.log", "scaling/0.jsonl", "shared-files/one", "files/.draft"):
        (machine.state / name).parent.mkdir(parents=True, exist_ok=True)
        (machine.state / name).write_text("not kept")
    (machine.state / "weights.json.new").write_text("not kept")
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


@contextmanager
def closing_lock(lock: ServerLock) -> Iterator[None]:
    try:
        yield
    finally:
        lock.release()


def add_file(batches: BatchStore, content: bytes) -> str:
    draft, name = batches.draft(), f"file-{content.decode()}"
    draft.write_bytes(content)
    record = {"id": name, "expires_at": 1e12, "bytes": len(content)}
    batches.add_file("", record, draft, 1 << 20)
    return name


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
    assert files_of(second.state) == {"responses.db", "salt.secret", "server.lock", "tls/ca.pem"}
    assert ResponseStore(second.state / "responses.db").get("", "resp_1") == b"an answer"
    assert (second.state / "salt.secret").read_text() == "s" * 64
    assert (second.state / "salt.secret").stat().st_mode & 0o777 == 0o600


def test_files_of_batches_may_come_and_go_meanwhile(
    first: Machine, second: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the copied database names is there; what is gone is missed only where it does."""
    batches = BatchStore(first.state)
    kept, gone, late = (add_file(batches, each) for each in (b"kept", b"gone", b"late"))
    late_bytes = (first.state / "files" / late).read_bytes()
    (first.state / "files" / late).unlink()
    copy = backup_module._copy

    def meanwhile(source: Path, target: Path) -> None:
        if source.name == gone and source.exists():
            batches.delete_file("", gone)
        if source.name == "batches.db":
            (first.state / "files" / late).write_bytes(late_bytes)
        copy(source, target)

    monkeypatch.setattr(backup_module, "_copy", meanwhile)
    made = first.run(backup, tmp_path / "copy")
    assert made.exit_code == 0, made.output
    assert second.run(restore, tmp_path / "copy").exit_code == 0
    assert {each.name for each in (second.state / "files").iterdir()} == {kept, late}
    (first.state / "files" / late).unlink()
    monkeypatch.undo()
    refused = first.run(backup, tmp_path / "another")
    assert (refused.exit_code, late in refused.output) == (1, True)
    assert not (tmp_path / "another").exists()
    batches.close()


def test_no_logs_are_written_over(first: Machine, second: Machine, tmp_path: Path) -> None:
    """A backup of an earlier version has some."""
    first.run(backup, tmp_path / "copy")
    log, manifest = tmp_path / "copy/state/logs/router-0.log", tmp_path / "copy/manifest.json"
    log.parent.mkdir()
    log.write_text("theirs")
    found = json.loads(manifest.read_text())
    found["files"]["logs/router-0.log"] = hashlib.sha256(b"theirs").hexdigest()
    manifest.write_text(json.dumps(found))
    (second.state / "logs").mkdir(parents=True)
    (second.state / "logs/router-0.log").write_text("mine")
    assert second.run(restore, tmp_path / "copy").exit_code == 0
    assert (second.state / "logs/router-0.log").read_text() == "mine"


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
    assert files_of(second.state) == {"salt.secret", "server.lock"}
    assert second.run(restore, tmp_path / "copy", "--overwrite").exit_code == 0
    assert (second.state / "salt.secret").read_text() == "s" * 64


@pytest.mark.slow
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
    with closing_lock(ServerLock.take(second.state)):  # whatever stores it uses
        refused = second.run(restore, tmp_path / "copy", "--overwrite")
        assert f"in use by process {os.getpid()}" in " ".join(refused.output.split())
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
