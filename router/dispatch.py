"""Where requests go: the workers that are up, what they hold, and the choice among them.

Life of an attempt: a queued request is matched with the prefix index, the policy picks from the
workers that can take it, and the load is booked at once, so that the next choice sees it. The
booking ends with the first token (prefill) and with the request (decode). KV may be fetched from a
worker that cannot take the request itself.

Whether a request fits on a worker at all, and how long its output may be there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf

from kvrelay.engine.backoff import Backoff
from kvrelay.engine.kv.events import KVEvents, KVSnapshot
from kvrelay.engine.needs import key_of, unserved
from kvrelay.engine.node import NodeId
from kvrelay.engine.request import Refusal, TokenDelta
from kvrelay.engine.stats import Role, WorkerInfo, WorkerStats
from kvrelay.router.averages import Average
from kvrelay.router.config import RouterConfig
from kvrelay.router.index.prefix_index import PrefixIndex
from kvrelay.router.placement.cost import CostModel
from kvrelay.router.placement.endpoint import Endpoint, Ends, model_number
from kvrelay.router.placement.policy import (
    GROUP,
    POOL,
    Fleet,
    Option,
    Policy,
    RoutingDecision,
    TtftPredictor,
)
from kvrelay.router.placement.retention_policy import RetentionPolicy
from kvrelay.router.placement.work import HashedPrompt, Work
from kvrelay.router.record import Attempt, Rejection, RequestRecord


def fits(info: WorkerInfo, num_tokens: int) -> bool:
    """Could an empty worker hold a sequence that ends at `num_tokens` tokens?"""
    return num_tokens <= info.max_model_len and info.blocks_for(num_tokens) <= info.num_blocks


def clamp_max_tokens(
    num_prompt: int, max_tokens: int, workers: Sequence[WorkerInfo]
) -> int | Rejection:
    """`max_tokens`, cut to the longest context among `workers` (at least one); or why the request
    can be served by none of them."""
    limit = max([info.max_model_len for info in workers])
    if num_prompt == 0:
        return Rejection(Refusal.CONTEXT_LENGTH, "the prompt has 0 tokens; it needs at least 1")
    if num_prompt + 1 > limit:
        return Rejection(
            Refusal.CONTEXT_LENGTH,
            f"the prompt has {num_prompt} tokens; with at least 1 token of output, "
            f"{limit - 1} fit into the context of {limit}",
        )
    max_tokens = min(max_tokens, limit - num_prompt)
    for info in workers:
        if fits(info, num_prompt + max_tokens):
            return max_tokens
    largest = max(workers, key=lambda info: info.pool_tokens)
    needed = largest.blocks_for(num_prompt + max_tokens)
    return Rejection(
        Refusal.NEVER_FITS,
        f"{num_prompt} prompt + {max_tokens} output tokens need {needed} KV blocks of "
        f"{largest.block_size} tokens; the largest worker has {largest.num_blocks}",
    )


MAX_DEAD = 64  # dead endpoints kept for status and to know old epochs
FIRST_OUTPUT = 128.0  # tokens, until requests have ended
STREAM_WEIGHT_ON_PREFILL = 8.0  # with a target for TTFT, a stream there counts as so many
LATE_S = 1.0  # KV that comes so much later than estimated, and than it takes to compute, is lost
Accepts = Callable[[float, RequestRecord, float, float, float], bool]  # `Admission.accepts`
STICKY_BLOCKS = 4  # prompts that begin with the same blocks, so many, belong to one session


class Dispatcher:
    """Owned by the router. Invariant: an endpoint has a booking for each live attempt that it still
    has work to do for, and for nothing else; the fleets are the workers that are up, by pool."""

    def __init__(self, config: RouterConfig, name: str = "") -> None:
        """`name` of the router: routers break ties differently."""
        self._config = config
        self._backoff = Backoff(config.backoff_s, config.max_backoff_s)
        self._endpoints: dict[NodeId, Endpoint] = {}
        targets = {"prefilling_at_least": STREAM_WEIGHT_ON_PREFILL} if config.ttft_target_s else {}
        self.cost = CostModel(**targets)
        self._fleets = {pool: Fleet(name, self.cost) for pool in (Role.DECODE, Role.PREFILL)}
        self._kinds: dict[tuple[bytes, int], WorkerInfo] = {}  # one of each that is up
        self.index = PrefixIndex(
            config.snapshot_retry_s, config.speculative_s, config.max_speculative
        )
        self.index.on_slot = self._on_slot
        self.index.on_store = self._on_store
        self._predictor = TtftPredictor()
        self._policy = Policy(
            config.policy,
            self.cost,
            self.index.table,
            self._fleets,
            max_inflight=config.max_inflight_per_worker,
            max_memory_wait_s=config.max_memory_wait_s,
            probe_after_s=config.probe_after_s,
        )
        self.links = self._policy.chooser.links
        self._retention = RetentionPolicy(self._fleets[Role.DECODE], self._fleets[Role.PREFILL])
        self.output_tokens = Average(FIRST_OUTPUT)  # per request
        self._shapes: list[WorkerInfo] = []  # one of each that workers have; always a new list
        self._now = 0.0  # when the last message about a worker came
        self.found_room = False  # for the last one that was to be placed
        self._waits: Attempt | None = None  # sent out to wait for memory, which is held for it

    @property
    def endpoints(self) -> Iterator[Endpoint]:
        """All that are known, dead ones too, by name."""
        return (self._endpoints[worker] for worker in sorted(self._endpoints))

    @property
    def prompt_tokens_per_s(self) -> float:
        """That the workers compute together which prompts are meant for; 0: not known yet."""
        return sum(self.prompt_rates)

    @property
    def prompt_rates(self) -> list[float]:
        """What each of these workers computes, as far as it is known."""
        fleet = self._fleets[Role.PREFILL] or self._fleets[Role.DECODE]
        rates = [each.stats.prefill_tokens_per_s for each in fleet if each.stats is not None]
        return [rate for rate in rates if rate > 0]

    @property
    def has_workers(self) -> bool:
        return any(len(fleet) for fleet in self._fleets.values())

    def workers(self) -> dict[NodeId, WorkerInfo]:
        """The workers that are up, by name."""
        return {e.worker: e.info for e in self.endpoints if e.alive}

    def endpoint(self, worker: NodeId, epoch: int) -> Endpoint | None:
        """The worker of exactly this epoch, if it is up."""
        endpoint = self._endpoints.get(worker)
        if endpoint is None or not endpoint.alive or endpoint.info.epoch != epoch:
            return None
        return endpoint

    def on_worker_up(self, now: float, info: WorkerInfo) -> tuple[Endpoint | None, bool]:
        """Returns the endpoint that the worker replaces, if that was alive, and whether it is new
        (of a later epoch, or up again)."""
        old = self._endpoints.get(info.worker)
        if old is not None and (
            info.epoch < old.info.epoch or (old.alive and info.epoch == old.info.epoch)
        ):
            if old.excluded_until == inf and info.epoch == old.info.epoch:
                old.excluded_until = now  # it was to go, and stays after all
            return None, False
        was_alive = old is not None and old.alive
        if old is not None:
            self._retire(old)
        endpoint = self._endpoints[info.worker] = Endpoint(info, last_seen_at=now)
        self.index.add(info.worker, info.epoch, GROUP[info.role], info.kind)
        endpoint.store_slot = self.index.stores.get(info.kind, -1)
        self._fleets[POOL[info.role]].add(now, endpoint)
        self._on_fleet_changed()
        return (old if was_alive else None), True

    def on_worker_down(self, worker: NodeId, epoch: int) -> Endpoint | None:
        """Returns the endpoint that is dead now; None: it was dead before."""
        endpoint = self._endpoints.get(worker)
        if endpoint is None or not endpoint.alive or epoch < endpoint.info.epoch:
            return None
        self._retire(endpoint)
        self._on_fleet_changed()
        dead = [e for e in self._endpoints.values() if not e.alive]
        for surplus in dead[: max(0, len(dead) - MAX_DEAD)]:
            del self._endpoints[surplus.worker]
        return endpoint

    def on_role(self, now: float, worker: NodeId, epoch: int, role: Role) -> Endpoint | None:
        """Prefer the worker for `role` from now on; None: that is no change."""
        endpoint = self.endpoint(worker, epoch)
        if endpoint is None or endpoint.info.role is role:
            return None
        self._fleets[POOL[endpoint.info.role]].remove(endpoint)
        endpoint.set_role(role)
        self._fleets[POOL[role]].add(now, endpoint)
        self.index.add(worker, epoch, GROUP[role], endpoint.info.kind)
        self._on_fleet_changed()
        return endpoint

    def on_weights(
        self, now: float, worker: NodeId, epoch: int, fingerprint: bytes, name: str, number: int
    ) -> Endpoint | None:
        """The worker computes with those of this name from now on, by its change of this number;
        None: the router knew, or knows of a later change."""
        endpoint = self.endpoint(worker, epoch)
        if endpoint is None or number < endpoint.num_weight_changes:
            return None
        endpoint.num_weight_changes = number
        if endpoint.info.fingerprint == fingerprint:
            return None
        fleet = self._fleets[POOL[endpoint.info.role]]
        fleet.remove(endpoint)
        endpoint.set_weights(fingerprint, name)
        fleet.add(now, endpoint)
        self._on_fleet_changed()
        return endpoint

    def on_stats(self, now: float, stats: WorkerStats) -> bool:
        """True: the worker has to be asked for a snapshot of its cache."""
        endpoint = self.endpoint(stats.worker, stats.epoch)
        if endpoint is None:
            return False
        endpoint.on_stats(now, stats)
        self._update(now, endpoint)
        self.cost.on_stats(stats)
        return self.index.on_event_seq(now, stats.worker, stats.epoch, stats.event_seq)

    def on_kv_events(self, now: float, events: KVEvents | KVSnapshot) -> bool:
        """True: the worker has to be asked for a snapshot of its cache."""
        endpoint = self._endpoints.get(events.worker)
        if endpoint is None or not endpoint.alive:
            return False
        return self.index.apply(now, events)

    def on_failure(self, now: float, endpoint: Endpoint, sent_at: float) -> None:
        """It has failed an attempt that it was sent at `sent_at`."""
        endpoint.fail(now, sent_at, self._backoff)

    def has_room(self, now: float) -> bool:
        limit = self._config.max_inflight_per_worker
        return any(fleet.has_room(now, limit) for fleet in self._fleets.values())

    def check(self, record: RequestRecord) -> Rejection | None:
        """Why no worker could ever serve `record`. Cuts max_tokens the first time."""
        if not self._shapes or record.fits is self._shapes:
            return None
        cut = clamp_max_tokens(record.num_prompt_tokens, record.sampling.max_tokens, self._shapes)
        if isinstance(cut, Rejection):
            return cut
        if (need := record.submit.need) is not None and not self.loads:
            return Rejection(Refusal.NEED, unserved(need.kind))
        pinned, known = record.submit.weights, sorted({i.weights for i in self._kinds.values()})
        if pinned and pinned not in known:
            return Rejection(
                Refusal.WEIGHTS, f"no worker has the weights {pinned!r}; there are: {known}"
            )
        record.clamp(cut)
        record.fits = self._shapes
        return None

    def place(
        self,
        now: float,
        record: RequestRecord,
        leaves: tuple[Endpoint, ...] = (),
        accepts: Accepts | None = None,
        *,
        patient: bool = False,
        apart_from: Sequence[Endpoint] = (),
    ) -> Attempt | Rejection | None:
        """Begin the next attempt of `record`. None: no worker can take it now, or what it would
        cost is not accepted. One that leaves workers goes where memory is free, or nowhere.
        `apart_from`: not to these, whatever others have failed at.

        One that is `patient` goes where there will be memory first, and others that do not fit
        beside it go elsewhere until it has begun: one at a time, and none of a low class."""
        rejection = self.check(record)
        if rejection is not None or not self.has_workers:
            return rejection
        if unlike := self._unlike(record):
            place = partial(self._place, now, record, leaves, accepts, patient=patient)
            attempt = place(apart_from=(*apart_from, *unlike))
            if attempt is not None or record.submit.weights:
                return attempt
        return self._place(now, record, leaves, accepts, patient=patient, apart_from=apart_from)

    def _unlike(self, record: RequestRecord) -> list[Endpoint]:
        """Workers with other weights than those that it is pinned to, or has begun with."""
        wanted = record.submit.weights or (record.weights[-1][1] if record.weights else "")
        names = {info.weights for info in self._kinds.values()}
        if len(names) < 2 or wanted not in names:
            return []
        return [e for e in self.endpoints if e.alive and e.info.weights != wanted]

    def _place(
        self,
        now: float,
        record: RequestRecord,
        leaves: tuple[Endpoint, ...],
        accepts: Accepts | None,
        *,
        patient: bool,
        apart_from: Sequence[Endpoint],
    ) -> Attempt | None:
        """As `place`, for one that workers may serve."""
        work = self._work(record)
        if patient:  # told a first token by a prefill worker, it would be silent while it waits
            if self._waits is not None:
                return None
            work = work._replace(alone=True, patient=True)
        if leaves or apart_from:
            avoid = (*record.avoid, *apart_from, *leaves)
            work = work._replace(avoid=avoid, num_left=len(leaves))
        choose = partial(self._policy.choose, now, sticky=lambda: self._sticky(record))
        choice = choose(work)
        if choice is None and record.avoid and not leaves:
            if apart_from:
                work = work._replace(avoid=apart_from)
            choice = choose(work, trusting=not apart_from)
        self.found_room = choice is not None
        if choice is None or (leaves and choice.best.seconds.memory > 0):
            return None
        best, first = choice.best, choice.best_prefill
        decode, prefill, _, seconds, intake = best
        free = decode.free_share
        if accepts is not None and not accepts(now, record, seconds.ttft, seconds.queue, free):
            return None
        attempt = record.dispatch(now, decode, prefill, intake.fetch_from)
        if self._config.policy == "prefix":
            block_hashes = record.block_hashes(decode.info)
            attempt.retain_on = self._retention.choose(now, record, block_hashes, prefill)
        attempt.num_held = len(record.tokens) - intake.computed
        attempt.num_stored = self._stored(now, record, decode.info)
        if patient and seconds.memory > 0 and not record.submit.is_low:
            missing = work.num_tokens - best.held.device
            decode.held_blocks = decode.info.blocks_for(missing)
            self._waits = attempt
        workers = [best] if first is None else [best, first]
        missing = sum(max(0, work.num_tokens - each.held.device) for each in workers)
        self.cost.on_placed(max(intake.load_s, intake.fetch_s), missing)
        others_decode = decode.num_decoding > 0
        self._book(now, record, best, work, decodes=True, computes=first is None)
        if first is not None:
            self._book(now, record, first, work, decodes=False, computes=True)
        attempt.decision = RoutingDecision(
            at_s=now,
            policy=self._config.policy,
            num_tokens=len(record.tokens),
            predicted_ttft_s=self._predictor.predict(seconds, others_decode=others_decode),
            others_decode=others_decode,
            was_measured=self.cost.is_measured,
            options=choice,
        )
        return attempt

    def no_room_for(self, record: RequestRecord) -> int | None:
        """Tokens that no worker has memory for, by the last `place`, which found no room for
        `record`; None: others that need as much may have a choice which it does not have."""
        if self.found_room or record.attempts or record.submit.weights:
            return None
        num_tokens = record.num_prompt_tokens + record.sampling.max_tokens
        is_everywhere = all(fits(info, num_tokens) for info in self._shapes)
        return record.num_prompt_tokens if is_everywhere else None

    def on_first_token(self, now: float, attempt: Attempt, request_id: str) -> None:
        """The first token of the attempt has come: its prefill is over, wherever it was."""
        decision = attempt.decision
        if decision is not None and decision.was_measured:
            real_s, others_decode = now - attempt.sent_at, decision.others_decode
            self._predictor.on_first_token(
                decision.options.best.seconds, real_s, others_decode=others_decode
            )
        self._stop_holding(attempt)
        attempt.decode.start_decoding(now, request_id)
        self._update(now, attempt.decode)
        self.on_prefill_over(now, attempt, request_id)

    def on_sent(self, now: float, attempt: Attempt) -> None:
        """KV is to be read for it, by these links."""
        if attempt.decision is not None:
            ends = attempt.decode, attempt.prefill
            attempt.decision.bad_links = self.links.losses(now, ends)
        for link in _links_of(attempt, self._endpoints.get(attempt.fetch_from or "")):
            attempt.links[link] = self.links.begin(now, link)

    def on_phases(
        self, now: float, attempt: Attempt, endpoint: Endpoint, delta: TokenDelta
    ) -> list[tuple[Ends, bool]]:
        """`endpoint` has told how long it waited for KV, and whether that came. Returns the links
        on which it was lost, and whether each is to be avoided from now on."""
        phases, decision = delta.phases, attempt.decision
        lost: list[tuple[Ends, bool]] = []
        if not phases or decision is None:
            return lost
        for ends in [each for each in attempt.links if each.reader is endpoint]:
            is_trial = attempt.links.pop(ends)
            seconds = decision.options.best.seconds
            if ends.fetches:
                wait_s = phases.get("fetch", 0.0) + phases.get("lost", 0.0)
                is_lost = wait_s > 0 and not delta.cached_by_source.get("peer")
                if not wait_s:  # it held what it was to read
                    continue
            elif "asked_back" in phases:  # not by the fault of the link
                is_lost, wait_s = False, 0.0
            elif "transfer" in phases:
                wait_s = phases["transfer"] - seconds.transfer
                is_lost = wait_s > max(LATE_S, seconds.prefill)
            else:
                wait_s = sum(phases.values()) - phases.get("prefill", 0.0)
                wait_s -= seconds.ttft + seconds.memory
                is_lost = True
            wait_s = max(0.0, wait_s)
            is_new = self.links.end(now, ends, is_lost=is_lost, is_trial=is_trial, wait_s=wait_s)
            if is_lost:
                lost.append((ends, is_new))
        return lost

    def on_prefill_over(self, now: float, attempt: Attempt, request_id: str) -> None:
        """Its prefill worker, if it has one, has no more to do for it."""
        if attempt.prefill is not None and attempt.awaits_prefill:
            attempt.awaits_prefill = False
            attempt.prefill.prompts.discard(now, request_id)
            attempt.prefill.release(request_id)
            self._update(now, attempt.prefill)

    def release(self, attempt: Attempt, request_id: str) -> None:
        """The attempt is over. A prefill worker was released when its part was over; what is booked
        there now is another attempt."""
        self._stop_holding(attempt)
        workers = attempt.workers if attempt.awaits_prefill else (attempt.decode,)
        for endpoint in workers:
            if endpoint.release(request_id):
                self._update(self._now, endpoint)

    def _stop_holding(self, attempt: Attempt) -> None:
        if attempt is self._waits:
            attempt.decode.held_blocks, self._waits = 0, None

    def check_idle(self) -> list[str]:
        """A line for each thing that should not be there when no request is."""
        left = [f"{e.worker} holds blocks" for e in self._endpoints.values() if e.held_blocks]
        for endpoint in self._endpoints.values():
            left += [f"{endpoint.worker} has {name} booked" for name in endpoint.bookings]
            left += endpoint.check_integrity()
        return left

    def _work(self, record: RequestRecord) -> Work:
        left = record.sampling.max_tokens - record.num_output_tokens
        # A prompt that gives outputs is computed whole, in one place.
        whole, need = record.sampling.reads_prompt, record.submit.need
        prompts = [
            HashedPrompt(
                model_number(f),
                size,
                size,
                bytearray() if whole else record.packed_hashes(info),
                info.mark_group,
            )
            for (f, size), info in self._kinds.items()
        ]
        return Work(
            num_tokens=len(record.tokens),
            total_tokens=record.num_prompt_tokens + record.sampling.max_tokens,
            output_tokens=min(float(left), self.output_tokens.value),
            others_output=self.output_tokens.value,
            prompts=prompts,
            avoid=record.avoid,
            alone=whole,
            resumes=record.num_output_tokens > 0,
            is_low=record.submit.is_low,
            need=key_of(need.digest) if need else 0,
            images=record.placed_images,
        )

    def held(self, now: float, record: RequestRecord) -> int | None:
        """Tokens of the prompt whose KV the worker with most of it holds, in any tier; None: no
        worker is up."""
        found = [
            size * self.index.lookup(now, record.packed_hashes(info)).longest
            for (_, size), info in self._kinds.items()
        ]
        return max(found, default=None)

    def _sticky(self, record: RequestRecord) -> bytes:
        """A session's name; else the hash of how the prompt begins."""
        submit = record.submit
        if submit.session is not None:
            return f"{submit.tenant} {submit.session}".encode()
        for info in self._kinds.values():
            block_hashes = record.block_hashes(info)
            if block_hashes:
                return block_hashes[min(len(block_hashes), STICKY_BLOCKS) - 1]
        return record.request_id.encode()

    def _book(
        self,
        now: float,
        record: RequestRecord,
        option: Option,
        work: Work,
        *,
        decodes: bool,
        computes: bool,
    ) -> None:
        """`computes`: the prompt is computed there."""
        endpoint, info, device = option.endpoint, option.endpoint.info, option.held.device
        output = work.output_tokens if decodes else 0.0
        num_blocks = info.blocks_for(work.num_tokens - device + int(output))
        if computes and option.seconds.prefill > 0:
            computed, prefill_s = option.intake.computed, option.seconds.prefill
        else:
            computed, prefill_s = 0, 0.0
        first = work.num_tokens - computed
        images = [each.key for each in work.images if each.end > first]
        booked = record.request_id, computed, num_blocks, prefill_s, work.need, images
        endpoint.book(now, *booked, is_low=work.is_low)
        fleet, until = self._fleets[POOL[info.role]], now + self.index.expected_s
        self._policy.chooser.expect(fleet, endpoint, device // info.block_size, until)
        self._now = max(self._now, now)

    def _on_slot(self, worker: NodeId, slot: int | None) -> None:
        self._policy.chooser.put(self._endpoints[worker], slot)

    def _on_store(self, kind: bytes, slot: int) -> None:
        for endpoint in self._endpoints.values():
            if endpoint.info.kind == kind:
                endpoint.store_slot = slot

    def _stored(self, now: float, record: RequestRecord, info: WorkerInfo) -> int:
        """Tokens of the prompt whose KV the object store of these workers has."""
        if info.kind not in self.index.stores:
            return 0
        found = self.index.lookup(now, record.packed_hashes(info))
        return info.block_size * found.stored(info.kind)

    def _update(self, now: float, endpoint: Endpoint) -> None:
        self._now = max(self._now, now)
        self._fleets[POOL[endpoint.info.role]].update(now, endpoint)

    @property
    def loads(self) -> bool:
        """Whether all workers that are up load what requests need."""
        return all(info.loads for info in self._shapes)

    def _retire(self, endpoint: Endpoint) -> None:
        endpoint.alive = False
        self._fleets[POOL[endpoint.info.role]].remove(endpoint)
        self.index.remove(endpoint.worker)
        self.links.forget(endpoint)

    def _on_fleet_changed(self) -> None:
        """Workers have come or gone."""
        infos = [e.info for fleet in self._fleets.values() for e in fleet]
        self._kinds = {(i.fingerprint, i.block_size): i for i in infos}
        kept = ((i.max_model_len, i.num_blocks, i.block_size, i.loads) for i in infos)
        shapes = dict(zip(kept, infos, strict=True))
        self._shapes = list(shapes.values())


def _links_of(attempt: Attempt, peer: Endpoint | None) -> Iterator[Ends]:
    """By which KV is to be read. `peer`: whose prefix is fetched."""
    if attempt.prefill is not None:
        yield Ends(attempt.prefill, attempt.decode, fetches=False)
    if peer is not None:
        yield Ends(peer, attempt.prefill or attempt.decode, fetches=True)
