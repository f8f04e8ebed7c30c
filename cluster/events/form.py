"""Events and batches in the form of vLLM (`vllm.distributed.kv_events`): arrays, as all who
subscribe to vLLM read them, also those that read maps, which later versions write.

A block is named by the last 8 bytes of its hash, as a number: what they make of longer names too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from kvrelay.cluster.events.held import Block, Change
from kvrelay.engine.kv.tier import Tier

MEDIUM = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "DISK"}
NAME_BYTES = 8
SEQ_BYTES = 8
END = (-1).to_bytes(SEQ_BYTES, "big", signed=True)  # after the last batch of a replay
MAX_BLOCKS = 1024  # in a batch


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float  # seconds since 1970
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """What has happened to blocks. The name of its class comes first."""


class BlockStored(KVCacheEvent):
    """Blocks one after the other, and their tokens."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


def number_of(name: bytes) -> int:
    return int.from_bytes(name[-NAME_BYTES:], "big")


def topic_of(about: str, model: str) -> bytes:
    return f"kv@{about}@{model}".encode()


def cleared(ts: float, rank: int) -> bytes:
    """A batch that says that nothing is held."""
    return msgspec.msgpack.encode(EventBatch(ts, [AllBlocksCleared()], rank))


def batches(ts: float, rank: int, changes: Sequence[Change]) -> Iterator[bytes]:
    """The changes of one worker."""
    changed = iter(changes)
    while part := list(islice(changed, MAX_BLOCKS)):
        yield msgspec.msgpack.encode(EventBatch(ts, list(_events(part)), rank))


def _events(changes: Sequence[Change]) -> Iterator[KVCacheEvent]:
    """One for blocks that follow each other."""
    run: list[Block] = []
    last: Change | None = None
    for change in changes:
        if last is not None and not _goes_on(last, change):
            yield _event(last, run)
            run = []
        run.append(change.block)
        last = change
    if last is not None:
        yield _event(last, run)


def _goes_on(last: Change, change: Change) -> bool:
    if change.tier is not last.tier or change.is_stored is not last.is_stored:
        return False
    if not change.is_stored:
        return True
    return change.block.parent is last.block and change.block.origin == last.block.origin


def _event(change: Change, run: Sequence[Block]) -> KVCacheEvent:
    """What `change` says of the last block of `run`, said of all."""
    names, medium = [number_of(block.name) for block in run], MEDIUM[change.tier]
    if not change.is_stored:
        return BlockRemoved(names, medium)
    parent, origin = run[0].parent, run[0].origin
    keys = [block.extra_keys or None for block in run]
    return BlockStored(
        names,
        None if parent is None else number_of(parent.name),
        array("I", b"".join(block.tokens for block in run)).tolist(),
        origin.block_size,
        origin.lora_id,
        medium,
        origin.lora_name,
        keys if any(keys) else None,
    )
