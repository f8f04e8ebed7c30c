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

from dataclasses import dataclass
from typing import Any

from engine.cost import decode_features, fitted_s, prompt_features
from engine.stats import WorkerStats
from router.endpoint import Endpoint, Rates
from router.placement import Intake, Placement, Seconds, Work
from router.prefix_index import Held

SMOOTHING = 0.05  # weight of one worker's statistics in the fleet's rates
_RATES = (
    "prefill_tokens_per_s",
    "decode_step_s",
    "read_bytes_per_s",
    "host_read_bytes_per_s",
    "disk_read_bytes_per_s",
)
_WEIGHTS = ("prompt_weights", "decode_weights")


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
    _measured: frozenset[str] = frozenset()
    _age: int = 0  # of the fleet's rates: grows whenever they change

    def observe(self, stats: WorkerStats) -> None:
        """Let one worker's rates count for the fleet; 0 is "not measured"."""
        for name in _RATES:
            value = getattr(stats, name)
            if value > 0:
                weight = SMOOTHING if name in self._measured else 1.0
                setattr(self, name, getattr(self, name) + weight * (value - getattr(self, name)))
                if name not in self._measured:
                    self._measured |= {name}
        self._age += 1
        self.prompt_weights = _nearer(self.prompt_weights, stats.prompt_weights)
        self.decode_weights = _nearer(self.decode_weights, stats.decode_weights)

    def prefill_s(self, endpoint: Endpoint, num_new: int, start: int) -> float:
        """Seconds that `endpoint` takes to compute tokens [start, start + num_new)."""
        return _prefill_s(endpoint, self._rates(endpoint), num_new, start)

    def lending_s(self, lender: Endpoint, held: Held) -> float:
        """Computing that the KV of `lender` saves a worker that has none of it, at most."""
        return held.said / self.prefill_tokens_per_s - self._promote_s(lender, held, 0)

    def prefill(self, now: float, endpoint: Endpoint, work: Work) -> Placement:
        """Queue and prefill on `endpoint`, whatever its role; with the worker's own KV alone, or
        with a peer's too, if that gains as much as a block takes to be computed."""
        rates = self._rates(endpoint)
        own = self._own_intake(endpoint, rates, work)
        alone = self._prefill(now, endpoint, rates, work, own)
        lent = self._lent_intake(endpoint, rates, work, own) if work.lenders else None
        if lent is None:
            return alone
        helped = self._prefill(now, endpoint, rates, work, lent)
        block_s = endpoint.info.block_size / rates.prefill_tokens_per_s
        return helped if sum(alone.seconds) - sum(helped.seconds) >= block_s else alone

    def may_be_local(self, decode: Endpoint, first: Placement, work: Work) -> bool:
        """Whether `local` could be cheaper than `remote` with `first`: a bound, that costs little.
        Computing there what neither it nor any lender holds takes so long, and stalls so many."""
        held = work.held_by(decode)
        most = held.device + held.host + held.disk
        for _, lent in work.lendings:
            most = max(most, lent.said)
        computed = work.num_tokens - most
        if computed <= self.free_tokens:
            return True
        rate = self._rates(decode).prefill_tokens_per_s
        least_s = 0.5 * computed / rate * (1.0 + self._stalled(decode))
        return least_s <= sum(first.seconds) + self.handoff_s

    def _stalled(self, decode: Endpoint) -> float:
        """Sequences that decode there while a prompt is computed."""
        return max(self.stalled_at_least, decode.num_decoding, decode.typical_decoding)

    def local(self, now: float, decode: Endpoint, work: Work) -> Placement:
        """Everything on one decode worker."""
        rates = self._rates(decode)
        part = self.prefill(now, decode, work)
        stalled = self._stalled(decode)
        computed = part.intake.computed
        beyond_free = max(0, computed - self.free_tokens) / max(1, computed)
        stall_s = part.seconds.prefill * beyond_free * stalled
        return self._with_decode(decode, rates, work, part, stall=stall_s)

    def remote(self, decode: Endpoint, first: Placement, work: Work) -> Placement:
        """Prefill elsewhere, as in `first`, and the KV that `decode` lacks read from there."""
        rates, info = self._rates(decode), decode.info
        own = self._own_intake(decode, rates, work)
        # Chunks are read while the next ones are computed; the last one cannot be.
        token_s = info.bytes_per_block / info.block_size / rates.read_bytes_per_s
        last_s = min(own.computed, info.max_num_batched_tokens) * token_s
        rest_s = max(own.computed * token_s, own.load_s) - first.seconds.prefill
        transfer_s = self.handoff_s + max(last_s, rest_s)
        return self._with_decode(decode, rates, work, first, transfer=transfer_s)

    def _prefill(
        self, now: float, endpoint: Endpoint, rates: Rates, work: Work, intake: Intake
    ) -> Placement:
        computed = intake.computed
        prefill_s = _prefill_s(endpoint, rates, computed, work.num_tokens - computed)
        wait_s, num_behind = endpoint.prompts.ahead_of(now, prefill_s)
        if endpoint.other_prefill_tokens:
            wait_s += endpoint.other_prefill_tokens / rates.prefill_tokens_per_s
        delay_s = num_behind * prefill_s
        # In the order of the fields: by name it takes three times as long.
        seconds = Seconds(
            wait_s, intake.load_s, intake.fetch_s, prefill_s, 0.0, 0.0, 0.0, delay_s, 0.0, 0.0
        )
        return Placement(seconds, intake)

    def _with_decode(
        self,
        decode: Endpoint,
        rates: Rates,
        work: Work,
        part: Placement,
        stall: float = 0.0,
        transfer: float = 0.0,
    ) -> Placement:
        """`part`, and then everything that is to be done on `decode`."""
        parts = work.decode_parts.get(decode)
        if parts is None:
            parts = work.decode_parts[decode] = self._decode_parts(decode, rates, work)
        memory_s, decode_s, crowd_s = parts
        wait_s, load_s, fetch_s, prefill_s, _, _, _, delay_s, _, _ = part.seconds
        seconds = Seconds(
            wait_s,
            load_s,
            fetch_s,
            prefill_s,
            transfer,
            memory_s,
            decode_s,
            delay_s,
            stall,
            crowd_s,
        )
        return Placement(seconds, part.intake)

    def _decode_parts(
        self, decode: Endpoint, rates: Rates, work: Work
    ) -> tuple[float, float, float]:
        """Memory, decode and crowd: the same wherever the prompt is computed."""
        info, output = decode.info, work.output_tokens
        num_seqs, num_free = decode.num_seqs, decode.num_free_blocks
        used = 1.0 - num_free / info.num_blocks
        growth = (work.missing(decode) + output / 2) / (info.num_blocks * info.block_size)
        before_s = _step_s(rates, num_seqs, used)
        after_s = max(before_s, _step_s(rates, num_seqs + 1, min(1.0, used + growth)))
        # Those that are there have half of their output before them, on average.
        crowd_s = num_seqs * output / 2 * (after_s - before_s)
        return self.memory_s(decode, work), output * after_s, crowd_s

    def memory_s(self, decode: Endpoint, work: Work) -> float:
        """Without room, requests have to end first: in the time of a whole one all blocks that are
        in use come free, about evenly."""
        info, num_free = decode.info, decode.num_free_blocks
        short = work.missing(decode) / info.block_size + 1 - num_free
        if short <= 0:
            return 0.0
        in_use = max(1, info.num_blocks - num_free)
        step_s = _step_s(self._rates(decode), decode.num_seqs, 1.0)
        return short / in_use * work.output_tokens * step_s

    def _own_intake(self, endpoint: Endpoint, rates: Rates, work: Work) -> Intake:
        """Load as far down the run of blocks in lower tiers as saves most: as the worker will."""
        held = work.held_by(endpoint)
        missing = work.num_tokens - held.device
        if not held.host and not held.disk:
            return Intake(missing)
        best, best_gain_s = Intake(missing), 0.0
        loaded, load_s = 0, 0.0
        for tokens, rate in (
            (held.host, rates.host_read_bytes_per_s),
            (held.disk, rates.disk_read_bytes_per_s),
        ):
            loaded += tokens
            load_s += _read_s(endpoint, tokens, rate)
            gain_s = loaded / rates.prefill_tokens_per_s - load_s
            if gain_s > best_gain_s:
                best, best_gain_s = Intake(missing - loaded, loaded, load_s=load_s), gain_s
        return best

    def _lent_intake(
        self, endpoint: Endpoint, rates: Rates, work: Work, own: Intake
    ) -> Intake | None:
        """`own`, and beyond it what the best lender has. None: nobody has more."""
        start = work.num_tokens - own.computed
        best: tuple[float, float, int, Endpoint] | None = None
        for lender, held in work.lendings:
            tokens = held.said - start
            if tokens <= 0 or lender is endpoint:
                continue
            if lender.info.fingerprint != endpoint.info.fingerprint:
                continue
            read_s = _read_s(endpoint, tokens, rates.read_bytes_per_s)
            fetch_s = self.handoff_s + read_s + self._promote_s(lender, held, start)
            gain_s = tokens / rates.prefill_tokens_per_s - fetch_s
            if best is None or gain_s > best[0]:
                best = (gain_s, fetch_s, tokens, lender)
        if best is None:
            return None
        _, fetch_s, tokens, lender = best
        return own._replace(
            computed=own.computed - tokens,
            fetched=tokens,
            fetch_s=fetch_s,
            fetch_from=lender.worker,
        )

    def _promote_s(self, lender: Endpoint, held: Held, start: int) -> float:
        """What is on the lender's disk alone, from token `start` on, has to come up first."""
        tokens = held.said - max(start, held.device + held.host)
        if tokens <= 0:
            return 0.0
        return _read_s(lender, tokens, self._rates(lender).disk_read_bytes_per_s)

    def _rates(self, endpoint: Endpoint) -> Rates:
        """As the worker has measured them, or else the fleet."""
        rates, stats = endpoint.rates, endpoint.stats
        if rates is not None and rates.of is stats and (rates.is_own or rates.age == self._age):
            return rates
        own = {name: getattr(stats, name, None) for name in _RATES + _WEIGHTS}
        values: dict[str, Any] = {name: own[name] or getattr(self, name) for name in own}
        rates = Rates(**values, of=stats, is_own=all(own.values()), age=self._age)
        endpoint.rates = rates
        return rates


