"""What the tests of the disk store share: small stores, blocks that can be told by their name, and
a reader that trusts checksums alone, as the caller of the disk's mover does."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import shake_128
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest

from kvrelay.engine.kv.tier import DiskRecord
from kvrelay.kvtransfer.agent import StoreIndex
from kvrelay.kvtransfer.store import DiskStore

FINGERPRINT = bytes(range(16))
COMPATIBILITY = (("model", "5ca1ab1e"), ("dtype", "bfloat16"))
BLOCK, SLOT, MAX_BLOCKS = 5000, 8192, 32
KEEP_S = 3600.0


class Clock:
    """Wall-clock seconds that stand still."""

    def __init__(self, now: float = 1.7e9) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def open_store(folder: Path, **changes: Any) -> DiskStore:
    arguments: dict[str, Any] = {
        "fingerprint": FINGERPRINT,
        "compatibility": COMPATIBILITY,
        "bytes_per_block": BLOCK,
        "max_blocks": MAX_BLOCKS,
        "lock_timeout_s": 0.0,
    }
    return DiskStore.open(folder, **{**arguments, **changes})


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def content(name: bytes) -> bytes:
    """The one right content of the block of this name."""
    return shake_128(name).digest(BLOCK)


def record(slot: int, name: bytes, keep_s: float = KEEP_S) -> DiskRecord:
    return DiskRecord(slot, name, xxh3_64_intdigest(content(name)), keep_s)


def write(store: DiskStore, slot: int, name: bytes) -> None:
    """The bytes alone, in two steps."""
    data, half = content(name), BLOCK // 2
    os.pwrite(store.fd, data[:half], store.offset(slot))
    os.pwrite(store.fd, data[half:], store.offset(slot) + half)


def keep(store: DiskStore, slots: Iterable[int], keep_s: float = KEEP_S) -> None:
    """Block `name_of(slot)` into each slot, in the order that is asked of callers."""
    slots = tuple(slots)
    store.update(StoreIndex(remove=slots))
    for slot in slots:
        write(store, slot, name_of(slot))
    store.update(StoreIndex(put=tuple(record(slot, name_of(slot), keep_s) for slot in slots)))


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """This process can write no file beyond `num_bytes`: as on a disk that becomes full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def serve(store: DiskStore) -> tuple[set[int], set[int]]:
    """Slots whose bytes fit their records, and those that a reader refuses. What fits is what
    would be used, so it must be right."""
    good, refused = set(), set()
    for found in store.records:
        data = os.pread(store.fd, store.bytes_per_block, store.offset(found.slot))
        if xxh3_64_intdigest(data) == found.checksum:
            assert data == content(found.block_hash), f"wrong block served from slot {found.slot}"
            good.add(found.slot)
        else:
            refused.add(found.slot)
    assert len(good) + len(refused) == len(store.records), "a slot is listed twice"
    return good, refused
