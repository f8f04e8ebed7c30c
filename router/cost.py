"""What a placement costs, in seconds: one sum for the request itself and for those it delays.

total = queue + prefill + transfer + stall + memory + evict + decode, where
  queue     prompt tokens ahead of it, at the worker's prefill rate
  prefill   its own missing tokens, at that rate
  transfer  reading KV from the prefill worker, as far as it does not hide behind the prefill
  stall     prefill time on a decode worker, once for each sequence that decodes there meanwhile;
            the few tokens that ride along in a decode step are free
  memory    waiting for blocks, if there are too few
  evict     computing again what it pushes out of the cache, as likely as prefixes are used again
  decode    its output at the worker's step time, longer with each sequence beside it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.node import NodeId
from engine.stats import WorkerStats
from router.endpoint import Endpoint

SMOOTHING = 0.05  # weight of one worker's statistics in the fleet's rates


@dataclass(frozen=True, slots=True)
class Seconds:
    """A cost by its parts."""

    queue: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0
    stall: float = 0.0
    memory: float = 0.0
    evict: float = 0.0
    decode: float = 0.0

    @property
    def total(self) -> float:
        own = self.queue + self.prefill + self.transfer + self.memory + self.decode
        return own + self.stall + self.evict


@dataclass(frozen=True, slots=True)
class Work:
    """What a request asks for. `cached` is in tokens, by worker; absent means none."""

    num_tokens: int  # prompt and output so far: KV that must be there before the next token
    cached: Mapping[NodeId, int]
    output_tokens: float  # expected from now on

    def missing(self, endpoint: Endpoint) -> int:
        return self.num_tokens - self.cached.get(endpoint.worker, 0)


@dataclass(slots=True)
class CostModel:
    """Owned by a router. The rates are the fleet's, for workers that have measured none yet; the
    numbers here are only believed until the first worker has reported one."""

    prefill_tokens_per_s: float = 1000.0
    decode_step_s: float = 0.03
    read_bytes_per_s: float = 1e9
    handoff_s: float = 0.01  # messages and connection of one handoff, whatever its size
    stalled_at_least: float = 0.5  # sequences that will come to decode while a prompt is computed
    free_tokens: int = 16  # of a prompt cost a decode step nothing: it waits for the weights anyway
    crowding: float = 0.02  # a step's growth with each sequence more
    reuse: float = 0.0  # share of a prompt's tokens that some worker had, of late
    _measured: frozenset[str] = frozenset()

    def observe(self, stats: WorkerStats) -> None:
        """Let one worker's rates count for the fleet; 0 is "not measured"."""
        for name in ("prefill_tokens_per_s", "decode_step_s", "read_bytes_per_s"):
            value = getattr(stats, name)
            if value > 0:
                weight = SMOOTHING if name in self._measured else 1.0
                setattr(self, name, getattr(self, name) + weight * (value - getattr(self, name)))
                self._measured |= {name}

    def observe_hit(self, work: Work) -> None:
        """Learn from one request how often what is cached is of use again."""
        best = max(work.cached.values(), default=0)
        self.reuse += SMOOTHING * (best / work.num_tokens - self.reuse)

    def prefill(self, endpoint: Endpoint, work: Work) -> Seconds:
        """Queue and prefill on `endpoint`, whatever its role."""
        rate = self._prefill_rate(endpoint)
        return Seconds(
            queue=endpoint.pending_prefill_tokens / rate,
            prefill=work.missing(endpoint) / rate,
            evict=self._evict_s(endpoint, work.missing(endpoint)),
        )

    def local(self, decode: Endpoint, work: Work) -> Seconds:
        """Everything on one decode worker."""
        first, rate = self.prefill(decode, work), self._prefill_rate(decode)
        stalled = max(self.stalled_at_least, decode.num_decoding, decode.typical_decoding)
        return Seconds(
            queue=first.queue,
            prefill=first.prefill,
            stall=max(0, work.missing(decode) - self.free_tokens) / rate * stalled,
            memory=self._memory_s(decode, work),
            evict=self._evict_s(decode, work.missing(decode) + work.output_tokens),
            decode=self._decode_s(decode, work),
        )

    def remote(self, decode: Endpoint, first: Seconds, work: Work) -> Seconds:
        """Prefill elsewhere, at `first` seconds, and the KV that `decode` lacks read from there."""
        rate = (decode.stats and decode.stats.read_bytes_per_s) or self.read_bytes_per_s
        info = decode.info
        bytes_per_token = info.bytes_per_block / info.block_size
        lacking = work.missing(decode)
        # Chunks are read while the next ones are computed; the last one cannot be.
        last_s = min(lacking, info.max_num_batched_tokens) * bytes_per_token / rate
        rest_s = lacking * bytes_per_token / rate - first.prefill
        return Seconds(
            queue=first.queue,
            prefill=first.prefill,
            transfer=self.handoff_s + max(last_s, rest_s),
            memory=self._memory_s(decode, work),
            evict=first.evict + self._evict_s(decode, lacking + work.output_tokens),
            decode=self._decode_s(decode, work),
        )

    def _evict_s(self, endpoint: Endpoint, num_tokens: float) -> float:
        tokens = num_tokens - endpoint.num_blank_blocks * endpoint.info.block_size
        return max(0.0, tokens) / self._prefill_rate(endpoint) * self.reuse

    def _prefill_rate(self, endpoint: Endpoint) -> float:
        return (endpoint.stats and endpoint.stats.prefill_tokens_per_s) or self.prefill_tokens_per_s

    def _step_s(self, decode: Endpoint) -> float:
        return (decode.stats and decode.stats.decode_step_s) or self.decode_step_s

    def _decode_s(self, decode: Endpoint, work: Work) -> float:
        crowd = 1.0 + self.crowding * decode.num_seqs
        return work.output_tokens * self._step_s(decode) * crowd

    def _memory_s(self, decode: Endpoint, work: Work) -> float:
        """Without room, a request like this one, half done, has to end first."""
        tokens = work.missing(decode) + work.output_tokens
        if tokens <= decode.num_free_blocks * decode.info.block_size:
            return 0.0
        return work.output_tokens / 2 * self._step_s(decode)
