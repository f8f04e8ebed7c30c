"""The digest of a checkpoint: any byte of it changes it, and a later start does not read it all."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from pathlib import Path

import pytest

from kvrelay.engine import cache_dir
from kvrelay.engine.cache_dir import file_digest
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.checkpoint.resolve import resolve_model
from kvrelay.engine.model.errors import ModelError
from tests.engine.model.checkpoint.gguf_files import write_model
from tests.engine.model.tiny import make_checkpoint

NUM_CHANGES = 500
LATER_S = 0.05  # more than a timestamp of the file system may lag


def change_byte(file: Path, offset: int) -> None:
    """In place, with the size and mtime that it had."""
    stat = file.stat()
    with file.open("r+b") as target:
        target.seek(offset)
        byte = target.read(1)[0]
        target.seek(offset)
        target.write(bytes([byte ^ 1 << offset % 8]))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def digests_of_changes(path: Path, num_changes: int) -> set[bytes]:
    """Hashes the checkpoint and `num_changes` others that differ from it in one byte each."""
    config, file, rng = read_config(path), path / "model.safetensors", random.Random(42)
    digests = {config.digest(path)}
    for offset in rng.sample(range(file.stat().st_size), num_changes):
        change_byte(file, offset)
        digests.add(config.digest(path))
        change_byte(file, offset)
    assert config.digest(path) in digests
    return digests


def test_every_changed_byte_is_another_model(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_dir, "LEAST_KEPT_BYTES", 0)
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_dir, "CHUNK_BYTES", 1 << 14)
    make_checkpoint("llama", tmp_path / "model")
    assert len(digests_of_changes(tmp_path / "model", NUM_CHANGES)) == 1 + NUM_CHANGES


def test_copies_with_other_inodes_and_times_have_one_digest(tmp_path):
    make_checkpoint("llama", tmp_path / "here")
    config = read_config(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    for file in (tmp_path / "there").iterdir():
        os.utime(file, (1, 1))
    assert config.digest(tmp_path / "here") == config.digest(tmp_path / "there")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "hf_quant_config.json"])
def test_what_says_how_weights_and_text_are_read_is_part_of_it(tmp_path, name):
    make_checkpoint("llama", tmp_path)
    config = read_config(tmp_path)
    digests = [config.digest(tmp_path)]
    for method in ("awq", "gptq"):
        stated = {"quantization_config": {"quant_method": method}}
        (tmp_path / name).write_text(json.dumps(stated))
        digests.append(config.digest(tmp_path))
    assert len(set(digests)) == 3


def test_a_chat_template_is_no_part_of_it(tmp_path):
    make_checkpoint("llama", tmp_path)
    config = read_config(tmp_path)
    before = config.digest(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert config.digest(tmp_path) == before


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Path:
    """A file whose digest is kept, in `tmp_path`; reading it again would be an error."""
    monkeypatch.setattr(cache_dir, "SETTLED_NS", 0)
    file = tmp_path / "weights"
    file.write_bytes(random.Random(1).randbytes(2 * cache_dir.LEAST_KEPT_BYTES))
    time.sleep(LATER_S)
    file_digest(file, tmp_path)
    time.sleep(LATER_S)
    return file


def test_a_later_start_does_not_read_the_file_again(kept, tmp_path, monkeypatch):
    first = file_digest(kept, tmp_path)
    monkeypatch.setattr(cache_dir, "_digest_of", lambda *_: pytest.fail("it was read again"))
    assert file_digest(kept, tmp_path) == first


def test_an_edit_in_place_with_its_mtime_set_back_is_noticed(kept, tmp_path):
    first = file_digest(kept, tmp_path)
    change_byte(kept, 12_345)
    assert file_digest(kept, tmp_path) != first


def test_a_file_that_is_renamed_over_another_is_noticed(kept, tmp_path):
    first, stat = file_digest(kept, tmp_path), kept.stat()
    other = tmp_path / "other"
    other.write_bytes(kept.read_bytes()[:-1] + b"x")
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(kept)
    assert file_digest(kept, tmp_path) != first


def test_a_file_that_has_just_changed_is_not_kept(tmp_path):
    """A write within one tick of the file system's clock does not move its ctime."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(cache_dir.LEAST_KEPT_BYTES))
    file_digest(file, tmp_path)
    assert list((tmp_path / "digests").iterdir()) == []


def test_a_truncated_entry_is_made_again(kept, tmp_path):
    first = file_digest(kept, tmp_path)
    (entry,) = (tmp_path / "digests").iterdir()
    entry.write_bytes(b"")
    assert file_digest(kept, tmp_path) == first
    assert entry.read_bytes() == first


def test_kept_digests_are_bounded(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_dir, "MAX_KEPT", 2)
    for offset in range(4):
        change_byte(kept, offset)
        time.sleep(LATER_S)
        file_digest(kept, tmp_path)
    assert len(list((tmp_path / "digests").iterdir())) == 2


def test_without_a_place_to_keep_it_the_file_is_read(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(bytes(cache_dir.LEAST_KEPT_BYTES))
    (tmp_path / "no-folder").write_text("")
    assert file_digest(file, tmp_path / "no-folder") == file_digest(file, tmp_path)


def test_a_gguf_file_with_one_other_byte_is_converted_again(tmp_path):
    file = tmp_path / "m.gguf"
    write_model(file, make_checkpoint("llama", tmp_path / "original"), "llama")
    found = set()
    for changed in (file.stat().st_size // 3, file.stat().st_size // 2, file.stat().st_size - 5):
        found.add(resolve_model(str(file), cache_dir=tmp_path, progress=lambda _: None))
        change_byte(file, changed)
    found.add(resolve_model(str(file), cache_dir=tmp_path, progress=lambda _: None))
    assert len(found) == 4


def test_a_gguf_that_changes_while_it_is_converted_is_not_kept(tmp_path):
    file = tmp_path / "m.gguf"
    write_model(file, make_checkpoint("llama", tmp_path / "original"), "llama")

    def touch(_line: str) -> None:
        os.utime(file, ns=(1, 1))

    with pytest.raises(ModelError, match=r"m\.gguf was changed while the model was loaded"):
        resolve_model(str(file), cache_dir=tmp_path / "cache", progress=touch)
    assert not list((tmp_path / "cache" / "models").iterdir())
    assert resolve_model(str(file), cache_dir=tmp_path / "cache", progress=lambda _: None)
