"""The decode worker: turns KV into tokens; computes prompts itself where asked or needed.

Life of a request here: waiting -> (remote: its KV is read from the prefill worker) -> running: a
token or more a step, in one batch with the others -> finished; its sealed blocks stay as prefix
cache.
Whatever goes wrong with the remote KV, the request becomes a running one whose prompt is computed
here.
"""

from __future__ import annotations

from typing import Any

from decode_worker.messages import Decode
from engine.config import WorkerConfig
from engine.core import EngineCore
from engine.messages import Refused
from engine.node import Effect, Note, Send, Wake, Woken
from engine.request import Abort, Probe, Refusal
from engine.sequence import SeqState, Sequence
from engine.stats import Audit, AuditRequest, RouterDown
from engine.step import Execute, StepDone
from kvtransfer.exchange import KVExchange
from kvtransfer.peer.arrival import Mode, Settled
from kvtransfer.tiers.blocks import StoreRecords


class DecodeWorker:
    """Node. Invariant: a sequence is REMOTE iff the connector has an arrival for it that has begun;
    blocks of an ended sequence are freed only when neither the step in flight nor a transfer writes
    to them."""

    def __init__(self, config: WorkerConfig, records: StoreRecords | None = None) -> None:
        """`records`: what its stores held when they were opened."""
        self.config = config
        self.node_id = config.node_id
        self.core = EngineCore(config)
        self.exchange = KVExchange(config, self.core)
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
        self._take_arrived(now)
        effects += self._schedule(now)
        effects += self.exchange.advance(now)
        return effects + self.core.flush()

    def _handle(self, now: float, message: Any) -> list[Effect]:
        match message:
            case Decode():
                return self._on_decode(now, message)
            case StepDone():
                return self._on_step_done(message)
            case Woken():
                return self._on_tick(now)
            case Abort(request_id, attempt):
                keys = [k for k in self.core.seqs if k[0] == request_id and k[1] <= attempt]
                return [effect for key in keys for effect in self.exchange.end(self.core.seqs[key])]
            case RouterDown(router):  # its clients are gone with it
                lost = [seq for seq in self.core.seqs.values() if seq.router == router]
                return [effect for seq in lost for effect in self.exchange.end(seq)]
            case Probe(request_id, attempt, router, position):
                return [self.core.answer_probe(request_id, attempt, router, position)]
            case AuditRequest(reply_to):
                return [Send(reply_to, self.audit())]
            case _:
                return [Note("warning", "unexpected_message", f"{type(message).__name__}")]

    def _on_decode(self, now: float, message: Decode) -> list[Effect]:
        accepted = self.core.accept(now, message, role_needs_growth=True)
        if isinstance(accepted, Refused):
            return [Send(message.router, accepted)]
        if accepted is None:
            return []
        connector = self.exchange.connector
        if message.prefill_from is not None:
            accepted.is_remote = True
            return connector.expect(now, accepted, Mode.HANDOFF, message.prefill_from)
        if message.fetch_from is not None:
            return connector.expect(now, accepted, Mode.FETCH, message.fetch_from)
        return []

    def _schedule(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        exchange = self.exchange
        for seq in self.core.scheduler.admit_waiting(now, exchange.has_external_kv):
            self.core.used(seq)
            if seq.state is SeqState.REMOTE:
                effects += exchange.connector.start(now, seq)
        self._take_arrived(now)
        step = self.core.next_step()
        effects += self.core.fail_left_out()
        return effects if step is None else [*effects, Execute(step)]

    def _on_step_done(self, done: StepDone) -> list[Effect]:
        survivors = self.core.finish_step(done)
        if done.error is not None:
            return self.core.fail_step(survivors, done.error)
        for seq, _ in survivors:
            if len(seq.tokens) > seq.num_computed and seq.num_reported < len(seq.tokens):
                if not seq.phases_reported:
                    is_handed_over = "transfer" in seq.phases
                    seq.end_phase("first_decode" if is_handed_over else "prefill", self.core.now)
                self._report(seq)
        return []

    def _report(self, seq: Sequence) -> None:
        """Tell the router of new tokens; the last of them may end the request."""
        finish = seq.finish_reason(self.config.max_model_len)
        self.core.report(seq, finish)
        if finish is not None:
            self.core.remove(seq)

    def _take_arrived(self, now: float) -> None:
        """Schedule the sequences whose arrivals have settled."""
        for settled in self.exchange.take_arrived(now):
            arrival, seq = settled.arrival, settled.arrival.seq
            if arrival.mode is Mode.HANDOFF:
                self._hand_over(now, settled)
            if arrival.next_token is not None:
                # The router may have streamed it already, so it is not sampled again.
                seq.append(arrival.next_token, arrival.next_logprobs)
                if seq.finish_reason(self.config.max_model_len) is not None:
                    self._report(seq)

    def _hand_over(self, now: float, settled: Settled) -> None:
        self.core.count("handoffs_done" if settled.complete else "handoffs_failed")
        if settled.complete:
            # The producer knows what was computed, and says so.
            settled.arrival.seq.cached_reported = True

    def _on_tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = [Wake(self.config.stats_interval_s, "tick")]
        for seq in self.core.expired(now):
            detail = f"not finished by {self.node_id} before the deadline"
            refused = self.core.refusal(seq.request_id, seq.attempt, Refusal.DEADLINE, detail)
            effects += [*self.exchange.end(seq), Send(seq.router, refused)]
        effects += self.exchange.tick(now)
        num_handoffs = len(self.exchange.connector.arrivals) + len(self.exchange.producer.leases)
        stats = self.core.stats(num_handoffs, self.exchange.rates())
        return effects + [Send(router, stats) for router in self.core.routers]

    def audit(self) -> Audit:
        return self.exchange.audit(self.check_idle())

    def check_idle(self) -> list[str]:
        """What an idle worker must not have; empty if all is well."""
        return self.exchange.check_idle() + self.core.check_idle()
