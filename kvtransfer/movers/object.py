"""Moves blocks between a worker's memory and an object store, by NIXL's OBJ backend.

Life of a block that is read: a slot of the staging area is free -> its object is read into it ->
what has come is compared with what the object says of itself -> decoded, and copied into the
worker's memory. Of one that is written: coded into a slot -> put.

What NIXL says of a read proves nothing. An object that is too short reads as done; of a missing
one the text of the error is where the block should be; and while a server does not answer, a
transfer goes on for minutes. So NIXL knows the staging area only. A copy that is given up leaves
its slots behind, and settles at once: nothing but this mover writes to the worker's memory.

Where a worker has several ranks, each has objects of its own, with its heads, below a prefix of its
own. Such an object says the checksum of the whole block as well, which ranks compare with the sum
of what they have read.

Copies take turns: the next object is one of the copy that has the fewest on their way. As many are
on their way as come within a fraction of a second: over a slow link they share it, and if it has
many of them at once, nothing comes for long.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvrelay.engine.backoff import Backoff
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import NodeId
from kvrelay.kvtransfer.agent import (
    DAMAGED,
    GIVEN_UP,
    MISSING,
    AgentError,
    CopyBlocks,
    CopyDone,
)
from kvrelay.kvtransfer.checksum import checksum_blocks
from kvrelay.kvtransfer.codec import MORE_BYTES, Codec, ExponentCodec
from kvrelay.kvtransfer.layout import HeadShare
from kvrelay.kvtransfer.movers.metadata import Space
from kvrelay.kvtransfer.movers.nixl_bindings import (
    Transfer,
    Transfers,
    error_text,
    open_nixl,
    whole,
)
from kvrelay.kvtransfer.movers.opening import Storage, TierSettings
from kvrelay.kvtransfer.movers.pool import Sides, block_bytes, sides_of, write_blocks
from kvrelay.kvtransfer.store.bucket import (
    Bucket,
    BucketError,
    Credentials,
    bucket_of,
    error_code,
    key_prefix,
)
from kvrelay.kvtransfer.store.objects import ObjectStore, Unlisted

HEADER = struct.Struct(
    "<8s16s24sQQQQ"
)  # magic, name, codec, block's bytes, body's, checksum, check
MAGIC = b"KVRELAY1"
PART = struct.Struct("<Q")  # behind it, in a rank's: the checksum of the body's block
HEADER_BYTES = 128  # the body begins there
ERROR_BYTES = 1024  # at the beginning of a slot: an error's text, where one has come
STAGING_BYTES = 48 << 20
MIN_STAGING, MAX_STAGING = 8, 128  # slots
WRITE_SHARE = 4  # writes have at most 1 / 4 of them
NUM_THREADS = 16  # NIXL's, each of which waits for one answer
STALL_S = 1.0  # a store from which nothing has come for so long does not answer
PROMPT_S = 0.25  # while objects take less, one more each time is on its way; twice that, fewer
FIRST_LIVE = 2  # on their way at the beginning
RETRY = Backoff(5.0, 60.0)  # before one that has failed is asked again
CLOSE_S = 1.0
CLOSE_POLL_S = 1e-3
NOT_THERE = {"NoSuchKey": MISSING, "InvalidRange": DAMAGED}  # the other: it is empty

logger = logging.getLogger(__name__)
_abandoned: list[object] = []  # what NIXL may still write to: never to be used again


@dataclass(slots=True, eq=False, kw_only=True)
class ObjectTransfer(Transfer):
    slot: int  # in the staging area
    registered: Any  # its key, with NIXL
    begun_at: float = 0.0


class ObjectTransport(Transfers[ObjectTransfer]):
    """Owned by an ObjectMover: NIXL's agent, and the staging area that it knows.

    Invariant: a slot is in `free`, or of one transfer that has not settled or was not looked at."""

    def __init__(self, name: NodeId, bucket: Bucket, credentials: Credentials, size: int) -> None:
        """`size`: bytes of a block. Raises AgentError, and whatever NIXL raises."""
        super().__init__()
        os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")  # it would be waited for
        self._nixl = open_nixl(on_cpu=False)
        self.credentials = credentials
        row_bytes = HEADER_BYTES + size
        num_slots = min(MAX_STAGING, max(MIN_STAGING, STAGING_BYTES // row_bytes))
        self.staging = np.zeros((num_slots, row_bytes), np.uint8)
        self.free = [*range(num_slots)]
        self._name = f"{name}#object#{secrets.token_hex(8)}"
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = False
        self._agent = self._nixl.nixlAgent(self._name, config)
        self._backend = self._agent.createBackend("OBJ", _options(bucket, credentials))
        space = Space(num_slots, self.staging.ctypes.data)
        self._memory = whole(self._nixl, space, row_bytes)
        self._agent.registerMem(self._memory, [self._backend])
        self._numbers = count(1)  # by which NIXL knows a key

    @property
    def num_live(self) -> int:
        return len(self._live)

    def has_settled(self, transfer: ObjectTransfer) -> bool:
        """Its end is for `poll` to tell."""
        self._look(transfer)
        return transfer.settled

    def start(self, reads: bool, key: str, slot: int, size: int) -> ObjectTransfer:
        """Between the object and the first `size` bytes of the slot. Raises AgentError."""
        nixl, number = self._nixl, next(self._numbers)
        if reads:
            self.staging[slot] = 0  # nor may what an object lacks be there from before
        registered = nixl.nixlRegDList(nixl.OBJ_SEG, [(0, size, number, key)])
        self._agent.registerMem(registered, [self._backend])
        transfer = ObjectTransfer(text=key, handle=0, slot=slot, registered=registered)
        try:
            transfer.handle = self._agent.createXferReq(
                nixl.NIXL_READ if reads else nixl.NIXL_WRITE,
                nixl.nixlXferDList(nixl.DRAM_SEG, [(int(self.staging[slot].ctypes.data), size, 0)]),
                nixl.nixlXferDList(nixl.OBJ_SEG, [(0, size, number)]),
                self._name,
                b"",
                [self._backend],
            )
        except Exception as error:
            self._agent.deregisterMem(registered, [self._backend])
            raise AgentError(f"{key}: {error_text(error)}") from error
        self.free.remove(slot)  # the last
        self._post(transfer)
        return transfer

    def _on_freed(self, transfer: ObjectTransfer) -> None:
        self._agent.deregisterMem(transfer.registered, [self._backend])
        self.free.append(transfer.slot)

    def close(self) -> None:
        """Undo everything, once no transfer is live."""
        self._agent.deregisterMem(self._memory, [self._backend])
        self._agent = None

    def abandon(self) -> None:
        """Never destroy NIXL's agent, not even when the process ends: that would wait for what it
        is doing, a minute where the store does not answer."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._agent))


