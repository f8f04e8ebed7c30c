"""How likely KV is to be used again, and how soon: learned from the prompts that come.

A prompt that continues an earlier one is found by hashes of blocks at a few positions of each, so
that it costs the same whatever is still cached anywhere. Requests are told apart by what is known
when they end: how many turns went before, and whether they are long enough to be continued at all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

MAX_REMEMBERED = 50_000  # requests
NUM_TURNS = 5  # from so many on, turns are counted as one kind
FORGET = 0.999  # weight of what was learned, with each request of the kind
HEAVY = 1e100  # of what is new beside what was learned, when the weights begin anew

POSITIONS = tuple(sorted({*(1 << i for i in range(21)), *(3 << i for i in range(20))}))
"""Lengths in blocks at which beginnings of prompts are remembered."""
GAPS_S = tuple(0.5 * 2 ** (i / 2) for i in range(28))
"""Upper ends of the bins of gaps between a request's end and the next one's coming."""


@dataclass(slots=True)
class Kind:
    """Requests that are alike. `gaps[i]` of them were continued after a gap in bin i. What was
    learned fades: what is new weighs more, each time."""

    num_requests: float = 0.0
    num_tokens: float = 0.0  # of KV, as `Reuse` weighs them: see `Reuse.rate`
    gaps: list[float] = field(default_factory=lambda: [0.0] * (len(GAPS_S) + 1))
    weight: float = 1.0  # of the latest request, in `num_requests` and `gaps`

    def count(self) -> None:
        """One request more."""
        self.weight /= FORGET
        if self.weight > HEAVY:
            self.num_requests /= self.weight
            self.gaps = [gap / self.weight for gap in self.gaps]
            self.weight = 1.0
        self.num_requests += self.weight

    def learn_gap(self, gap_s: float) -> None:
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
    """Owned by a dispatcher. Invariant: `_seen` has the latest request for each beginning of a
    prompt that it remembers, at most MAX_REMEMBERED."""

    def __init__(self) -> None:
        self.kinds = [Kind() for _ in range(NUM_TURNS + 1)]
        self._seen: OrderedDict[bytes, _Seen] = OrderedDict()
        self._since: float | None = None
        self._tokens_s = 0.0  # time over which tokens were counted, with the same weights
        self._weight = 1.0  # of what comes now

    def note(self, now: float, block_hashes: Sequence[bytes], num_tokens: int) -> int:
        """A prompt has come, whose blocks have these hashes. Returns its kind."""
        turn, kind = 0, 0
        last = bisect_right(POSITIONS, len(block_hashes))
        seen_at = self._seen.get
        for position in POSITIONS[last - 1 : 0 : -1] if last else ():
            seen = seen_at(block_hashes[position - 1])
            if seen is not None:
                turn = seen.turn + 1
                if not seen.continued:
                    seen.continued = True
                    self._kind(seen.turn, position).learn_gap(now - seen.at_s)
                break
        if last:
            longest = POSITIONS[last - 1]
            name = block_hashes[longest - 1]
            kind = _kind_number(turn, longest)
            self._seen[name] = _Seen(now, turn)
            self._seen.move_to_end(name)
            if len(self._seen) > MAX_REMEMBERED:
                self._seen.popitem(last=False)
        self._count(now, self.kinds[kind], num_tokens)
        return kind

    def rate(self, kind: Kind) -> float:
        """Tokens of KV that requests of this kind bring per second."""
        return kind.num_tokens / self._tokens_s if self._tokens_s else 0.0

    def worth_keeping(self, room_tokens: float) -> list[float]:
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

    def _kind(self, turn: int, num_blocks: int) -> Kind:
        return self.kinds[_kind_number(turn, num_blocks)]

    def _count(self, now: float, kind: Kind, num_tokens: int) -> None:
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


def _kind_number(turn: int, num_blocks: int) -> int:
    return min(turn, NUM_TURNS - 1) + 1 if num_blocks >= 2 else 0
