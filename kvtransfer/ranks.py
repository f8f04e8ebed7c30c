"""What the ranks of a worker answer to a request for a transfer, as one answer.

Each rank copies its heads of the same blocks: a request goes to all, and is answered when all have
answered. It has failed if it did in one of them. So a copy that is done is done everywhere, and
nothing writes to its destination in any rank.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvrelay.engine.kv.tier import DiskRecord, Tier
from kvrelay.kvtransfer.agent import (
    DAMAGED,
    MISSING,
    NOT_STORED,
    AttachStore,
    ConnectPeer,
    CopyBlocks,
    CopyDone,
    PeerConnected,
    StoreFound,
    StoreGone,
    StoreRoom,
)
from kvrelay.kvtransfer.checksum import MOD
from kvrelay.kvtransfer.layout import HeadShare
from kvrelay.kvtransfer.transfer_loop import Answer, Request


class FoundInAll:
    """Joins what the ranks find in the places that rank 0 has attached, each its part at a time of
    its own. A block is found when all have it, in one slot and with one checksum.

    Invariant: what has been found by some is kept until it is found by all, or gone in any."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        # By tier, first slot and place: ranks that have each block, unless all have.
        self._places: dict[tuple[Tier, int, str], dict[Hashable, set[int]]] = {}

    def add(self, rank: int, found: StoreFound) -> tuple[AttachStore | None, StoreFound | None]:
        """(what the other ranks are to attach, what all ranks have now and had not before)."""
        place, asked = (found.tier, found.first_slot, found.place), None
        if rank == 0 and place not in self._places:
            self._places[place] = {}
            asked = AttachStore(found.tier, found.place, found.first_slot, found.num_slots)
        blocks = self._places.get(place)
        if blocks is None:
            return None, None  # it has gone meanwhile
        complete: list[DiskRecord] = []
        for record in found.records:
            block = record.slot, record.block_hash, record.checksum
            ranks = blocks.setdefault(block, set())
            ranks.add(rank)
            if len(ranks) == self._num_ranks:
                del blocks[block]
                complete.append(record)
        return asked, replace(found, records=tuple(complete)) if complete else None

    def drop(self, gone: StoreGone) -> None:
        """What others find of it from now on is of no use."""
        for place in [place for place in self._places if place[:2] == (gone.tier, gone.first_slot)]:
            del self._places[place]