def _prefill_s(endpoint: Endpoint, rates: Rates, num_new: int, start: int) -> float:
    if num_new <= 0:
        return 0.0
    rate_s = num_new / rates.prefill_tokens_per_s
    if not rates.prompt_weights:
        return rate_s
    features = prompt_features(num_new, start, endpoint.info.max_num_batched_tokens)
    # A fit may be wrong where nothing was measured yet.
    return max(fitted_s(rates.prompt_weights, features), 0.05 * rate_s)


def _step_s(rates: Rates, num_seqs: float, used: float) -> float:
    """One decode step of so many sequences, with that fraction of the pool."""
    if not rates.decode_weights:
        return rates.decode_step_s * (1.0 + 0.02 * num_seqs)
    seconds = fitted_s(rates.decode_weights, decode_features(num_seqs, used))
    return max(seconds, 0.2 * rates.decode_step_s)


def _read_s(endpoint: Endpoint, num_tokens: int, bytes_per_s: float) -> float:
    if not num_tokens:
        return 0.0
    info = endpoint.info
    return num_tokens * info.bytes_per_block / info.block_size / bytes_per_s


def _nearer(known: tuple[float, ...], told: tuple[float, ...]) -> tuple[float, ...]:
    """`known`, a step towards what one worker told."""
    if not told:
        return known
    if len(known) != len(told):
        return told
    return tuple(a + SMOOTHING * (b - a) for a, b in zip(known, told, strict=True))
