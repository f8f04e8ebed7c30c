"""What of a prompt's KV is worth keeping, and where.

After a handoff both workers have it. Any worker can fetch it from either, so one copy is enough,
and the other may be the first to go. The copies are shared out so that KV lasts as long in one pool
as in the other: in proportion to the room that each has for KV that nobody is using. Where there is
too little room for all, what is least likely to be used again is kept nowhere, so that the rest
lasts until it is. KV of a session is kept where it is decoded, since that is where orders about it
go.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.placement.endpoint import Endpoint
from router.placement.fleet import Fleet
from router.placement.reuse import Reuse
from router.record import RequestRecord
from router.retention import RetainOn

REFRESH_S = 2.0  # room and reuse change slowly
MIN_REQUESTS = 500  # before anything is kept nowhere


class RetentionPolicy:
    """Owned by a dispatcher. Invariant: of any run of handoffs, the share that prefill workers keep
    is theirs of the room, to within one request; of each kind likewise what is kept at all."""

    def __init__(self, decodes: Fleet, prefills: Fleet) -> None:
        self._decodes = decodes
        self._prefills = prefills
        self._reuse = Reuse()
        self._num_seen = 0
        self._due_at = float("-inf")
        self._prefill_share = 0.0
        self._prefill_owed = 0.0  # requests that prefill workers should have kept, and have not
        self._shares = [1.0] * len(self._reuse.kinds)
        self._owed = [0.0] * len(self._reuse.kinds)

    def choose(
        self,
        now: float,
        log: RequestRecord,
        block_hashes: Sequence[bytes],
        prefill: Endpoint | None,
    ) -> RetainOn:
        """Of a request that is dispatched now. `block_hashes`: of its full blocks."""
        kind = self._reuse.note(now, block_hashes, log.num_prompt_tokens)
        if now >= self._due_at:
            self._due_at = now + REFRESH_S
            self._refresh()
        self._num_seen += 1
        if log.submit.session is not None:
            return RetainOn.DECODE
        self._owed[kind] = min(2.0, self._owed[kind] + self._shares[kind])
        if self._owed[kind] < 1.0:
            return RetainOn.NOBODY
        self._owed[kind] -= 1.0
        if prefill is None:
            return RetainOn.DECODE
        self._prefill_owed += self._prefill_share
        if self._prefill_owed < 1.0:
            return RetainOn.DECODE
        self._prefill_owed -= 1.0
        return RetainOn.PREFILL

    def _refresh(self) -> None:
        ours, theirs = _room(self._prefills), _room(self._decodes)
        self._prefill_share = ours / max(1, ours + theirs)
        if self._num_seen >= MIN_REQUESTS:
            self._shares = self._reuse.worth_keeping(ours + theirs)


def _room(fleet: Fleet) -> int:
    """Tokens of KV that the workers could keep beside what requests hold now."""
    return sum(
        (max(0, e.num_free_blocks) + e.info.num_host_blocks + e.info.num_disk_blocks)
        * e.info.block_size
        for e in fleet
    )
