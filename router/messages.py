"""Messages to a router from clients, the controller and other routers, and its answers to clients.

Workers' messages to it are `engine.messages`, `engine.kv.events` and `engine.stats`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum

from kvrelay.engine.kv.tier import Retention, Tier
from kvrelay.engine.node import NodeId
from kvrelay.engine.request import (
    NO_OUTPUTS,
    FinishReason,
    PromptOutputs,
    Refusal,
    RequestSpec,
    TokenLogprobs,
)
from kvrelay.engine.stats import Role, WorkerInfo
from kvrelay.engine.wire.codec import register


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What a tenant may keep; what is beyond it makes its own sessions go, the pinned last."""

    max_sessions: int = 0  # 0: as many as the router lets each tenant keep
    max_tokens: int = 0  # all its sessions may have; 0: any number, and so is the next
    max_pinned_tokens: int = 0  # those that are pinned may have


@dataclass(frozen=True, slots=True)
class TenantShare:
    """Limits and weight of a tenant at a router. Its requests carry it."""

    weight: float = 1.0  # its part of the service where tenants compete, against the others'
    max_concurrent: int = 0  # requests at workers; 0: any number
    max_queued: int = 0  # that wait; 0: any number
    sessions: SessionLimits = SessionLimits()


@dataclass(frozen=True, slots=True)
class Submit(RequestSpec):
    """A client's request. Answered to `reply_to` by `Output`s, the last with `finish` set, or by
    one `Failed`; exactly one of the two ends it."""

    reply_to: NodeId
    tokens: tuple[int, ...]
    timeout_s: float
    _: KW_ONLY
    session: str | None = None  # name of the session it is a turn of, unique within `tenant`
    has_branches: bool = False  # subagents use the same name: their prompts begin otherwise
    has_twins: bool = False  # so do other agents whose prompts begin alike
    root: str = ""  # name of the agent that its session belongs to, with those of its subagents
    tenant: str = ""
    share: TenantShare = TenantShare()
    call: bytes = b""  # names the client's call; the same when it is repeated; b"": the tokens do
    weights: str = ""  # name of the version that it is pinned to; "": any
    caller: str = ""  # who of the tenant asks: a name without meaning; "": it is not known


@dataclass(frozen=True, slots=True)
class RoleChanged:
    """From the controller: prefer the worker for `role` from now on. What decodes on a worker that
    is to compute prompts moves elsewhere, as far as there is room."""

    worker: NodeId
    epoch: int
    role: Role


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    """From the controller, again and again: the worker is about to go. It gets no more requests,
    and what decodes there moves elsewhere, as far as there is room; `WorkerDown` follows when it is
    empty. Answered by a `DrainReport` each time."""

    worker: NodeId
    epoch: int


@dataclass(frozen=True, slots=True)
class DrainReport:
    """To the controller: requests of `router` that still need a worker that is draining."""

    router: NodeId
    worker: NodeId
    epoch: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client is gone; send it nothing more."""

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
    cached_by_source: dict[str, int] = field(default_factory=dict)  # as in TokenDelta
    prompt: PromptOutputs = NO_OUTPUTS  # with the first token
    # (index, name of the weights that computed the output from there on), with `finish`, and with
    # each once there are several
    weights: tuple[tuple[int, str], ...] = ()
    drafts: tuple[int, int] = (0, 0)  # draft tokens accepted and rejected, so far


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
    """From the controller: the worker of this epoch is gone, with its KV."""

    worker: NodeId
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerSuspected:
    """To the controller, again and again as long as it is so: `router` hears nothing of the worker,
    or hears that it makes no progress."""

    router: NodeId
    worker: NodeId
    epoch: int
    why: str


@dataclass(frozen=True, slots=True)
class PromptRouted:
    """From another router: these blocks are about to come into device memory of `worker`.
    `block_hashes` is packed: 16 bytes a block."""

    worker: NodeId
    epoch: int
    block_hashes: bytes


class SessionOp(StrEnum):
    LIST = "list"
    SHOW = "show"
    PARK = "park"
    RESUME = "resume"
    FORK = "fork"
    PIN = "pin"
    UNPIN = "unpin"
    CLOSE = "close"


class SessionState(StrEnum):
    ACTIVE = "active"  # a turn is running
    IDLE = "idle"
    PARKED = "parked"  # idle, and below the device; what is on it too goes when others need that


class SessionRefusal(StrEnum):
    """Why a command was not carried out: also the error code."""

    UNKNOWN = "session_not_found"
    CONFLICT = "session_conflict"
    DEADLINE = "deadline_exceeded"  # workers did not answer in time; it may still come true
    BUSY = "too_many_commands"
    LIMIT = "session_limit_exceeded"  # the tenant's


@dataclass(frozen=True, slots=True)
class SessionCommand:
    """What a tenant asks about its sessions. Answered to `reply_to` by exactly one
    `SessionReply`."""

    command_id: str
    reply_to: NodeId
    tenant: str
    op: SessionOp
    session: str = ""  # its name; of LIST: the sessions whose names come after this one
    argument: str = ""  # for FORK: the name of the new session
    limit: int = 20  # for LIST: at most so many
    limits: SessionLimits = SessionLimits()  # the tenant's


@dataclass(frozen=True, slots=True)
class SessionHolder:
    """Blocks of a session that a worker holds, by tier. A block may be in several tiers."""

    worker: NodeId
    num_blocks: dict[Tier, int]


@dataclass(frozen=True, slots=True)
class SessionInfo:
    session: str
    tenant: str
    state: SessionState
    num_tokens: int  # prompt and output of its last finished turn
    num_blocks: int  # whole blocks of them; 0 while no worker is up
    num_turns: int
    pinned: bool
    retention: Retention
    age_s: float
    last_used_s: float  # since the end of its last turn
    worker: NodeId | None  # that decoded its last turn
    holders: tuple[SessionHolder, ...]  # the one to go on with first


@dataclass(frozen=True, slots=True)
class SessionReply:
    """`refusal` None: it was done. `sessions`: those asked for, as they are now; none of CLOSE."""

    command_id: str
    refusal: SessionRefusal | None = None
    detail: str = ""
    sessions: tuple[SessionInfo, ...] = ()
    has_more: bool = False  # for LIST: there are sessions after the last one
    done: dict[NodeId, int] = field(default_factory=dict)  # blocks it came true for, by worker


register(
    Submit,
    Cancel,
    Output,
    Failed,
    WorkerUp,
    WorkerDown,
    RoleChanged,
    WorkerDraining,
    DrainReport,
    SessionCommand,
    SessionReply,
    PromptRouted,
    WorkerSuspected,
)
