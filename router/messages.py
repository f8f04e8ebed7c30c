"""What a router accepts from clients and from the controller, and what it answers to clients.

Workers' messages to it are `engine.outbox`, `engine.kv_events` and `engine.stats`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.node import NodeId
from engine.request import FinishReason, Refusal, SamplingParams, TokenLogprobs
from engine.stats import WorkerInfo


@dataclass(frozen=True, slots=True)
class Submit:
    """A client's request. Answered to `reply_to` by `Output`s, the last with `finish` set, or by
    one `Failed`; exactly one of the two ends it."""

    request_id: str
    reply_to: NodeId
    tokens: tuple[int, ...]
    sampling: SamplingParams
    timeout_s: float
    priority: int = 0
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client is gone; nothing more is to be sent to it."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Output:
    """Tokens for the client, gapless and without repeats. `index` counts output tokens from 0."""

    request_id: str
    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    num_cached_tokens: int = 0
    phases: dict[str, float] = field(default_factory=dict)  # on the last one


@dataclass(frozen=True, slots=True)
class Failed:
    request_id: str
    reason: Refusal
    detail: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """From the controller: this worker can be used. A higher epoch replaces a lower one."""

    info: WorkerInfo


@dataclass(frozen=True, slots=True)
class WorkerDown:
    """From the controller: the worker of this epoch is gone, with all that it held."""

    worker: NodeId
    epoch: int
    reason: str
