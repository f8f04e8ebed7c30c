"""What of a prompt's KV is worth keeping, and on which worker.

After a handoff both workers have it. Any worker can fetch it from either, so one copy is enough,
and the other is evicted first. The copies are split so that KV lasts as long in one pool as in the
other: in proportion to the memory that each pool has free of running requests. Where there is too
little memory for all, KV that is least likely to be used again is retained on no worker, so that
the rest lasts until it is used. KV of a session is kept where it is decoded, since orders about the
session go there.

How likely KV is to be used again, and how soon, is measured on the prompts that arrive. A prompt
that continues an earlier one is found by the block hashes at a few positions of each, so that the
cost does not depend on what is still cached. Requests are told apart by what is known when they
end: how many turns went before, and whether they are long enough to be continued at all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from kvrelay.router.placement.endpoint import Endpoint
from kvrelay.router.placement.policy import Fleet
from kvrelay.router.record import RequestRecord, RetainOn

REFRESH_S = 2.0  # room and reuse change slowly
MIN_REQUESTS = 500  # before any KV is retained on no worker
MAX_REMEMBERED = 50_000  # requests
NUM_TURNS = 5  # from so many on, turns are counted as one kind
FORGET = 0.999  # weight of earlier requests, with each new one of the kind
HEAVY = 1e100  # weight of a new request at which all weights are scaled down

POSITIONS = tuple(sorted({*(1 << i for i in range(21)), *(3 << i for i in range(20))}))
"""Lengths in blocks at which beginnings of prompts are remembered."""
GAPS_S = tuple(0.5 * 2 ** (i / 2) for i in range(28))
"""Upper ends of the bins of gaps between the end of a request and the next turn."""


@dataclass(slots=True)
class RequestKind:
    """Requests that are alike. `gaps[i]` of them were continued after a gap in bin i. Old requests
    count for less: each new one weighs more than the last."""

    num_requests: float = 0.0
    num_tokens: float = 0.0  # KV, as `Reuse` weighs them: see `Reuse.rate`
    gaps: list[float] = field(default_factory=lambda: [0.0] * (len(GAPS_S) + 1))
    weight: float = 1.0  # what the latest request has, in `num_requests` and `gaps`

    def count(self) -> None:
        """One request more has come."""
        self.weight /= FORGET
        if self.weight > HEAVY:
            self.num_requests /= self.weight
            self.gaps = [gap / self.weight for gap in self.gaps]
            self.weight = 1.0
        self.num_requests += self.weight

    def add_gap(self, gap_s: float) -> None:
        """One of them was continued after `gap_s`."""
        self.gaps[bisect_right(GAPS_S, gap_s)] += self.weight

    def continued_within(self, seconds: float) -> float:
        """Share of the requests that are continued so soon."""
        if self.num_requests < self.weight:
            return 0.0
        whole = bisect_right(GAPS_S, seconds)
        total = sum(self.gaps[:whole])
        if whole < len(GAPS_S):  # the bin that it lies in, in part
            begin = GAPS_S[whole - 1] if whole else 0.0
            total += self.gaps[whole] * (seconds - begin) / (GAPS_S[whole] - begin)
        return min(1.0, total / self.num_requests)


@dataclass(slots=True)
class _Seen:
    at_s: float
    turn: int
    continued: bool = False


class Reuse:
    """How likely KV is to be used again, and how soon. Invariant: `_seen` has the latest request
    for each beginning of a prompt that it remembers, at most MAX_REMEMBERED."""

    def __init__(self) -> None:
        self.kinds = [RequestKind() for _ in range(NUM_TURNS + 1)]
        self._seen: OrderedDict[bytes, _Seen] = OrderedDict()
        self._since: float | None = None
        self._tokens_s = 0.0  # time over which tokens were counted, with the same weights
        self._weight = 1.0  # what comes now has

    def on_prompt(self, now: float, block_hashes: Sequence[bytes], num_tokens: int) -> int:
        """A prompt with these block hashes has arrived. Returns its kind."""
        turn, kind = 0, 0
        last = bisect_right(POSITIONS, len(block_hashes))
        seen_at = self._seen.get
        for position in POSITIONS[last - 1 : 0 : -1] if last else ():
            seen = seen_at(block_hashes[position - 1])
            if seen is not None:
                turn = seen.turn + 1
                if not seen.continued:
                    seen.continued = True
                    self._kind(seen.turn, position).add_gap(now - seen.at_s)
                break
        if last:
            longest = POSITIONS[last - 1]
            block_hash = block_hashes[longest - 1]
            kind = _kind_number(turn, longest)
            self._seen[block_hash] = _Seen(now, turn)
            self._seen.move_to_end(block_hash)
            if len(self._seen) > MAX_REMEMBERED:
                self._seen.popitem(last=False)
        self._count(now, self.kinds[kind], num_tokens)
        return kind

    def rate(self, kind: RequestKind) -> float:
        """Tokens of KV that requests of this kind bring per second."""
        return kind.num_tokens / self._tokens_s if self._tokens_s else 0.0

    def worth_retaining(self, room_tokens: float) -> list[float]:
        """The share of each kind's requests whose KV to keep, so that most tokens are found again
        in a cache of `room_tokens` that is emptied from its oldest end.

        Keeping less keeps it longer. With kinds in the order of how often they are continued, this
        tries all of the first few and a part of the next."""
        rates = [self.rate(kind) for kind in self.kinds]
        longest_s = GAPS_S[-1]
        chances = [kind.continued_within(longest_s) for kind in self.kinds]
        order = sorted(range(len(rates)), key=lambda kind: -chances[kind])
        kept_before = [0.0, *accumulate(rates[kind] for kind in order)]
        best, best_found = [1.0] * len(rates), 0.0
        for position, marginal in enumerate(order):
            for part in (0.25, 0.5, 0.75, 1.0):
                inflow = kept_before[position] + part * rates[marginal]
                lifetime_s = min(longest_s, room_tokens / inflow) if inflow > 0 else longest_s
                shares = [0.0] * len(rates)
                for kind in order[:position]:
                    shares[kind] = 1.0
                shares[marginal] = part
                found = sum(
                    share * rates[kind] * self.kinds[kind].continued_within(lifetime_s)
                    for kind, share in enumerate(shares)
                )
                if found > best_found * 1.001 or (found >= best_found and lifetime_s == longest_s):
                    best, best_found = shares, found
        return best

    def _kind(self, turn: int, num_blocks: int) -> RequestKind:
        return self.kinds[_kind_number(turn, num_blocks)]

    def _count(self, now: float, kind: RequestKind, num_tokens: int) -> None:
        kind.count()
        self._weight /= FORGET
        if self._weight > HEAVY:
            for other in self.kinds:
                other.num_tokens /= self._weight
            self._tokens_s /= self._weight
            self._weight = 1.0
        kind.num_tokens += num_tokens * self._weight
        if self._since is not None:
            self._tokens_s += (now - self._since) * self._weight
        self._since = now


class RetentionPolicy:
    """Owned by a dispatcher. Invariant: of any run of handoffs, prefill workers keep a share equal
    to theirs of the free memory, to within one request; likewise for what is kept of each kind."""

    def __init__(self, decodes: Fleet, prefills: Fleet) -> None:
        self._decodes = decodes
        self._prefills = prefills
        self._reuse = Reuse()
        self._num_seen = 0
        self._due_at = float("-inf")
        self._prefill_share = 0.0
        self._prefill_owed = 0.0  # requests that prefill workers should have kept and did not
        self._shares = [1.0] * len(self._reuse.kinds)
        self._owed = [0.0] * len(self._reuse.kinds)

    def choose(
        self,
        now: float,
        record: RequestRecord,
        block_hashes: Sequence[bytes],
        prefill: Endpoint | None,
    ) -> RetainOn:
        """For a request that is dispatched now. `block_hashes`: of its full blocks."""
        kind = self._reuse.on_prompt(now, block_hashes, record.num_prompt_tokens)
        if now >= self._due_at:
            self._due_at = now + REFRESH_S
            self._refresh()
        self._num_seen += 1
        if record.submit.session is not None:
            return RetainOn.DECODE
        self._owed[kind] = min(2.0, self._owed[kind] + self._shares[kind])
        if self._owed[kind] < 1.0:
            return RetainOn.NONE
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
            self._shares = self._reuse.worth_retaining(ours + theirs)


def _room(fleet: Fleet) -> int:
    """Tokens of KV that the workers could cache beside what requests hold now."""
    return sum(
        (max(0, e.num_free_blocks) + e.info.num_host_blocks + e.info.num_disk_blocks)
        // e.info.row_blocks
        * e.info.block_size
        for e in fleet
    )


def _kind_number(turn: int, num_blocks: int) -> int:
    return min(turn, NUM_TURNS - 1) + 1 if num_blocks >= 2 else 0
