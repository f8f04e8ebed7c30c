"""The two sides of a handoff as transition tables: the specification, and what runs.

Consumer: reads, then asks whether what it read was held all the while (read, then confirm, like a
seqlock). Only the answer makes the blocks usable. A cancel while a transfer may still write to the
destination drains first, and what does not settle is left behind with it. Producer: computes, holds
under a lease, frees.
"""

from __future__ import annotations

from enum import StrEnum

Key = tuple[str, int]  # (request_id, attempt)


class ConsumerState(StrEnum):
    WAITING = "waiting"  # no destination blocks yet
    HANDSHAKING = "handshaking"  # destination allocated; peer or first blocks not known yet
    READING = "reading"
    DRAINING = "draining"  # given up; destination pinned until every transfer has settled
    CONFIRMING = "confirming"
    DONE = "done"
    FAILED = "failed"


class ConsumerEvent(StrEnum):
    START = "start"  # destination blocks are allocated
    READY = "ready"  # the peer is connected and has announced blocks
    DONE = "done"  # all transfers have settled, without error
    ERROR = "error"  # something failed, and no transfer is live
    CANCEL = "cancel"  # given up, for whatever reason; transfers may be live
    LEAVE = "leave"  # transfers do not settle: the destination is left to them
    CONFIRMED = "confirmed"
    REFUSED = "refused"


class ProducerState(StrEnum):
    COMPUTING = "computing"
    HELD = "held"
    FREED = "freed"


class ProducerEvent(StrEnum):
    COMPUTED = "computed"
    READ = "read"  # the consumer asks for confirmation
    RELEASE = "release"  # the consumer does not want it, or the request is aborted
    EXPIRE = "expire"  # the lease has run out


_C, _CE = ConsumerState, ConsumerEvent
CONSUMER: dict[tuple[ConsumerState, ConsumerEvent], ConsumerState] = {
    (_C.WAITING, _CE.START): _C.HANDSHAKING,
    (_C.WAITING, _CE.CANCEL): _C.FAILED,
    (_C.HANDSHAKING, _CE.READY): _C.READING,
    (_C.HANDSHAKING, _CE.ERROR): _C.FAILED,
    (_C.HANDSHAKING, _CE.CANCEL): _C.FAILED,
    (_C.READING, _CE.DONE): _C.CONFIRMING,
    (_C.READING, _CE.ERROR): _C.FAILED,
    (_C.READING, _CE.CANCEL): _C.DRAINING,
    (_C.DRAINING, _CE.DONE): _C.FAILED,
    (_C.DRAINING, _CE.ERROR): _C.FAILED,
    (_C.DRAINING, _CE.LEAVE): _C.FAILED,
    (_C.CONFIRMING, _CE.CONFIRMED): _C.DONE,
    (_C.CONFIRMING, _CE.REFUSED): _C.FAILED,
    (_C.CONFIRMING, _CE.CANCEL): _C.FAILED,
}

_P, _PE = ProducerState, ProducerEvent
PRODUCER: dict[tuple[ProducerState, ProducerEvent], ProducerState] = {
    (_P.COMPUTING, _PE.COMPUTED): _P.HELD,
    (_P.COMPUTING, _PE.RELEASE): _P.FREED,
    (_P.HELD, _PE.READ): _P.FREED,
    (_P.HELD, _PE.RELEASE): _P.FREED,
    (_P.HELD, _PE.EXPIRE): _P.FREED,
}


class IllegalTransition(AssertionError):
    """Our bug: the table has no such transition. Nothing was changed."""


def next_consumer(state: ConsumerState, event: ConsumerEvent) -> ConsumerState:
    """The state after `event`. Raises IllegalTransition."""
    try:
        return CONSUMER[state, event]
    except KeyError:
        raise IllegalTransition(f"consumer: {event} in state {state}") from None


def next_producer(state: ProducerState, event: ProducerEvent) -> ProducerState:
    """The state after `event`. Raises IllegalTransition."""
    try:
        return PRODUCER[state, event]
    except KeyError:
        raise IllegalTransition(f"producer: {event} in state {state}") from None
