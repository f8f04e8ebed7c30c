"""The decode worker: turns KV into tokens; computes prompts itself where asked or needed.

Life of a request here: waiting -> (remote: its KV is read from the prefill worker) -> running: one
token a step, in one batch with the others -> finished; its sealed blocks stay as prefix cache.
Whatever goes wrong with the remote KV, the request becomes a running one whose prompt is computed
here.
"""

from __future__ import annotations

from typing import Any

from decode_worker.messages import Decode
from engine.config import WorkerConfig
from engine.core import EngineCore
from engine.node import Effect, Note, Send, Wake, Woken
from engine.outbox import Refused
from engine.request import Abort, Probe, Refusal
from engine.sequence import SeqState, Sequence
from engine.step import Execute, StepDone
from kvtransfer.agent import PeerConnected, ReadDone
from kvtransfer.connector import Connector, Settled
from kvtransfer.messages import KVConfirmed, KVConnected, KVReady, KVRefused


class DecodeWorker:
    """Node. Invariant: a sequence is remote iff the connector has a handoff for it; blocks of an
    ended sequence go back only when neither the step in flight nor a transfer writes to them."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.node_id = config.node_id
        self.core = EngineCore(config)
        self.connector = Connector(config)

    def start(self, now: float) -> list[Effect]:
        return [Wake(self.config.stats_interval_s, "tick")]

    def receive(self, now: float, message: Any) -> list[Effect]:
        effects = self.core.listen(now, message)
        if effects is None:
            effects = self._handle(now, message)
        self._apply_settled(now)
        effects += self._schedule(now)
        return effects + self.core.flush(now)

    def _handle(self, now: float, message: Any) -> list[Effect]:
        connector = self.connector
        match message:
            case Decode():
                return self._on_decode(now, message)
            case StepDone():
                return self._on_step_done(now, message)
            case Woken():
                return self._on_tick(now)
            case Abort(request_id, attempt):
                keys = [k for k in self.core.seqs if k[0] == request_id and k[1] <= attempt]
                return [effect for key in keys for effect in self._end(self.core.seqs[key])]
            case Probe(request_id, attempt, router, position):
                return [self.core.answer_probe(request_id, attempt, router, position)]
            case KVReady():
                return connector.on_ready(now, message)
            case ReadDone():
                if message.error is None and message.elapsed_s > 0:
                    self.core.read_bytes_per_s.add(message.num_bytes, message.elapsed_s)
                    self.core.count("read_bytes", message.num_bytes)
                return connector.on_read_done(now, message)
            case KVConfirmed(request_id, attempt):
                connector.on_confirmed((request_id, attempt))
                return []
            case KVRefused():
                return connector.on_refused(message)
            case KVConnected():
                return connector.on_connected(now, message)
            case PeerConnected():
                return connector.on_peer_connected(now, message)
            case _:
                return [Note("warning", "unexpected_message", f"{type(message).__name__}")]

    def _on_decode(self, now: float, message: Decode) -> list[Effect]:
        accepted = self.core.accept(now, message, role_needs_growth=True)
        if isinstance(accepted, Refused):
            return [Send(message.router, accepted)]
        if accepted is None or message.prefill_from is None:
            return []
        accepted.is_remote = True
        return self.connector.expect(now, accepted, message.prefill_from)

    def _schedule(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for seq in self.core.scheduler.admit_waiting(now):
            if seq.state is SeqState.REMOTE:
                effects += self.connector.start(now, seq)
        self._apply_settled(now)
        step = self.core.next_step()
        return effects if step is None else [*effects, Execute(step)]

    def _on_step_done(self, now: float, done: StepDone) -> list[Effect]:
        survivors = self.core.finish_step(now, done)
        if done.error is not None:
            return self.core.fail_step(survivors, done.error)
        for seq, num_fed in survivors:
            if len(seq.tokens) > seq.num_computed and seq.num_reported < len(seq.tokens):
                if num_fed > 1 and "prefill" not in seq.phases and seq.admitted_at is not None:
                    seq.phases["prefill"] = now - seq.admitted_at
                self._report(seq)
        return []

    def _report(self, seq: Sequence) -> None:
        """Tell the router of new tokens; the last of them may end the request."""
        finish = seq.finish_reason(self.config.max_model_len)
        self.core.report(seq, finish)
        if finish is not None:
            self.core.remove(seq)

    def _apply_settled(self, now: float) -> None:
        """Handoffs that have ended: their sequences run from what has come, or from the cache."""
        for settled in self.connector.take_settled():
            handoff, seq = settled.handoff, settled.handoff.seq
            if seq.state is SeqState.DEAD:
                self.core.scheduler.release_if_settled(seq)
                continue
            self.core.count("handoffs_done" if settled.ok else "handoffs_failed")
            if settled.ok:
                self._use_remote_kv(now, settled)
            if seq.state is SeqState.REMOTE:
                self.core.scheduler.compute_here(seq)
            else:
                seq.is_remote = False  # still waiting: it will be admitted as a local one
            if handoff.next_token is not None:
                # The router may have streamed it already, so it is not sampled again.
                seq.append(handoff.next_token, handoff.next_logprobs)
                if seq.finish_reason(self.config.max_model_len) is not None:
                    self._report(seq)

    def _use_remote_kv(self, now: float, settled: Settled) -> None:
        handoff, seq = settled.handoff, settled.handoff.seq
        seq.num_computed = len(seq.tokens)
        seq.phases["transfer"] = now - handoff.final_at
        seq.cached_reported = True  # the producer knows what was computed, and says so
        for index in range(handoff.first_missing, len(seq.block_ids)):
            self.core.kv.checksums[seq.block_ids[index]] = handoff.source[index][1]
        self.core.kv.seal_computed(seq)

    def _on_tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = [Wake(self.config.stats_interval_s, "tick")]
        for seq in self.core.expired(now):
            detail = f"not finished by {self.node_id} before the deadline"
            refused = self.core.refusal(seq.request_id, seq.attempt, Refusal.DEADLINE, detail)
            effects += [*self._end(seq), Send(seq.router, refused)]
        effects += self.connector.tick(now)
        for why, times in self.connector.failures.items():
            self.core.counters[f"handoff_failed_{why}"] = times
        stats = self.core.stats(len(self.connector.handoffs))
        return effects + [Send(router, stats) for router in self.core.routers]

    def _end(self, seq: Sequence) -> list[Effect]:
        """Forget `seq` now; its blocks go back when nothing writes to them."""
        handoff = self.connector.handoffs.get(seq.key)
        self.core.remove(seq)
        return self.connector.fail(handoff, "cancelled") if handoff is not None else []

    def check_idle(self) -> list[str]:
        """What is left over when nothing should be; empty if all is well."""
        return self.connector.check_idle() + self.core.check_idle()
