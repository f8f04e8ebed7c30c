"""Weights in use outlive the folder of the trainer that has written them."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.model.checkpoint import version
from kvrelay.engine.model.checkpoint.version import KEPT, find_version, read_version
from kvrelay.engine.model.errors import WeightsMissing
from kvrelay.engine.weights import WeightVersion

WEIGHTS = "model.safetensors"


def weights(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / WEIGHTS).write_text(text)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return weights(tmp_path / "model", "base")


def test_a_trainer_may_remove_or_overwrite_what_is_in_use(model: Path, tmp_path: Path) -> None:
    step, cache = weights(tmp_path / "step", "one"), tmp_path / "cache"
    one = read_version(step)
    kept = find_version(one, model, cache)
    assert cache in kept.parents
    weights(step, "two")  # in place: a second name for the file would have changed with it
    assert (kept / WEIGHTS).read_text() == "one"
    two = read_version(step)
    assert find_version(one, model, cache) == kept
    assert find_version(two, model, cache) != kept
    shutil.rmtree(step)
    assert [read_version(find_version(each, model, cache)) for each in (one, two)] != [one, one]
    assert find_version(read_version(model), model, cache) == model


def test_what_is_nowhere_any_more_is_said_with_its_digest(model: Path, tmp_path: Path) -> None:
    step, cache = weights(tmp_path / "step", "one"), tmp_path / "cache"
    one = read_version(step, "step-1")
    kept = find_version(one, model, cache)
    (kept / WEIGHTS).write_text("damaged")
    assert (find_version(one, model, cache) / WEIGHTS).read_text() == "one", "copied again"
    shutil.rmtree(kept)
    weights(step, "two")
    with pytest.raises(WeightsMissing, match=r"other bytes than step-1 .* no copy of it is in"):
        find_version(one, model, cache)
    shutil.rmtree(step)
    with pytest.raises(WeightsMissing, match=r"is no folder.* no copy of step-1 is in") as error:
        find_version(one, model, cache)
    assert error.value.digest == one.digest


def test_copies_that_were_superseded_go(model: Path, tmp_path: Path) -> None:
    step, cache = tmp_path / "step", tmp_path / "cache"
    first = find_version(read_version(weights(step, "0")), model, cache)
    versions = []
    for number in range(1, KEPT + 2):
        versions.append(read_version(weights(step, str(number))))
        find_version(versions[-1], model, cache)
    assert not first.exists()
    assert len(list(first.parent.iterdir())) == KEPT
    shutil.rmtree(step)
    for each in versions[-KEPT:]:
        assert find_version(each, model, cache).is_dir()


def test_without_room_they_are_read_where_they_are(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(version, "_copy", full)
    step = weights(tmp_path / "step", "one")
    assert find_version(read_version(step), model, tmp_path / "cache") == step
    assert "is gone with its folder" in caplog.text


def test_a_copy_stays_as_it_is_for_all_who_make_it_at_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ranks of a worker do: all have found none when the first begins to copy."""
    step, together = weights(tmp_path / "step", "one" * 100_000), threading.Barrier(8)
    one = read_version(step)

    def read(path: Path, *given: Any) -> WeightVersion:
        found = read_version(path, *given)
        if path == step:
            together.wait(10)
        return found

    def find(number: int) -> bool:
        kept = find_version(one, model, tmp_path / f"cache-{number}")
        inode = (kept / WEIGHTS).stat().st_ino
        together.wait(10)
        return (kept / WEIGHTS).stat().st_ino == inode

    monkeypatch.setattr(version, "read_version", read)
    with ThreadPoolExecutor(8) as threads:
        for number in range(5):
            assert all(threads.map(find, 8 * [number]))
