"""The rule by which callers share what is limited: while more than a reserve is free anybody may
take; of the reserve a caller takes only what leaves it with no more than is free. So somebody alone
has nearly all, and who has nothing finds something (ADR 73)."""

from __future__ import annotations

RESERVE = 8  # part of a limit that is kept for others: one in so many


def reserve_of(limit: int) -> int:
    """How much of a limit is kept for others: of few places one, of a single one none."""
    return max(1, limit // RESERVE) if limit > 1 else 0


def may_take(own: int, free: int, reserve: int, amount: int = 1) -> bool:
    """Whether one that has `own` may take `amount` of what is `free`."""
    return free - amount >= reserve or own + amount <= free
