"""Links: from a worker that has KV to one that reads it, and how often nothing came.

Life of a link: there is none as long as all that was read there came. Each loss counts, and what is
old counts for less. With LEAST_LOST of them the link is bad, and costs what a loss costs, times the
share of losses. After a while without a loss, one request is sent over it as if it were good: if
its KV comes, the link is forgotten, else it is left alone for twice as long. Requests that follow
while that is not known count it as bad.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp

from kvrelay.engine.backoff import Backoff
from kvrelay.router.placement.endpoint import Endpoint, Ends
from kvrelay.router.status import LinkLoss

LEAST_LOST = 2.5  # about three losses; with fewer nothing changes
MAX_CASES = 16.0  # cases that are remembered
FADES_S = 600.0  # time constant with which they are forgotten
RETRY = Backoff(30.0, 480.0)  # after the loss that makes a link bad, and after each trial
MAX_LINKS = 4096


@dataclass(slots=True)
class LinkHistory:
    """Invariant: `lost <= cases <= MAX_CASES`, as of `at`."""

    at: float
    cases: float = 0.0
    lost: float = 0.0
    wait_s: float = 0.0  # that a loss took beyond what the KV should have taken, on average
    is_bad: bool = False
    num_trials: int = 0
    retry_at: float = 0.0

    def lost_share(self, now: float) -> float:
        """What is expected to get lost from now on; 0 while it is good, or is to be tried."""
        return self.lost / self.cases if self.is_bad and now < self.retry_at else 0.0

    def add(self, now: float, *, is_lost: bool) -> None:
        kept = exp(min(0.0, self.at - now) / FADES_S)
        kept = min(kept, (MAX_CASES - 1.0) / self.cases) if self.cases else 1.0
        self.at, self.cases, self.lost = now, self.cases * kept + 1.0, self.lost * kept + is_lost
        self.is_bad = self.lost >= LEAST_LOST or (self.is_bad and is_lost)


class KVLinks:
    """Owned by a dispatcher. Invariant: has the links between living workers on which something was
    lost, at most MAX_LINKS of them."""

    def __init__(self) -> None:
        self._links: dict[Ends, LinkHistory] = {}

    def begin(self, now: float, ends: Ends) -> bool:
        """A request is sent over it. True: to try it."""
        link = self._links.get(ends)
        if link is None or not link.is_bad or now < link.retry_at:
            return False
        link.num_trials += 1
        link.retry_at = now + RETRY.pause_s(1 + link.num_trials)
        return True

    def end(
        self, now: float, ends: Ends, *, is_lost: bool, is_trial: bool, wait_s: float = 0.0
    ) -> bool:
        """Its KV has come, or not: then who reads has waited for `wait_s` in vain. True: the link
        is bad from now on."""
        link = self._links.get(ends)
        if link is None:
            if not is_lost or not (ends.source.alive and ends.reader.alive):
                return False
            if len(self._links) == MAX_LINKS:
                del self._links[next(iter(self._links))]
            link = self._links[ends] = LinkHistory(now)
        elif is_trial and not is_lost:
            del self._links[ends]
            return False
        was_bad = link.is_bad
        link.add(now, is_lost=is_lost)
        if is_lost:
            link.wait_s += (wait_s - link.wait_s) / max(1.0, link.lost)
            link.retry_at = now + RETRY.pause_s(1 + link.num_trials)
        return link.is_bad and not was_bad

    def forget(self, endpoint: Endpoint) -> None:
        """Forget the links of a worker that is gone."""
        for ends in [each for each in self._links if endpoint in each]:
            del self._links[ends]

    def bad(self, now: float) -> Iterator[tuple[Ends, float, float]]:
        """Those that are to be avoided now, with the share of losses, and what each waits for."""
        for ends, link in self._links.items():
            lost_share = link.lost_share(now)
            if lost_share:
                yield ends, lost_share, link.wait_s

    def losses(
        self, now: float, of: tuple[Endpoint | None, ...] | None = None
    ) -> tuple[LinkLoss, ...]:
        """`of`: with one of these at an end; None: all."""
        return tuple(
            LinkLoss(ends.source.worker, ends.reader.worker, ends.fetches, lost_share, wait_s)
            for ends, lost_share, wait_s in self.bad(now)
            if of is None or ends.source in of or ends.reader in of
        )