def _options(bucket: Bucket, credentials: Credentials) -> dict[str, str]:
    at = urlsplit(bucket.url)
    options = {
        "bucket": bucket.name,
        "region": bucket.region,
        "scheme": at.scheme,
        "endpoint_override": bucket.endpoint,
        "use_virtual_addressing": str(bucket.is_in_host).lower(),
        "access_key": credentials.access_key,
        "secret_key": credentials.secret_key,
        "session_token": credentials.session_token,
        "ca_bundle": os.environ.get("AWS_CA_BUNDLE", ""),
        "num_threads": str(NUM_THREADS),
        # Bodies have a checksum of their own, and not every store knows those of AWS.
        "req_checksum": "required",
        "resp_checksum": "required",
    }
    return {name: value for name, value in options.items() if value}


@dataclass(slots=True, eq=False)
class ObjectCopy:
    request: CopyBlocks
    sides: Sides
    results: list[int]  # checksums, as CopyDone has them; where it writes: bytes of each object
    wholes: list[int]  # what was read says of the block of all ranks
    transport: ObjectTransport
    begun: int = 0
    done: int = 0
    live: dict[ObjectTransfer, int] = field(default_factory=dict)  # -> number in `sides.blocks`
    error: str = ""  # why its next object could not be begun
    given_up: bool = False


