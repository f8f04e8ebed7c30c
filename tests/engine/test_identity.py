"""What computes is named by its bytes and by what changes them, and by nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.identity import OWN, VLLM, checkpoint_identity, telling_arguments


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "here" / "model"
    folder.mkdir(parents=True)
    for name in ("model.safetensors", "pytorch_model.bin", "modeling.py", "config.json", "README"):
        (folder / name).write_bytes(name.encode() * 99)
    return folder


@pytest.mark.parametrize("runs", [OWN, VLLM])
def test_a_place_a_time_and_a_link_are_no_part_of_it(
    checkpoint: Path, tmp_path: Path, runs: str
) -> None:
    """As in two caches of the hub, where files are links to what they are named after."""
    first = checkpoint_identity(checkpoint, runs)
    there, blobs = tmp_path / "there" / "snapshots" / "main", tmp_path / "there" / "blobs"
    shutil.copytree(checkpoint, blobs)
    there.mkdir(parents=True)
    for file in blobs.iterdir():
        os.utime(file, (1, 1))
        (there / file.name).symlink_to(file)
    (there / "README").unlink()
    assert checkpoint_identity(there, runs) == first


def test_what_an_engine_may_read_counts_and_what_it_does_not_read_does_not(
    checkpoint: Path,
) -> None:
    def changed_by(name: str) -> list[bool]:
        before = [checkpoint_identity(checkpoint, runs) for runs in (OWN, VLLM)]
        file = checkpoint / name
        file.write_bytes(file.read_bytes()[:-1] + b"!")
        after = [checkpoint_identity(checkpoint, runs) for runs in (OWN, VLLM)]
        return [one != other for one, other in zip(before, after, strict=True)]

    assert changed_by("model.safetensors") == changed_by("config.json") == [True, True]
    assert changed_by("pytorch_model.bin") == changed_by("modeling.py") == [False, True]
    assert changed_by("README") == [False, False]


def test_arguments_count_unless_they_are_about_speed_alone(
    checkpoint: Path, tmp_path: Path
) -> None:
    def identity(**arguments: Any) -> bytes:
        return checkpoint_identity(checkpoint, VLLM, arguments)

    plain = identity()
    assert identity(enforce_eager=True, max_num_seqs=7, gpu_memory_utilization=0.5) == plain
    rope = {"rope_type": "yarn", "factor": 2.0}
    others = [
        identity(quantization="fp8"),
        identity(hf_overrides={"rope_scaling": rope}),
        identity(hf_overrides={"rope_scaling": {**rope, "factor": 4.0}}),
        identity(an_argument_of_next_year=1),
    ]
    assert len({plain, *others}) == 5
    assert identity(a=1, b=2) == identity(b=2, a=1)
    # A head that drafts, by its bytes and not by where it is.
    heads = [tmp_path / name for name in ("head", "same", "retrained")]
    for head in heads:
        head.mkdir()
        (head / "model.safetensors").write_bytes(b"1" if head.name == "retrained" else b"0")
    named = [telling_arguments({"speculative_config": {"model": str(head)}}) for head in heads]
    assert named[0] == named[1] != named[2]
    assert str(tmp_path) not in repr(named)
