"""The worker: one node for both roles, over the engine and its KV traffic.

Any worker computes prompts for others and decodes; its role is what routers prefer it for. What it
does with a request is up to a `RoleHandler`, one for each role: `prefill_worker.prefills` for
prompts that are computed for another worker, `decode_worker.decodes` for requests that are
generated here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.core import EngineCore
from kvrelay.engine.kv.block_hash import first_of
from kvrelay.engine.kv.events import SLICE, KVSnapshotRequest
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.messages import Abort, Preempted, Probe, Refused, TokenDeltas, WorkRequest
from kvrelay.engine.node import Effect, Exit, NodeId, Note, Send, Unsendable, Wake, Woken
from kvrelay.engine.plug import Plug
from kvrelay.engine.request import Refusal
from kvrelay.engine.sequence import SeqState, Sequence
from kvrelay.engine.stats import (
    Audit,
    AuditRequest,
    ProgressReport,
    ProgressRequest,
    RouterDown,
    RouterUp,
    WorkerStats,
)
from kvrelay.engine.step import (
    AbandonStep,
    AskProgress,
    Execute,
    PrepareGrammar,
    StepDone,
    StepProgress,
)
from kvrelay.kvtransfer.agent import (
    CopyDone,
    PeerConnected,
    StoreFailed,
    StoreFound,
    StoreGone,
    StoreListed,
    StoreRoom,
)
from kvrelay.kvtransfer.messages import (
    CacheOrder,
    KVConfirmed,
    KVConfirmRequest,
    KVConnect,
    KVConnected,
    KVFetch,
    KVReady,
    KVRefused,
    KVRelease,
)
from kvrelay.kvtransfer.peer.arrival import Mode, Settled, choose_loads
from kvrelay.kvtransfer.peer.connector import Connector, UnsettledReads
from kvrelay.kvtransfer.peer.handoff import ProducerEvent
from kvrelay.kvtransfer.peer.producer import Handoff, Producer
from kvrelay.kvtransfer.tiers.blocks import StoreRecords
from kvrelay.kvtransfer.tiers.manager import HOST_TIERS, Tiers
from kvrelay.kvtransfer.tiers.registry import TIERS
from kvrelay.worker.left_kv import LeftKV
from kvrelay.worker.stored_kv import StoredKV
from kvrelay.worker.weights import WeightUpdates

Handler = Callable[[float, Any], list[Effect]]
"""What a worker does about messages of one type: (now, message) -> effects."""


class KVExchange:
    """Owned by a worker node, over its core. Invariant: every `CopyDone` goes to who
    asked for the copy: the connector, which may have left it to `unsettled`, or the tiers."""

    def __init__(self, config: WorkerConfig, core: EngineCore) -> None:
        self._core = core
        self.tiers = Tiers(config, core.kv)
        self.left_kv = LeftKV(core, self.tiers)
        self.stored_kv = StoredKV(core, self.tiers)
        self.unsettled = UnsettledReads(core.kv.pool, self.tiers)
        self.connector = Connector(config, core.kv, self.tiers, self.unsettled)
        self.producer = Producer(config, core.kv, self.tiers, self._forget)
        core.publisher.lower = self.tiers
        self.handlers: dict[type, Handler] = {
            CopyDone: self._on_copy_done,
            KVReady: lambda now, message: self.connector.on_ready(now, message),
            KVConfirmed: self._on_confirmed,
            KVRefused: lambda now, message: self.connector.on_refused(message),
            KVConnect: lambda now, message: self.connector.peers.on_connect(message),
            KVConnected: lambda now, message: self.connector.on_connected(message),
            PeerConnected: lambda now, message: self.connector.on_peer_connected(now, message),
            KVFetch: lambda now, message: self.producer.on_fetch(now, message),
            KVConfirmRequest: self._on_confirm_request,
            KVRelease: self._on_release,
            CacheOrder: lambda now, message: self.tiers.order(now, message),
            StoreFailed: lambda now, message: self.tiers.on_store_failed(now, message),
            StoreFound: self._on_store_found,
            StoreListed: self._on_store_listed,
            StoreGone: lambda now, message: self.tiers.on_store_gone(message),
            StoreRoom: lambda now, message: self.tiers.on_store_room(message),
        }

    def has_external_kv(self, seq: Sequence) -> bool:
        """Whether KV of `seq`, which was just allocated, is read or loaded. Decides which blocks
        are loaded from lower tiers rather than computed, and pins them."""
        core = self._core
        compute_s = core.config.block_size / (core.timing.prefill_tokens_per_s or 1e-9)
        rates = self.connector.rates

        def load_s(tier: Tier) -> float:
            # To compute a stream's context again would hold up the others, which a copy does not;
            # and where a worker has just died, neither rate is what was measured before.
            return 0.0 if seq.is_stream and tier in HOST_TIERS else rates.load_s(tier)

        sources = choose_loads(seq, core.kv, self.tiers, load_s, compute_s)
        return self.connector.plan(seq, sources)

    def advance(self, now: float) -> list[Effect]:
        """After every message: start the transfers that have become possible."""
        return [*self.tiers.advance(now), *self.producer.advance(now)]

    def tick(self, now: float) -> list[Effect]:
        effects = [*self.connector.tick(now), *self.producer.tick(now), *self.tiers.tick(now)]
        core = self._core
        for why, times in self.connector.failures.items():
            core.counters[f"handoff_failed_{why}"] = times
        core.counters.update(self.connector.rates.counters)
        core.counters["kv_reads_left_behind"] = self.unsettled.num_taken
        core.counters.update(self.producer.counters)
        core.counters.update(self.tiers.counters)
        return effects

    def end(self, seq: Sequence) -> list[Effect]:
        """Forget `seq` now; its blocks are freed once nothing writes to them."""
        lease = self.producer.leases.get(seq.key)
        if isinstance(lease, Handoff):
            return self.producer.end(lease, ProducerEvent.RELEASE)
        return self._forget(seq)

    def _forget(self, seq: Sequence) -> list[Effect]:
        arrival = self.connector.arrivals.get(seq.key)
        self._core.remove(seq)
        return self.connector.fail(arrival, "cancelled") if arrival is not None else []

    def take_arrived(self, now: float) -> list[Settled]:
        """Arrivals that have ended: what is good of them is sealed, and their sequences are
        scheduled to compute the rest. Blocks of ended sequences are freed."""
        alive: list[Settled] = []
        if not self.connector.settled:  # as after most messages
            return alive
        for settled in self.connector.take_settled():
            seq = settled.arrival.seq
            if seq.state is SeqState.DEAD:
                self._core.scheduler.release_if_settled(seq)
                continue
            self._use(now, settled)
            alive.append(settled)
        return alive

    def _use(self, now: float, settled: Settled) -> None:
        core, arrival, seq = self._core, settled.arrival, settled.arrival.seq
        seq.num_arriving = 0
        seq.is_remote = False
        if arrival.is_asked_back:
            seq.end_phase("asked_back", now)
        if seq.state is not SeqState.REMOTE:
            return  # still waiting: it will be admitted as a local one
        if settled.left:
            # What is in the lower tiers may be loaded now, but not from one that did not answer.
            seq.compute_all |= any(read.tier is not None for read in settled.left)
            seq.num_preemptions += 1  # it has lost its blocks, and may find none here
            seq.end_phase("lost", now)
            core.scheduler.readmit(seq)
            return
        if not settled.complete and not core.kv.can_go_on(seq, settled.end):
            seq.compute_all = True
            seq.end_phase("lost", now)
            core.scheduler.readmit(seq)
            return
        windows = core.kv.windows
        settled_at = windows.tokens(settled.end)
        first, end = arrival.first // windows.count, settled.end // windows.count
        for index, block in seq.block_ids.entries(first, end):
            core.kv.checksums[block] = arrival.checksum(index)
            source = arrival.source_tier(index)
            core.count(f"blocks_from_{source}")
            row = index // windows.count  # the rows up to it are not computed
            if row >= first and not settled.complete and not seq.has_own_kv:
                num_tokens = (row + 1 - first) * windows.block_size
                seq.cached_by_source[source] = seq.cached_by_source.get(source, 0) + num_tokens
            first = max(first, row + 1)
        if settled.complete:
            seq.num_computed, seq.has_own_kv = len(seq.tokens), True
        elif settled.end > arrival.first:
            seq.num_computed = settled_at
        self._end_phases(now, settled)
        core.kv.seal_computed(seq)
        self.tiers.on_loaded(arrival.own_sources)
        core.scheduler.compute_here(seq)
        if not settled.complete:
            core.begin(seq)

    def _end_phases(self, now: float, settled: Settled) -> None:
        """The sequence has waited for what has come: until the producer had computed all of it,
        and from then on; or all of it is lost."""
        arrival, seq = settled.arrival, settled.arrival.seq
        if arrival.mode is not Mode.HANDOFF:
            seq.end_phase(arrival.mode, now)
        elif settled.complete:
            seq.end_phase("prefill_wait", max(arrival.final_at, seq.phase_since))
            seq.end_phase("transfer", now)
        else:
            seq.end_phase("lost", now)

    def _on_confirmed(self, now: float, message: KVConfirmed) -> list[Effect]:
        self.connector.on_confirmed((message.request_id, message.attempt))
        return []

    def _on_confirm_request(self, now: float, message: KVConfirmRequest) -> list[Effect]:
        effects = self.producer.on_confirm_request(message)
        return [self._refuse(message)] if effects is None else effects

    def _on_release(self, now: float, message: KVRelease) -> list[Effect]:
        return self.producer.on_release((message.request_id, message.attempt))

    def _on_copy_done(self, now: float, done: CopyDone) -> list[Effect]:
        effects = self.tiers.on_copy_done(now, done)
        if effects is not None:
            return effects
        return [] if self.unsettled.on_copy_done(done) else self.connector.on_copy_done(now, done)

    def _on_store_found(self, now: float, message: StoreFound) -> list[Effect]:
        effects = self.tiers.on_store_found(now, message)
        self.left_kv.on_found(now, message)
        return effects

    def _on_store_listed(self, now: float, message: StoreListed) -> list[Effect]:
        effects = self.tiers.on_store_listed(now, message)
        self.stored_kv.on_listed(now, message)
        return effects

    def _refuse(self, message: KVConfirmRequest) -> Send:
        self._core.count("kv_refused")
        why = f"no lease {message.lease} is held"
        return Send(message.consumer, KVRefused(message.request_id, message.attempt, why))

    def rates(self) -> dict[Tier | None, float]:
        """Bytes per second that requests have read at, by own tier; None: from peers."""
        rates = self.connector.rates
        return {tier: rates.bytes_per_s(tier) for tier in rates.read_bytes_per_s}

    def audit(self, left: list[str]) -> Audit:
        """Where every block is. `left`: what the worker would not have if it were idle."""
        config, pool = self._core.config, self._core.kv.pool
        counts = {
            "device.blocks": pool.num_blocks,
            "device.in_use": pool.num_blocks - pool.num_free,
            "device.evictable": pool.num_evictable,
            "device.blank": pool.num_free - pool.num_evictable,
            "device.left_to_reads": self.unsettled.num_blocks,
            "transfers": self.connector.num_reads + self.unsettled.num_reads + self.tiers.num_moves,
            "leases": len(self.producer.leases),
        }
        for tier, spec in TIERS.items():
            counts[f"{tier}.blocks"] = spec.num_blocks(config)
            counts[f"{tier}.used"] = self.tiers.num_blocks(tier)
            counts[f"{tier}.pinned"] = self.tiers.num_pinned(tier)
        return Audit(config.node_id, config.epoch, counts, tuple(left))

    def check_idle(self) -> list[str]:
        """What an idle worker must not have; empty if all is well."""
        return [
            *self.connector.check_idle(),
            *self.unsettled.check_idle(),
            *self.producer.check_idle(),
            *self.tiers.check_idle(),
        ]


TICK = "tick"
MAX_REPORTED = 8  # sequences that wait for memory, which are reported to routers at a time
MAX_LEFT_SHARE = 0.5
"""So much of its KV blocks may be left to reads that do not settle. Beyond it a worker ends if they
have not settled within `WorkerConfig.left_reads_s`: their peer may be the one that is stopped, and
is ended then."""
MEMORY_WAIT_S = 0.5  # so long it may wait for its first blocks before that is reported


class RoleHandler(ABC):
    """What a worker does with the requests of one role. Owned by the worker, and shares its core
    and exchange with the other one; each sequence belongs to exactly one."""

    request: ClassVar[type]  # the message that asks for it
    needs_growth: ClassVar[bool]  # tokens are generated here, after the first
    goal: ClassVar[str]  # what one that missed its deadline was not, for the refusal

    def __init__(self, core: EngineCore, exchange: KVExchange) -> None:
        self.core = core
        self.exchange = exchange

    @abstractmethod
    def begin(self, now: float, seq: Sequence, request: Any) -> list[Effect]:
        """`seq` has been accepted for `request`, and waits."""

    def on_admitted(self, seq: Sequence) -> list[Effect]:
        """It has its blocks; those that were cache hits are sealed."""
        return []

    @abstractmethod
    def on_arrived(self, now: float, settled: Settled) -> list[Effect]:
        """Its KV has come from elsewhere, as far as it has; the rest is computed."""

    @abstractmethod
    def on_computed(self, seq: Sequence) -> list[Effect]:
        """A step has computed more of its KV, and perhaps sampled tokens."""

    @abstractmethod
    def on_prompt_computed(self, seq: Sequence) -> list[Effect]:
        """All of its KV is there, and no token is sampled here."""


class Worker:
    """Node. Invariants: blocks of an ended sequence are freed only once neither the step in flight
    nor a transfer writes to them; a sequence is REMOTE iff the connector has an arrival for it that
    has begun; one that is computed for another worker has a handoff with the producer."""

    def __init__(
        self,
        config: WorkerConfig,
        roles: Iterable[type[RoleHandler]],
        records: StoreRecords | None = None,
    ) -> None:
        """`records`: what its stores held when they were opened."""
        self.config = config
        self.node_id = config.node_id
        self.core = EngineCore(config)
        self.exchange = KVExchange(config, self.core)
        updates = WeightUpdates(self.core, self.exchange.connector.arrivals, self.exchange.end)
        self.plugs: list[Plug] = [updates]
        self.core.plugs = self.plugs
        self._roles = {role.needs_growth: role(self.core, self.exchange) for role in roles}
        self._handlers = self._make_handlers()
        self._records = records or {}
        self._has_ended = False
        self._lacks_blocks_s = 0.0  # reads that do not settle have had too many, tick by tick
        self._ticked_at = 0.0

    def start(self, now: float) -> list[Effect]:
        self.exchange.tiers.start(now, self._records)
        self._records = {}
        return [Wake(self.config.stats_interval_s, TICK)]

    def receive(self, now: float, message: Any) -> list[Effect]:
        self.core.now = self.core.kv.pool.now = now
        effects = self._handlers.get(type(message), _on_unexpected)(now, message)
        effects += self._use_arrived(now)
        effects += self._schedule(now)
        for plug in self.plugs:
            effects += plug.advance(now)
        effects += self.exchange.advance(now)
        effects += self.core.flush()
        why = "" if self._has_ended else self._why_not_go_on()
        if why:
            self._has_ended = True
            effects += self.core.give_up(why)
            effects += [Note("error", "worker_gives_up", why), Exit(why, self.core.watch.hangs)]
        return effects

    def _why_not_go_on(self) -> str:
        """Why another process would serve better than this one; "": it would not."""
        num_left, num_blocks = self.exchange.unsettled.num_blocks, self.config.num_blocks
        if self._lacks_blocks_s > self.config.left_reads_s:
            return f"{num_left} of {num_blocks} KV blocks are left to reads that do not settle"
        return self.core.watch.why

    def _role_of(self, seq: Sequence) -> RoleHandler:
        return self._roles[seq.reserve_growth]

    def _make_handlers(self) -> dict[type, Handler]:
        core, publisher = self.core, self.core.publisher
        return {
            **self.exchange.handlers,
            **{kind: do for plug in self.plugs for kind, do in plug.handlers.items()},
            **{role.request: partial(self._begin, role) for role in self._roles.values()},
            StepDone: lambda now, message: self._on_step_done(message),
            StepProgress: lambda now, message: self._on_step_progress(message),
            Woken: lambda now, message: self._on_woken(now, message.tag),
            Abort: lambda now, message: self._on_abort(message),
            RouterUp: lambda now, message: self._on_router_up(message.router),
            RouterDown: lambda now, message: self._on_router_down(message.router),
            KVSnapshotRequest: lambda now, message: publisher.snapshot(message.router),
            Probe: lambda now, message: [core.answer_probe(message)],
            AuditRequest: lambda now, message: [Send(message.reply_to, self.audit())],
            ProgressRequest: lambda now, message: [Send(message.reply_to, self.progress())],
            Unsendable: lambda now, message: self._on_unsendable(message),
        }

    def _begin(self, role: RoleHandler, now: float, request: WorkRequest) -> list[Effect]:
        if request.images is not None and (why := self._no_images(request)):
            key = request.request_id, request.attempt
            return [Send(request.router, self.core.refusal(*key, Refusal.UNSUPPORTED, why))]
        accepted = self.core.accept(now, request, role_needs_growth=role.needs_growth)
        if isinstance(accepted, Refused):
            about = [each for plug in self.plugs for each in plug.on_refused(request)]
            return [*about, Send(request.router, accepted)]
        if accepted is None:
            return []
        if request.num_stored:
            num_blocks = request.num_stored // self.config.block_size
            names = accepted.block_hashes
            names = first_of(names, min(num_blocks, len(names)))
            self.exchange.tiers.expect_stored(now, names)
        grammar = accepted.sampling.grammar
        prepared: list[Effect] = [PrepareGrammar(grammar)] if grammar else []
        begun = role.begin(now, accepted, request)
        left_kv, stored_kv = self.exchange.left_kv, self.exchange.stored_kv
        return [*prepared, *begun, *left_kv.begin(now, accepted), *stored_kv.begin(now, accepted)]

    def _no_images(self, request: WorkRequest) -> str:
        expands = "the API itself says what tokens images are to this model"
        return self.config.no_images or (expands if request.sampling.expands else "")

    def _on_abort(self, abort: Abort) -> list[Effect]:
        mine = [seq for seq in self.core.seqs.values() if seq.request_id == abort.request_id]
        return self._end([seq for seq in mine if seq.attempt <= abort.attempt])

    def _on_router_up(self, router: NodeId) -> list[Effect]:
        told = [each for plug in self.plugs for each in plug.on_router_up(router)]
        return [*told, *self.core.publisher.subscribe(router)]

    def _on_router_down(self, router: NodeId) -> list[Effect]:
        """Its clients are gone with it."""
        self.core.publisher.unsubscribe(router)
        return self._end([seq for seq in self.core.seqs.values() if seq.router == router])

    def _use_arrived(self, now: float) -> list[Effect]:
        """Go on with the sequences whose arrivals have settled."""
        effects: list[Effect] = []
        for settled in self.exchange.take_arrived(now):
            effects += self._role_of(settled.arrival.seq).on_arrived(now, settled)
        return effects

    def _admit(self, now: float) -> list[Effect]:
        """Those that have come by now and may go on have their blocks after it."""
        effects: list[Effect] = []
        exchange = self.exchange
        token_s = self.core.timing.token_s
        for seq in self.core.scheduler.admit_waiting(now, exchange.has_external_kv, token_s):
            self.core.mark_used(seq)
            if seq.state is SeqState.REMOTE:
                effects += exchange.connector.start(now, seq)
            else:
                self.core.begin(seq)
            effects += self._role_of(seq).on_admitted(seq)
        for seq in self.core.scheduler.wanted:
            effects += exchange.producer.ask_back(now, seq)
        return effects + self._use_arrived(now)

    def _schedule(self, now: float) -> list[Effect]:
        effects = [*self._end_faults(), *self._admit(now)]
        steps: list[Effect] = []
        if (step_id := self.core.scheduler.step_in_the_way()) is not None:
            steps.append(AbandonStep(step_id))
        while (step := self.core.next_step()) is not None:
            steps.append(Execute(step))
        effects += self._end_faults()
        effects += self._report_preempted(self.core.scheduler.take_preempted())
        return [*effects, *steps]

    def _end_faults(self) -> list[Effect]:
        """End the sequences that were left out of a step, or made one fail."""
        for seq, *_ in self.core.scheduler.faults:
            self.exchange.producer.forget_handoff(seq)
        return self.core.fail_left_out()

    def _report_preempted(self, preempted: Iterable[Sequence]) -> list[Effect]:
        """Their routers learn that they wait for memory."""
        node_id, epoch = self.config.node_id, self.config.epoch
        return [
            Send(seq.router, Preempted(node_id, epoch, *seq.key, awaits_prefill=seq.is_remote))
            for seq in preempted
            if seq.state is SeqState.WAITING and seq.reserve_growth
        ]

    def _on_step_done(self, done: StepDone) -> list[Effect]:
        effects: list[Effect] = []
        if done.error is not None:
            effects.append(Note("error", "step_failed", done.error))
        for seq, _ in self.core.finish_step(done):
            effects += self._role_of(seq).on_computed(seq)
        return effects

    def _on_unsendable(self, lost: Unsendable) -> list[Effect]:
        """Tokens of several requests go again apart; of one, they end it."""
        if not isinstance(lost.message, TokenDeltas):
            return [Note("error", "unsendable", f"{type(lost.message).__name__}: {lost.why}")]
        deltas = lost.message.deltas
        if len(deltas) > 1:
            return [Send(lost.to, replace(lost.message, deltas=(each,))) for each in deltas]
        key = deltas[0].request_id, deltas[0].attempt
        ended = self._end([seq for seq in self.core.seqs.values() if seq.key == key])
        refused = self.core.refusal(*key, Refusal.UNENCODABLE, lost.why)
        return [*ended, Send(lost.to, refused)]

    def _on_step_progress(self, progress: StepProgress) -> list[Effect]:
        self.core.watch.on_progress(progress.num_passed)
        return []

    def _on_woken(self, now: float, tag: str) -> list[Effect]:
        if tag == SLICE:
            self.core.publisher.on_woken()
        return self._on_tick(now) if tag == TICK else []

    def _on_tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = [Wake(self.config.stats_interval_s, TICK)]
        watch = self.core.watch
        watch.tick(now)
        if watch.is_slow:
            effects.append(AskProgress())
        self._count_left(now)
        for seq in self.core.expired(now):
            detail = f"not {self._role_of(seq).goal} by {self.node_id} before the deadline"
            refused = self.core.refusal(seq.request_id, seq.attempt, Refusal.DEADLINE, detail)
            effects += [*self.exchange.end(seq), Send(seq.router, refused)]
        # Again, in case that a router has not heard of it.
        waiting = filter(self._is_stuck, self.core.scheduler.waiting)
        effects += self._report_preempted(islice(waiting, MAX_REPORTED))
        effects += self.exchange.tick(now)
        stats = self._stats()
        return effects + [Send(router, stats) for router in self.core.publisher.routers]

    def _stats(self) -> WorkerStats:
        links = self.exchange.connector.peers.links()
        return self.core.stats(self._num_handoffs, self.exchange.rates(), links)

    def _count_left(self, now: float) -> None:
        """Time counts as it passes here: that of a process that was stopped itself does not."""
        passed_s = min(now - self._ticked_at, 2 * self.config.stats_interval_s)
        self._ticked_at = now
        is_much = self.exchange.unsettled.num_blocks > MAX_LEFT_SHARE * self.config.num_blocks
        self._lacks_blocks_s = self._lacks_blocks_s + passed_s if is_much else 0.0

    def _is_stuck(self, seq: Sequence) -> bool:
        """Whether it would rather be elsewhere: it has lost its blocks, or waits for the first.
        Where others share these cores a long prompt would only be computed at the same time."""
        if seq.num_preemptions:
            return True
        core = self.core
        if not core.scheduler.lacks_room or seq.awaits_producer:
            return False
        compute_s = seq.num_to_compute * core.timing.token_s
        is_short = not self.config.cores or compute_s <= MEMORY_WAIT_S
        return is_short and core.now - seq.arrived_at > MEMORY_WAIT_S

    def _end(self, seqs: list[Sequence]) -> list[Effect]:
        return [effect for seq in seqs for effect in self.exchange.end(seq)]

    @property
    def _num_handoffs(self) -> int:
        return len(self.exchange.producer.leases) + len(self.exchange.connector.arrivals)

    def progress(self) -> ProgressReport:
        watch, scheduler = self.core.watch, self.core.scheduler
        num_requests = len(scheduler.waiting) + scheduler.num_admitted
        return ProgressReport(
            self.node_id,
            self.config.epoch,
            watch.num_done,
            watch.progress,
            num_requests + self._num_handoffs,
        )

    def audit(self) -> Audit:
        """What does not add up is reported. It is no reason to end the worker, which has found
        nothing wrong in what it computes with: that is checked before every step."""
        left: list[str] = []
        wrong: list[str] = []
        try:
            left += self.check_idle()
        except Exception as error:
            wrong.append(f"blocks do not add up: {_what_failed(error)}")
        return replace(self.exchange.audit(left), wrong=tuple(wrong))

    def check_idle(self) -> list[str]:
        """What an idle worker must not have; empty if all is well."""
        return self.exchange.check_idle() + self.core.check_idle()


def _on_unexpected(now: float, message: object) -> list[Effect]:
    return [Note("warning", "unexpected_message", type(message).__name__)]


def _what_failed(error: Exception) -> str:
    """And where: most assertions have no text."""
    at = error.__traceback__
    assert at is not None
    while at.tb_next is not None:
        at = at.tb_next
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__} {text} in {at.tb_frame.f_code.co_name}, line {at.tb_lineno}"
