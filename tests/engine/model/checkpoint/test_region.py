"""Tensors in shared memory: each is a copy of what was described, or the answer says what is
wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import pytest
import torch

from kvrelay.engine.model.checkpoint.described import check_described
from kvrelay.engine.model.checkpoint.region import OpenRegion
from kvrelay.engine.model.errors import ModelError, WeightsMissing
from kvrelay.engine.weights import SharedTensor, SharedWeights

TENSORS = {
    "odd": torch.arange(5, dtype=torch.uint8),  # what follows begins at no multiple of its size
    "norm": torch.randn(8, dtype=torch.bfloat16),
    "head": torch.randn(4, 8),
    "none": torch.empty(0, 8),
    "scale": torch.tensor(0.5),
}


@pytest.fixture
def region() -> Iterator[tuple[SharedMemory, SharedWeights]]:
    memory = SharedMemory(f"kvrelay-region-{os.getpid()}", create=True, size=4096)
    rows, at = [], 0
    for name, tensor in TENSORS.items():
        data = tensor.view(-1).view(torch.uint8).numpy().tobytes()
        memory.buf[at : at + len(data)] = data
        kind = str(tensor.dtype).removeprefix("torch.")
        digest = blake2b(data, digest_size=32).digest()
        rows.append(SharedTensor(name, kind, tuple(tensor.shape), at, digest))
        at += len(data)
    yield memory, SharedWeights(memory.name, tuple(rows))
    memory.close()
    memory.unlink()


def test_each_tensor_is_a_copy(region: tuple[SharedMemory, SharedWeights]) -> None:
    memory, weights = region
    with OpenRegion(weights, b"v") as opened:
        found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    memory.buf[:] = bytes(len(memory.buf))
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_version_is_its_content(region: tuple[SharedMemory, SharedWeights]) -> None:
    """Not the region, nor where a tensor is in it, nor their order."""
    _, weights = region
    version = weights.version()
    moved = tuple(replace(each, offset=each.offset + 64) for each in reversed(weights.tensors))
    assert SharedWeights("other", moved).version().digest == version.digest
    first, *rest = weights.tensors
    for field, value in (("dtype", "int8"), ("shape", (1, 5)), ("digest", bytes(32)), ("name", "")):
        other = SharedWeights("other", (replace(first, **{field: value}), *rest))
        assert other.version().digest != version.digest, field
    assert weights.version("step-1").digest == version.digest
    assert weights.version("step-1").name == "step-1"


def test_a_region_that_is_written_cut_or_gone_is_not_what_was_described(
    region: tuple[SharedMemory, SharedWeights],
) -> None:
    memory, weights = region
    row = weights.tensors[2]
    with OpenRegion(weights, b"v") as opened:
        memory.buf[row.offset + 3] ^= 1
        with pytest.raises(WeightsMissing, match="head has other bytes than its digest") as caught:
            opened.get_tensor("head")
        assert caught.value.digest == b"v"
        memory.buf[row.offset + 3] ^= 1
        assert torch.equal(opened.get_tensor("head"), TENSORS["head"])
        os.truncate(opened.path, row.offset + 16)
        with pytest.raises(WeightsMissing, match=f"region has {row.offset + 16} bytes"):
            opened.get_tensor("head")
    with pytest.raises(WeightsMissing, match="is no region of shared memory"):
        OpenRegion(replace(weights, region="kvrelay-none"), b"v")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "F32"}, "odd: dtype F32 is not supported; supported: float32, "),
        ({"name": "norm"}, "norm is there twice"),
        ({"name": "n" * (3 << 20)}, "names of 3145732 characters: expected at most 2097152"),
        ({"offset": -1}, "offset -1"),
        ({"shape": (-2, -4)}, r"shape \[-2, -4\]"),
        ({"shape": (1 << 30, 1 << 30)}, "within a region"),
        ({"digest": b"short"}, "a digest of 5 bytes, expected the 32 of BLAKE2b"),
    ],
)
def test_what_is_wrong_in_a_description_is_said(change: dict[str, Any], says: str) -> None:
    rows = [SharedTensor(name, "uint8", (5,), 0, bytes(32)) for name in ("odd", "norm")]
    check_described(SharedWeights("region", tuple(rows)))
    rows[0] = replace(rows[0], **change)
    with pytest.raises(ModelError, match=says):
        check_described(SharedWeights("region", tuple(rows)))


def test_who_only_checks_a_description_does_not_import_torch() -> None:
    """Routers do that, which start without it."""
    code = "import sys, kvrelay.engine.model.checkpoint.described; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("name", ["", ".", "..", "../etc/passwd", "/a", "a b", "a" * 201, "a\n"])
def test_a_region_is_a_name_and_no_path(name: str) -> None:
    row = SharedTensor("a", "uint8", (5,), 0, bytes(32))
    with pytest.raises(ModelError, match="expected a name"):
        check_described(SharedWeights(name, (row,)))
    with pytest.raises(ModelError, match="0 tensors"):
        check_described(SharedWeights("a", ()))
