"""A process that trains: it has the tensors of a checkpoint in shared memory of its own, says what
they are, and keeps them until its input ends.

    python -m tests.support.trainer FOLDER REGION
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file

from kvrelay.engine.weights import SharedTensor, SharedWeights
from tests.structure import ROOT


def main(folder: str, name: str) -> None:
    files = sorted(Path(folder).glob("*.safetensors"))
    tensors = {name: each for file in files for name, each in load_file(file).items()}
    region = SharedMemory(name, create=True, size=sum(each.nbytes for each in tensors.values()))
    rows, at = [], 0
    for each, tensor in tensors.items():
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        region.buf[at : at + data.size] = data.data
        kind, digest = str(tensor.dtype).removeprefix("torch."), blake2b(data, digest_size=32)
        rows.append(SharedTensor(each, kind, tuple(tensor.shape), at, digest.digest()))
        at += data.size
    print(msgspec.json.encode(SharedWeights(region.name, tuple(rows))).decode(), flush=True)
    sys.stdin.read()
    region.close()
    region.unlink()


@contextmanager
def training(folder: Path, name: str) -> Iterator[SharedWeights]:
    command = [sys.executable, "-m", "tests.support.trainer", str(folder), name]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield msgspec.json.decode(process.stdout.readline(), type=SharedWeights)
        finally:
            process.stdin.close()
            assert process.wait(30) == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
