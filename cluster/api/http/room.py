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

C = TypeVar("C")


class Stage(IntEnum):
    """What a connection is at, in the order in which they have to make room."""

    IDLE = 0  # asks for nothing
    HEAD = 1  # of a request, which is not whole
    BODY = 2  # likewise
    ANSWER = 3  # is never dropped


class _OfAddress(Generic[C]):
    def __init__(self) -> None:
        # Each the one first that has been at it for the longest.
        self.at: dict[Stage, dict[C, None]] = {stage: {} for stage in Stage}

    @property
    def num_open(self) -> int:
        return sum(map(len, self.at.values()))

    @property
    def num_resting(self) -> int:
        return len(self.at[Stage.IDLE]) + len(self.at[Stage.HEAD])

    @property
    def num_droppable(self) -> int:
        return self.num_resting + len(self.at[Stage.BODY])


class OpenConnections(Generic[C]):
    """Those of one server. Invariant: each is at one stage; the bodies and answers of an address
    are its share of all connections at most."""

    def __init__(self, most: int) -> None:
        self.under_way = Shares(most)  # bodies and answers
        self._place: dict[C, tuple[str, Stage]] = {}
        self._of: dict[str, _OfAddress[C]] = {}

    def enter(self, connection: C, address: str) -> None:
        """A new one, which has asked for nothing yet."""
        self._place[connection] = address, Stage.IDLE
        self._of.setdefault(address, _OfAddress()).at[Stage.IDLE][connection] = None

    def stage(self, connection: C) -> Stage | None:
        """None: it has left."""
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
        own = self._of[address].at
        del own[before][connection]
        own[stage][connection] = None
        self._place[connection] = address, stage
        return True

    def leave(self, connection: C) -> None:
        """It is closed, or about to be. May be called again."""
        self.put(connection, Stage.IDLE)
        place = self._place.pop(connection, None)
        if place is None:
            return
        own = self._of[place[0]]
        del own.at[Stage.IDLE][connection]
        if not own.num_open:
            del self._of[place[0]]

    def drop_for(self, address: str) -> C | None:
        """Which one makes room for a new connection of `address`; it has left then. A body does
        only if its address keeps as many as the new one's gets. None: none does."""
        most = max(self._of.values(), key=lambda own: own.num_droppable, default=None)
        if most is None:
            return None
        if not most.num_resting:
            own = self._of.get(address)
            if most.num_droppable and most.num_open > (own.num_open if own else 0) + 1:
                return self._drop(most)
            most = max(self._of.values(), key=lambda own: own.num_resting)
        return self._drop(most) if most.num_resting else None

    def _drop(self, own: _OfAddress[C]) -> C:
        dropped = next(each for stage in Stage for each in own.at[stage])
        self.leave(dropped)
        return dropped
