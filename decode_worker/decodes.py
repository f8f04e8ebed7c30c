"""Requests that are generated here: KV becomes tokens; prompts are computed where asked or needed.

Life of a request: waiting -> (remote: its KV is read from another worker) -> running: a token or
more a step, in one batch with the others -> finished; its sealed blocks stay as prefix cache.
Whatever goes wrong with the remote KV, the request becomes a running one whose prompt is computed
here.
"""

from __future__ import annotations

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.node import Effect
from kvrelay.engine.sequence import Sequence
from kvrelay.kvtransfer.peer.arrival import Mode, Settled
from kvrelay.worker.node import RoleHandler


class Decodes(RoleHandler):
    """Invariant: every token is reported to the router, once, in order."""

    request = Decode
    needs_growth = True
    goal = "finished"

    def begin(self, now: float, seq: Sequence, request: Decode) -> list[Effect]:
        connector = self.exchange.connector
        if request.prefill_from is not None:
            seq.is_remote = True
            return connector.expect(now, seq, Mode.HANDOFF, request.prefill_from)
        if request.fetch_from is not None:
            return connector.expect(now, seq, Mode.FETCH, request.fetch_from)
        return []

    def on_arrived(self, now: float, settled: Settled) -> list[Effect]:
        arrival, seq = settled.arrival, settled.arrival.seq
        if arrival.mode is Mode.HANDOFF:
            self.core.count("handoffs_done" if settled.complete else "handoffs_failed")
            # The producer knows what was computed, and says so.
            seq.cached_reported |= settled.complete
        if arrival.next_token is not None:
            # The router may have streamed it already, so it is not sampled again.
            seq.append(arrival.next_token, arrival.next_logprobs)
            if seq.finish_reason(self.core.config.max_model_len) is not None:
                self._report(seq)
        return []

    def on_computed(self, seq: Sequence) -> list[Effect]:
        if len(seq.tokens) > seq.num_computed and seq.num_reported < len(seq.tokens):
            if not seq.phases_reported:
                is_handed_over = "transfer" in seq.phases
                seq.end_phase("first_decode" if is_handed_over else "prefill", self.core.now)
            self._report(seq)
        return []

    def on_prompt_computed(self, seq: Sequence) -> list[Effect]:
        raise AssertionError(f"{seq.key} samples tokens here")

    def _report(self, seq: Sequence) -> None:
        """Tell the router of new tokens; the last of them may end the request."""
        finish = seq.finish_reason(self.core.config.max_model_len)
        self.core.report(seq, finish)
        if finish is not None:
            self.core.remove(seq)
