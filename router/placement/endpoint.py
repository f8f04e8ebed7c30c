"""One worker of one epoch, as a router sees it.

Life: made when the controller says the worker is up; fed by its statistics and by what this router
sends it; dead for ever when the controller says so (a new epoch is a new `Endpoint`).

Statistics are late by up to an interval, so what was dispatched is booked at once. When statistics
come, booked work that they must know of is taken off them: the rest is other routers' load.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from ctypes import c_bool, c_double, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from math import exp

from engine.stats import Role, WorkerInfo, WorkerStats
from router.placement.prompt_queue import PromptQueue

SETTLE_S = 0.1  # statistics that come this long after a dispatch count it
TYPICAL_S = 10.0  # time constant of the typical number of decoding sequences
NUM_WEIGHTS = 4  # of a fit, as `engine.cost` has it
RATES = (
    "prefill_tokens_per_s",
    "decode_step_s",
    "read_bytes_per_s",
    "host_read_bytes_per_s",
    "disk_read_bytes_per_s",
)


@cache
def model_number(fingerprint: bytes) -> int:
    """Equal for equal fingerprints."""
    return int.from_bytes(blake2b(fingerprint, digest_size=8).digest())


class Rates(ctypes.Structure):
    """What a cost is computed with, in SI units; 0 or no weights: not measured. `rates` of
    native/worker.h."""

    prefill_tokens_per_s: float
    decode_step_s: float
    read_bytes_per_s: float
    host_read_bytes_per_s: float
    disk_read_bytes_per_s: float

    _fields_ = (
        ("prefill_tokens_per_s", c_double),
        ("decode_step_s", c_double),
        ("read_bytes_per_s", c_double),
        ("host_read_bytes_per_s", c_double),
        ("disk_read_bytes_per_s", c_double),
        ("prompt_weights", c_double * NUM_WEIGHTS),
        ("decode_weights", c_double * NUM_WEIGHTS),
        ("has_prompt_weights", c_bool),
        ("has_decode_weights", c_bool),
    )

    def set_weights(self, prompt: tuple[float, ...], decode: tuple[float, ...]) -> None:
        """Empty: there is no fit yet."""
        self.has_prompt_weights, self.has_decode_weights = bool(prompt), bool(decode)
        if prompt:
            self.prompt_weights = prompt
        if decode:
            self.decode_weights = decode


@dataclass(slots=True)
class Booking:
    """One dispatched request: what the worker has still to do for it."""

    booked_at: float
    prefill_tokens: int  # to be computed here
    num_blocks: int  # to be allocated here
    counted: bool = False  # True: the last statistics know of it
    decoding: bool = False


class Endpoint(ctypes.Structure):
    """Owned by the router's pool. Invariant: the `own_*` sums are those over `bookings`.

    Its numbers lie in memory that native code reads: `worker` of native/worker.h."""

    slot: int  # its blocks in the prefix index
    tie: int  # its place among equally busy ones
    heard_at: float
    excluded_until: float
    typical_decoding: float
    chosen_at: int  # number of the decision that last took this worker
    num_blocks: int
    alive: bool
    is_placed: bool  # in its fleet
    _num_booked: int
    _told_free_blocks: int
    _own_tokens: int
    _own_decoding: int
    _uncounted_blocks: int
    _other_tokens: int
    _other_seqs: int

    _anonymous_ = ("rates",)
    _fields_ = (
        ("model", c_uint64),
        ("block_size", c_int64),
        ("num_blocks", c_int64),
        ("max_model_len", c_int64),
        ("max_seq_blocks", c_int64),
        ("max_num_batched_tokens", c_int64),
        ("bytes_per_token", c_double),
        ("slot", c_int64),
        ("tie", c_int64),
        ("heard_at", c_double),
        ("excluded_until", c_double),
        ("typical_decoding", c_double),
        ("chosen_at", c_int64),
        ("_num_booked", c_int64),
        ("_told_free_blocks", c_int64),
        ("_own_tokens", c_int64),
        ("_own_decoding", c_int64),
        ("_uncounted_blocks", c_int64),
        ("_other_tokens", c_int64),
        ("_other_seqs", c_int64),
        ("rates", Rates),
        ("_waiting", c_void_p),
        ("_placed_busy", c_int64),
        ("_placed_chosen_at", c_int64),
        ("_is_prefill", c_bool),
        ("alive", c_bool),
        ("_has_stats", c_bool),
        ("is_placed", c_bool),
    )
    __hash__ = object.__hash__

    def __init__(self, info: WorkerInfo, heard_at: float) -> None:
        super().__init__(
            model=model_number(info.fingerprint),
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_model_len=info.max_model_len,
            max_seq_blocks=info.max_seq_blocks,
            max_num_batched_tokens=info.max_num_batched_tokens,
            bytes_per_token=info.bytes_per_block / info.block_size,
            slot=-1,
            heard_at=heard_at,
            _told_free_blocks=info.num_blocks,
            _is_prefill=info.role is Role.PREFILL,
            alive=True,
        )
        self.info = info
        self.worker = info.worker
        self.address = ctypes.addressof(self)
        self.stats: WorkerStats | None = None
        self.bookings: dict[str, Booking] = {}
        self.failures = 0  # in a row
        self.prompt_tokens = 0  # of requests whose prefix hit this worker has reported
        self.cached_tokens = 0
        self.cached_tokens_by_source: Counter[str] = Counter()
        self.prompts = PromptQueue()
        self._waiting = self.prompts.address

    @property
    def pending_prefill_tokens(self) -> int:
        """Prompt tokens known to wait for computation there, of all routers."""
        return self._own_tokens + self._other_tokens

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
        return self._told_free_blocks - self._uncounted_blocks

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
        self._num_booked += 1
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
        self._num_booked -= 1
        self._own_tokens -= booking.prefill_tokens
        self._own_decoding -= booking.decoding
        if booking.counted:  # until statistics say so, it is as good as known that they are free
            self._told_free_blocks = min(
                self.num_blocks, self._told_free_blocks + booking.num_blocks
            )
        else:
            self._uncounted_blocks -= booking.num_blocks
        return True

    def observe(self, now: float, stats: WorkerStats) -> None:
        """Take statistics in and settle the books against them."""
        elapsed_s = now - self.heard_at if self.stats is not None else TYPICAL_S
        weight = 1.0 - exp(-max(0.0, elapsed_s) / TYPICAL_S)
        self.typical_decoding += weight * (stats.num_running - self.typical_decoding)
        self.stats = stats
        self._has_stats = True
        self._told_free_blocks = stats.num_free_blocks - stats.num_wanted_blocks
        self.heard_at = now
        rates = self.rates
        for name in RATES:
            setattr(rates, name, getattr(stats, name))
        rates.set_weights(stats.prompt_weights, stats.decode_weights)
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
            "requests": (self._num_booked, len(bookings)),
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
