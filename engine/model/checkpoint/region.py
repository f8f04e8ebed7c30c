"""Weights in shared memory that another process of the machine owns, such as a trainer.

Each tensor is copied, and the digest of the copy is compared with what was said of it. So whatever
the owner writes meanwhile, what computes is what was described. A region is read and never mapped:
one that its owner shortens would end a process that has it mapped.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Self

import torch

from kvrelay.engine.model.checkpoint.described import DIGEST_BYTES, check_described
from kvrelay.engine.model.errors import WeightsMissing
from kvrelay.engine.weights import SharedTensor, SharedWeights

REGIONS = Path("/dev/shm")  # where Linux shows them


class OpenRegion:
    """What `Checkpoint` asks of an open file."""

    def __init__(self, weights: SharedWeights, version: bytes) -> None:
        """`version`: its digest. Raises WeightsMissing, and ModelError where tensors are not
        described as they have to be."""
        check_described(weights)
        self._tensors = {each.name: each for each in weights.tensors}
        self.path, self._version = str(REGIONS / weights.region), version
        try:
            self._handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            text = f"{self.path} is no region of shared memory on this machine: {error.strerror}"
            raise WeightsMissing(text, version) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        handle, self._handle = self._handle, -1
        os.close(handle)

    def keys(self) -> Collection[str]:
        return self._tensors.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        """A copy. Raises WeightsMissing if the region does not hold what it was said to."""
        about = self._tensors[name]
        dtype: torch.dtype = getattr(torch, about.dtype)
        found = torch.empty(prod(about.shape) * dtype.itemsize, dtype=torch.uint8)
        content = memoryview(found.numpy().data)
        self._read(about, content)
        if blake2b(content, digest_size=DIGEST_BYTES).digest() != about.digest:
            raise self._missing(about, "has other bytes than its digest is of")
        return found.view(dtype).view(about.shape)

    def _read(self, about: SharedTensor, content: memoryview) -> None:
        at = 0
        while at < len(content):
            count = os.preadv(self._handle, [content[at:]], about.offset + at)
            if not count:
                size = os.fstat(self._handle).st_size
                text = f"ends at {about.offset + len(content)}, and the region has {size} bytes"
                raise self._missing(about, text)
            at += count

    def _missing(self, about: SharedTensor, why: str) -> WeightsMissing:
        return WeightsMissing(f"{self.path}: {about.name} {why}", self._version)
