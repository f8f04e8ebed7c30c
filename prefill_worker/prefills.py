"""Prompts that are computed here, chunk by chunk, for another worker that decodes.

Life of a request: waiting -> computing (after each chunk, `KVReady` to the consumer) -> held under
a lease, the first token sent to the router and to the consumer -> freed, when the consumer confirms
its reads, when the request is aborted, or when the lease expires.
"""

from __future__ import annotations

from kvrelay.engine.kv.block_table import NO_BLOCK
from kvrelay.engine.node import Effect
from kvrelay.engine.request import FinishReason
from kvrelay.engine.sequence import Sequence
from kvrelay.kvtransfer.peer.arrival import Mode, Settled
from kvrelay.kvtransfer.peer.handoff import ProducerEvent
from kvrelay.kvtransfer.peer.producer import Handoff, Producer
from kvrelay.prefill_worker.messages import Prefill
from kvrelay.worker.node import RoleHandler


class Prefills(RoleHandler):
    """Invariant: every sequence has a handoff, its lease with the producer."""

    request = Prefill
    needs_growth = False
    goal = "computed"

    @property
    def producer(self) -> Producer:
        return self.exchange.producer

    def begin(self, now: float, seq: Sequence, request: Prefill) -> list[Effect]:
        self.producer.grant(seq, request.decode_to, len(request.tokens))
        if request.fetch_from is None:
            return []
        return self.exchange.connector.expect(now, seq, Mode.FETCH, request.fetch_from)

    def on_admitted(self, seq: Sequence) -> list[Effect]:
        handoff = self.producer.handoff(seq.key)
        self.producer.restart(handoff)
        return self._announce(handoff, seq.num_sealed)

    def on_arrived(self, now: float, settled: Settled) -> list[Effect]:
        """The consumer may read what came."""
        arrival = settled.arrival
        return self._announce(self.producer.handoff(arrival.key), arrival.seq.num_sealed)

    def on_computed(self, seq: Sequence) -> list[Effect]:
        handoff = self.producer.handoff(seq.key)
        config = self.core.config
        if len(seq.tokens) > seq.num_computed:
            finish = seq.finish_reason(config.max_model_len)
            if seq.num_reported < len(seq.tokens):
                return self._on_first_token(handoff, finish)
        return self._announce(handoff, self.core.kv.windows.full(seq.num_computed))

    def _on_first_token(self, handoff: Handoff, finish: FinishReason | None) -> list[Effect]:
        seq = handoff.seq
        seq.end_phase("prefill", self.core.now)
        if finish is None:
            return self.on_prompt_computed(seq)
        self.core.report(seq, finish)
        return self.producer.end(handoff, ProducerEvent.RELEASE)

    def on_prompt_computed(self, seq: Sequence) -> list[Effect]:
        handoff = self.producer.handoff(seq.key)
        # No block for the sampled token here: its KV is computed by the consumer.
        self.producer.hold(self.core.now, handoff)
        self.core.scheduler.hold(seq)
        effects = self._announce(handoff, len(seq.block_ids), final=True)
        self.core.report(seq, None)
        return effects

    def _announce(self, handoff: Handoff, end: int, *, final: bool = False) -> list[Effect]:
        """Tell the consumer of blocks `[announced_end, end)`, if there are any or it is the end;
        with a window, of those that it will read."""
        first, seq, kv = handoff.announced_end, handoff.seq, self.core.kv
        if end <= first and not final:
            return []
        handoff.announced_end = end
        windows, num_tokens = kv.windows, handoff.num_tokens
        runs = windows.runs(first, end, num_tokens)
        if final and not runs:
            runs = [range(end, end)]
        is_sampled, sampled_at = len(seq.tokens) > num_tokens, len(seq.tokens) - 1
        effects: list[Effect] = []
        for run in runs:
            is_last = final and run is runs[-1]
            blocks, entries = [NO_BLOCK] * len(run), seq.block_ids[run.start : run.stop]
            for index in windows.kept_of(run.start, run.stop, num_tokens):
                blocks[index - run.start] = entries[index - run.start]
            announced = self.producer.announce(
                handoff,
                run.start,
                tuple(blocks),
                tuple(kv.checksums[block] if block != NO_BLOCK else 0 for block in blocks),
                num_tokens=seq.num_computed,
                final=is_last,
                next_token=seq.tokens[sampled_at] if is_last and is_sampled else None,
                next_logprobs=seq.logprobs.get(sampled_at) if is_last else None,
            )
            effects.append(announced)
        return effects
