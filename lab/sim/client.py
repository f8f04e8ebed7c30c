"""The client of a run: a node that submits the jobs, cancels some, and judges every answer.

Life of a request here: submitted -> open -> exactly one of finished, failed, cancelled. After that
nothing more may come for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvrelay.engine.node import Effect, NodeId, Send, Wake, Woken
from kvrelay.engine.request import NO_OUTPUTS, PromptOutputs
from kvrelay.engine.service_class import ServiceClass
from kvrelay.lab.sim.executor import OnViolation
from kvrelay.lab.sim.model import FULL, Attention, output_logprobs
from kvrelay.lab.sim.workload import Job
from kvrelay.router.messages import Cancel, Failed, Output, Submit, TenantShare

TENANTS = (
    ("red", TenantShare()),
    ("blue", TenantShare(weight=3.0)),
    ("green", TenantShare(max_concurrent=1, max_queued=8)),
)
"""Whose requests they are, in turn."""
ALONE = ("", TenantShare())
CLASSES = (ServiceClass.DEFAULT, ServiceClass.BATCH, ServiceClass.PRIORITY, ServiceClass.FLEX)


def class_of(job: Job) -> ServiceClass:
    """They come in turn too, but a crowd has one class, in which its tenants share."""
    turn = int(job.request_id[1:]) // len(TENANTS)
    return ServiceClass.DEFAULT if job.tenant else CLASSES[turn % len(CLASSES)]


def tenant_of(job: Job) -> tuple[str, TenantShare]:
    if job.is_alone:
        return ALONE
    return job.tenant or TENANTS[int(job.request_id[1:]) % len(TENANTS)]


@dataclass(frozen=True, slots=True)
class SecondWave:
    """To the client: the faults are over and the first wave has ended; submit the rest."""


class Outcome(StrEnum):
    OPEN = "open"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class ClientRequest:
    """One job as the client sees it."""

    job: Job
    submitted_at: float | None = None
    ended_at: float = 0.0
    tokens: list[int] = field(default_factory=list)
    # What its prompt gave, as often as it came, with the index of the tokens that it came with.
    prompts: list[tuple[int, PromptOutputs]] = field(default_factory=list)
    outcome: Outcome = Outcome.OPEN
    failure: Failed | None = None


JudgeFailure = Callable[[ClientRequest, Failed, float], str | None]
"""Why a request must not have failed in this way at this time; None if it may."""


class SimClient:
    """Node. Invariant: `num_open` counts the jobs of the current wave that have not ended."""

    def __init__(
        self,
        node_id: NodeId,
        routers: Sequence[NodeId],
        jobs: list[Job],
        judge: JudgeFailure,
        on_violation: OnViolation,
        attention: Attention = FULL,
    ) -> None:
        self.node_id = node_id
        self.orders = {job.request_id: ClientRequest(job) for job in jobs}
        self.num_open = 0
        self._routers = routers
        self._attention = attention
        self._judge = judge
        self._on_violation = on_violation

    def start(self, now: float) -> list[Effect]:
        return self._begin_wave(after_faults=False)

    def receive(self, now: float, message: Any) -> list[Effect]:
        match message:
            case Woken(tag):
                what, request_id = tag.split()
                order = self.orders[request_id]
                return self._submit(now, order) if what == "submit" else self._cancel(now, order)
            case SecondWave():
                return self._begin_wave(after_faults=True)
            case Output():
                return self._on_output(now, message)
            case Failed():
                return self._on_failed(now, message)
            case _:
                raise AssertionError(f"a client got {message!r}")

    def describe_open(self) -> list[str]:
        return [
            f"{o.job.request_id}: {len(o.tokens)} of {len(o.job.expected)} tokens"
            for o in self.orders.values()
            if o.outcome is Outcome.OPEN
        ]

    def _begin_wave(self, *, after_faults: bool) -> list[Effect]:
        wave = [o.job for o in self.orders.values() if o.job.after_faults is after_faults]
        self.num_open += len(wave)
        return [Wake(job.arrive_s, f"submit {job.request_id}") for job in wave]

    def _submit(self, now: float, order: ClientRequest) -> list[Effect]:
        job = order.job
        order.submitted_at = now
        tenant, share = tenant_of(job)
        submit = Submit(
            request_id=job.request_id,
            reply_to=self.node_id,
            tokens=job.prompt,
            sampling=job.sampling,
            timeout_s=job.timeout_s,
            priority=class_of(job).priority,
            tenant=tenant,
            share=share,
            scope=job.scope,
            caller=job.caller,
        )
        effects: list[Effect] = [Send(self._router_of(job), submit)]
        if job.cancel_after_s is not None:
            effects.append(Wake(job.cancel_after_s, f"cancel {job.request_id}"))
        return effects

    def _cancel(self, now: float, order: ClientRequest) -> list[Effect]:
        if order.outcome is not Outcome.OPEN:
            return []
        self._end(now, order, Outcome.CANCELLED)
        return [Send(self._router_of(order.job), Cancel(order.job.request_id))]

    def _router_of(self, job: Job) -> NodeId:
        return self._routers[int(job.request_id[1:]) % len(self._routers)]

    def _check_logprobs(self, job: Job, first: int, output: Output) -> None:
        """One for each token, of what the oracle says."""
        wanted: list[Any] = []
        if job.sampling.logprobs is not None:
            sent = job.expected[: first + len(output.tokens)]
            every = output_logprobs(job.prompt, sent, job.sampling.logprobs, self._attention)
            wanted = every[first:]
        if list(output.logprobs) != wanted:
            self._on_violation(
                "wrong log-probabilities",
                f"{job.request_id} from {first}: {len(output.logprobs)}, wanted {len(wanted)}",
            )

    def _on_output(self, now: float, output: Output) -> list[Effect]:
        order = self.orders[output.request_id]
        if not self._may_still_come(now, order, "output"):
            return []
        job, first = order.job, len(order.tokens)
        order.tokens += output.tokens
        if output.prompt != NO_OUTPUTS:
            order.prompts.append((output.index, output.prompt))
        if output.index != first:
            self._on_violation(
                "gap or repeat", f"{job.request_id}: index {output.index}, had {first} tokens"
            )
        if tuple(order.tokens) != job.expected[: len(order.tokens)]:
            self._on_violation(
                "wrong tokens",
                f"{job.request_id} from {first}: {output.tokens},"
                f" expected {job.expected[first : len(order.tokens)]}",
            )
        self._check_logprobs(job, first, output)
        if job.poison is not None and output.tokens:
            self._on_violation("poison was sampled", f"{job.request_id}: {output.tokens}")
        if output.finish is not None:
            if output.finish is not job.finish or len(order.tokens) != len(job.expected):
                self._on_violation(
                    "wrong end",
                    f"{job.request_id}: {output.finish} after {len(order.tokens)} tokens,"
                    f" expected {job.finish} after {len(job.expected)}",
                )
            self._end(now, order, Outcome.FINISHED)
        elif job.cancel_at_output is not None and len(order.tokens) >= job.cancel_at_output:
            return self._cancel(now, order)
        return []

    def _on_failed(self, now: float, failed: Failed) -> list[Effect]:
        order = self.orders[failed.request_id]
        if self._may_still_come(now, order, f"failure {failed.reason}"):
            order.failure = failed
            self._end(now, order, Outcome.FAILED)
            if why_not := self._judge(order, failed, now):
                self._on_violation(
                    "failed without reason",
                    f"{failed.request_id}: {failed.reason} ({failed.detail}), but {why_not}",
                )
        return []

    def _may_still_come(self, now: float, order: ClientRequest, what: str) -> bool:
        """What was on its way when the client cancelled arrives at that very time, not later."""
        if order.outcome is Outcome.OPEN:
            return True
        if order.outcome is not Outcome.CANCELLED or now > order.ended_at:
            self._on_violation(
                "answer after the end", f"{order.job.request_id} was {order.outcome}, got {what}"
            )
        return False

    def _end(self, now: float, order: ClientRequest, outcome: Outcome) -> None:
        order.outcome = outcome
        order.ended_at = now
        self.num_open -= 1
