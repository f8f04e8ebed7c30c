"""The node of a worker that computes with vLLM: messages of routers in, tokens of vLLM out.

Life of a request: begun (vLLM queues, computes and batches it by itself) -> tokens come, a step at
a time -> finished, refused, aborted or past its deadline. It is another attempt's continuation
where `tokens` has output: vLLM gets that as part of the prompt. Where the next token depends on
which tokens are output, it gets the prompt alone and generates them once more; they have to come
out the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from kvrelay.decode_worker.messages import Decode
from kvrelay.decode_worker.vllm.held import HeldBlocks, salt_of
from kvrelay.decode_worker.vllm.messages import (
    Begin,
    EngineLost,
    Generated,
    NotBegun,
    Stepped,
    Stop,
)
from kvrelay.decode_worker.vllm.parameters import (
    depends_on_output,
    options,
    unsupported,
)
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.cost import Rate
from kvrelay.engine.kv.events import KVPublisher, KVSnapshotRequest
from kvrelay.engine.kv.tier import LOWER_TIERS
from kvrelay.engine.messages import Abort, Probe, Refused, TokenDeltas, WorkRequest
from kvrelay.engine.node import Effect, Exit, NodeId, Note, Send, Unsendable, Wake, Woken
from kvrelay.engine.request import (
    NO_OUTPUTS,
    FinishReason,
    PromptOutputs,
    Refusal,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
)
from kvrelay.engine.stats import (
    Audit,
    AuditRequest,
    Progress,
    ProgressReport,
    ProgressRequest,
    RouterDown,
    RouterUp,
    WorkerStats,
)
from kvrelay.engine.weights import NO_VERSION, UpdateWeights, WeightsUpdated
from kvrelay.kvtransfer.messages import CacheOrder, CacheOrderDone

TICK = "tick"
MAX_ENDED = 4096  # ended attempts that are remembered, so that a late duplicate is not served
FIRST_SLACK = 10.0  # times the deadline of a step, before the first one: it compiles
LATE = 1 / 3  # share of the deadline
NO_READS = 1.0  # bytes per second at which it reads KV of others: no router counts on it
FIXED_WEIGHTS = "workers that run vllm keep their weights: restart the server with the new ones"

Handler = Callable[[float, Any], list[Effect]]
FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@dataclass(slots=True, eq=False)
class Request:
    """One attempt. Invariant: `tokens` are the prompt and the output that the router may have;
    of the `num_known` tokens of output that it came with, the first `num_repeated` are in the
    prompt that vLLM got, or have come again."""

    request_id: str
    attempt: int
    router: NodeId
    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    deadline: float
    arrived_at: float
    num_known: int
    num_repeated: int
    num_given: int  # tokens that vLLM has begun from
    num_sent: int  # tokens that the router has
    has_begun: bool = False  # tokens have come of it
    num_cached: int = 0
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # position -> logprobs
    prompt: PromptOutputs = NO_OUTPUTS

    @property
    def key(self) -> tuple[str, int]:
        return self.request_id, self.attempt

    @property
    def name(self) -> str:
        """The key that vLLM knows it by."""
        return f"{self.request_id}/{self.attempt}"


class VllmWorker:
    """Node. Invariant: `_requests` has those that vLLM has, and no others, as soon as the effects
    so far are performed."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.node_id = config.node_id
        self.held = HeldBlocks(config.fingerprint, config.block_size)
        self._publisher = KVPublisher(config, self.held)
        self._requests: dict[str, Request] = {}  # by name
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._counters: dict[str, float] = {}
        self._last = Stepped(())
        self._prefill_tokens_per_s, self._decode_step_s = Rate(), Rate()
        self._prompts_s = 0.0  # that steps took with prompts that have no token yet
        self._num_steps = 0
        self._waited_s = 0.0  # for the step that runs, tick by tick
        self._ticked_at = 0.0
        self._why_ended = ""
        self._handlers: dict[type, Handler] = {
            Decode: self._on_decode,
            Stepped: self._on_stepped,
            NotBegun: self._on_not_begun,
            EngineLost: lambda now, lost: self._give_up(lost.why, hangs=False),
            Abort: self._on_abort,
            Unsendable: self._on_unsendable,
            Probe: lambda now, probe: [self._answer(probe)],
            Woken: lambda now, woken: self._on_tick(now) if woken.tag == TICK else [],
            RouterUp: lambda now, up: self._publisher.subscribe(up.router),
            RouterDown: lambda now, down: self._on_router_down(down.router),
            KVSnapshotRequest: lambda now, asked: self._publisher.snapshot(asked.router),
            AuditRequest: lambda now, asked: [Send(asked.reply_to, self.audit())],
            ProgressRequest: lambda now, asked: [Send(asked.reply_to, self._progress_report())],
            UpdateWeights: lambda now, asked: [self._keep_weights(asked)],
            CacheOrder: lambda now, order: [
                Send(order.router, CacheOrderDone(self.node_id, order.order_id, 0))
            ],
        }

    def start(self, now: float) -> list[Effect]:
        return [Wake(self.config.stats_interval_s, TICK)]

    def receive(self, now: float, message: Any) -> list[Effect]:
        if self._why_ended:
            return []
        handler = self._handlers.get(type(message))
        if handler is not None:
            return handler(now, message)
        if isinstance(message, WorkRequest):  # a prompt for another worker
            why = f"{self.node_id} computes with vLLM, and for nobody else"
            return [self._refuse(message, Refusal.WORKER_FAILED, why)]
        return [Note("warning", "unexpected_message", type(message).__name__)]

    def _on_decode(self, now: float, work: Decode) -> list[Effect]:
        num_output = len(work.tokens) - work.num_prompt_tokens
        again = num_output > 0 and depends_on_output(work.sampling)
        request = Request(
            work.request_id,
            work.attempt,
            work.router,
            list(work.tokens),
            work.num_prompt_tokens,
            work.sampling,
            deadline=now + work.timeout_s,
            arrived_at=now,
            num_known=num_output,
            num_repeated=0 if again else num_output,
            num_given=work.num_prompt_tokens if again else len(work.tokens),
            num_sent=len(work.tokens),
        )
        if request.name in self._requests or request.name in self._ended:
            return []
        refused = self._why_not(work)
        if refused is not None:
            return [self._refuse(work, *refused)]
        if not self._requests:
            self._waited_s = 0.0
        self._requests[request.name] = request
        self._count("requests")
        begun_from = tuple(request.tokens[: request.num_given])
        given = options(work.sampling, 0 if again else num_output, sent=num_output > 0)
        return [Begin(request.name, begun_from, salt_of(work.scope), given)]

    def _why_not(self, work: Decode) -> tuple[Refusal, str] | None:
        config, num_tokens = self.config, len(work.tokens)
        if num_tokens >= config.max_model_len:
            return Refusal.CONTEXT_LENGTH, (
                f"{num_tokens} tokens leave no room for an answer in the model's context of"
                f" {config.max_model_len}"
            )
        most = min(work.num_prompt_tokens + work.sampling.max_tokens, config.max_model_len)
        needed = -(-max(most, num_tokens) // config.block_size)
        if needed > config.num_blocks:
            return Refusal.NEVER_FITS, (
                f"{most} tokens need {needed} KV blocks of {config.block_size} tokens,"
                f" {self.node_id} has {config.num_blocks}"
            )
        if len(self._requests) >= config.max_waiting + config.max_num_seqs:
            return Refusal.QUEUE_FULL, (
                f"{self.node_id} has {len(self._requests)} requests, of which"
                f" {config.max_num_seqs} may run"
            )
        if what := unsupported(work.sampling):
            return Refusal.UNSUPPORTED, f"{what}: {self.node_id} computes with vLLM, which has none"
        return None

    def _on_stepped(self, now: float, step: Stepped) -> list[Effect]:
        self._num_steps += 1
        self._waited_s, self._last = 0.0, step
        self._count("steps")
        self._counters["preemptions"] = step.num_preempted
        self._measure(step)
        self.held.take(step.events)
        effects: list[Effect] = []
        deltas: dict[NodeId, list[TokenDelta]] = {}
        for generated in step.generated:
            request = self._requests.get(generated.key)
            if request is not None:  # else it was stopped while the step ran
                effects += self._take(now, request, generated, deltas)
        node_id, epoch = self.node_id, self.config.epoch
        frames = [Send(to, TokenDeltas(node_id, epoch, tuple(own))) for to, own in deltas.items()]
        return [*frames, *effects, *self._publisher.publish()]

    def _measure(self, step: Stepped) -> None:
        awaiting = [each for each in self._requests.values() if not each.has_begun]
        if len(awaiting) <= step.num_waiting or not awaiting:
            if step.generated:
                self._decode_step_s.add(step.elapsed_s, 1)
            return
        share_s = self._decode_step_s.value if step.num_running > len(awaiting) else 0.0
        self._prompts_s += max(step.elapsed_s - share_s, 0.1 * step.elapsed_s)
        first = [(self._requests.get(each.key), each) for each in step.generated]
        num_new = sum(
            max(1, request.num_given - each.num_cached)
            for request, each in first
            if request is not None and not request.has_begun
        )
        if num_new:
            self._prefill_tokens_per_s.add(num_new, self._prompts_s)
            self._prompts_s = 0.0

    def _take(
        self,
        now: float,
        request: Request,
        generated: Generated,
        deltas: dict[NodeId, list[TokenDelta]],
    ) -> list[Effect]:
        """The tokens of `generated` go into the next frame, but for those that the router has."""
        is_first, request.has_begun = not request.has_begun, True
        if is_first:
            request.num_cached = generated.num_cached
            count = request.sampling.prompt_logprobs or 0
            prompt = (_best(each, count) for each in generated.prompt_logprobs)
            request.prompt = PromptOutputs(tuple(prompt))
        logprobs = generated.logprobs or (None,) * len(generated.tokens)
        for token, about in zip(generated.tokens, logprobs, strict=True):
            if request.num_repeated < request.num_known:
                at = request.num_prompt_tokens + request.num_repeated
                if request.tokens[at] != token:
                    why = f"token {at} is {token}, and was {request.tokens[at]} elsewhere"
                    return self._fail(request, Refusal.EXECUTION, f"it cannot go on: {why}")
                request.num_repeated += 1
                continue
            if about is not None:
                about = _best(about, request.sampling.logprobs or 0)
                request.logprobs[len(request.tokens)] = about
            request.tokens.append(token)
        finish = FINISHES.get(generated.finish)
        if generated.finish and (finish is None or request.num_repeated < request.num_known):
            why = f"vLLM has ended it: {generated.finish}"
            self._forget(request)
            return [self._refuse(request, Refusal.EXECUTION, why)]
        if is_first or finish is not None or len(request.tokens) > request.num_sent:
            phases = {"prefill": now - request.arrived_at} if is_first else {}
            delta = self._delta(request, request.num_sent, finish, is_first=is_first, phases=phases)
            deltas.setdefault(request.router, []).append(delta)
            request.num_sent = len(request.tokens)
        if finish is not None:
            self._forget(request)
        return []

    def _delta(
        self,
        request: Request,
        start: int,
        finish: FinishReason | None,
        *,
        is_first: bool,
        phases: dict[str, float],
    ) -> TokenDelta:
        tokens = tuple(request.tokens[start:])
        positions = range(start, len(request.tokens))
        known = [request.logprobs[at] for at in positions if at in request.logprobs]
        return TokenDelta(
            request.request_id,
            request.attempt,
            start,
            tokens,
            tuple(known) if len(known) == len(tokens) else (),
            finish,
            request.num_cached if is_first else None,
            {"device": request.num_cached} if is_first and request.num_cached else {},
            phases,
            request.prompt if start == request.num_prompt_tokens and tokens else NO_OUTPUTS,
        )

    def _answer(self, probe: Probe) -> Send:
        request = self._requests.get(f"{probe.request_id}/{probe.attempt}")
        if request is None:
            why = f"{self.node_id} does not know attempt {probe.attempt} of {probe.request_id}"
            refused = self._refusal(probe.request_id, probe.attempt, Refusal.UNKNOWN, why)
            return Send(probe.router, refused)
        request.router = probe.router
        start = min(max(probe.position, request.num_prompt_tokens), len(request.tokens))
        delta = self._delta(request, start, None, is_first=False, phases={})
        return Send(probe.router, TokenDeltas(self.node_id, self.config.epoch, (delta,)))

    def _on_not_begun(self, now: float, said: NotBegun) -> list[Effect]:
        request = self._requests.get(said.key)
        if request is None:
            return []
        self._forget(request)
        return [self._refuse(request, Refusal.UNSUPPORTED, f"vLLM does not take it: {said.why}")]

    def _on_abort(self, now: float, abort: Abort) -> list[Effect]:
        return self._stop(
            each
            for each in self._requests.values()
            if each.request_id == abort.request_id and each.attempt <= abort.attempt
        )

    def _on_unsendable(self, now: float, lost: Unsendable) -> list[Effect]:
        """Tokens of several requests go again apart; of one, they end it."""
        if not isinstance(lost.message, TokenDeltas):
            return [Note("error", "unsendable", f"{type(lost.message).__name__}: {lost.why}")]
        deltas = lost.message.deltas
        if len(deltas) > 1:
            return [Send(lost.to, replace(lost.message, deltas=(each,))) for each in deltas]
        key = deltas[0].request_id, deltas[0].attempt
        ended = self._stop(each for each in self._requests.values() if each.key == key)
        return [*ended, Send(lost.to, self._refusal(*key, Refusal.UNENCODABLE, lost.why))]

    def _on_router_down(self, router: NodeId) -> list[Effect]:
        """Its clients are gone with it."""
        self._publisher.unsubscribe(router)
        return self._stop(each for each in self._requests.values() if each.router == router)

    def _stop(self, requests: Iterable[Request]) -> list[Effect]:
        stopped = [*requests]
        for each in stopped:
            self._forget(each)
        return [Stop(each.name) for each in stopped]

    def _forget(self, request: Request) -> None:
        del self._requests[request.name]
        self._ended[request.name] = None
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _fail(self, request: Request, reason: Refusal, why: str) -> list[Effect]:
        return [*self._stop([request]), self._refuse(request, reason, why)]

    def _refuse(self, request: Request | WorkRequest, reason: Refusal, why: str) -> Send:
        about = self._refusal(request.request_id, request.attempt, reason, why)
        return Send(request.router, about)

    def _refusal(self, request_id: str, attempt: int, reason: Refusal, why: str) -> Refused:
        self._count(f"refused_{reason}")
        return Refused(self.node_id, self.config.epoch, request_id, attempt, reason, why)

    def _keep_weights(self, asked: UpdateWeights) -> Send:
        about = self.node_id, self.config.epoch, NO_VERSION, self.config.fingerprint
        return Send(asked.reply_to, WeightsUpdated(*about, asked.version.digest, FIXED_WEIGHTS))

    def _on_tick(self, now: float) -> list[Effect]:
        interval_s = self.config.stats_interval_s
        passed_s = min(now - self._ticked_at, 2 * interval_s)  # that of a stopped process is not
        self._ticked_at = now
        self._waited_s = self._waited_s + passed_s if self._requests else 0.0
        if self._progress is Progress.NONE:
            return self._give_up(f"a step has not ended after {self._waited_s:.0f} s", hangs=True)
        effects: list[Effect] = [Wake(interval_s, TICK)]
        for each in [each for each in self._requests.values() if now >= each.deadline]:
            why = f"not finished by {self.node_id} before the deadline"
            effects += self._fail(each, Refusal.DEADLINE, why)
        self._publisher.tick()
        effects += self._publisher.publish()
        stats = self._stats()
        return effects + [Send(router, stats) for router in self._publisher.routers]

    def _give_up(self, why: str, *, hangs: bool) -> list[Effect]:
        """The routers try its requests elsewhere, and need not wait until they hear of its end."""
        self._why_ended = why
        requests = self._requests.values()
        refused = [self._refuse(each, Refusal.WORKER_FAILED, why) for each in requests]
        return [*refused, Note("error", "worker_gives_up", why), Exit(why, hangs)]

    @property
    def _deadline_s(self) -> float:
        """How long a step may take."""
        floor_s = self.config.step_timeout_s
        return floor_s if self._num_steps else FIRST_SLACK * floor_s

    @property
    def _progress(self) -> Progress:
        if not self._deadline_s or self._waited_s < LATE * self._deadline_s:
            return Progress.MADE
        return Progress.LATE if self._waited_s < self._deadline_s else Progress.NONE

    def _progress_report(self) -> ProgressReport:
        about = self.node_id, self.config.epoch, self._num_steps, self._progress
        return ProgressReport(*about, len(self._requests))

    @property
    def _num_used(self) -> int:
        return round(self._last.used * self.config.num_blocks)

    def _stats(self) -> WorkerStats:
        requests, last = self._requests.values(), self._last
        awaiting = [each for each in requests if not each.has_begun]
        decoding = [len(each.tokens) for each in requests if each.has_begun]
        waiting = awaiting[len(awaiting) - last.num_waiting :] if last.num_waiting else []
        size = self.config.block_size
        return WorkerStats(
            worker=self.node_id,
            epoch=self.config.epoch,
            num_free_blocks=self.config.num_blocks - self._num_used,
            num_cached_blocks=len(self.held),
            num_waiting=len(waiting),
            num_running=len(self._requests) - len(waiting),
            num_handoffs=0,
            pending_prefill_tokens=sum(each.num_given for each in awaiting),
            prefill_tokens_per_s=self._prefill_tokens_per_s.value,
            decode_step_s=self._decode_step_s.value,
            read_bytes_per_s=NO_READS,
            event_seq=self._publisher.event_seq,
            counters=dict(self._counters),
            num_wanted_blocks=sum(-(-each.num_given // size) for each in waiting),
            num_decoding=len(decoding),
            decoding_tokens=sum(decoding),
            progress=self._progress,
        )

    def audit(self) -> Audit:
        """vLLM says how many blocks requests hold, and which are cached, not which of these are
        held: those count as in use."""
        config, in_use = self.config, self._num_used
        evictable = min(len(self.held), config.num_blocks - in_use)
        counts = {
            "device.blocks": config.num_blocks,
            "device.in_use": in_use,
            "device.evictable": evictable,
            "device.blank": config.num_blocks - in_use - evictable,
            "transfers": 0,
            "leases": 0,
        }
        parts = ("blocks", "used", "pinned")
        counts |= {f"{tier}.{part}": 0 for tier in LOWER_TIERS for part in parts}
        return Audit(self.node_id, config.epoch, counts, tuple(self.check_idle()))

    def check_idle(self) -> list[str]:
        """What an idle worker must not have; empty if all is well."""
        left = [f"request {each.name} is at vLLM" for each in self._requests.values()]
        if self._last.num_running + self._last.num_waiting:
            left.append(f"vLLM has {self._last.num_running} running, {self._last.num_waiting} wait")
        if self._num_used:
            left.append(f"{self._num_used} blocks are in use")
        return left

    def _count(self, name: str) -> None:
        self._counters[name] = self._counters.get(name, 0) + 1


def _best(known: TokenLogprobs, count: int) -> TokenLogprobs:
    """vLLM adds the token itself to the best ones where it is none of them."""
    return replace(known, top=known.top[:count])
