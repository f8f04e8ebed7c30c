"""Prompts wait a moment for what an object store may have of them, which nobody here knows of.

A store is listed as far as a worker remembers names, and its keys are hashes: of a bucket that is
larger, a session is hardly ever known whole. So where to compute what is missing would take long,
the store is asked by name, from the beginning of the prefix on.
"""

from __future__ import annotations

from kvrelay.engine.core import EngineCore
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import Effect, Wake
from kvrelay.engine.sequence import Sequence
from kvrelay.kvtransfer.agent import FindStored, StoreListed
from kvrelay.kvtransfer.tiers.manager import Tiers

WORTH_S = 1.0  # less is computed sooner than the store is asked and read
WAIT_S = 2.0  # the most that a prompt waits for the answer, and half of what it would compute
UNKNOWN_RATE = 5000.0  # tokens per second, before a prompt was computed
ABSENT_S = 60.0  # what was not there is not asked for again
MAX_ABSENT = 4096  # blocks that are known not to be there


class StoredKV:
    """Owned by a worker's exchange. A sequence that waits has `awaits_stored`, the first name that
    was asked for, until the answer has come or `not_before`."""

    def __init__(self, core: EngineCore, tiers: Tiers) -> None:
        self._core = core
        self._tiers = tiers
        self._absent: dict[bytes, float] = {}  # until when

    def begin(self, now: float, seq: Sequence) -> list[Effect]:
        """Asks the store for what `seq`, which has just come, lacks."""
        core, kv = self._core, self._core.kv
        waits = seq.is_remote or now < seq.not_before
        if not core.config.num_object_blocks or kv.windows.any or waits:
            return []
        names = kv.usable_hashes(seq)
        num_had = kv.pool.num_found(names)
        num_had += len(self._tiers.find(names[num_had:]))
        missing = names[num_had:]
        rate = core.timing.prefill_tokens_per_s or UNKNOWN_RATE
        compute_s = len(missing) * core.config.block_size / rate
        if not missing or compute_s < WORTH_S or now < self._absent.get(missing[0], now):
            return []
        wait_s = min(WAIT_S, compute_s / 2)
        seq.not_before, seq.awaits_stored = now + wait_s, missing[0]
        core.count("stored_kv_asked")
        return [Wake(wait_s, "stored_kv"), FindStored(tuple(missing), Tier.OBJECT)]

    def on_listed(self, now: float, listed: StoreListed) -> None:
        """Who asked for it goes on, with what was found or without."""
        if not listed.asked:
            return
        if not listed.names:
            self._absent.pop(listed.asked, None)
            self._absent[listed.asked] = now + ABSENT_S
            if len(self._absent) > MAX_ABSENT:
                del self._absent[next(iter(self._absent))]
        for seq in self._core.scheduler.waiting:
            if seq.awaits_stored == listed.asked:
                seq.not_before, seq.awaits_stored = now, b""
                self._core.count("stored_kv_found", len(listed.names))
