"""How the index of a storage tier has to change, after what happened to its blocks.

Life of a record in the index of a storage tier: put when the block is written -> put again when its
retention has become much longer -> removed when the block is forgotten, and that before its slot is
written again.
"""

from __future__ import annotations

from math import inf

from kvrelay.engine.backoff import Backoff
from kvrelay.engine.kv.tier import DiskRecord, Tier
from kvrelay.engine.node import Effect, Note
from kvrelay.kvtransfer.agent import StoreIndex
from kvrelay.kvtransfer.tiers.pool import Entry
from kvrelay.kvtransfer.tiers.registry import has_keys

RETRY = Backoff(10.0, 300.0)  # before a store that failed is written again
REFRESH_SHARE = 0.5  # a record that lacks so much of its block's retention is put again
MAX_REFRESHED = 64  # records that are put again at a time
WHAT_IT_NEEDS = {
    False: "folder exists, is writable, and has room for the full size",
    True: "server answers, and the bucket may be written",
}


def lacks_time(now: float, until: float, expires_at: float) -> bool:
    """Whether a record that ends then is to be put again."""
    return until < expires_at - REFRESH_SHARE * (expires_at - now)


class IndexUpdates:
    """How the index of a storage tier has to change, and when the store may be written.

    Owned by `TierBlocks`. Invariant: a record is removed before its slot is given to a move,
    because `take` goes first and nothing is moved to the store while it waits."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._removed: list[int] = []  # slots
        self._put: list[Entry] = []
        self._stale: dict[Entry, None] = {}  # listed, with too little retention
        self._failures = 0  # each soon after the one before
        self._retry_at = float("-inf")

    def may_write(self, now: float) -> bool:
        return now >= self._retry_at

    def put(self, entry: Entry) -> None:
        """It can be read from now on."""
        if not has_keys(self._tier):
            self._put.append(entry)

    def remove(self, entry: Entry) -> None:
        if entry.indexed_until is not None:
            self._removed.append(entry.slot)

    def on_use(self, now: float, entry: Entry) -> float:
        """Its retention may have grown. Returns the end of its record; of one that will be put
        again, or is not here: none."""
        until = entry.indexed_until
        if until is None:
            return inf
        if lacks_time(now, until, entry.usage.expires_at):
            self._stale[entry] = None
            return inf
        return until

    def refresh(self, now: float) -> None:
        """Put some of those again whose records end too early."""
        if not self.may_write(now):
            return
        for entry in list(self._stale)[:MAX_REFRESHED]:
            del self._stale[entry]
            self._put.append(entry)

    def take(self, now: float) -> list[Effect]:
        """What to change in the index; nothing while the store must not be written."""
        if not self.may_write(now) or not (self._removed or self._put):
            return []
        records = []
        for entry in self._put:
            if not entry.gone:
                until = entry.indexed_until = entry.usage.expires_at
                if (run := entry.usage.run) is not None:
                    run.indexed_until = min(run.indexed_until, until)
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
        if now >= self._retry_at + RETRY.pause_s(self._failures + 1):  # it was well
            self._failures = 0
        self._failures += 1
        retry_s = RETRY.pause_s(self._failures)
        self._retry_at = now + retry_s
        text = (
            f"{error}. Nothing is written to the {self._tier} store for {retry_s:g} s, what it"
            f" holds is still read; see that its {WHAT_IT_NEEDS[has_keys(self._tier)]}"
        )
        return [Note("warning", f"{self._tier}_store_failed", text)]
