"""The prefill worker: computes prompts chunk by chunk, and holds their KV for a decode worker.

Life of a request here: waiting -> computing (after each chunk, `KVReady` to the consumer) -> held
under a lease, the first token sent to the router and to the consumer -> freed, when the consumer
confirms its reads, when the request is aborted, or when the lease expires.
"""

from __future__ import annotations

from typing import Any

from engine.messages import Refused
from engine.node import Effect, Send
from engine.request import FinishReason
from engine.sequence import SeqState
from engine.step import Execute, StepDone
from kvtransfer.exchange import KVWorker
from kvtransfer.peer.arrival import Mode
from kvtransfer.peer.handoff import ProducerEvent
from kvtransfer.peer.producer import Handoff, Producer
from prefill_worker.messages import Prefill


class PrefillWorker(KVWorker):
    """Node. Invariant: every sequence has a handoff, its lease with the producer."""

    DONE = "computed"

    @property
    def producer(self) -> Producer:
        return self.exchange.producer

    def _on_request(self, now: float, message: Any) -> list[Effect] | None:
        if not isinstance(message, Prefill):
            return None
        accepted = self.core.accept(now, message, role_needs_growth=False)
        if isinstance(accepted, Refused):
            return [Send(message.router, accepted)]
        if accepted is None:
            return []
        self.producer.grant(accepted, message.decode_to, len(message.tokens))
        if message.fetch_from is None:
            return []
        return self.exchange.connector.expect(now, accepted, Mode.FETCH, message.fetch_from)

    def _schedule(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        exchange = self.exchange
        for seq in self.core.scheduler.admit_waiting(now, exchange.has_external_kv):
            self.core.mark_used(seq)
            if seq.state is SeqState.REMOTE:
                effects += exchange.connector.start(now, seq)
            handoff = self.producer.handoff(seq.key)
            self.producer.restart(handoff)
            effects += self._announce(handoff, seq.num_sealed)
        effects += self._use_arrived(now)
        step = self.core.next_step()
        for seq, _ in self.core.scheduler.faults:
            self.producer.forget(seq.key)
        effects += self.core.fail_left_out()
        if step is None:
            return effects
        size = self.config.block_size
        for share in step.seqs:
            end = share.start + len(share.tokens)
            if share.sample and end % size:  # the last block is sent though it is not full
                step.checksum_blocks.append(share.block_ids[end // size])
        return [*effects, Execute(step)]

    def _use_arrived(self, now: float) -> list[Effect]:
        """Prompts whose cached prefix has come go on; the consumer may read what came."""
        return [
            effect
            for settled in self.exchange.take_arrived(now)
            for effect in self._announce(
                self.producer.handoff(settled.arrival.key), settled.arrival.seq.num_sealed
            )
        ]

    def _on_step_done(self, done: StepDone) -> list[Effect]:
        survivors = self.core.finish_step(done)
        if done.error is not None:
            effects = self.core.fail_step(survivors, done.error)
            for seq, _ in survivors:
                self.producer.forget(seq.key)
            return effects
        effects = []
        for seq, _ in survivors:
            handoff = self.producer.handoff(seq.key)
            if len(seq.tokens) > seq.num_computed:
                finish = seq.finish_reason(self.config.max_model_len)
                if seq.num_reported < len(seq.tokens):
                    effects += self._on_first_token(handoff, finish)
                    continue
            effects += self._announce(handoff, seq.num_computed // self.config.block_size)
        return effects

    def _on_first_token(self, handoff: Handoff, finish: FinishReason | None) -> list[Effect]:
        seq, now = handoff.seq, self.core.now
        seq.end_phase("prefill", now)
        if finish is None:
            # No block for the sampled token here: its KV is computed by the consumer.
            self.producer.hold(now, handoff)
            self.core.scheduler.hold(seq)
            effects = self._announce(handoff, len(seq.block_ids), final=True)
            self.core.report(seq, None)
            return effects
        self.core.report(seq, finish)
        return self.producer.end(handoff, ProducerEvent.RELEASE)

    def _announce(self, handoff: Handoff, end: int, *, final: bool = False) -> list[Effect]:
        """Tell the consumer of blocks `[announced_end, end)`, if there are any or it is the end;
        with a window, of those that it will read."""
        first, seq, kv = handoff.announced_end, handoff.seq, self.core.kv
        if end <= first and not final:
            return []
        handoff.announced_end = end
        runs = kv.window.runs(first, end, handoff.num_tokens)
        if final and not runs:
            runs = [range(end, end)]
        sampled_at = len(seq.tokens) - 1
        effects: list[Effect] = []
        for run in runs:
            is_last = final and run is runs[-1]
            blocks = tuple(seq.block_ids[run.start : run.stop])
            announced = self.producer.announce(
                handoff,
                run.start,
                blocks,
                tuple(kv.checksums[block] for block in blocks),
                num_tokens=seq.num_computed,
                final=is_last,
                next_token=seq.tokens[sampled_at] if is_last else None,
                next_logprobs=seq.logprobs.get(sampled_at) if is_last else None,
            )
            effects.append(announced)
        return effects
