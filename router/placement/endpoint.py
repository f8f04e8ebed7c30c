"""One worker of one epoch, as a router sees it.

Life: made when the controller says the worker is up; updated by its statistics and by what this
router dispatches; dead for ever when the controller says so (a new epoch is a new `Endpoint`).

Statistics are up to an interval old, so what is dispatched is booked at once. When statistics come,
booked work that they must include is subtracted from them: the rest is other routers' load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from itertools import count
from math import exp
from operator import attrgetter
from typing import Any, NamedTuple

from kvrelay.engine.backoff import Backoff
from kvrelay.engine.needs import key_of
from kvrelay.engine.stats import Progress, Role, WorkerInfo, WorkerStats
from kvrelay.router.native.bindings import address_of, bindings, constants, ffi

SETTLE_S = 0.1  # statistics that come this long after a dispatch count it
# A worker may have one request in so many beside those that run: the next ones have their prompts
# computed, and all others wait at the router, where callers take turns.
AHEAD = 8
TYPICAL_S = 10.0  # time constant of what is typical: sequences that decode, prompts to compute
ROLE_BITS = {
    Role.DECODE: constants.DECODES,
    Role.PREFILL: constants.PREFILLS,
    Role.BOTH: constants.DECODES | constants.PREFILLS,
}


@cache
def model_number(fingerprint: bytes) -> int:
    """A number that is equal for equal fingerprints."""
    return int.from_bytes(blake2b(fingerprint, digest_size=8).digest())


@cache
def _fields_of(struct: str) -> attrgetter[tuple[Any, ...]]:
    return attrgetter(*dict(ffi.typeof(struct).fields))


def native(struct: str, facts: WorkerInfo | WorkerStats) -> Any:
    """A struct of the native code, each of whose fields is a fact by its name."""
    return ffi.new(f"{struct} *", _fields_of(struct)(facts))[0]


def struct_field(name: str) -> Any:
    """An attribute that is a field of an object's `struct`."""

    def write(owner: Any, value: float) -> None:
        setattr(owner.struct, name, value)

    return property(attrgetter(f"struct.{name}"), write)


@dataclass(slots=True)
class Booking:
    """One dispatched request: what the worker has still to do for it."""

    booked_at: float
    prefill_tokens: int  # to be computed here
    num_blocks: int  # to be allocated here
    token_s: float = 0.0  # to compute one of the tokens, at best
    counted: bool = False  # True: the last statistics know of it
    decoding: bool = False
    is_low: bool = False  # its class of service is a low one
    need: int = 0  # the key of what the worker loads for it; 0: nothing
    images: Sequence[int] = ()  # keys of those that it encodes for it


class PromptQueue:
    """The prompts that wait for computation on one worker, as a router that sent them sees it.
    Owned by an endpoint. Invariant: it has every booked prompt that is not known to be computed,
    with the seconds it still needs, under the number in `_tickets`.

    Workers compute the shortest prompt first. Between one message and the next a router only knows
    what it has sent and how long each should take: the queue runs down by itself, and what is
    reported corrects it."""

    __slots__ = ("_lib", "_numbers", "_tickets", "address", "struct")

    def __init__(self) -> None:
        self._lib = bindings()
        self.struct = ffi.gc(ffi.new("prompt_queue *"), _free_prompts)
        self.address = address_of(self.struct)
        self._tickets: dict[str, int] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, now: float, request_id: str, seconds: float) -> None:
        """`request_id` is not there yet."""
        ticket = self._tickets[request_id] = next(self._numbers)
        self._lib.kvr_prompts_add(self.address, now, ticket, seconds)

    def correct(self, now: float, request_id: str, seconds: float) -> None:
        """It still needs so long, if it is there."""
        ticket = self._tickets.get(request_id)
        if ticket is not None:
            self._lib.kvr_prompts_correct(self.address, now, ticket, seconds)

    def discard(self, now: float | None, request_id: str) -> None:
        """It is computed (`now`), or not wanted any more (None)."""
        ticket = self._tickets.pop(request_id, None)
        if ticket is not None:
            if now is not None:
                self._lib.kvr_prompts_run_down(self.address, now)
            self._lib.kvr_prompts_discard(self.address, ticket)


def _free_prompts(queue: Any) -> None:
    bindings().kvr_prompts_free(address_of(queue))


