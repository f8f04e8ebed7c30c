"""Streams whose worker has died wait a moment for the KV that it left on this machine.

Their router hands them over within milliseconds. The host memory of the dead worker can be read
once the kernel has freed its lock, a moment later; a stream that begins before that computes its
whole context again. It asks for its blocks by name, since much else may be there, and goes on when
all of them that are left have been found.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvrelay.engine.core import EngineCore
from kvrelay.engine.node import Effect, Wake
from kvrelay.engine.sequence import Sequence
from kvrelay.kvtransfer.agent import FindStored, StoreFound
from kvrelay.kvtransfer.tiers.manager import Tiers

WAIT_S = 0.25  # what is not found by then is computed
MIN_MISSING_BLOCKS = 2  # fewer are computed sooner than they are found
_LATER_S = 0.002  # a timer may be early


class LeftKV:
    """Owned by a worker's exchange. It says until when a sequence waits (`Sequence.not_before`)."""

    def __init__(self, core: EngineCore, tiers: Tiers) -> None:
        self._core = core
        self._tiers = tiers

    def begin(self, now: float, seq: Sequence) -> list[Effect]:
        """`seq` has just come. What its router knows to be held somewhere is not missing."""
        if not self._core.config.reads_left_kv or not seq.is_stream or seq.is_remote:
            return []
        names = tuple(self._core.kv.usable_hashes(seq))
        seq.num_had, windows = self._num_had(names), self._core.kv.windows
        num_held = max(windows.tokens(seq.num_had), seq.num_held)
        if len(seq.tokens) - num_held < MIN_MISSING_BLOCKS * windows.block_size:
            return []
        seq.not_before = now + WAIT_S
        self._core.count("left_kv_waits")
        wanted = names if windows.any else names[seq.num_had :]
        return [Wake(WAIT_S + _LATER_S, "left_kv"), FindStored(wanted)]

    def on_found(self, now: float, found: StoreFound) -> None:
        """Lower tiers have more than before: those that can use it go on, once they have all that
        they asked for. While that comes, they wait on."""
        if not found.was_asked_for:
            return
        for seq in self._core.scheduler.waiting:
            if now >= seq.not_before:
                continue
            if found.has_more:
                seq.not_before = now + WAIT_S
            elif self._num_had(self._core.kv.usable_hashes(seq)) > seq.num_had:
                seq.not_before = now
                self._core.count("left_kv_found")

    def _num_had(self, names: Seq[bytes]) -> int:
        """How many of the blocks of a prefix, from the first, need not be computed."""
        kv, tiers = self._core.kv, self._tiers
        if not kv.windows.any:
            count = kv.pool.num_found(names)
            return count + len(tiers.find(names[count:]))
        return kv.windows.reach(
            len(names), lambda i: kv.pool.is_cached(names[i]) or bool(tiers.find([names[i]]))
        )
