"""Connections of which nobody knows yet whose they are: how many there may be, and which has to
go."""

from __future__ import annotations

from typing import Generic, TypeVar

C = TypeVar("C")


class PendingConnections(Generic[C]):
    """By the address that they come from, oldest first.

    Invariant: at most `most` in all, and `most_of_address` of each address. A new one always gets
    in: whoever opens many pushes out their own, and a peer needs only the time of a handshake.
    """

    def __init__(self, most: int, most_of_address: int) -> None:
        self._most, self._most_of_address = most, most_of_address
        self._address_of: dict[C, str] = {}
        self._of_address: dict[str, dict[C, None]] = {}

    def __len__(self) -> int:
        return len(self._address_of)

    def all(self) -> list[C]:
        return list(self._address_of)

    def add(self, connection: C, address: str) -> C | None:
        """Returns the one that has to be dropped for it, which counts no longer."""
        dropped: C | None = None
        own = self._of_address.get(address, {})
        if len(own) >= self._most_of_address:
            dropped = next(iter(own))
            self.remove(dropped)
        elif len(self._address_of) >= self._most:
            dropped = self.drop()
        self._address_of[connection] = address
        self._of_address.setdefault(address, {})[connection] = None
        return dropped

    def drop(self) -> C | None:
        """The oldest of the address that has the most, which counts no longer; None: there is
        none."""
        if not self._of_address:
            return None
        busiest = max(self._of_address, key=lambda address: len(self._of_address[address]))
        dropped = next(iter(self._of_address[busiest]))
        self.remove(dropped)
        return dropped

    def remove(self, connection: C) -> None:
        """It is known, or closed. May be called again."""
        address = self._address_of.pop(connection, None)
        if address is None:
            return
        own = self._of_address[address]
        del own[connection]
        if not own:
            del self._of_address[address]
