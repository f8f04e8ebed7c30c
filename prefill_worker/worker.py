"""The prefill worker: computes prompts chunk by chunk, and holds their KV for a decode worker.

Life of a request here: waiting -> computing (after each chunk, `KVReady` to the consumer) -> held
under a lease, the first token sent to the router and to the consumer -> freed, when the consumer
confirms its reads, when somebody aborts, or when the lease runs out.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from engine.config import WorkerConfig
from engine.core import EngineCore
from engine.kv.tier import DiskRecord
from engine.messages import Abort, Probe, Refused
from engine.node import Effect, NodeId, Note, Send, Wake, Woken
from engine.request import FinishReason, Refusal
from engine.sequence import SeqState, Sequence
from engine.stats import Audit, AuditRequest, RouterDown
from engine.step import Execute, StepDone
from kvtransfer.exchange import KVExchange
from kvtransfer.messages import KVConfirmed, KVConfirmRequest, KVReady, KVRelease
from kvtransfer.peer.arrival import Mode
from kvtransfer.peer.handoff import ProducerEvent, ProducerState, next_producer
from prefill_worker.messages import Prefill


@dataclass(slots=True)
class Production:
    """The producer's side of one handoff. `num_announced` counts blocks told to the consumer."""

    seq: Sequence
    consumer: NodeId
    lease: int
    num_tokens: int  # that the consumer asked for
    state: ProducerState = ProducerState.COMPUTING
    num_announced: int = 0
    lease_until: float = 0.0


