"""A model of the hub has a revision, which is one commit for all machines: in a cache of the hub's
own layout, by its own library, which is offline."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from kvrelay.engine.config import EngineSection, ModelSection, TiersSection
from kvrelay.engine.identity import checkpoint_identity, shown
from kvrelay.engine.model.checkpoint.resolve import commit_of, resolve_model
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.stats import Role
from kvrelay.worker.spec import WorkerSpec
from tests.engine.model.tiny import make_checkpoint

NAME = "owner/tiny"
OLD, NEW = "a" * 40, "b" * 40


def publish(hub: Path, commit: str, files: Path) -> Path:
    """What the hub's library leaves of a commit: links to blobs that are named by their bytes."""
    repository = hub / "models--owner--tiny"
    folder = repository / "snapshots" / commit
    for each in (folder, repository / "blobs", repository / "refs"):
        each.mkdir(parents=True, exist_ok=True)
    for file in files.iterdir():
        blob = repository / "blobs" / sha256(file.read_bytes()).hexdigest()
        shutil.copyfile(file, blob)
        (folder / file.name).symlink_to(Path("../../blobs") / blob.name)
    (repository / "refs" / "main").write_text(commit)
    return folder


@pytest.fixture
def files(tmp_path: Path) -> Path:
    make_checkpoint("llama", tmp_path / "files")
    (tmp_path / "files" / "tokenizer.json").write_text("{}")
    return tmp_path / "files"


@pytest.fixture
def hub(tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One commit, and a later one that is main, with other weights."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    publish(tmp_path / "hub", OLD, files)
    weights = files / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    publish(tmp_path / "hub", NEW, files)
    return tmp_path / "hub"


def spec(**changes: object) -> WorkerSpec:
    whole = WorkerSpec(
        cluster="c",
        worker="decode-0",
        role=Role.DECODE,
        epoch=1,
        model_dir="/not/here",
        model=ModelSection(name=NAME),
        engine=EngineSection(),
        tiers=TiersSection(),
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def found(revision: str = "") -> Path:
    return resolve_model(NAME, revision, progress=lambda _: None)


def test_a_machine_that_looks_later_finds_the_commit_that_the_server_has(hub: Path) -> None:
    """Its publisher has pushed meanwhile: main is another model there."""
    assert [commit_of(found(each)) for each in ("", "main", NEW, OLD)] == [NEW, NEW, NEW, OLD]
    served = found(OLD)
    asked = spec(checkpoint=checkpoint_identity(served), commit=commit_of(served))
    assert asked.find_model() == served
    pinned = ModelSection(name=NAME, revision=OLD)
    assert replace(asked, model=pinned, commit="").find_model() == served
    with pytest.raises(ModelError) as error:
        replace(asked, commit="").find_model()
    for each in (served, found()):
        assert shown(checkpoint_identity(each)) in str(error.value)
    assert "model.revision" in str(error.value)


def test_the_same_path_with_other_files_is_refused_by_a_worker(hub: Path, files: Path) -> None:
    served = spec(model_dir=str(files), checkpoint=checkpoint_identity(files))
    assert served.find_model() == files
    config = json.loads((files / "config.json").read_text())
    (files / "config.json").write_text(json.dumps(config | {"rope_theta": 7.0}))
    with pytest.raises(ModelError, match=f"{files} on this machine is .*, and the server serves"):
        served.find_model()
    assert replace(served, checkpoint=b"").find_model() == files, "an earlier version says nothing"


@pytest.mark.parametrize("name", ["smollm2-135m", "FILES"])
def test_what_has_no_revisions_is_refused_in_words(files: Path, name: str) -> None:
    name = str(files) if name == "FILES" else name
    with pytest.raises(ModelError, match=r"model.revision = 'v1': only a model of the hub"):
        resolve_model(name, "v1", progress=lambda _: None)


def test_a_revision_that_is_not_there_is_named(hub: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot fetch owner/tiny at v9 from the hub"):
        found("v9")
