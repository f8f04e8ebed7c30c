"""Classes of service: who goes first, and whose memory and steps may be taken for whom.

A class is a range of priorities, as clients of vLLM give them (the lowest number goes first); a
`service_tier` names the class. Routers order by the priority, workers by the class alone.
"""

from __future__ import annotations

from enum import IntEnum


class ServiceClass(IntEnum):
    """A higher class goes first. Its names are values of `service_tier` and metric labels."""

    BATCH = 0  # nobody waits for it: it takes what the others leave
    FLEX = 1  # somebody waits, and can
    DEFAULT = 2
    PRIORITY = 3

    @property
    def tier(self) -> str:
        return self.name.lower()

    @property
    def priority(self) -> int:
        """That its requests have where they only name the class."""
        return _PRIORITIES[self]

    @property
    def is_low(self) -> bool:
        """Whether others go before it at workers too: nobody waits for each token."""
        return self < ServiceClass.DEFAULT

    @classmethod
    def of(cls, priority: int) -> ServiceClass:
        if priority <= 0:
            return cls.PRIORITY if priority < 0 else cls.DEFAULT
        return cls.FLEX if priority < _PRIORITIES[cls.BATCH] else cls.BATCH


_PRIORITIES = {
    ServiceClass.BATCH: 50,
    ServiceClass.FLEX: 10,
    ServiceClass.DEFAULT: 0,
    ServiceClass.PRIORITY: -10,
}
TIERS = {each.tier: each for each in reversed(ServiceClass)}
