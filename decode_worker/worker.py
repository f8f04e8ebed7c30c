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
from engine.messages import Refused
from engine.node import Effect, Send
from engine.sequence import SeqState, Sequence
from engine.step import Execute, StepDone
from kvtransfer.exchange import KVWorker
from kvtransfer.peer.arrival import Mode, Settled


class DecodeWorker(KVWorker):
    """Node. Invariant: a sequence is REMOTE iff the connector has an arrival for it that has
    begun."""

    @property
    def num_handoffs(self) -> int:
        return super().num_handoffs + len(self.exchange.connector.arrivals)

    def _on_request(self, now: float, message: Any) -> list[Effect] | None:
        if not isinstance(message, Decode):
            return None
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
            self.core.mark_used(seq)
            if seq.state is SeqState.REMOTE:
                effects += exchange.connector.start(now, seq)
        self._use_arrived(now)
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

    def _use_arrived(self, now: float) -> list[Effect]:
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
        return []

    def _hand_over(self, now: float, settled: Settled) -> None:
        self.core.count("handoffs_done" if settled.complete else "handoffs_failed")
        if settled.complete:
            # The producer knows what was computed, and says so.
            settled.arrival.seq.cached_reported = True
