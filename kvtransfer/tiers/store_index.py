"""What the index of a storage tier has to be told, and when the store may be written.

Life of a record: put when its block is written -> put again when its retention has become much
longer -> removed when the block is forgotten, and that before its slot is written again.
"""

from __future__ import annotations

from engine.kv.tier import DiskRecord, Tier
from engine.node import Effect, Note
from kvtransfer.agent import StoreIndex
from kvtransfer.tiers.pool import Entry

FIRST_RETRY_S = 10.0  # after a failure, before the store is written again; doubles if it fails soon
MAX_RETRY_S = 300.0
REFRESH_SHARE = 0.5  # of a block's retention has to be missing from its record to put it again
MAX_REFRESHED = 64  # records that are put again at a time


class IndexUpdates:
    """Of one storage tier, owned by `TierBlocks`. Invariant: a record is removed before its slot is
    given to a move, because `take` goes first and nothing is moved to the store while it waits."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._removed: list[int] = []  # slots
        self._put: list[Entry] = []
        self._stale: dict[Entry, None] = {}  # listed, with too little retention
        self._retry_s = FIRST_RETRY_S
        self._retry_at = float("-inf")

    def may_write(self, now: float) -> bool:
        return now >= self._retry_at

    def put(self, entry: Entry) -> None:
        """It can be read from now on."""
        self._put.append(entry)

    def remove(self, entry: Entry) -> None:
        """It was forgotten."""
        if entry.indexed_until is not None:
            self._removed.append(entry.slot)

    def on_use(self, now: float, entry: Entry) -> None:
        """Its retention may have grown."""
        until, expires_at = entry.indexed_until, entry.usage.expires_at
        if until is not None and until < expires_at - REFRESH_SHARE * (expires_at - now):
            self._stale[entry] = None

    def refresh(self, now: float) -> None:
        """Put some of those again whose records end too early."""
        if not self.may_write(now):
            return
        for entry in list(self._stale)[:MAX_REFRESHED]:
            del self._stale[entry]
            self._put.append(entry)

    def take(self, now: float) -> list[Effect]:
        """What to tell the index; nothing while the store must not be written."""
        if not self.may_write(now) or not (self._removed or self._put):
            return []
        records = []
        for entry in self._put:
            if not entry.gone:
                until = entry.indexed_until = entry.usage.expires_at
                record = DiskRecord(
                    entry.slot, entry.block_hash, entry.checksum, keep_s=max(0.0, until - now)
                )
                records.append(record)
        removed = tuple(self._removed)
        self._removed.clear()
        self._put.clear()
        return [StoreIndex(removed, tuple(records), self._tier)] if removed or records else []

    def on_failed(self, now: float, error: str) -> list[Effect]:
        """The store could not be written."""
        if not self.may_write(now):
            return []  # posted before the failure that was noted
        was_well = now >= self._retry_at + self._retry_s
        retry_s = FIRST_RETRY_S if was_well else self._retry_s
        self._retry_at = now + retry_s
        self._retry_s = min(2 * retry_s, MAX_RETRY_S)
        text = (
            f"{error}. Nothing is written to the {self._tier} store for {retry_s:g} s, what it"
            " holds is still read; see that its folder exists, is writable, and has room for the"
            " full size"
        )
        return [Note("warning", f"{self._tier}_store_failed", text)]

    def has_work(self, now: float) -> bool:
        return self.may_write(now) and bool(self._removed or self._put or self._stale)