class PrefillWorker:
    """Node. Invariant: every sequence has one production, and none is FREED."""

    def __init__(self, config: WorkerConfig, records: Seq[DiskRecord] = ()) -> None:
        """`records`: what its disk store held when it was opened."""
        self.config = config
        self.node_id = config.node_id
        self.core = EngineCore(config)
        self.exchange = KVExchange(config, self.core)
        self._records = records
        self.productions: dict[tuple[str, int], Production] = {}
        self._num_leases = config.epoch << 32  # no two lives of a worker share a number

    def start(self, now: float) -> list[Effect]:
        self.exchange.start(now, self._records)
        self._records = ()
        return [Wake(self.config.stats_interval_s, "tick")]

    def receive(self, now: float, message: Any) -> list[Effect]:
        effects = self.core.on_router_message(now, message)
        if effects is None:
            effects = self._produce(message)
        if effects is None:
            effects = self.exchange.handle(now, message)
        if effects is None:
            effects = self._handle(now, message)
        effects += self._take_arrived(now)
        effects += self._schedule(now)
        effects += self.exchange.advance(now)
        return effects + self.core.flush()

    def _produce(self, message: Any) -> list[Effect] | None:
        """What a consumer of a production says; None if it is something else, perhaps of a loan."""
        match message:
            case KVConfirmRequest():
                return self._on_read(message)
            case KVRelease(request_id, attempt) if (request_id, attempt) in self.productions:
                return self._free(self.productions[request_id, attempt], ProducerEvent.RELEASE)
            case _:
                return None

    def _handle(self, now: float, message: Any) -> list[Effect]:
        match message:
            case Prefill():
                return self._on_prefill(now, message)
            case StepDone():
                return self._on_step_done(message)
            case Woken():
                return self._on_tick(now)
            case Abort(request_id, attempt):
                keys = [k for k in self.productions if k[0] == request_id and k[1] <= attempt]
                return self._release([self.productions[key] for key in keys])
            case RouterDown(router):  # and its clients with it: nobody takes the tokens
                return self._release(
                    [p for p in self.productions.values() if p.seq.router == router]
                )
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
        self._num_leases += 1
        production = Production(accepted, message.decode_to, self._num_leases, len(message.tokens))
        self.productions[accepted.key] = production
        if message.fetch_from is None:
            return []
        return self.exchange.connector.expect(now, accepted, Mode.FETCH, message.fetch_from)

    def _schedule(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        exchange = self.exchange
        for seq in self.core.scheduler.admit_waiting(now, exchange.comes_from_elsewhere):
            self.core.mark_used(seq)
            if seq.state is SeqState.REMOTE:
                effects += exchange.connector.start(now, seq)
            production = self.productions[seq.key]
            self._start_again(production)
            effects += self._announce(production, seq.num_sealed)
        effects += self._take_arrived(now)
        step = self.core.next_step()
        for seq, _ in self.core.scheduler.faults:
            self.productions.pop(seq.key, None)
        effects += self.core.fail_left_out()
        if step is None:
            return effects
        size = self.config.block_size
        for share in step.seqs:
            end = share.start + len(share.tokens)
            if share.sample and end % size:  # the last block is sent though it is not full
                step.checksum_blocks.append(share.block_ids[end // size])
        return [*effects, Execute(step)]

    def _start_again(self, production: Production) -> None:
        """It has got its blocks. What was announced of others is gone: the rest is announced under
        another lease, so that the consumer gives it up."""
        if production.num_announced:
            self._num_leases += 1
            production.lease = self._num_leases
            production.num_announced = 0

    def _take_arrived(self, now: float) -> list[Effect]:
        """Prompts whose cached prefix has come go on; the consumer may read what came."""
        return [
            effect
            for settled in self.exchange.take_arrived(now)
            for effect in self._announce(
                self.productions[settled.arrival.key], settled.arrival.seq.num_sealed
            )
        ]

    def _on_step_done(self, done: StepDone) -> list[Effect]:
        survivors = self.core.finish_step(done)
        if done.error is not None:
            effects = self.core.fail_step(survivors, done.error)
            for seq, _ in survivors:
                self.productions.pop(seq.key)
            return effects
        effects = []
        for seq, _ in survivors:
            production = self.productions[seq.key]
            if len(seq.tokens) > seq.num_computed:
                finish = seq.finish_reason(self.config.max_model_len)
                if seq.num_reported < len(seq.tokens):
                    effects += self._on_first_token(production, finish)
                    continue
            effects += self._announce(production, seq.num_computed // self.config.block_size)
        return effects

    def _on_first_token(self, production: Production, finish: FinishReason | None) -> list[Effect]:
        seq, now = production.seq, self.core.now
        seq.end_phase("prefill", now)
        if finish is None:
            # No block for the sampled token here: its KV is computed by the consumer.
            production.state = next_producer(production.state, ProducerEvent.COMPUTED)
            production.lease_until = now + self.config.lease_s
            self.core.scheduler.hold(seq)
            effects = self._announce(production, len(seq.block_ids), final=True)
            self.core.report(seq, None)
            return effects
        self.core.report(seq, finish)
        return self._free(production, ProducerEvent.RELEASE)

    def _announce(self, production: Production, end: int, *, final: bool = False) -> list[Effect]:
        """Tell the consumer of blocks [num_announced, end), if there are any or it is the end; with
        a window, of those that it will read."""
        first = production.num_announced
        if end <= first and not final:
            return []
        production.num_announced = end
        runs = self.core.kv.window.runs(first, end, production.num_tokens)
        if final and not runs:
            runs = [range(end, end)]
        return [
            Send(production.consumer, self._ready(production, run, final=final and run is runs[-1]))
            for run in runs
        ]

    def _ready(self, production: Production, run: range, *, final: bool) -> KVReady:
        seq = production.seq
        blocks = tuple(seq.block_ids[run.start : run.stop])
        sampled_at = len(seq.tokens) - 1
        return KVReady(
            request_id=seq.request_id,
            attempt=seq.attempt,
            producer=self.node_id,
            epoch=self.config.epoch,
            first=run.start,
            block_ids=blocks,
            checksums=tuple(self.core.kv.checksums[block] for block in blocks),
            num_tokens=min(run.stop * self.config.block_size, seq.num_computed),
            final=final,
            next_token=seq.tokens[sampled_at] if final else None,
            next_logprobs=seq.logprobs.get(sampled_at) if final else None,
            lease=production.lease,
        )

    def _on_read(self, message: KVConfirmRequest) -> list[Effect] | None:
        """A lease that exists was held throughout: it ends the moment its blocks are freed.

        Its number tells it from a later one of the same request, computed into other blocks. None
        if it is not held (any more); it may be that of a loan."""
        key = (message.request_id, message.attempt)
        production = self.productions.get(key)
        if (
            production is None
            or production.lease != message.lease
            or production.state is not ProducerState.HELD
        ):
            return None
        return [
            *self._free(production, ProducerEvent.READ),
            Send(message.consumer, KVConfirmed(*key)),
        ]

    def _on_tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = [Wake(self.config.stats_interval_s, "tick")]
        for production in list(self.productions.values()):
            if production.state is ProducerState.HELD and now >= production.lease_until:
                self.core.count("leases_expired")
                effects += self._free(production, ProducerEvent.EXPIRE)
        for seq in self.core.expired(now):
            effects += self._free(self.productions[seq.key], ProducerEvent.RELEASE)
            detail = f"not computed by {self.node_id} before the deadline"
            refused = self.core.refusal(seq.request_id, seq.attempt, Refusal.DEADLINE, detail)
            effects.append(Send(seq.router, refused))
        effects += self.exchange.tick(now)
        num_handoffs = len(self.productions) + len(self.exchange.lender.loans)
        stats = self.core.stats(num_handoffs, self.exchange.rates())
        return effects + [Send(router, stats) for router in self.core.routers]

    def _release(self, productions: Seq[Production]) -> list[Effect]:
        return [e for p in productions for e in self._free(p, ProducerEvent.RELEASE)]

    def _free(self, production: Production, event: ProducerEvent) -> list[Effect]:
        production.state = next_producer(production.state, event)
        del self.productions[production.seq.key]
        arrival = self.exchange.connector.arrivals.get(production.seq.key)
        self.core.remove(production.seq)
        if arrival is None:
            return []
        return self.exchange.connector.fail(arrival, "cancelled")

    def audit(self) -> Audit:
        return self.exchange.audit(self.check_idle(), len(self.productions))

    def check_idle(self) -> list[str]:
        """What is left over when nothing should be; empty if all is well."""
        held = [f"handoff {key} is {p.state}" for key, p in self.productions.items()]
        return held + self.exchange.check_idle() + self.core.check_idle()
