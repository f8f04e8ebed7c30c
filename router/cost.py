"""What a placement costs, in seconds: one sum for the request itself and for those it delays.

total = queue + load + fetch + prefill + transfer + stall + memory + evict + decode, where
  queue     prompt tokens ahead of it, at the worker's prefill rate
  load      reading KV from the worker's own host memory and disk into its device
  fetch     reading KV from a peer that holds more of the prefix
  prefill   the tokens that are missing then, at the worker's prefill rate
  transfer  reading KV from the prefill worker, as far as it does not hide behind the prefill
  stall     prefill time on a decode worker, once for each sequence that decodes there meanwhile;
            the few tokens that ride along in a decode step are free
  memory    waiting for blocks, if there are too few
  evict     getting back what it pushes out of the cache, as likely as prefixes are used again
  decode    its output at the worker's step time, longer with each sequence beside it

KV is loaded or fetched only where that is quicker than computing it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from engine.node import NodeId
from engine.stats import WorkerStats
from router.endpoint import Endpoint
from router.prefix_index import Held

SMOOTHING = 0.05  # weight of one worker's statistics in the fleet's rates
NOTHING = Held()
_RATES = (
    "prefill_tokens_per_s",
    "decode_step_s",
    "read_bytes_per_s",
    "host_read_bytes_per_s",
    "disk_read_bytes_per_s",
)


@dataclass(frozen=True, slots=True)
class Seconds:
    """A cost by its parts."""

    queue: float = 0.0
    load: float = 0.0
    fetch: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0
    stall: float = 0.0
    memory: float = 0.0
    evict: float = 0.0
    decode: float = 0.0

    @property
    def total(self) -> float:
        own = self.queue + self.load + self.fetch + self.prefill + self.transfer
        return own + self.memory + self.decode + self.stall + self.evict


@dataclass(frozen=True, slots=True)
class Work:
    """What a request asks for. `cached` is in tokens, by worker; absent means none."""

    num_tokens: int  # prompt and output so far: KV that must be there before the next token
    cached: Mapping[NodeId, Held]
    output_tokens: float  # expected from now on
    lenders: tuple[Endpoint, ...] = ()  # whom others may fetch from; each is in `cached`

    def held_by(self, endpoint: Endpoint) -> Held:
        return self.cached.get(endpoint.worker, NOTHING)

    def missing(self, endpoint: Endpoint) -> int:
        """Tokens whose KV is not in device memory of `endpoint`, from wherever it is to come."""
        return self.num_tokens - self.held_by(endpoint).device


@dataclass(frozen=True, slots=True)
class Intake:
    """How the worker that computes comes to the KV of the prompt: what its device does not hold is
    loaded, then fetched, and the rest computed."""

    computed: int  # tokens, as the following
    loaded: int = 0
    fetched: int = 0
    load_s: float = 0.0
    fetch_s: float = 0.0
    fetch_from: NodeId | None = None


@dataclass(frozen=True, slots=True)
class Placement:
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
    handoff_s: float = 0.01  # messages and connection of one handoff, whatever its size
    stalled_at_least: float = 0.5  # sequences that will come to decode while a prompt is computed
    free_tokens: int = 16  # of a prompt cost a decode step nothing: it waits for the weights anyway
    crowding: float = 0.02  # a step's growth with each sequence more
    reuse: float = 0.0  # share of a prompt's tokens that some worker had, of late
    _measured: frozenset[str] = frozenset()

    def observe(self, stats: WorkerStats) -> None:
        """Let one worker's rates count for the fleet; 0 is "not measured"."""
        for name in _RATES:
            value = getattr(stats, name)
            if value > 0:
                weight = SMOOTHING if name in self._measured else 1.0
                setattr(self, name, getattr(self, name) + weight * (value - getattr(self, name)))
                self._measured |= {name}

    def observe_hit(self, work: Work) -> None:
        """Learn from one request how often what is cached is of use again."""
        best = max((held.total for held in work.cached.values()), default=0)
        self.reuse += SMOOTHING * (best / work.num_tokens - self.reuse)

    def lending_s(self, lender: Endpoint, held: Held) -> float:
        """Computing that the KV of `lender` saves a worker that has none of it, at most."""
        return held.said / self.prefill_tokens_per_s - self._promote_s(lender, held, 0)

    def prefill(self, endpoint: Endpoint, work: Work) -> Placement:
        """Queue and prefill on `endpoint`, whatever its role."""
        return self._cheaper(endpoint, work, self._prefill_seconds)

    def local(self, decode: Endpoint, work: Work) -> Placement:
        """Everything on one decode worker."""
        return self._cheaper(decode, work, self._local_seconds)

    def remote(self, decode: Endpoint, first: Placement, work: Work) -> Placement:
        """Prefill elsewhere, as in `first`, and the KV that `decode` lacks read from there."""
        part, own = first.seconds, self._own_intake(decode, work)
        # Chunks are read while the next ones are computed; the last one cannot be.
        last = min(own.computed, decode.info.max_num_batched_tokens)
        last_s = self._read_s(decode, last, "read_bytes_per_s")
        read_s = self._read_s(decode, own.computed, "read_bytes_per_s")
        rest_s = max(read_s, own.load_s) - part.prefill
        seconds = Seconds(
            queue=part.queue,
            load=part.load,
            fetch=part.fetch,
            prefill=part.prefill,
            transfer=self.handoff_s + max(last_s, rest_s),
            memory=self._memory_s(decode, work),
            evict=part.evict + self._evict_s(decode, work.missing(decode) + work.output_tokens),
            decode=self._decode_s(decode, work),
        )
        return Placement(seconds, first.intake)

    def _cheaper(
        self,
        endpoint: Endpoint,
        work: Work,
        seconds_of: Callable[[Endpoint, Work, Intake], Seconds],
    ) -> Placement:
        """With the worker's own KV alone; or with a peer's too, if that gains as much as a block
        takes to be computed."""
        own = self._own_intake(endpoint, work)
        alone = Placement(seconds_of(endpoint, work, own), own)
        lent = self._lent_intake(endpoint, work, own)
        if lent is None:
            return alone
        helped = Placement(seconds_of(endpoint, work, lent), lent)
        block_s = endpoint.info.block_size / self._rate(endpoint, "prefill_tokens_per_s")
        gained_s = alone.seconds.total - helped.seconds.total
        return helped if gained_s >= block_s else alone

    def _own_intake(self, endpoint: Endpoint, work: Work) -> Intake:
        """Load as far down the run of blocks in lower tiers as saves most: as the worker will."""
        held, missing = work.held_by(endpoint), work.missing(endpoint)
        best, best_gain_s = Intake(missing), 0.0
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
        for lender in work.lenders:
            if lender is endpoint or lender.info.fingerprint != endpoint.info.fingerprint:
                continue
            held = work.held_by(lender)
            tokens = held.said - start
            if tokens <= 0:
                continue
            read_s = self._read_s(endpoint, tokens, "read_bytes_per_s")
            fetch_s = self.handoff_s + read_s + self._promote_s(lender, held, start)
            gain_s = tokens / self._rate(endpoint, "prefill_tokens_per_s") - fetch_s
            if gain_s > best_gain_s:
                best_gain_s = gain_s
                best = replace(
                    own,
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

    def _prefill_seconds(self, endpoint: Endpoint, work: Work, intake: Intake) -> Seconds:
        rate = self._rate(endpoint, "prefill_tokens_per_s")
        return Seconds(
            queue=endpoint.pending_prefill_tokens / rate,
            load=intake.load_s,
            fetch=intake.fetch_s,
            prefill=intake.computed / rate,
            evict=self._evict_s(endpoint, work.missing(endpoint)),
        )

    def _local_seconds(self, decode: Endpoint, work: Work, intake: Intake) -> Seconds:
        rate = self._rate(decode, "prefill_tokens_per_s")
        stalled = max(self.stalled_at_least, decode.num_decoding, decode.typical_decoding)
        return Seconds(
            queue=decode.pending_prefill_tokens / rate,
            load=intake.load_s,
            fetch=intake.fetch_s,
            prefill=intake.computed / rate,
            stall=max(0, intake.computed - self.free_tokens) / rate * stalled,
            memory=self._memory_s(decode, work),
            evict=self._evict_s(decode, work.missing(decode) + work.output_tokens),
            decode=self._decode_s(decode, work),
        )

    def _evict_s(self, endpoint: Endpoint, num_tokens: float) -> float:
        """What goes is computed again when it is wanted, or loaded where a lower tier has it."""
        tokens = max(0.0, num_tokens - endpoint.num_blank_blocks * endpoint.info.block_size)
        seconds = tokens / self._rate(endpoint, "prefill_tokens_per_s")
        if endpoint.stats is not None and endpoint.stats.num_host_blocks:
            seconds = min(seconds, self._read_s(endpoint, tokens, "host_read_bytes_per_s"))
        return seconds * self.reuse

    def _rate(self, endpoint: Endpoint, name: str) -> float:
        """As the worker has measured it, or else the fleet."""
        own: float = getattr(endpoint.stats, name, 0.0)  # a worker may not have told any
        return own or float(getattr(self, name))

    def _read_s(self, endpoint: Endpoint, num_tokens: float, rate: str) -> float:
        info = endpoint.info
        return num_tokens * info.bytes_per_block / info.block_size / self._rate(endpoint, rate)

    def _decode_s(self, decode: Endpoint, work: Work) -> float:
        crowd = 1.0 + self.crowding * decode.num_seqs
        return work.output_tokens * self._rate(decode, "decode_step_s") * crowd

    def _memory_s(self, decode: Endpoint, work: Work) -> float:
        """Without room, a request like this one, half done, has to end first."""
        tokens = work.missing(decode) + work.output_tokens
        if tokens <= decode.num_free_blocks * decode.info.block_size:
            return 0.0
        return work.output_tokens / 2 * self._rate(decode, "decode_step_s")
