"""Where requests go: the workers that are up, what they hold, and the choice among them.

Life of a placement: a queued request is matched with the prefix index, the policy picks from the
workers that can take it, and the load is booked at once, so that the next choice sees it. The
booking ends with the first token (prefill) and with the request (decode). A worker that cannot take
it may still lend its KV to one that can.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.kv.events import KVEvents, KVSnapshot
from engine.node import NodeId
from engine.stats import Role, WorkerInfo, WorkerStats
from router.admission.admission import Rejection, blocks_needed, clamp_max_tokens
from router.config import RouterConfig
from router.index.prefix_index import PrefixIndex
from router.placement.choice import GROUP, Option
from router.placement.cost import CostModel
from router.placement.endpoint import Endpoint, model_number
from router.placement.fleet import Fleet
from router.placement.policy import Decision, Policy, Question
from router.placement.retention_policy import RetentionPolicy
from router.placement.ttft_predictor import TtftPredictor
from router.placement.work import HashedPrompt, Work
from router.record import Attempt, RequestRecord

MAX_DEAD = 64  # dead endpoints kept for status and to know old epochs
EXPECTED_OUTPUT = 128.0  # tokens, until requests have ended
OUTPUT_SMOOTHING = 0.05
STICKY_BLOCKS = 4  # beginnings of prompts that agree in so many blocks belong to one session


class Dispatcher:
    """Owned by the router. Invariant: an endpoint has a booking for each live attempt that it still
    has work to do for, and for nothing else; the fleets are the living, by role."""

    def __init__(self, config: RouterConfig, name: str = "") -> None:
        """`name` of the router: what it does with ties is its own."""
        self._config = config
        self._endpoints: dict[NodeId, Endpoint] = {}
        self.cost = CostModel()
        self._fleets = {role: Fleet(name, self.cost) for role in Role}
        self._kinds: dict[tuple[bytes, int], WorkerInfo] = {}  # of the living
        self.index = PrefixIndex(
            config.snapshot_retry_s, config.speculative_s, config.max_speculative
        )
        self.index.on_slot = self._move
        self._predictor = TtftPredictor()
        self._policy = Policy(
            config.policy,
            self.cost,
            self.index.table,
            max_inflight=config.max_inflight_per_worker,
            max_memory_wait_s=config.max_memory_wait_s,
            probe_after_s=config.probe_after_s,
        )
        self._keepers = RetentionPolicy(self._fleets[Role.DECODE], self._fleets[Role.PREFILL])
        self._expected_output = EXPECTED_OUTPUT
        self._shapes: list[WorkerInfo] = []  # of the decode workers, one of each; always a new list
        self._now = 0.0  # of the last message that was about a worker

    @property
    def endpoints(self) -> Iterator[Endpoint]:
        """All that are known, dead ones too, by name."""
        return (self._endpoints[worker] for worker in sorted(self._endpoints))

    @property
    def has_decode(self) -> bool:
        return len(self._fleets[Role.DECODE]) > 0

    def endpoint(self, worker: NodeId, epoch: int) -> Endpoint | None:
        """The living worker of exactly this epoch."""
        endpoint = self._endpoints.get(worker)
        if endpoint is None or not endpoint.alive or endpoint.info.epoch != epoch:
            return None
        return endpoint

    def up(self, now: float, info: WorkerInfo) -> tuple[Endpoint | None, bool]:
        """Take a worker in. Returns the endpoint that it replaces, if that was alive, and whether
        the worker is new (of a later epoch, or back from the dead)."""
        old = self._endpoints.get(info.worker)
        if old is not None and (
            info.epoch < old.info.epoch or (old.alive and info.epoch == old.info.epoch)
        ):
            return None, False
        was_alive = old is not None and old.alive
        if old is not None:
            self._retire(old)
        endpoint = self._endpoints[info.worker] = Endpoint(info, last_seen_at=now)
        self.index.add(info.worker, info.epoch, GROUP[info.role])
        self._fleets[info.role].add(now, endpoint)
        self._sort()
        return (old if was_alive else None), True

    def down(self, worker: NodeId, epoch: int) -> Endpoint | None:
        """Returns the endpoint that is dead now; None if that is no news."""
        endpoint = self._endpoints.get(worker)
        if endpoint is None or not endpoint.alive or epoch < endpoint.info.epoch:
            return None
        self._retire(endpoint)
        self._sort()
        dead = [e for e in self._endpoints.values() if not e.alive]
        for surplus in dead[: max(0, len(dead) - MAX_DEAD)]:
            del self._endpoints[surplus.worker]
        return endpoint

    def observe(self, now: float, stats: WorkerStats) -> bool:
        """Take statistics in. True: the worker has to be asked for a snapshot of its cache."""
        endpoint = self.endpoint(stats.worker, stats.epoch)
        if endpoint is None:
            return False
        endpoint.on_stats(now, stats)
        self._update(now, endpoint)
        self.cost.on_stats(stats)
        return self.index.hear(now, stats.worker, stats.epoch, stats.event_seq)

    def heed(self, now: float, news: KVEvents | KVSnapshot) -> bool:
        """Take cache news in. True: the worker has to be asked for a snapshot of its cache."""
        endpoint = self._endpoints.get(news.worker)
        if endpoint is None or not endpoint.alive:
            return False
        return self.index.apply(now, news)

    def fail(self, now: float, endpoint: Endpoint) -> None:
        endpoint.fail(now, self._config.backoff_s, self._config.max_backoff_s)

    def has_room(self, now: float) -> bool:
        return self._fleets[Role.DECODE].has_room(now, self._config.max_inflight_per_worker)

    def check(self, log: RequestRecord) -> Rejection | None:
        """Why none of the decode workers could ever serve `log`. Cuts max_tokens the first time."""
        if not self._shapes or log.fits is self._shapes:
            return None
        cut = clamp_max_tokens(log.num_prompt_tokens, log.sampling.max_tokens, self._shapes)
        if isinstance(cut, Rejection):
            return cut
        log.clamp(cut)
        log.fits = self._shapes
        return None

    def place(self, now: float, log: RequestRecord) -> Attempt | Rejection | None:
        """Begin the next attempt of `log`. None: nobody can take it now."""
        rejection = self.check(log)
        if rejection is not None or not self.has_decode:
            return rejection
        question = self._question(now, log)
        choice = self._policy.choose(question)
        if choice is None and log.avoid:
            choice = self._policy.choose(question._replace(trusting=True))
        if choice is None:
            return None
        best, first, work = choice.best, choice.prefill_option, question.work
        seconds, intake = best.seconds, best.intake
        attempt = log.dispatch(now, choice.decode, choice.prefill, intake.fetch_from)
        if self._config.policy == "prefix":
            named = log.block_hashes(choice.decode.info)
            attempt.keeper = self._keepers.choose(now, log, named, choice.prefill)
        others_decode = choice.decode.num_decoding > 0
        self._book(now, log, best, work, computes=first is None)
        if first is not None:
            self._book(now, log, first, work, computes=True)
        decision = Decision(
            request_id=log.request_id,
            attempt=attempt.number,
            at_s=now,
            policy=self._config.policy,
            num_tokens=len(log.tokens),
            decode=choice.decode.worker,
            prefill=None if choice.prefill is None else choice.prefill.worker,
            fetch_from=intake.fetch_from,
            seconds=seconds,
            predicted_ttft_s=self._predictor.predict(seconds, others_decode=others_decode),
            others_decode=others_decode,
            was_measured=self.cost.has_prompt_weights,
            options=choice.options,
        )
        attempt.decision = decision
        return attempt

    def started(self, now: float, attempt: Attempt, request_id: str) -> None:
        """The first token of the attempt has come: its prefill is over, wherever it was."""
        decision = attempt.decision
        if decision is not None and decision.was_measured:
            real_s, others_decode = now - attempt.sent_at, decision.others_decode
            self._predictor.learn(decision.seconds, real_s, others_decode=others_decode)
        attempt.decode.start_decoding(now, request_id)
        self._update(now, attempt.decode)
        if attempt.prefill is not None:
            attempt.prefill.prompts.discard(now, request_id)
            attempt.prefill.release(request_id)
            self._update(now, attempt.prefill)

    def release(self, attempt: Attempt, request_id: str) -> None:
        """The attempt is over."""
        for endpoint in (attempt.decode, attempt.prefill):
            if endpoint is not None and endpoint.release(request_id):
                self._update(self._now, endpoint)

    def observe_output(self, num_tokens: int) -> None:
        """A request ended after `num_tokens` of output."""
        self._expected_output += OUTPUT_SMOOTHING * (num_tokens - self._expected_output)

    def _question(self, now: float, log: RequestRecord) -> Question:
        left = log.sampling.max_tokens - log.num_output_tokens
        work = Work(
            num_tokens=len(log.tokens),
            total_tokens=log.num_prompt_tokens + log.sampling.max_tokens,
            output_tokens=min(float(left), self._expected_output),
            prompts=[
                HashedPrompt(model_number(fingerprint), size, size, log.packed_hashes(info))
                for (fingerprint, size), info in self._kinds.items()
            ],
            avoid=log.avoid,
        )
        return Question(
            now=now,
            work=work,
            decodes=self._fleets[Role.DECODE],
            prefills=self._fleets[Role.PREFILL],
            trusting=False,
            sticky=lambda: _sticky(log, self._kinds.values()),
        )

    def _book(
        self, now: float, log: RequestRecord, option: Option, work: Work, *, computes: bool
    ) -> None:
        """`computes`: the prompt is computed there."""
        endpoint, info, device = option.endpoint, option.endpoint.info, option.held.device
        output = work.output_tokens if info.role is Role.DECODE else 0.0
        num_blocks = blocks_needed(work.num_tokens - device + int(output), info.block_size)
        num_blocks = min(num_blocks, info.max_seq_blocks or num_blocks)
        if computes and option.seconds.prefill > 0:
            computed, prefill_s = option.intake.computed, option.seconds.prefill
        else:
            computed, prefill_s = 0, 0.0
        endpoint.book(now, log.request_id, computed, num_blocks, prefill_s)
        fleet, until = self._fleets[info.role], now + self.index.speculative_s
        self._policy.chooser.expect(fleet, endpoint, device // info.block_size, until)
        self._now = max(self._now, now)

    def _move(self, worker: NodeId, slot: int | None) -> None:
        self._policy.chooser.put(self._endpoints[worker], slot)

    def _update(self, now: float, endpoint: Endpoint) -> None:
        self._now = max(self._now, now)
        self._fleets[endpoint.info.role].update(now, endpoint)

    def _retire(self, endpoint: Endpoint) -> None:
        endpoint.alive = False
        self._fleets[endpoint.info.role].remove(endpoint)
        self.index.remove(endpoint.worker)

    def _sort(self) -> None:
        """Who lives has changed."""
        living = [e for fleet in self._fleets.values() for e in fleet]
        self._kinds = {(e.info.fingerprint, e.info.block_size): e.info for e in living}
        decodes = [e.info for e in self._fleets[Role.DECODE]]
        shapes = {(i.max_model_len, i.num_blocks, i.block_size): i for i in decodes}
        self._shapes = list(shapes.values())


def _sticky(log: RequestRecord, kinds: Iterable[WorkerInfo]) -> bytes:
    """A session's name; else the name of how the prompt begins."""
    submit = log.submit
    if submit.session is not None:
        return f"{submit.tenant} {submit.session}".encode()
    for info in kinds:
        block_hashes = log.block_hashes(info)
        if block_hashes:
            return block_hashes[min(len(block_hashes), STICKY_BLOCKS) - 1]
    return log.request_id.encode()
