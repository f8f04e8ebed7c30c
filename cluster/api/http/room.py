"""Which connections of clients are open, and which one makes room where there are too many.

An address may hold any number while nobody else comes. Then the one that has most makes room: with
a connection that asks for nothing, with one whose request has not come, at last with a body that
has not. A request that is being answered is never given up, so of these, and of bodies, an address
has its share (`limiter.Shares`) at most: something of it can always make room.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Generic, TypeVar

from kvrelay.cluster.api.limiter import Shares
from kvrelay.router.admission.turns import Most

C = TypeVar("C")


class Stage(IntEnum):
    """What a connection is at, in the order in which they have to make room."""

    IDLE = 0  # asks for nothing
    HEAD = 1  # some of a request's headers have come
    BODY = 2  # has not all come
    ANSWER = 3  # is never dropped


class OpenConnections(Generic[C]):
    """Those of one server. Invariant: each is at one stage; the bodies and answers of an address
    are its share of all connections at most."""

    def __init__(self, most: int) -> None:
        self.under_way = Shares(most)  # bodies and answers
        self._place: dict[C, tuple[str, Stage]] = {}
        # By address and stage, each the one first that has been at it for the longest.
        self._at: dict[str, dict[Stage, dict[C, None]]] = {}
        self._most_resting: Most[str] = Most()  # idle, or with a part of a head
        self._most_droppable: Most[str] = Most()  # these, and bodies

    def enter(self, connection: C, address: str) -> None:
        """A new one, which has asked for nothing yet."""
        own = self._at.setdefault(address, {stage: {} for stage in Stage})
        own[Stage.IDLE][connection] = None
        self._place[connection] = address, Stage.IDLE
        self._count(address)

    def stage(self, connection: C) -> Stage | None:
        """What it is at; None means that it has left."""
        place = self._place.get(connection)
        return None if place is None else place[1]

    def put(self, connection: C, stage: Stage) -> bool:
        """It is at that stage now, or has got on within it. False: nothing has changed, since its
        address has its share of bodies and answers. One that has left stays away."""
        if (place := self._place.get(connection)) is None:
            return True
        address, before = place
        if before < Stage.BODY <= stage and not self.under_way.take((address,)):
            return False
        if stage < Stage.BODY <= before:
            self.under_way.give_back((address,))
        own = self._at[address]
        del own[before][connection]
        own[stage][connection] = None
        self._place[connection] = address, stage
        if stage != before:
            self._count(address)
        return True

    def leave(self, connection: C) -> None:
        """It is closed, or about to be. May be called again."""
        self.put(connection, Stage.IDLE)
        place = self._place.pop(connection, None)
        if place is None:
            return
        address = place[0]
        del self._at[address][Stage.IDLE][connection]
        self._count(address)
        if not self._num_open(address):
            del self._at[address]

    def _count(self, address: str) -> None:
        own = self._at[address]
        resting = len(own[Stage.IDLE]) + len(own[Stage.HEAD])
        self._most_resting.put(address, resting, 0)
        self._most_droppable.put(address, resting + len(own[Stage.BODY]), 0)

    def _num_open(self, address: str) -> int:
        return sum(map(len, self._at.get(address, {}).values()))

    def drop_for(self, address: str) -> C | None:
        """Which one makes room for a new connection of `address`; it has left then. A body does
        only if its address keeps as many as the new one's gets. None: none does."""
        busiest = self._most_droppable.top()
        if busiest is None:
            return None
        own = self._at[busiest]
        has_more = self._num_open(busiest) > self._num_open(address) + 1
        if not (own[Stage.IDLE] or own[Stage.HEAD] or has_more):
            resting = self._most_resting.top()
            if resting is None:
                return None
            own = self._at[resting]
        dropped = next(each for stage in Stage for each in own[stage])
        self.leave(dropped)
        return dropped
