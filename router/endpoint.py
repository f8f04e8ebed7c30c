"""One worker of one epoch, as a router sees it.

Life: made when the controller says the worker is up; fed by its statistics and by what this router
sends it; dead for ever when the controller says so (a new epoch is a new `Endpoint`).

Statistics are late by up to an interval, so what was dispatched is booked at once. When statistics
come, booked work that they must know of is taken off them: the rest is other routers' load.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import exp

from engine.node import NodeId
from engine.stats import WorkerInfo, WorkerStats
from router.prompt_queue import PromptQueue

SETTLE_S = 0.1  # statistics that come this long after a dispatch count it
TYPICAL_S = 10.0  # time constant of the typical number of decoding sequences


@dataclass(slots=True)
class Rates:
    """What a cost is computed with: a worker's own measurements, the fleet's where it has none."""

    prefill_tokens_per_s: float
    decode_step_s: float
    read_bytes_per_s: float
    host_read_bytes_per_s: float
    disk_read_bytes_per_s: float
    prompt_weights: tuple[float, ...]
    decode_weights: tuple[float, ...]
    of: WorkerStats | None  # the statistics that they were taken from
    is_own: bool  # True: nothing of it is the fleet's
    age: int  # of the fleet's rates then


@dataclass(slots=True)
class Booking:
    """One dispatched request: what the worker has still to do for it."""

    booked_at: float
    prefill_tokens: int  # to be computed here
    num_blocks: int  # to be allocated here
    counted: bool = False  # True: the last statistics know of it
    decoding: bool = False


@dataclass(slots=True, eq=False)
class Endpoint:
    """Owned by the router's pool. Invariant: the `_own_*` sums are those over `bookings`."""

    info: WorkerInfo
    heard_at: float
    alive: bool = True
    stats: WorkerStats | None = None
    bookings: dict[str, Booking] = field(default_factory=dict)
    failures: int = 0  # in a row
    excluded_until: float = 0.0
    chosen_at: int = 0  # number of the decision that last took this worker
    prompt_tokens: int = 0  # of requests whose prefix hit this worker has reported
    cached_tokens: int = 0
    cached_tokens_by_source: Counter[str] = field(default_factory=Counter)
    typical_decoding: float = 0.0
    rates: Rates | None = None  # kept by the cost model
    prompts: PromptQueue = field(default_factory=PromptQueue)
    _own_tokens: int = 0
    _own_decoding: int = 0
    _uncounted_blocks: int = 0
    _other_tokens: int = 0
    _other_seqs: int = 0

    @property
    def worker(self) -> NodeId:
        return self.info.worker

    @property
    def pending_prefill_tokens(self) -> int:
        """Prompt tokens known to wait for computation there, of all routers."""
        return self._own_tokens + self._other_tokens

    @property
    def other_prefill_tokens(self) -> int:
        """Of these, what other routers have sent there."""
        return self._other_tokens

    @property
    def used_fraction(self) -> float:
        """Of its KV pool, what requests hold or are about to."""
        return 1.0 - self.num_free_blocks / self.info.num_blocks

    @property
    def num_seqs(self) -> int:
        """Requests there, in whatever state, of all routers."""
        return len(self.bookings) + self._other_seqs

    @property
    def num_decoding(self) -> int:
        return self._own_decoding + self._other_seqs

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds or waits for; negative where more is wanted than there is."""
        free = self.info.num_blocks
        if self.stats is not None:
            free = self.stats.num_free_blocks - self.stats.num_wanted_blocks
        return free - self._uncounted_blocks

    def book(
        self,
        now: float,
        request_id: str,
        prefill_tokens: int,
        num_blocks: int,
        prefill_s: float = 0.0,
    ) -> None:
        """`prefill_s`: how long the `prefill_tokens` should take to be computed."""
        assert request_id not in self.bookings, f"{request_id} is booked twice on {self.worker}"
        self.bookings[request_id] = Booking(now, prefill_tokens, num_blocks)
        if prefill_tokens:
            self.prompts.add(now, request_id, prefill_s)
        self._own_tokens += prefill_tokens
        self._uncounted_blocks += num_blocks

    def start_decoding(self, now: float, request_id: str) -> None:
        """The first token of `request_id` has come: no more of its prompt is to be computed."""
        self.prompts.discard(now, request_id)
        booking = self.bookings.get(request_id)
        if booking is not None and not booking.decoding:
            self._own_tokens -= booking.prefill_tokens
            booking.prefill_tokens = 0
            booking.decoding = True
            self._own_decoding += 1

    def release(self, request_id: str) -> bool:
        """Take `request_id` off the books. False: it was not on them."""
        self.prompts.discard(None, request_id)
        booking = self.bookings.pop(request_id, None)
        if booking is None:
            return False
        self._own_tokens -= booking.prefill_tokens
        self._own_decoding -= booking.decoding
        if not booking.counted:
            self._uncounted_blocks -= booking.num_blocks
        return True

    def observe(self, now: float, stats: WorkerStats) -> None:
        """Take statistics in and settle the books against them."""
        elapsed_s = now - self.heard_at if self.stats is not None else TYPICAL_S
        weight = 1.0 - exp(-max(0.0, elapsed_s) / TYPICAL_S)
        self.typical_decoding += weight * (stats.num_running - self.typical_decoding)
        self.stats = stats
        self.heard_at = now
        known = [b for b in self.bookings.values() if b.booked_at + SETTLE_S <= now]
        for booking in known:
            if not booking.counted:
                booking.counted = True
                self._uncounted_blocks -= booking.num_blocks
        self._other_seqs = max(0, stats.num_running + stats.num_waiting - len(known))
        # One pending token of each running sequence is the one it decodes next.
        pending = max(0, stats.pending_prefill_tokens - stats.num_running)
        excess = sum(b.prefill_tokens for b in known) - pending
        self._other_tokens = max(0, -excess)
        for booking in known:  # prompts are computed in the order they came
            done = min(max(0, excess), booking.prefill_tokens)
            booking.prefill_tokens -= done
            self._own_tokens -= done
            excess -= done

    def fail(self, now: float, backoff_s: float, max_backoff_s: float) -> None:
        """Leave the worker alone for a while; longer with every failure in a row."""
        self.excluded_until = now + min(max_backoff_s, backoff_s * 2.0 ** min(self.failures, 30))
        self.failures += 1

    def succeed(self) -> None:
        self.failures = 0

    def check_integrity(self) -> list[str]:
        """A line for each sum that is not that over `bookings`."""
        bookings = self.bookings.values()
        sums = {
            "prefill tokens": (self._own_tokens, sum(b.prefill_tokens for b in bookings)),
            "decoding": (self._own_decoding, sum(b.decoding for b in bookings)),
            "blocks": (
                self._uncounted_blocks,
                sum(b.num_blocks for b in bookings if not b.counted),
            ),
        }
        return [
            f"{self.worker} counts {kept} {name}, its bookings have {real}"
            for name, (kept, real) in sums.items()
            if kept != real
        ]

    def usable(self, now: float, max_inflight: int) -> bool:
        return self.alive and now >= self.excluded_until and len(self.bookings) < max_inflight