class Endpoint:
    """Owned by the router's pool. Invariant: the `own_*` sums are those over `bookings`.

    Its numbers lie in a struct that native code reads: `worker` of kvrelay_router.h."""

    model: int = struct_field("model")  # equal for workers that can use each other's KV
    slot: int = struct_field("slot")  # its blocks in the prefix index
    store_slot: int = struct_field("store_slot")  # those of the object store that it can read
    excluded_until: float = struct_field("excluded_until")
    typical_decoding: float = struct_field("typical_decoding")
    prompt_slowdown: float = struct_field("stats.prompt_slowdown")
    typical_prefilling: float = struct_field("typical_prefilling")
    chosen_at: int = struct_field("chosen_at")  # number of the decision that last took it
    held_blocks: int = struct_field("held_blocks")  # that one which was sent there waits for
    alive: bool = struct_field("alive")

    def __init__(self, info: WorkerInfo, last_seen_at: float) -> None:
        self.num_weight_changes = 0  # that are known
        self.info = info
        self.worker = info.worker
        self.prompts = PromptQueue()
        fields = {
            "model": model_number(info.fingerprint),
            "cores": model_number(info.cores.encode()) if info.cores else 0,
            "info": native("worker_info", info),
            "stats": {"num_free_blocks": info.num_blocks, "prompt_slowdown": 1.0},
            "max_booked": info.max_num_seqs + max(1, info.max_num_seqs // AHEAD),
            "slot": -1,
            "store_slot": -1,
            "last_seen_at": last_seen_at,
            "prompts": self.prompts.struct,
            "roles": ROLE_BITS[info.role],
            "alive": True,
        }
        self.struct = ffi.new("worker *", fields)
        self.address = address_of(self.struct)
        self.stats: WorkerStats | None = None
        self.bookings: dict[str, Booking] = {}
        self.loaded: set[int] = set()  # keys, as it says, or of what was sent there
        self.images = frozenset[int]()  # likewise, keys of those whose embeddings are there
        self.failures = 0  # in a row
        self._failed_at = float("-inf")
        self.silent_s = 0.0  # since its last statistics, or since it came up
        self.progress = Progress.MADE  # as it says
        self.complained_at = float("-inf")
        self.prompt_tokens = 0  # in requests whose prefix hit this worker has reported
        self.cached_tokens = 0
        self.cached_tokens_by_source: Counter[str] = Counter()

    def _set_images(self, keys: frozenset[int]) -> None:
        if keys != self.images:
            self.images, self._keys = keys, ffi.new("uint64_t[]", sorted(keys))
            self.struct.images, self.struct.num_images = self._keys, len(keys)

    def set_role(self, role: Role) -> None:
        self.info = replace(self.info, role=role)
        self.struct.roles = ROLE_BITS[role]

    def set_weights(self, fingerprint: bytes, name: str) -> None:
        """They are those of its last change that is known."""
        self.info = replace(self.info, fingerprint=fingerprint, weights=name)
        self.model = model_number(fingerprint)

    @property
    def free_share(self) -> float:
        """The share of its KV blocks that are free, but for those that are about to be
        allocated."""
        return max(0, self.num_free_blocks) / max(1, self.info.num_blocks)

    @property
    def num_seqs(self) -> int:
        """Requests there, in whatever state, of all routers."""
        number: int = len(self.bookings) + self.struct.other_seqs
        return number

    @property
    def num_decoding(self) -> int:
        number: int = self.struct.own_decoding + self.struct.other_seqs
        return number

    @property
    def num_free_blocks(self) -> int:
        """Blocks that are neither held nor waited for; negative where more are wanted than free."""
        stats = self.struct.stats
        number: int = stats.num_free_blocks - stats.num_wanted_blocks - self.struct.uncounted_blocks
        return number

    def book(
        self,
        now: float,
        request_id: str,
        prefill_tokens: int,
        num_blocks: int,
        prefill_s: float = 0.0,
        need: int = 0,
        images: Sequence[int] = (),
        *,
        is_low: bool = False,
    ) -> None:
        """`prefill_s`: how long the `prefill_tokens` should take to be computed. `is_low`: for a
        low class of service: others do not wait for its prompt."""
        assert request_id not in self.bookings, f"{request_id} is booked twice on {self.worker}"
        token_s = prefill_s / max(1, prefill_tokens) / self.prompt_slowdown
        booking = Booking(
            now, prefill_tokens, num_blocks, token_s, False, False, is_low, need, images
        )
        self.bookings[request_id] = booking
        self.loaded.add(need)
        if images:
            self._set_images(self.images.union(images))
        struct = self.struct
        struct.num_booked += 1
        struct.low_booked += is_low
        self._count_blocks(booking, num_blocks)
        if prefill_tokens:
            struct.own_tokens += prefill_tokens
            if not is_low:
                self.prompts.add(now, request_id, prefill_s)

    def start_decoding(self, now: float, request_id: str) -> None:
        """The first token of `request_id` has come: no more of its prompt is to be computed."""
        self.prompts.discard(now, request_id)
        booking = self.bookings.get(request_id)
        if booking is not None and not booking.decoding:
            self.struct.own_tokens -= booking.prefill_tokens
            booking.prefill_tokens = 0
            booking.decoding = True
            self.struct.own_decoding += 1
            self.struct.low_decoding += booking.is_low

    def release(self, request_id: str) -> bool:
        """Take `request_id` off the books. False: it was not on them."""
        self.prompts.discard(None, request_id)
        booking = self.bookings.pop(request_id, None)
        if booking is None:
            return False
        struct = self.struct
        struct.num_booked -= 1
        struct.own_tokens -= booking.prefill_tokens
        struct.own_decoding -= booking.decoding
        struct.low_booked -= booking.is_low
        struct.low_decoding -= booking.decoding and booking.is_low
        if booking.counted:  # until statistics say so, they are as good as known to be free
            stats = struct.stats
            most = self.info.num_blocks + stats.num_wanted_blocks
            stats.num_free_blocks = min(most, stats.num_free_blocks + booking.num_blocks)
            if booking.is_low:
                stats.num_low_blocks = max(0, stats.num_low_blocks - booking.num_blocks)
        else:
            self._count_blocks(booking, -booking.num_blocks)
        return True

    def _count_blocks(self, booking: Booking, num_blocks: int) -> None:
        """So many more are to be allocated for it, which no statistics know of yet."""
        self.struct.uncounted_blocks += num_blocks
        if booking.is_low:
            self.struct.low_uncounted_blocks += num_blocks

    def on_stats(self, now: float, stats: WorkerStats) -> None:
        """Take statistics in and settle the books against them."""
        elapsed_s = now - self.struct.last_seen_at if self.stats is not None else TYPICAL_S
        weight = 1.0 - exp(-max(0.0, elapsed_s) / TYPICAL_S)
        num_decoding = stats.num_decoding - stats.num_low_decoding
        self.typical_decoding += weight * (num_decoding - self.typical_decoding)
        has_prompts = stats.pending_prefill_tokens > stats.num_running
        self.typical_prefilling += weight * (has_prompts - self.typical_prefilling)
        self.stats = stats
        self.silent_s, self.progress = 0.0, stats.progress
        self.struct.has_stats = True
        self.struct.stats = native("worker_stats", stats)
        self.struct.last_seen_at = now
        self.loaded = {each.need for each in self.bookings.values()}
        self.loaded.update(map(key_of, stats.loaded))
        booked = [each.images for each in self.bookings.values() if each.images]
        if stats.images or booked or self.images:
            self._set_images(frozenset(stats.images).union(*booked))
        known = [b for b in self.bookings.values() if b.booked_at + SETTLE_S <= now]
        for booking in known:
            if not booking.counted:
                booking.counted = True
                self._count_blocks(booking, -booking.num_blocks)
        self.struct.other_seqs = max(0, stats.num_running + stats.num_waiting - len(known))
        # One pending token of each running sequence is the one it decodes next.
        pending = max(0, stats.pending_prefill_tokens - stats.num_running)
        excess = sum(b.prefill_tokens for b in known) - pending
        recent = sum(b.prefill_tokens for b in self.bookings.values() if not b.counted)
        self.struct.other_tokens = max(0, -excess - recent)
        for request_id, booking in self.bookings.items():  # computed in the order they came
            if not booking.counted:
                continue
            done = min(max(0, excess), booking.prefill_tokens)
            booking.prefill_tokens -= done
            self.struct.own_tokens -= done
            excess -= done
            if booking.prefill_tokens:
                left_s = booking.prefill_tokens * booking.token_s * self.prompt_slowdown
                self.prompts.correct(now, request_id, left_s)

    def fail(self, now: float, sent_at: float, backoff: Backoff) -> None:
        """Leave the worker alone for a while; longer with every failure in a row. An attempt of
        `sent_at` was lost. One failure of the worker costs it many attempts: those that it had
        before the last failure tell nothing new."""
        if sent_at <= self._failed_at:
            return
        self._failed_at = now
        self.failures += 1
        self.excluded_until = now + backoff.pause_s(self.failures)

    def succeed(self) -> None:
        self.failures = 0

    def check_integrity(self) -> list[str]:
        """A line for each sum that is not that over `bookings`."""
        bookings = self.bookings.values()
        sums = {
            "requests": (self.struct.num_booked, len(bookings)),
            "prefill tokens": (self.struct.own_tokens, sum(b.prefill_tokens for b in bookings)),
            "decoding": (self.struct.own_decoding, sum(b.decoding for b in bookings)),
            "low classes": (self.struct.low_booked, sum(b.is_low for b in bookings)),
            "blocks of low classes": (
                self.struct.low_uncounted_blocks,
                sum(b.num_blocks for b in bookings if b.is_low and not b.counted),
            ),
            "blocks": (
                self.struct.uncounted_blocks,
                sum(b.num_blocks for b in bookings if not b.counted),
            ),
        }
        return [
            f"{self.worker} counts {kept} {name}, its bookings have {real}"
            for name, (kept, real) in sums.items()
            if kept != real
        ]


class Ends(NamedTuple):
    """The ends of a link, by which KV is read. `fetches`: a prefix that `source` holds; else a
    prompt that it computes."""

    source: Endpoint
    reader: Endpoint
    fetches: bool