class RankAnswers:
    """Joins the answers of all ranks. Its methods may be called from any thread.

    Invariant: a connection and a copy that were begun are answered once; a store's failure in any
    rank is the worker's, and is reported at once, as is that a part of it has gone."""

    def __init__(
        self,
        counted: Sequence[bool],
        send: Callable[[Request], None],
        deliver: Callable[[Answer], None],
    ) -> None:
        """`counted`: for each rank, whether its checksums count; of ranks with the same heads one
        does. `send`: to all ranks but 0."""
        self._counted = counted
        self._send = send
        self._deliver = deliver
        self._lock = threading.Lock()
        self._found = FoundInAll(len(counted))
        self._room: dict[Tier, dict[int, int]] = {}  # slots that ranks have memory for, if not all
        # By what an answer names; connections to one peer may be asked for more than once.
        self._asked: dict[Hashable, deque[dict[int, Answer]]] = {}  # answers by rank

    def begin(self, request: Request) -> None:
        """Before rank 0 is asked."""
        key = _key(request)
        if key is not None:
            with self._lock:
                self._asked.setdefault(key, deque()).append({})
        self._send(request)

    def add(self, rank: int, answer: Answer) -> None:
        """Takes what `rank` has answered."""
        if isinstance(answer, StoreFound):
            with self._lock:
                asked, found = self._found.add(rank, answer)
            if asked is not None:
                self._send(asked)
            if found is not None:
                self._deliver(found)
            return
        if isinstance(answer, StoreRoom):
            with self._lock:
                of_ranks = self._room.setdefault(answer.tier, {})
                of_ranks[rank] = answer.num_slots
                answer = replace(answer, num_slots=min(of_ranks.values()))
        if isinstance(answer, StoreGone):
            with self._lock:
                self._found.drop(answer)
        key = _key(answer)
        if key is None:
            self._deliver(answer)
            return
        with self._lock:
            waiting = self._asked[key]
            answers = next(each for each in waiting if rank not in each)
            answers[rank] = answer
            if len(answers) < len(self._counted):
                return
            waiting.remove(answers)
            if not waiting:
                del self._asked[key]
        self._deliver(self._joined(answers))

    def audit(self) -> int:
        """Requests that not all ranks have answered."""
        with self._lock:
            return sum(map(len, self._asked.values()))

    def _joined(self, of_ranks: Mapping[int, Any]) -> PeerConnected | CopyDone:
        """`of_ranks`: an answer of each, of one kind."""
        answers = [of_ranks[rank] for rank in range(len(of_ranks))]
        first: PeerConnected | CopyDone = next(
            (each for each in answers if each.error is not None), answers[0]
        )
        if isinstance(first, PeerConnected):
            if first.error:
                return first
            # All read at once, and a copy is done when the slowest is.
            rate = len(answers) * min(each.bytes_per_s for each in answers)
            untimed = next((each.not_timed for each in answers if each.not_timed), None)
            return replace(first, bytes_per_s=rate, not_timed=untimed)
        elapsed_s = max(each.elapsed_s for each in answers)
        if first.error is not None:
            return replace(first, elapsed_s=elapsed_s)
        sums = [each.checksums for each, c in zip(answers, self._counted, strict=True) if c]
        return replace(
            first,
            checksums=_of_parts(answers, add_checksums(sums)),
            whole_checksums=(),
            elapsed_s=elapsed_s,
            num_bytes=sum(each.num_bytes for each in answers),
            stored_bytes=tuple(map(sum, zip(*(e.stored_bytes for e in answers), strict=True))),
            stored_checksums=self._stored(answers),
        )

    def _stored(self, answers: Sequence[CopyDone]) -> tuple[int, ...]:
        """What ranks will read of blocks of which some store fewer bits."""
        if not any(each.stored_checksums for each in answers):
            return ()
        each = [answer.stored_checksums or answer.checksums for answer in answers]
        added = add_checksums(sums for sums, c in zip(each, self._counted, strict=True) if c)
        is_lost = (NOT_STORED in of_block for of_block in zip(*each, strict=True))
        return tuple(NOT_STORED if lost else s for lost, s in zip(is_lost, added, strict=True))


def _of_parts(answers: Sequence[CopyDone], added: Sequence[int]) -> tuple[int, ...]:
    """`added`, but for blocks that a rank has not found, or whose parts are not of one block."""
    wholes = {each.whole_checksums for each in answers}
    if wholes == {()}:
        return tuple(added)
    found: list[int] = []
    for index, total in enumerate(added):
        of_ranks = {each.checksums[index] for each in answers}
        said = {each.whole_checksums[index] for each in answers}
        if lost := of_ranks & {MISSING, DAMAGED}:
            found.append(min(lost))  # that one is damaged says more than that one is missing
        else:
            found.append(total if said == {total} else DAMAGED)
    return tuple(found)


def add_checksums(of_ranks: Iterable[Sequence[int]]) -> list[int]:
    """Adds up, for each block, what ranks with different heads found in it."""
    return [sum(each) % MOD for each in zip(*of_ranks, strict=True)]


def first_with_heads(shares: Sequence[HeadShare]) -> list[bool]:
    """For each rank, whether those before it have other heads."""
    heads = [share.own_heads for share in shares]
    return [each not in heads[:rank] for rank, each in enumerate(heads)]


def _key(message: Request | Answer) -> Hashable:
    """What a request and its answers have in common; None: it is not always answered."""
    match message:
        case ConnectPeer() | PeerConnected():
            return message.peer, message.epoch
        case CopyBlocks() | CopyDone():
            return message.transfer_id
    return None
