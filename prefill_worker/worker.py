"""The prefill worker: computes prompts chunk by chunk, and holds their KV for a decode worker.

Life of a request here: waiting -> computing (after each chunk, `KVReady` to the consumer) -> held
under a lease, the first token sent to the router and to the consumer -> freed, when the consumer
confirms its reads, when the request is aborted, or when the lease expires.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.config import WorkerConfig
from engine.core import EngineCore
from engine.messages import Refused
from engine.node import Effect, Note, Send, Wake, Woken
from engine.request import Abort, FinishReason, Probe, Refusal
from engine.sequence import SeqState
from engine.stats import Audit, AuditRequest, RouterDown
from engine.step import Execute, StepDone
from kvtransfer.exchange import KVExchange
from kvtransfer.peer.arrival import Mode
from kvtransfer.peer.handoff import ProducerEvent
from kvtransfer.peer.producer import Handoff
from kvtransfer.tiers.blocks import StoreRecords
from prefill_worker.messages import Prefill


class PrefillWorker:
    """Node. Invariant: every sequence has a handoff, its lease with the producer."""

    def __init__(self, config: WorkerConfig, records: StoreRecords | None = None) -> None:
        """`records`: what its stores held when they were opened."""
        self.config = config
        self.node_id = config.node_id
        self.core = EngineCore(config)
        self.exchange = KVExchange(config, self.core)
        self.producer = self.exchange.producer
        self._records = records or {}

    def start(self, now: float) -> list[Effect]:
        self.exchange.start(now, self._records)
        self._records = {}
        return [Wake(self.config.stats_interval_s, "tick")]

    def receive(self, now: float, message: Any) -> list[Effect]:
        effects = self.core.listen(now, message)
        if effects is None:
            effects = self.exchange.handle(now, message)
        if effects is None:
            effects = self._handle(now, message)
        effects += self._take_arrived(now)
        effects += self._schedule(now)
        effects += self.exchange.advance(now)
        return effects + self.core.flush()

    def _handle(self, now: float, message: Any) -> list[Effect]:
        match message:
            case Prefill():
                return self._on_prefill(now, message)
            case StepDone():
                return self._on_step_done(message)
            case Woken():
                return self._on_tick(now)
            case Abort(request_id, attempt):
                return self._release(
                    h
                    for h in self.producer.handoffs
                    if h.key[0] == request_id and h.key[1] <= attempt
                )
            case RouterDown(router):  # its clients are gone with it
                return self._release(h for h in self.producer.handoffs if h.seq.router == router)
            case Probe(request_id, attempt, router, position):
                return [self.core.answer_probe(request_id, attempt, router, position)]
            case AuditRequest(reply_to):
                return [Send(reply_to, self.audit())]
            case _:
                return [Note("warning", "unexpected_message", f"{type(message).__name__}")]

    def _on_prefill(self, now: float, message: Prefill) -> list[Effect]:
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
            self.core.used(seq)
            if seq.state is SeqState.REMOTE:
                effects += exchange.connector.start(now, seq)
            handoff = self.producer.handoff(seq.key)
            self.producer.restart(handoff)
            effects += self._announce(handoff, seq.num_sealed)
        effects += self._take_arrived(now)
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

    def _take_arrived(self, now: float) -> list[Effect]:
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

    def _on_tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = [Wake(self.config.stats_interval_s, "tick")]
        for seq in self.core.expired(now):
            effects += self._release([self.producer.handoff(seq.key)])
            detail = f"not computed by {self.node_id} before the deadline"
            refused = self.core.refusal(seq.request_id, seq.attempt, Refusal.DEADLINE, detail)
            effects.append(Send(seq.router, refused))
        effects += self.exchange.tick(now)
        stats = self.core.stats(len(self.producer.leases), self.exchange.rates())
        return effects + [Send(router, stats) for router in self.core.routers]

    def _release(self, handoffs: Iterable[Handoff]) -> list[Effect]:
        return [e for h in handoffs for e in self.producer.end(h, ProducerEvent.RELEASE)]

    def audit(self) -> Audit:
        return self.exchange.audit(self.check_idle())

    def check_idle(self) -> list[str]:
        """What an idle worker must not have; empty if all is well."""
        return self.exchange.check_idle() + self.core.check_idle()
