"""Versions of a model's weights, and what is said about changing them while a worker serves.

A version is the digest of all its bytes. It is in the root of the block hashes: what one version
has left in any tier, another one does not find.

Life of an update at a worker: `UpdateWeights` -> the new weights are loaded beside the steps, the
old ones stay -> no step begins any more; what runs is finished before, or goes on after, by the
mode -> the new ones take their place, and answer a probe -> `WeightsUpdated`. Whatever fails, the
old ones go on, and the answer says why.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b

from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import InfoChange, WorkerInfo
from kvrelay.engine.wire.codec import register

NAME_DIGITS = 12  # begin the digest, and name a version that was given no name


@dataclass(frozen=True, slots=True)
class SharedTensor:
    name: str  # as in a checkpoint
    dtype: str  # as torch names it
    shape: tuple[int, ...]
    offset: int  # bytes from the begin of the region to its own, which have the machine's order
    digest: bytes  # BLAKE2b of its bytes, 32 bytes


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Weights in a region of POSIX shared memory, of the same name on each machine."""

    region: str
    tensors: tuple[SharedTensor, ...]

    def version(self, name: str = "") -> WeightVersion:
        """What it is called, by the content of all tensors: not by the region or the place in it.
        `name`: where it is given one."""
        about = sorted((t.name, t.dtype, t.shape, t.digest.hex()) for t in self.tensors)
        digest = blake2b(json.dumps(about).encode(), digest_size=32, person=b"kvrelay-memory")
        found = digest.digest()
        return WeightVersion(name or found.hex()[:NAME_DIGITS], found, memory=self)


@dataclass(frozen=True, slots=True)
class WeightVersion:
    name: str = ""
    digest: bytes = b""  # covers all bytes of its files; b"": not known
    path: str = ""  # a folder, the same on every machine
    memory: SharedWeights | None = None  # in place of a folder

    @property
    def place(self) -> str:
        """Where it was to be found when it was named."""
        return self.path if self.memory is None else f"the region {self.memory.region}"

    def root_key(self, fingerprint: bytes, base: bytes) -> bytes:
        """The fingerprint that block hashes begin with where these weights compute. `fingerprint`:
        of a worker with the weights `base`, which its server was started with."""
        if self.digest in (b"", base):
            return fingerprint
        key = blake2b(self.digest, digest_size=16, key=fingerprint[:64], person=b"kvrelay-weights")
        return key.digest()


NO_VERSION = WeightVersion()


class UpdateMode(StrEnum):
    """What becomes of the requests that a worker has when its weights change."""

    DRAIN = "drain"  # they finish with the old ones before; those that come meanwhile wait
    RECOMPUTE = "recompute"  # their KV is dropped, and computed again by the new ones
    KEEP = "keep"  # they go on with the KV that they have, which nobody else gets any more


class PauseMode(StrEnum):
    """What becomes of requests while their worker is paused."""

    KEEP = "keep"  # they stay as they are, and go on when it resumes
    WAIT = "wait"  # those that it has finish, and those that come wait


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """To a worker: compute with this version from now on. Answered to `reply_to` by
    `WeightsUpdated`, at once where it does so already; a repeat is ignored."""

    reply_to: NodeId
    version: WeightVersion
    mode: UpdateMode
    drain_s: float = 600.0  # what is not finished by then is computed again


@dataclass(frozen=True, slots=True)
class WeightsUpdated(InfoChange):
    """`version`: the one that is used now, whether it was asked for or, with `why`, is the old
    one; `wanted`: the digest that was asked for."""

    worker: NodeId
    epoch: int
    version: WeightVersion
    fingerprint: bytes  # as in WorkerInfo, from now on
    wanted: bytes
    why: str = ""  # it failed
    load_s: float = 0.0
    pause_s: float = 0.0  # in which no step ran

    def changed(self, info: WorkerInfo) -> WorkerInfo:
        return replace(info, weights=self.version.name, fingerprint=self.fingerprint)


@dataclass(frozen=True, slots=True)
class WeightsChanged:
    """From a worker to its routers, before it sends anything that the new weights computed. Who
    misses it reads the same in the next `WorkerStats`, by `number`, which counts changes."""

    worker: NodeId
    epoch: int
    fingerprint: bytes
    name: str
    number: int


@dataclass(frozen=True, slots=True)
class PauseWorker:
    """To a worker: begin no step (any more), or go on (None)."""

    mode: PauseMode | None


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Effect: load these beside those in use; answered by `WeightsLoaded`."""

    version: WeightVersion


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    digest: bytes
    why: str = ""  # they cannot be loaded
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class UseWeights:
    """Effect, while no step is under way: compute with those that were loaded last, once they have
    answered a probe; answered by `WeightsUsed`. `block_ids`: a row of blocks for the probe."""

    digest: bytes
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightsUsed:
    digest: bytes
    why: str = ""  # the old ones are in use


register(UpdateWeights, WeightsUpdated, WeightsChanged, PauseWorker, since=3)
