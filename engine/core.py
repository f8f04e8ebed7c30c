"""What both kinds of worker share: sequences, steps, prefix-cache events, statistics.

A worker node owns one `EngineCore`, passes it messages, and adds what its role does with KV.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.cost import StepTiming
from kvrelay.engine.images import KeptImages
from kvrelay.engine.kv.block_hash import HASH_BYTES, BlockChain
from kvrelay.engine.kv.cache_manager import KVCacheManager
from kvrelay.engine.kv.events import KVPublisher
from kvrelay.engine.kv.tier import LOWER_TIERS, Tier
from kvrelay.engine.messages import Probe, Refused, TokenDeltas, WorkRequest
from kvrelay.engine.needs import Loaded
from kvrelay.engine.node import Effect, NodeId, Note, Send
from kvrelay.engine.plug import Plug
from kvrelay.engine.progress import StepWatch
from kvrelay.engine.request import (
    NO_OUTPUTS,
    FinishReason,
    Refusal,
    RequestSpec,
    TokenDelta,
    TokenLogprobs,
)
from kvrelay.engine.scheduling.drafts import drafted
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.sequence import SeqState, Sequence
from kvrelay.engine.stats import RECOMPUTED, KVLink, WorkerStats
from kvrelay.engine.step import Step, StepDone

MAX_ENDED = 4096  # ended attempts that are remembered, so that a late duplicate is not served


class EngineCore:
    """Sequences by (request, attempt), over one scheduler and one KV cache.

    Invariant: `seqs` holds every sequence that is not DEAD.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.plugs: list[Plug] = []  # in the order in which they are called
        self.kv = KVCacheManager(config.num_blocks, config.block_size, config.kv_windows)
        self.scheduler = Scheduler(config, self.kv)
        self.seqs: dict[tuple[str, int], Sequence] = {}
        self.publisher = KVPublisher(config, self.kv.pool)
        self.counters: dict[str, float] = {}
        self.timing = StepTiming(config)
        self.loaded = Loaded()
        self.kept_images = KeptImages()
        self.watch = StepWatch(config)
        self.now = 0.0  # when the message came that is being handled
        self.compute_with(config.kv_root, config.weights.name)
        self._ended: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._pending_deltas: dict[NodeId, list[TokenDelta]] = {}

    def compute_with(self, fingerprint: bytes, weights: str) -> None:
        """Steps compute with weights of this name from now on, and name their KV by this root."""
        self.fingerprint, self.weights = fingerprint, weights

    def is_for_others(self, work: WorkRequest) -> bool:
        """Whether its router takes this worker for one with other weights."""
        return (work.fingerprint or self.config.fingerprint) != self.fingerprint

    def accept(
        self, now: float, work: WorkRequest, *, role_needs_growth: bool
    ) -> Sequence | Refused | None:
        """A new waiting sequence, a refusal to send, or None for a duplicate."""
        key = (work.request_id, work.attempt)
        if key in self.seqs or key in self._ended:
            return None
        config = self.config
        if self.is_for_others(work):
            detail = f"{config.node_id} computes with the weights {self.weights} now"
            return self.refusal(*key, Refusal.UNKNOWN, detail)
        if len(work.tokens) >= config.max_model_len:
            return self.refusal(
                *key,
                Refusal.CONTEXT_LENGTH,
                f"{len(work.tokens)} tokens leave no room for an answer in the model's context of"
                f" {config.max_model_len}",
            )
        last = work.num_prompt_tokens + work.sampling.max_tokens if role_needs_growth else 0
        most_tokens = min(max(last, len(work.tokens)), config.max_model_len)
        needed = self.kv.windows.max_blocks(most_tokens)
        if needed > config.num_blocks:
            return self.refusal(
                *key,
                Refusal.NEVER_FITS,
                f"{most_tokens} tokens need {needed} KV blocks of {config.block_size} tokens,"
                f" {config.node_id} has {config.num_blocks}",
            )
        num_here = len(self.scheduler.waiting) + self.scheduler.num_admitted
        if num_here >= config.max_waiting + config.max_num_seqs:
            return self.refusal(
                *key,
                Refusal.QUEUE_FULL,
                f"{config.node_id} has {num_here} requests, of which {config.max_num_seqs} may run",
            )
        seq = Sequence(
            spec=RequestSpec(**work.carried()),
            attempt=work.attempt,
            router=work.router,
            tokens=list(work.tokens),
            num_prompt_tokens=work.num_prompt_tokens,
            deadline=now + work.timeout_s,
            arrived_at=now,
            phase_since=now,
            chain=BlockChain(
                self.fingerprint, work.scope, config.block_size, self.kv.windows.count
            ),
            retention=replace(
                work.retention or config.retention,
                is_approximate=work.scope.is_approximate and config.quantizes,
                is_low=work.service_class.is_low,
            ),
            reserve_growth=role_needs_growth,
            num_reported=len(work.tokens),
            num_held=work.num_held,
            weights=((0, self.weights),),
            is_pinned=work.is_pinned,
        )
        # A router's hashes are trusted: they only decide what requests of this router share. Their
        # number is checked.
        if len(work.block_hashes) == len(work.tokens) // config.block_size * HASH_BYTES:
            seq.chain.adopt(work.block_hashes)
        self.seqs[seq.key] = seq
        self.scheduler.add(seq)
        self.count("requests")
        return seq

    def refusal(self, request_id: str, attempt: int, reason: Refusal, detail: str) -> Refused:
        self.count(f"refused_{reason}")
        config = self.config
        return Refused(config.node_id, config.epoch, request_id, attempt, reason, detail)

    def begin(self, seq: Sequence) -> None:
        """The rest of `seq` will be computed, after what is cached of it."""
        lower = self.publisher.lower

        def is_below(block_hash: bytes) -> bool:
            return lower is not None and any(lower.holds(t, block_hash) for t in LOWER_TIERS)

        is_counted = bool(seq.recomputed)
        self.kv.begin(seq, is_below)
        for cause, num_tokens in () if is_counted else seq.recomputed.items():
            self.count(f"{RECOMPUTED}{cause}", num_tokens)

    def mark_used(self, seq: Sequence) -> None:
        """The blocks of `seq` are in use, or were until now: the lower tiers retain them longer."""
        lower = self.publisher.lower
        if lower is not None:
            lower.use(self.now, seq.block_hashes, seq.retention)

    def remove(self, seq: Sequence) -> None:
        """Forget `seq`; its blocks are freed as soon as nothing writes to them."""
        if seq.num_sealed:
            self.mark_used(seq)
        del self.seqs[seq.key]
        self.scheduler.remove(seq)
        self._ended[seq.key] = None
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def next_step(self) -> Step | None:
        """The next step, if the executor takes one. It also takes the checksums of the blocks that
        it fills, and of the last block of a prompt that is computed for another worker: it is sent,
        full or not."""
        if self.watch.why:
            return None
        timing = self.timing
        step = self.scheduler.schedule(
            self.now,
            timing.prompt_budget,
            timing.prompt_cost,
            timing.decode_step_s.value,
            timing.draft_costs(),
            timing.token_s,
            timing.computes_apart,
            timing.low_class_room,
        )
        if step is not None:
            self.watch.begin(self.now, timing.expected_s(step))
        if step is None or step.repeats > 1 or step.is_health_check:  # these fill no block
            return step
        size, count = self.config.block_size, self.kv.windows.count
        for seq, share in zip(self.scheduler.in_flight[-1].seqs, step.seqs, strict=True):
            stop = share.end
            first, end = share.start // size, stop // size
            if share.sample and not seq.reserve_growth and stop % size:
                end += 1
            if end > first:  # as in few decodes
                step.checksum_blocks += share.block_ids[first * count : end * count]
        return step

    def finish_step(self, done: StepDone) -> list[tuple[Sequence, int]]:
        """As `Scheduler.finish_step`; also updates counters and the measured costs."""
        step = self.scheduler.in_flight[0].step
        is_check, is_lost = step.is_health_check, done.device_lost
        self.watch.end(self.now, done.error, is_health_check=is_check, device_lost=is_lost)
        if done.error is None and not is_check:
            self._count_step(step, done)
        self.loaded = done.loaded or self.loaded
        self.kept_images = done.kept_images or self.kept_images
        for index, (encoded, found) in done.images.items():
            seq = self.scheduler.in_flight[0].seqs[index]
            seq.images = seq.images[0] + encoded, seq.images[1] + found
            self.count("images_encoded", encoded)
            self.count("images_found", found)
        return self.scheduler.finish_step(done)

    def _count_step(self, step: Step, done: StepDone) -> None:
        repeats = 1
        if step.repeats > 1 and done.sampled[0] is not None:
            repeats += len(done.sampled[0].more)
        self.count("steps", repeats)
        self.count("tokens_scheduled", step.num_tokens * repeats)
        drafts = drafted(step, done)
        is_timed = done.elapsed_s > 0 and not done.waiting
        for source, (proposed, accepted) in drafts.items():
            if not proposed:
                continue
            self.count(f"{source}_tokens", proposed)
            self.count(f"{source}_tokens_accepted", accepted)
            if is_timed:
                rows = proposed / drafts["draft"][0]
                spent, gained = self.timing.draft_seconds(step, done, rows, accepted)
                self.count(f"{source}_seconds_spent", spent)
                self.count(f"{source}_seconds_gained", gained)
        if is_timed:
            accepted = drafts["draft"][1]
            self.timing.on_step(step, done.elapsed_s, repeats, accepted, done.draft_s)

    def give_up(self, why: str) -> list[Effect]:
        """This worker cannot go on: the routers try its requests elsewhere, and need not wait until
        they hear of its end."""
        return [
            Send(seq.router, self.refusal(*seq.key, Refusal.WORKER_FAILED, why))
            for seq in self.seqs.values()
        ]

    def fail_left_out(self) -> list[Effect]:
        """End the sequences that were left out of a step, or made one fail."""
        effects: list[Effect] = []
        for seq, reason, why in self.scheduler.take_faults():
            self.count("sequences_left_out")
            note = Note("error", reason.fault, f"{seq.request_id}: {why}")
            self.remove(seq)
            effects += [note, Send(seq.router, self.refusal(*seq.key, reason, why))]
        return effects

    def report(self, seq: Sequence, finish: FinishReason | None) -> None:
        """Put the tokens that the router does not have yet into the next frame to it."""
        start = seq.num_reported
        cached = None if seq.cached_reported else seq.num_cached
        reported = seq.phases_reported and finish is None
        delta = self.delta_from(
            seq, start, finish, cached, {} if reported else seq.phases, seq.drafts
        )
        self._pending_deltas.setdefault(seq.router, []).append(delta)
        seq.num_reported = len(seq.tokens)
        seq.cached_reported = True
        seq.phases_reported, seq.drafts = True, (0, 0)

    def delta_from(
        self,
        seq: Sequence,
        start: int,
        finish: FinishReason | None,
        cached: int | None,
        phases: Mapping[str, float],
        drafts: tuple[int, int] = (0, 0),
    ) -> TokenDelta:
        tokens, known = tuple(seq.tokens[start:]), seq.logprobs
        logprobs: tuple[TokenLogprobs, ...] = ()
        if known:
            positions = range(start, len(seq.tokens))
            logprobs = tuple(known[at] for at in positions if at in known)
        return TokenDelta(
            seq.request_id,
            seq.attempt,
            start,
            tokens,
            logprobs if len(logprobs) == len(tokens) else (),
            finish,
            cached,
            dict(seq.cached_by_source) if cached is not None else {},
            dict(phases),
            seq.prompt_outputs if start == seq.num_prompt_tokens and tokens else NO_OUTPUTS,
            dict(seq.recomputed) if cached is not None else {},
            seq.weights if phases or not seq.phases_reported or len(seq.weights) > 1 else (),
            drafts,
            seq.images if cached is not None else (0, 0),
        )

    def answer_probe(self, probe: Probe) -> Send:
        key = probe.request_id, probe.attempt
        seq = self.seqs.get(key)
        if seq is None:
            detail = f"{self.config.node_id} does not know attempt {probe.attempt} of {key[0]}"
            return Send(probe.router, self.refusal(*key, Refusal.UNKNOWN, detail))
        seq.router = probe.router
        start = max(probe.position, seq.num_prompt_tokens)
        delta = self.delta_from(seq, min(start, len(seq.tokens)), None, None, {})
        return Send(probe.router, TokenDeltas(self.config.node_id, self.config.epoch, (delta,)))

    def flush(self) -> list[Effect]:
        """Frames to routers: tokens, then what changed in the prefix cache."""
        config = self.config
        effects: list[Effect] = [
            Send(router, TokenDeltas(config.node_id, config.epoch, tuple(deltas)))
            for router, deltas in self._pending_deltas.items()
        ]
        self._pending_deltas.clear()
        return effects + self.publisher.publish()

    def expired(self, now: float) -> list[Sequence]:
        """Sequences whose deadline has passed, except HELD ones, which have a lease."""
        return [
            seq
            for seq in self.seqs.values()
            if now >= seq.deadline and seq.state is not SeqState.HELD
        ]

    def stats(
        self,
        num_handoffs: int,
        read_rates: Mapping[Tier | None, float],
        links: tuple[KVLink, ...] = (),
    ) -> WorkerStats:
        """`read_rates`: bytes per second into device memory, by own tier; None: from peers."""
        pool, scheduler, lower = self.kv.pool, self.scheduler, self.publisher.lower
        decoding = [len(seq.tokens) for seq in scheduler.running if seq.is_decoding]
        low = [s for s in scheduler.running if s.is_low and s.is_decoding]
        wanted = [(s, self.kv.windows.max_blocks(len(s.tokens))) for s in scheduler.waiting]
        low_wanted = sum(count for s, count in wanted if s.is_low)
        is_busy = bool(decoding)
        self.counters["preemptions"] = scheduler.num_preemptions
        self.counters["evictions"] = pool.num_evictions
        return WorkerStats(
            worker=self.config.node_id,
            epoch=self.config.epoch,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_waiting=len(scheduler.waiting),
            num_running=scheduler.num_admitted,
            num_handoffs=num_handoffs,
            pending_prefill_tokens=scheduler.pending_tokens,
            prefill_tokens_per_s=self.timing.present_prefill_rate(is_busy=is_busy),
            decode_step_s=self.timing.decode_step_s.value,
            read_bytes_per_s=read_rates[None],
            event_seq=self.publisher.event_seq,
            counters=dict(self.counters),
            host_read_bytes_per_s=read_rates[Tier.HOST],
            disk_read_bytes_per_s=read_rates[Tier.DISK],
            num_host_blocks=sum(map(lower.num_blocks, (Tier.HOST, Tier.PACKED))) if lower else 0,
            num_disk_blocks=lower.num_blocks(Tier.DISK) if lower else 0,
            disk_used_bytes=lower.used_bytes(Tier.DISK) if lower else 0,
            prompt_weights=self.timing.prompt_cost.published(),
            prompt_slowdown=self.timing.present_slowdown(is_busy=is_busy),
            decode_weights=self.timing.decode_cost.published(),
            num_wanted_blocks=sum(count for _, count in wanted),
            num_decoding=len(decoding),
            decoding_tokens=sum(decoding),
            progress=self.watch.progress,
            groups=self.kv.group_blocks(),
            object_read_bytes_per_s=read_rates[Tier.OBJECT],
            num_low_blocks=pool.num_used_low + low_wanted,
            num_low_decoding=len(low),
            low_decoding_tokens=sum(len(s.tokens) for s in low),
            num_host_lacking=lower.num_lacking(Tier.HOST) if lower else 0,
            loaded=self.loaded.digests,
            load_s=self.loaded.load_s,
            images=self.kept_images.keys,
            image_token_s=self.kept_images.token_s,
            links=links,
            **{name: value for plug in self.plugs for name, value in plug.facts().items()},
        )

    def count(self, name: str, amount: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount

    def check_idle(self) -> list[str]:
        """What is still held by an idle worker, one line each; empty if all is well."""
        self.kv.pool.check_integrity()
        scheduler = self.scheduler
        left = [f"sequence {seq.key} is {seq.state}" for seq in self.seqs.values()]
        left += [f"step {each.step.step_id} is in flight" for each in scheduler.in_flight]
        if scheduler.waiting or scheduler.running or scheduler.remote:
            left.append(
                f"{len(scheduler.waiting)} waiting, {len(scheduler.running)} running,"
                f" {len(scheduler.remote)} remote"
            )
        pool = self.kv.pool
        if not pool.is_idle():
            left.append(f"{pool.num_blocks - pool.num_free} blocks are in use")
        return left
