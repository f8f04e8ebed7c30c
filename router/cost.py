"""What a placement costs, in seconds: one sum for the request itself and for those it delays.

total = queue + load + fetch + prefill + transfer + memory + decode   the request's own time
      + delay + stall + crowd                                         what it takes from others
  queue     prompts that go before it: those that are shorter
  load      reading KV from the worker's own host memory and disk into its device
  fetch     reading KV from a peer that holds more of the prefix
  prefill   computing the tokens that are missing then
  transfer  reading KV from the prefill worker, as far as it does not hide behind the prefill
  memory    waiting for blocks, where there are too few
  decode    its output at the worker's step time, with the KV that is there then
  delay     to the longer prompts, which now wait for this one
  stall     prefill time on a decode worker, once for each sequence that decodes there meanwhile;
            the few tokens that ride along in a decode step are free
  crowd     to the sequences there: each step takes longer

KV is loaded or fetched only where that is quicker than computing it. queue + load + fetch + prefill
is the time to the first token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.cost import decode_features, fitted_s, prompt_features
from engine.node import NodeId
from engine.stats import WorkerStats
from router.endpoint import Endpoint
from router.prefix_index import Held

SMOOTHING = 0.05  # weight of one worker's statistics in the fleet's rates
_RATES = (
    "prefill_tokens_per_s",
    "decode_step_s",
    "read_bytes_per_s",
    "host_read_bytes_per_s",
    "disk_read_bytes_per_s",
)


class Seconds(NamedTuple):
    """A cost by its parts."""

    queue: float = 0.0
    load: float = 0.0
    fetch: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0
    memory: float = 0.0
    decode: float = 0.0
    delay: float = 0.0
    stall: float = 0.0
    crowd: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def ttft(self) -> float:
        """From the decision to the first token."""
        return self.queue + self.load + self.fetch + self.prefill


class Holdings(Protocol):
    """What a lookup of a prompt has found."""

    def held(self, worker: NodeId) -> Held: ...


@dataclass(slots=True)
class Work:
    """What a request asks for."""

    num_tokens: int  # prompt and output so far: KV that must be there before the next token
    holdings: Holdings  # in blocks
    output_tokens: float  # expected from now on
    lenders: tuple[Endpoint, ...] = ()  # whom others may fetch from
    _held: dict[NodeId, Held] = field(default_factory=dict)

    def held_by(self, endpoint: Endpoint) -> Held:
        """In tokens."""
        worker = endpoint.worker
        held = self._held.get(worker)
        if held is None:
            held = self.holdings.held(worker).times(endpoint.info.block_size)
            self._held[worker] = held
        return held

    def missing(self, endpoint: Endpoint) -> int:
        """Tokens whose KV is not in device memory of `endpoint`, from wherever it is to come."""
        return self.num_tokens - self.held_by(endpoint).device


class Intake(NamedTuple):
    """How the worker that computes comes to the KV of the prompt: what its device does not hold is
    loaded, then fetched, and the rest computed."""

    computed: int  # tokens, as the following
    loaded: int = 0
    fetched: int = 0
    load_s: float = 0.0
    fetch_s: float = 0.0
    fetch_from: NodeId | None = None


class Placement(NamedTuple):
    """One way to serve a request, or for a prefill worker alone its part of it."""

    seconds: Seconds
    intake: Intake


@dataclass(slots=True)
class CostModel:
    """Owned by a router. The rates are the fleet's, for workers that have measured none yet; the
    numbers here are only believed until the first worker has reported one."""

    prefill_tokens_per_s: float = 1000.0
    decode_step_s: float = 0.03
    read_bytes_per_s: float = 1e9
    host_read_bytes_per_s: float = 2e9
    disk_read_bytes_per_s: float = 5e8
    prompt_weights: tuple[float, ...] = ()
    decode_weights: tuple[float, ...] = ()
    handoff_s: float = 0.01  # messages and connection of one handoff, whatever its size
    stalled_at_least: float = 0.5  # sequences that will come to decode while a prompt is computed
    free_tokens: int = 16  # of a prompt cost a decode step nothing: it waits for the weights anyway
    overhead_s: float = 0.0  # of a first token, beyond its parts: messages, the step under way
    _measured: frozenset[str] = frozenset()

    def observe(self, stats: WorkerStats) -> None:
        """Let one worker's rates count for the fleet; 0 is "not measured"."""
        for name in _RATES:
            value = getattr(stats, name)
            if value > 0:
                weight = SMOOTHING if name in self._measured else 1.0
                setattr(self, name, getattr(self, name) + weight * (value - getattr(self, name)))
                if name not in self._measured:
                    self._measured |= {name}
        self.prompt_weights = _nearer(self.prompt_weights, stats.prompt_weights)
        self.decode_weights = _nearer(self.decode_weights, stats.decode_weights)

    def observe_ttft(self, parts_s: float, real_s: float) -> None:
        """Learn what the parts leave out, slowly, and from no single request much."""
        bound_s = 0.5 * parts_s + 0.005
        miss_s = min(bound_s, max(-bound_s, real_s - parts_s))
        self.overhead_s += SMOOTHING * (miss_s - self.overhead_s)

    def predicted_ttft_s(self, placement: Placement) -> float:
        return max(0.0, placement.seconds.ttft + self.overhead_s)

    def prefill_s(self, endpoint: Endpoint, num_new: int, start: int) -> float:
        """Seconds that `endpoint` takes to compute tokens [start, start + num_new)."""
        if num_new <= 0:
            return 0.0
        stats = endpoint.stats
        weights = (stats.prompt_weights if stats is not None else ()) or self.prompt_weights
        rate_s = num_new / self._rate(endpoint, "prefill_tokens_per_s")
        if not weights:
            return rate_s
        budget = endpoint.info.max_num_batched_tokens
        seconds = fitted_s(weights, prompt_features(num_new, start, budget))
        return max(seconds, 0.05 * rate_s)  # a fit may be wrong where nothing was measured yet

    def lending_s(self, lender: Endpoint, held: Held) -> float:
        """Computing that the KV of `lender` saves a worker that has none of it, at most."""
        return held.said / self.prefill_tokens_per_s - self._promote_s(lender, held, 0)

    def prefill(self, now: float, endpoint: Endpoint, work: Work) -> Placement:
        """Queue and prefill on `endpoint`, whatever its role; with the worker's own KV alone, or
        with a peer's too, if that gains as much as a block takes to be computed."""
        own = self._own_intake(endpoint, work)
        alone = self._prefill(now, endpoint, work, own)
        lent = self._lent_intake(endpoint, work, own) if work.lenders else None
        if lent is None:
            return alone
        helped = self._prefill(now, endpoint, work, lent)
        block_s = endpoint.info.block_size / self._rate(endpoint, "prefill_tokens_per_s")
        return helped if alone.seconds.total - helped.seconds.total >= block_s else alone

    def local(self, now: float, decode: Endpoint, work: Work) -> Placement:
        """Everything on one decode worker."""
        part = self.prefill(now, decode, work)
        stalled = max(self.stalled_at_least, decode.num_decoding, decode.typical_decoding)
        computed = part.intake.computed
        beyond_free = max(0, computed - self.free_tokens) / max(1, computed)
        return self._with_decode(
            decode, work, part, stall=part.seconds.prefill * beyond_free * stalled
        )

    def remote(self, decode: Endpoint, first: Placement, work: Work) -> Placement:
        """Prefill elsewhere, as in `first`, and the KV that `decode` lacks read from there."""
        own = self._own_intake(decode, work)
        # Chunks are read while the next ones are computed; the last one cannot be.
        last = min(own.computed, decode.info.max_num_batched_tokens)
        last_s = self._read_s(decode, last, "read_bytes_per_s")
        read_s = self._read_s(decode, own.computed, "read_bytes_per_s")
        rest_s = max(read_s, own.load_s) - first.seconds.prefill
        return self._with_decode(decode, work, first, transfer=self.handoff_s + max(last_s, rest_s))

    def _prefill(self, now: float, endpoint: Endpoint, work: Work, intake: Intake) -> Placement:
        computed = intake.computed
        prefill_s = self.prefill_s(endpoint, computed, work.num_tokens - computed)
        wait_s, num_behind = endpoint.prompts.ahead_of(now, prefill_s)
        if endpoint.other_prefill_tokens:
            wait_s += endpoint.other_prefill_tokens / self._rate(endpoint, "prefill_tokens_per_s")
        seconds = Seconds(
            queue=wait_s,
            load=intake.load_s,
            fetch=intake.fetch_s,
            prefill=prefill_s,
            delay=num_behind * prefill_s,
        )
        return Placement(seconds, intake)

    def _with_decode(
        self,
        decode: Endpoint,
        work: Work,
        part: Placement,
        stall: float = 0.0,
        transfer: float = 0.0,
    ) -> Placement:
        """`part`, and then everything that is to be done on `decode`."""
        info, output = decode.info, work.output_tokens
        num_seqs, used = decode.num_seqs, decode.used_fraction
        growth = (work.missing(decode) + output / 2) / (info.num_blocks * info.block_size)
        before_s = self._step_s(decode, num_seqs, used)
        after_s = max(before_s, self._step_s(decode, num_seqs + 1, min(1.0, used + growth)))
        seconds = part.seconds._replace(
            transfer=transfer,
            memory=self.memory_s(decode, work),
            decode=output * after_s,
            stall=stall,
            # Those that are there have half of their output before them, on average.
            crowd=num_seqs * output / 2 * (after_s - before_s),
        )
        return Placement(seconds, part.intake)

    def memory_s(self, decode: Endpoint, work: Work) -> float:
        """Without room, requests have to end first: in the time of a whole one all blocks that are
        in use come free, about evenly."""
        info = decode.info
        short = work.missing(decode) / info.block_size + 1 - decode.num_free_blocks
        if short <= 0:
            return 0.0
        in_use = max(1, info.num_blocks - decode.num_free_blocks)
        step_s = self._step_s(decode, decode.num_seqs, 1.0)
        return short / in_use * work.output_tokens * step_s

    def _step_s(self, decode: Endpoint, num_seqs: float, used: float) -> float:
        """One decode step of so many sequences, with that fraction of the pool."""
        rate_s = self._rate(decode, "decode_step_s")
        stats = decode.stats
        weights = (stats.decode_weights if stats is not None else ()) or self.decode_weights
        if not weights:
            return rate_s * (1.0 + 0.02 * num_seqs)
        return max(fitted_s(weights, decode_features(num_seqs, used)), 0.2 * rate_s)

    def _own_intake(self, endpoint: Endpoint, work: Work) -> Intake:
        """Load as far down the run of blocks in lower tiers as saves most: as the worker will."""
        held, missing = work.held_by(endpoint), work.missing(endpoint)
        best, best_gain_s = Intake(missing), 0.0
        if not held.host and not held.disk:
            return best
        loaded, load_s = 0, 0.0
        for tokens, rate in (
            (held.host, "host_read_bytes_per_s"),
            (held.disk, "disk_read_bytes_per_s"),
        ):
            loaded += tokens
            load_s += self._read_s(endpoint, tokens, rate)
            gain_s = loaded / self._rate(endpoint, "prefill_tokens_per_s") - load_s
            if gain_s > best_gain_s:
                best, best_gain_s = Intake(missing - loaded, loaded, load_s=load_s), gain_s
        return best

    def _lent_intake(self, endpoint: Endpoint, work: Work, own: Intake) -> Intake | None:
        """`own`, and beyond it what the best lender has. None: nobody has more."""
        start = work.num_tokens - own.computed
        best, best_gain_s = None, float("-inf")
        rate = self._rate(endpoint, "prefill_tokens_per_s")
        for lender in work.lenders:
            if lender is endpoint or lender.info.fingerprint != endpoint.info.fingerprint:
                continue
            held = work.held_by(lender)
            tokens = held.said - start
            if tokens <= 0:
                continue
            read_s = self._read_s(endpoint, tokens, "read_bytes_per_s")
            fetch_s = self.handoff_s + read_s + self._promote_s(lender, held, start)
            gain_s = tokens / rate - fetch_s
            if gain_s > best_gain_s:
                best_gain_s = gain_s
                best = own._replace(
                    computed=own.computed - tokens,
                    fetched=tokens,
                    fetch_s=fetch_s,
                    fetch_from=lender.worker,
                )
        return best

    def _promote_s(self, lender: Endpoint, held: Held, start: int) -> float:
        """What is on the lender's disk alone, from token `start` on, has to come up first."""
        tokens = max(0, held.said - max(start, held.device + held.host))
        return self._read_s(lender, tokens, "disk_read_bytes_per_s")

    def _rate(self, endpoint: Endpoint, name: str) -> float:
        """As the worker has measured it, or else the fleet."""
        own: float = getattr(endpoint.stats, name, 0.0)  # a worker may not have told any
        return own or float(getattr(self, name))

    def _read_s(self, endpoint: Endpoint, num_tokens: int, rate: str) -> float:
        if not num_tokens:
            return 0.0
        info = endpoint.info
        return num_tokens * info.bytes_per_block / info.block_size / self._rate(endpoint, rate)


def _nearer(known: tuple[float, ...], told: tuple[float, ...]) -> tuple[float, ...]:
    """`known`, a step towards what one worker told."""
    if not told:
        return known
    if len(known) != len(told):
        return told
    return tuple(a + SMOOTHING * (b - a) for a, b in zip(known, told, strict=True))