class ObjectMover:
    """Copies between a worker's memory and an object store. Owned by a thread of the worker.

    Invariant: a block of the worker's memory is written only from an object that is whole, of the
    right name, and fits its checksum."""

    def __init__(
        self,
        name: NodeId,
        memory: Mapping[Tier, Any],
        bucket: Bucket,
        prefix: str,
        codec: Codec,
        share: HeadShare | None = None,
        *,
        is_part: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`memory`: the worker's, `[num_blocks, ...]` each, contiguous, on the CPU or a GPU;
        `prefix`: of all keys; `share`: the heads that blocks hold; `is_part`: they are those of one
        of several ranks. Raises AgentError, BucketError."""
        self._name = name
        self._memory = dict(memory)
        self._bytes = {tier: block_bytes(pool, share) for tier, pool in memory.items()}
        (self._size,) = {pool.shape[1] for pool in self._bytes.values()}
        self._bucket = bucket
        self._prefix = prefix
        self._codec = codec
        self._share = share
        self._is_part = is_part
        self._clock = clock
        self._block = np.empty((1, self._size), np.uint8)  # one that was decoded
        self._coded = np.empty(self._size + MORE_BYTES, np.uint8)
        self._copies: dict[ObjectCopy, None] = {}  # not done, and not given up
        self._most_live = float(FIRST_LIVE)  # objects on their way
        self._took_s = 0.0  # how long the last ones took
        self._moved_at = float("-inf")  # something has come, or was asked for when nothing was
        self._left: dict[ObjectTransfer, ObjectTransport] = {}  # their copies were given up
        self._retired: list[ObjectTransport] = []  # with other credentials
        self._failures = 0  # each soon after the one before
        self._retry_at = float("-inf")
        self._why = ""
        self._transport = self._open(bucket.credentials())

    @property
    def num_left(self) -> int:
        """Transfers that were given up and have not settled."""
        return len(self._left)

    def copy(self, request: CopyBlocks) -> ObjectCopy:
        sides, text = sides_of(request, Tier.OBJECT, self._memory), request.text
        if len(request.names) != len(sides.blocks):
            raise AgentError(f"{text}: they have {len(request.names)} names")
        now = self._clock()
        self._forget_settled()
        if now < self._retry_at:
            raise AgentError(f"{text}: {self._why}; asked again in {self._retry_at - now:.0f} s")
        self._renew()
        if not self._transport.free and self.num_left >= len(self._transport.staging):
            raise AgentError(f"{text}: {self.num_left} transfers that were given up have not ended")
        results, wholes = [0] * len(sides.blocks), [0] * len(sides.blocks)
        copy = ObjectCopy(request, sides, results, wholes, self._transport)
        self._copies[copy] = None
        self._begin(now)
        if copy.error:
            self.cancel(copy)
            raise self._failed(copy, copy.error)
        return copy

    def poll(self, handle: ObjectCopy) -> CopyDone | None:
        self._forget_settled()
        if handle.given_up:
            return CopyDone(handle.request.transfer_id, GIVEN_UP)
        now, transport = self._clock(), handle.transport
        for transfer, index in [*handle.live.items()]:
            settled = transport.poll(transfer)
            if settled is None:
                continue
            del handle.live[transfer]
            self._note_speed(now, now - transfer.begun_at)
            handle.results[index] = self._end(handle, transfer, index)
            handle.done += 1
        self._begin(now)
        if handle.error:
            raise self._failed(handle, handle.error)
        if handle.done == len(handle.results):
            self._copies.pop(handle, None)
            self._failures = 0
            done, results = CopyDone(handle.request.transfer_id, None), tuple(handle.results)
            if handle.sides.reads:
                wholes = tuple(handle.wholes) if self._is_part else ()
                return replace(done, checksums=results, whole_checksums=wholes)
            return replace(done, stored_bytes=results)
        if now < self._retry_at:  # another copy has found that
            raise AgentError(f"{handle.request.text}: {self._why}")
        silent_s = now - self._moved_at
        if handle.live and silent_s >= STALL_S + 2 * self._took_s and not self._has_come():
            raise self._failed(handle, f"nothing has come for {silent_s:.0f} s")
        return None

    def cancel(self, handle: ObjectCopy) -> None:
        handle.given_up = True
        self._copies.pop(handle, None)
        self._left |= dict.fromkeys(handle.live, handle.transport)
        handle.live.clear()

    def close(self) -> None:
        self._retired.append(self._transport)
        deadline = time.monotonic() + CLOSE_S
        while self._retired and time.monotonic() < deadline:
            self._forget_settled()
            time.sleep(CLOSE_POLL_S)
        for transport in self._retired:
            transport.abandon()
        _abandoned.extend(self._retired)

    def _begin(self, now: float) -> None:
        """As many transfers as may be on their way, of all copies in turns."""
        while sum(len(copy.live) for copy in self._copies) < int(self._most_live):
            able = [copy for copy in self._copies if self._may_begin(copy)]
            if not able:
                return
            copy = min(able, key=lambda each: len(each.live))
            try:
                self._begin_next(now, copy)
            except AgentError as error:
                copy.error = str(error)

    def _may_begin(self, copy: ObjectCopy) -> bool:
        transport = copy.transport
        most = len(transport.staging) // (1 if copy.sides.reads else WRITE_SHARE)
        has_next = copy.begun < len(copy.results) and not copy.error
        return has_next and bool(transport.free) and len(copy.live) < most

    def _begin_next(self, now: float, copy: ObjectCopy) -> None:
        """Begins the transfer of one more block. Raises AgentError."""
        transport, index = copy.transport, copy.begun
        slot, name, reads = transport.free[-1], copy.request.names[index], copy.sides.reads
        size = transport.staging.shape[1] if reads else self._pack(copy, index, slot)
        transfer = transport.start(reads, self._prefix + name.hex(), slot, size)
        if not any(each.live for each in self._copies):
            self._moved_at = now
        transfer.begun_at = now
        copy.live[transfer] = index
        copy.begun += 1

    def _note_speed(self, now: float, took_s: float) -> None:
        """Takes note of an object that has come, for how many are asked for at once."""
        self._moved_at = now
        self._took_s += (took_s - self._took_s) / 4
        if took_s < PROMPT_S:
            self._most_live = min(self._most_live + 1, MAX_STAGING)
        elif took_s > 2 * PROMPT_S:
            self._most_live = max(1.0, self._most_live * 0.8)

    def _has_come(self) -> bool:
        """Whether something has, of a copy that was not looked at since."""
        return any(
            copy.transport.has_settled(transfer) for copy in self._copies for transfer in copy.live
        )

    def _end(self, copy: ObjectCopy, transfer: ObjectTransfer, index: int) -> int:
        """The result of a transfer that has settled. Raises AgentError if it says that the store
        does not serve."""
        row, error = copy.transport.staging[transfer.slot], transfer.error or ""
        if not copy.sides.reads:
            if error:
                raise self._failed(copy, error)
            return copy.results[index]
        says = error_code(row[:ERROR_BYTES].tobytes())
        if says in NOT_THERE:
            return NOT_THERE[says]
        if error:
            raise self._failed(copy, f"{error} {says}".strip())
        found = self._unpack(row, copy.request.names[index])
        if found is None:
            return DAMAGED
        checksum, copy.wholes[index] = found
        write_blocks(self._memory[copy.sides.tier], [copy.sides.blocks[index]], self._block[:1])
        return checksum

    def _pack(self, copy: ObjectCopy, index: int, slot: int) -> int:
        """The object of a block, in its slot; its size."""
        block = self._bytes[copy.sides.tier][copy.sides.blocks[index]]
        row, codec = copy.transport.staging[slot], self._codec.name.encode()
        body: NDArray[np.uint8] = self._coded[: self._codec.encode(block, self._coded)]
        if len(body) >= self._size:
            body, codec = block, b""
        end = HEADER_BYTES + len(body)
        row[HEADER_BYTES:end] = body
        name, checksum = copy.request.names[index], copy.request.checksums[index]
        part = checksum_blocks(block[None], [0], self._share)[0] if self._is_part else None
        header = pack_header(name, codec, self._size, len(body), checksum, part)
        row[:HEADER_BYTES] = np.frombuffer(header, np.uint8)
        copy.results[index] = end
        return end

    def _unpack(self, row: NDArray[np.uint8], name: bytes) -> tuple[int, int] | None:
        """Its block, in `_block`; (its checksum, that of the block of all ranks). None if it is not
        that of `name`, or not whole."""
        facts = unpack_header(row[:HEADER_BYTES].tobytes(), is_part=self._is_part)
        if facts is None:
            return None
        its_name, codec, size, body_bytes, whole, checksum = facts
        body = row[HEADER_BYTES : HEADER_BYTES + body_bytes]
        if its_name != name or size != self._size or len(body) != body_bytes:
            return None
        if not codec and body_bytes == size:
            self._block[0] = body
        elif codec != self._codec.name.encode() or not self._codec.decode(body, self._block[0]):
            return None
        fits = checksum_blocks(self._block, [0], self._share) == [checksum]
        return (checksum, whole) if fits else None

    def _failed(self, copy: ObjectCopy, why: str) -> AgentError:
        """The store is left alone for a while."""
        now = self._clock()
        if now >= self._retry_at:
            self._failures += 1
            self._most_live = FIRST_LIVE
            self._retry_at = now + RETRY.pause_s(self._failures)
        self._why = f"{self._bucket} does not serve: {why}"
        return AgentError(f"{copy.request.text}: {self._why}")

    def _forget_settled(self) -> None:
        """Slots of what was given up are free again once NIXL is done with them."""
        for transfer, transport in [*self._left.items()]:
            if transport.poll(transfer) is not None:
                del self._left[transfer]
        for transport in [each for each in self._retired if not each.num_live]:
            self._retired.remove(transport)
            transport.close()

    def _renew(self) -> None:
        """With the credentials that there are now, if they have changed."""
        try:
            credentials = self._bucket.credentials()
        except BucketError as error:
            logger.warning("%s goes on with the credentials that it has: %s", self._name, error)
            return
        if credentials != self._transport.credentials:
            self._retired.append(self._transport)
            self._transport = self._open(credentials)

    def _open(self, credentials: Credentials) -> ObjectTransport:
        try:
            return ObjectTransport(self._name, self._bucket, credentials, self._size)
        except Exception as error:
            text = str(error) if isinstance(error, AgentError) else error_text(error)
            raise AgentError(f"object store of {self._name}: {text}") from error


def open_tier(settings: TierSettings) -> Storage:
    """Opens the bucket. Raises AgentError, BucketError, NativeBuildError."""
    config, tiers = settings.config, settings.tiers
    bucket, is_part = bucket_of(tiers), bool(settings.part)
    prefix = key_prefix(f"{tiers.object_prefix}/{settings.part}", config.fingerprint)
    what = settings.memory, bucket, prefix, ExponentCodec(), settings.share
    mover = ObjectMover(config.node_id, *what, is_part=is_part)
    if not settings.lists:
        return Storage(mover, Unlisted())
    return Storage(mover, ObjectStore(bucket, prefix, tiers.object_blocks))


def pack_header(
    name: bytes, codec: bytes, size: int, body_bytes: int, checksum: int, part: int | None = None
) -> bytes:
    """`size`: bytes of the block; `checksum`: that of the block of all ranks, as it was computed;
    `part`: that of these bytes, of one of several ranks."""
    facts, more = (MAGIC, name, codec, size, body_bytes, checksum), b""
    if part is not None:
        more = PART.pack(part)
    check = xxh3_64_intdigest(HEADER.pack(*facts, 0) + more)
    return (HEADER.pack(*facts, check) + more).ljust(HEADER_BYTES, b"\0")


def unpack_header(
    header: bytes, *, is_part: bool = False
) -> tuple[bytes, bytes, int, int, int, int] | None:
    """What `pack_header` was given, where it was given no `part` with the checksum of the block in
    its place; None if this is not what it returned."""
    magic, *facts, check = HEADER.unpack_from(header)
    more = header[HEADER.size :][: PART.size] if is_part else b""
    if magic != MAGIC or check != xxh3_64_intdigest(HEADER.pack(magic, *facts, 0) + more):
        return None
    name, codec, size, body_bytes, checksum = facts
    part = PART.unpack(more)[0] if is_part else checksum
    return name, codec.rstrip(b"\0"), size, body_bytes, checksum, part
