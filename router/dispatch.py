"""Where requests go: the workers that are up, what they hold, and the choice among them.

Life of a placement: a queued request is matched with the prefix index, the policy picks from the
workers that can take it, and the load is booked at once, so that the next choice sees it. The
booking ends with the first token (prefill) and with the request (decode). A worker that cannot take
it may still lend its KV to one that can.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import nsmallest

from engine.kv_events import KVEvents, KVSnapshot
from engine.node import NodeId
from engine.stats import Role, WorkerInfo, WorkerStats
from router.admission import Rejection, blocks_needed, clamp_max_tokens, fits
from router.config import RouterConfig
from router.cost import CostModel, Intake, Work
from router.endpoint import Endpoint
from router.policy import Decision, Policy
from router.prefix_index import Held, PrefixIndex
from router.token_log import Attempt, LoggedRequest

MAX_DEAD = 64  # dead endpoints kept for status and to know old epochs
EXPECTED_OUTPUT = 128.0  # tokens, until requests have ended
OUTPUT_SMOOTHING = 0.05
MAX_LENDERS = 4  # the best ones of a kind; more would only cost the choice its time


class Dispatcher:
    """Owned by the router. Invariant: an endpoint has a booking for each live attempt that it still
    has work to do for, and for nothing else; `_decodes` and `_prefills` are the living, by name."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._endpoints: dict[NodeId, Endpoint] = {}
        self._decodes: list[Endpoint] = []
        self._prefills: list[Endpoint] = []
        self.index = PrefixIndex(
            config.snapshot_retry_s, config.speculative_s, config.max_speculative
        )
        self.cost = CostModel()
        self._policy = Policy(config.policy, self.cost, self.index.num_blocks)
        self._decisions: deque[Decision] = deque(maxlen=config.max_decisions)
        self._expected_output = EXPECTED_OUTPUT

    @property
    def endpoints(self) -> Iterator[Endpoint]:
        """All that are known, dead ones too, by name."""
        return (self._endpoints[worker] for worker in sorted(self._endpoints))

    @property
    def has_decode(self) -> bool:
        return bool(self._decodes)

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
        self._endpoints[info.worker] = Endpoint(info, heard_at=now)
        self.index.add(info.worker, info.epoch)
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
        endpoint.observe(now, stats)
        self.cost.observe(stats)
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
        limit = self._config.max_inflight_per_worker
        return any(d.usable(now, limit) for d in self._decodes)

    def check(self, log: LoggedRequest) -> Rejection | None:
        """Why none of the decode workers could ever serve `log`. Cuts max_tokens the first time."""
        if not self._decodes:
            return None
        infos = [d.info for d in self._decodes]
        cut = clamp_max_tokens(log.num_prompt_tokens, log.sampling.max_tokens, infos)
        if isinstance(cut, Rejection):
            return cut
        log.clamp(cut)
        return None

    def place(self, now: float, log: LoggedRequest) -> Attempt | Rejection | None:
        """Begin the next attempt of `log`. None: nobody can take it now."""
        rejection = self.check(log)
        if rejection is not None:
            return rejection
        total = log.num_prompt_tokens + log.sampling.max_tokens
        decodes = [d for d in self._usable(now, self._decodes) if fits(d.info, total)]
        # A worker that failed this request, or is silent, is better than none.
        decodes = [d for d in decodes if self._trusted(now, d, log)] or decodes
        if not decodes:
            return None
        prefills = [
            p
            for p in self._usable(now, self._prefills)
            if self._trusted(now, p, log) and fits(p.info, len(log.tokens) + 1)
        ]
        return self._decide(now, log, decodes, prefills)

    def started(self, attempt: Attempt, request_id: str) -> None:
        """The first token of the attempt has come: its prefill is over, wherever it was."""
        attempt.decode.start_decoding(request_id)
        if attempt.prefill is not None:
            attempt.prefill.release(request_id)

    def release(self, attempt: Attempt, request_id: str) -> None:
        """The attempt is over."""
        attempt.decode.release(request_id)
        if attempt.prefill is not None:
            attempt.prefill.release(request_id)

    def observe_output(self, num_tokens: int) -> None:
        """A request ended after `num_tokens` of output."""
        self._expected_output += OUTPUT_SMOOTHING * (num_tokens - self._expected_output)

    def explain(self, request_id: str) -> tuple[Decision, ...]:
        """The decisions about `request_id` that are still kept, oldest first."""
        return tuple(d for d in self._decisions if d.request_id == request_id)

    def _decide(
        self,
        now: float,
        log: LoggedRequest,
        decodes: list[Endpoint],
        prefills: list[Endpoint],
    ) -> Attempt:
        left = log.sampling.max_tokens - log.num_output_tokens
        cached, lenders = self._match(now, log, [*decodes, *prefills])
        work = Work(
            num_tokens=len(log.tokens),
            cached=cached,
            output_tokens=min(float(left), self._expected_output),
            lenders=lenders,
        )
        choice = self._policy.choose(work, decodes, prefills)
        self.cost.observe_hit(work)
        intake = choice.placement.intake
        attempt = log.dispatch(now, choice.decode, choice.prefill, intake.fetch_from)
        computing = choice.prefill or choice.decode
        for endpoint in (choice.decode, choice.prefill):
            if endpoint is not None:
                self._book(now, log, endpoint, work, intake if endpoint is computing else None)
        self._decisions.append(
            Decision(
                request_id=log.request_id,
                attempt=attempt.number,
                at_s=now,
                policy=self._config.policy,
                num_tokens=len(log.tokens),
                decode=choice.decode.worker,
                prefill=None if choice.prefill is None else choice.prefill.worker,
                fetch_from=intake.fetch_from,
                seconds=choice.placement.seconds,
                decode_candidates=choice.decode_candidates,
                prefill_candidates=choice.prefill_candidates,
            )
        )
        return attempt

    def _book(
        self, now: float, log: LoggedRequest, endpoint: Endpoint, work: Work, intake: Intake | None
    ) -> None:
        """`intake` is what `endpoint` has to compute; None: it computes nothing."""
        output = work.output_tokens if endpoint.info.role is Role.DECODE else 0.0
        num_blocks = blocks_needed(work.missing(endpoint) + int(output), endpoint.info.block_size)
        computed = 0 if intake is None else intake.computed
        endpoint.book(now, log.request_id, computed, num_blocks)
        self.index.speculate(now, endpoint.worker, log.block_names(endpoint.info))

    def _match(
        self, now: float, log: LoggedRequest, endpoints: list[Endpoint]
    ) -> tuple[dict[NodeId, Held], tuple[Endpoint, ...]]:
        """Tokens that each worker of the kinds of `endpoints` holds, where it holds some; and the
        workers that may lend theirs, best first, among equals the least busy."""
        kinds = {(e.info.fingerprint, e.info.block_size): e.info for e in endpoints}
        cached: dict[NodeId, Held] = {}
        lenders: list[Endpoint] = []
        for info in kinds.values():
            # The last token is always computed: its logits are what the next one is drawn from.
            num_full = (len(log.tokens) - 1) // info.block_size
            found = self.index.lookup(now, log.block_names(info)[:num_full])
            ranked = []
            for worker, blocks in found.items():
                held = cached[worker] = blocks.times(info.block_size)
                lender = self._endpoints[worker]
                if now >= lender.excluded_until and self._trusted(now, lender, log):
                    gain_s = self.cost.lending_s(lender, held)
                    ranked.append((-gain_s, lender.num_seqs, worker))
            lenders += [self._endpoints[worker] for *_, worker in nsmallest(MAX_LENDERS, ranked)]
        return cached, tuple(lenders)

    def _usable(self, now: float, endpoints: list[Endpoint]) -> list[Endpoint]:
        limit = self._config.max_inflight_per_worker
        return [e for e in endpoints if e.usable(now, limit)]

    def _trusted(self, now: float, endpoint: Endpoint, log: LoggedRequest) -> bool:
        silent = endpoint.stats is not None and (
            now - endpoint.heard_at >= self._config.probe_after_s
        )
        return not silent and all(endpoint is not avoided for avoided in log.avoid)

    def _retire(self, endpoint: Endpoint) -> None:
        endpoint.alive = False
        self.index.remove(endpoint.worker)

    def _sort(self) -> None:
        living = [e for e in self.endpoints if e.alive]
        self._decodes = [e for e in living if e.info.role is Role.DECODE]
        self._prefills = [e for e in living if e.info.role is Role.PREFILL]
