"""Who serves a request: decode worker first, then whether to hand its prefill over, then to whom.

"prefix" takes the cheapest placement in seconds; in each, whoever computes may fetch from a third
worker what that one holds of the prefix. "round_robin" and "least_loaded" are baselines: they know
nothing of prefixes, fetch nothing, and hand every prefill over when there is anybody to hand it to.

Choices repeat exactly: ties (within a millisecond) go to the worker with the fewest requests, then
the emptiest cache, then the one that was chosen longest ago, then by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.node import NodeId
from router.cost import CostModel, Placement, Seconds, Work
from router.endpoint import Endpoint
from router.prefix_index import Held

MAX_EXPLAINED = 8  # candidates kept in a decision, the best ones


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve the request. For a prefill worker alone, only queue and prefill count."""

    worker: NodeId
    prefill_from: NodeId | None
    fetch_from: NodeId | None  # who lends whoever computes what it holds of the prefix
    cached: Held  # tokens on `worker`
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice and what stood beside it, best first, so that it can be explained."""

    request_id: str
    attempt: int
    at_s: float  # the router's clock
    policy: str
    num_tokens: int
    decode: NodeId
    prefill: NodeId | None
    fetch_from: NodeId | None  # by `prefill`, or else by `decode`
    seconds: Seconds
    decode_candidates: tuple[Candidate, ...]
    prefill_candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    decode: Endpoint
    prefill: Endpoint | None
    placement: Placement
    decode_candidates: tuple[Candidate, ...]
    prefill_candidates: tuple[Candidate, ...]


@dataclass(slots=True)
class _Option:
    endpoint: Endpoint
    prefill: _Option | None
    placement: Placement
    cached: Held
    key: tuple[float, ...] = ()

    def candidate(self) -> Candidate:
        return Candidate(
            worker=self.endpoint.worker,
            prefill_from=None if self.prefill is None else self.prefill.endpoint.worker,
            fetch_from=self.placement.intake.fetch_from,
            cached=self.cached,
            seconds=self.placement.seconds,
        )


class Policy:
    """Owned by a router. Invariant: its choice depends on its arguments and on earlier choices
    only; `chosen_at` of an endpoint is the number of the last choice that took it."""

    def __init__(self, name: str, cost: CostModel, num_blocks: Callable[[NodeId], int]) -> None:
        """`num_blocks` tells how many blocks are cached on a worker."""
        self.name = name
        self._cost = cost
        self._num_blocks = num_blocks
        self._num_choices = 0

    def choose(
        self, work: Work, decodes: Sequence[Endpoint], prefills: Sequence[Endpoint]
    ) -> Choice:
        """Pick from `decodes` (at least one) and `prefills` (perhaps none; only those with the
        fingerprint of the decode worker are considered). Both are sorted by name."""
        assert decodes, "nobody to choose from"
        self._num_choices += 1
        if self.name != "prefix":
            work = replace(work, lenders=())
        prefill_options = self._ranked(
            [_Option(p, None, self._cost.prefill(p, work), work.held_by(p)) for p in prefills]
        )
        decode_options = self._ranked(
            [o for d in decodes for o in self._decode_options(d, work, prefill_options)]
        )
        best = decode_options[0]
        best.endpoint.chosen_at = self._num_choices
        if best.prefill is not None:
            best.prefill.endpoint.chosen_at = self._num_choices
        return Choice(
            decode=best.endpoint,
            prefill=None if best.prefill is None else best.prefill.endpoint,
            placement=best.placement,
            decode_candidates=tuple(o.candidate() for o in decode_options[:MAX_EXPLAINED]),
            prefill_candidates=tuple(o.candidate() for o in prefill_options[:MAX_EXPLAINED]),
        )

    def _decode_options(
        self, decode: Endpoint, work: Work, prefill_options: list[_Option]
    ) -> list[_Option]:
        """On `decode`: all of it there, and with the best prefill worker that fits to it."""
        cached = work.held_by(decode)
        local = _Option(decode, None, self._cost.local(decode, work), cached)
        fingerprint = decode.info.fingerprint
        best = next(
            (p for p in prefill_options if p.endpoint.info.fingerprint == fingerprint), None
        )
        if best is None:
            return [local]
        remote = _Option(decode, best, self._cost.remote(decode, best.placement, work), cached)
        return [local, remote] if self.name == "prefix" else [remote]

    def _ranked(self, options: list[_Option]) -> list[_Option]:
        """Best first. The sort is stable: what is equal stays in the order of names."""
        for option in options:
            endpoint = option.endpoint
            # Chosen longest ago, and among those never chosen the first by name: round robin.
            if self.name == "round_robin":
                option.key = (endpoint.chosen_at,)
            elif self.name == "least_loaded":
                load = endpoint.num_seqs + endpoint.pending_prefill_tokens
                option.key = (load, endpoint.chosen_at)
            else:
                option.key = (
                    round(option.placement.seconds.total, 3),
                    endpoint.num_seqs,
                    self._num_blocks(endpoint.worker),
                    endpoint.chosen_at,
                )
        return sorted(options, key=lambda option: option.key)
