"""Facts that a worker publishes about itself, for routing, autoscaling and metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, get_type_hints

from kvrelay.engine.node import NodeId
from kvrelay.engine.wire.codec import register

RECOMPUTED = "prefix_tokens_recomputed:"
"""Counters of prompt tokens that were computed though attention KV of them was cached: what was
not, a "window" or a "state", follows in the name."""


class Role(StrEnum):
    """What routers prefer a worker for. Any worker can do either."""

    PREFILL = "prefill"
    DECODE = "decode"  # and prompts where that costs less: one pool is decode workers alone
    BOTH = "both"


class Progress(StrEnum):
    """What a worker's steps make."""

    MADE = "made"  # or there is nothing to do
    LATE = "late"  # the step in flight takes far longer than one like it should
    NONE = "none"  # it is over its deadline, or the last ones all failed: the worker ends itself


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What stays the same during an epoch of a worker, but for its role and its weights, which the
    controller may change."""

    worker: NodeId
    role: Role
    epoch: int
    num_blocks: int
    block_size: int
    bytes_per_block: int
    max_model_len: int
    max_num_batched_tokens: int
    fingerprint: bytes  # model, dtype, layout: peers with different ones never exchange KV
    num_host_blocks: int = 0  # that its host tier has room for
    num_disk_blocks: int = 0
    max_seq_blocks: int = 0  # that a sequence holds at once; 0: no bound below its tokens
    max_num_seqs: int = 64
    cores: str = ""  # the machine on whose cores it computes, beside others; "": it has its own
    # Windows of the groups of layers, where any has one (`engine.kv.window`); 0: all is read.
    group_windows: tuple[int, ...] = ()
    model: str = ""  # that it serves, by its name in [[models]]; "": there is one
    loads: bool = False  # it loads what requests need, beside the model
    hands_over: bool = True  # it computes prompts for others, and reads their KV
    # A lost stream goes on here with the tokens that it would have had, sampled or not.
    repeats_draws: bool = True
    weights: str = ""  # name of their version
    store_kind: bytes = b""  # equal where workers share an object store; b"": the fingerprint
    graph_bytes: int = 0  # captured decode steps have taken them of a rank's GPU

    @property
    def kind(self) -> bytes:
        return self.store_kind or self.fingerprint

    @property
    def row_blocks(self) -> int:
        """Blocks that `block_size` tokens more need in a long sequence, or where all layers attend
        to windows, in a short one."""
        return self.group_windows.count(0) or len(self.group_windows) or 1

    @property
    def windowed_groups(self) -> int:
        """Groups that need `window_blocks` together in a long sequence, beside `row_blocks`."""
        whole = self.group_windows.count(0)
        return len(self.group_windows) - whole if whole else 0

    @property
    def window_blocks(self) -> int:
        if not self.windowed_groups:
            return 0
        longest = -(-self.max_model_len // self.block_size)
        return max(0, self.max_seq_blocks - self.row_blocks * longest)

    @property
    def mark_group(self) -> int:
        """The group whose block at a prefix's end says that its windows are there; 0: none does."""
        return len(self.group_windows) - 1 if self.windowed_groups else 0

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_per_block * self.row_blocks / self.block_size

    @property
    def pool_tokens(self) -> int:
        """What its pool holds of long sequences, about."""
        return self.num_blocks // self.row_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` holds at once."""
        rows = -(-num_tokens // self.block_size)
        windows = min(self.windowed_groups * rows, self.window_blocks)
        needed = self.row_blocks * rows + windows
        return min(needed, self.max_seq_blocks) if self.max_seq_blocks else needed


class InfoChange:
    """A message of a worker that changes what it has said of itself."""

    __slots__ = ()

    def changed(self, info: WorkerInfo) -> WorkerInfo:
        """Returns what holds from now on in place of `info`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class KVLink:
    """How a worker reads KV from a peer that it is connected to."""

    peer: NodeId
    bytes_per_s: float  # measured by a small read when it was connected; 0: not known


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """What the groups of layers of one kind have of a worker's pool, together."""

    kind: str  # one of `engine.kv.window.GROUP_KINDS`
    num_groups: int
    num_used: int  # blocks that requests hold
    num_cached: int  # sealed, whether in use or evictable
    num_evicted: int  # since its start


@dataclass(frozen=True, slots=True)
class Fact:
    """What operators are told of a field: `text` on the pages, in the console and for its gauge
    `kvrelay_worker_METRIC`, if it is one."""

    text: str
    metric: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.text[0].upper()}{self.text[1:]}."


@dataclass(frozen=True, slots=True)
class Hidden:
    """A field that operators are not shown, and why."""

    why: str


def notes_of(kind: type) -> dict[str, Any]:
    """What stands beside the types of the fields of a class; None: nothing."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: getattr(hint, "__metadata__", (None,))[0] for name, hint in hints.items()}


def facts_of(kind: type) -> dict[str, Fact]:
    """The fields of a class that operators are shown. Each has a `Fact`, or is `Hidden`."""
    return {name: note for name, note in notes_of(kind).items() if isinstance(note, Fact)}


_FOR_ROUTERS = Hidden("a term of the routers' costs")
_FOR_LOW = Hidden("routers count low classes of service apart")


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """What changes. Rates are moving averages in SI units; 0: nothing was measured yet.

    A field is written here alone, with what operators are told of it: `/status`, metrics, console,
    `kvrelay status` and the pages take it from here."""

    worker: Annotated[NodeId, Hidden("the row's name")]
    epoch: Annotated[int, Hidden("the row's")]
    num_free_blocks: Annotated[int, Hidden("what is used is shown")]  # free or evictable
    num_cached_blocks: Annotated[
        int, Fact("KV blocks that are sealed: found by prefix", "cached_blocks")
    ]
    num_waiting: Annotated[int, Fact("requests that wait to run", "waiting")]
    num_running: Annotated[int, Fact("requests in the running batch", "running")]
    num_handoffs: Annotated[
        int, Fact("KV transfers not settled, and KV held for a consumer", "handoffs")
    ]
    pending_prefill_tokens: Annotated[
        int, Fact("tokens known and not computed", "pending_prefill_tokens")
    ]
    prefill_tokens_per_s: Annotated[
        float, Fact("rate of prefill, recent", "prefill_tokens_per_second")
    ]
    decode_step_s: Annotated[float, Fact("time of a decode step, recent", "decode_step_seconds")]
    read_bytes_per_s: Annotated[
        float, Fact("rate of KV transfers, recent", "read_bytes_per_second")
    ]
    # The last KVEvents: shows the loss of one that no other follows.
    event_seq: Annotated[int, Hidden("between worker and router")] = 0
    counters: Annotated[
        dict[str, float], Fact("totals since its start, as in `kvrelay_worker_events_total`")
    ] = field(default_factory=dict)
    host_read_bytes_per_s: Annotated[
        float, Fact("rate of loads from host memory, recent", "host_read_bytes_per_second")
    ] = 0.0
    disk_read_bytes_per_s: Annotated[
        float, Fact("rate of loads from disk, recent", "disk_read_bytes_per_second")
    ] = 0.0
    num_host_blocks: Annotated[int, Fact("blocks of host memory that hold KV", "host_blocks")] = 0
    num_disk_blocks: Annotated[int, Fact("blocks of disk that hold KV", "disk_blocks")] = 0
    disk_used_bytes: Annotated[int, Fact("bytes that these take there", "disk_used_bytes")] = 0
    # For `cost.prompt_features` and `cost.decode_features`; empty: not known yet.
    prompt_weights: Annotated[tuple[float, ...], _FOR_ROUTERS] = ()
    decode_weights: Annotated[tuple[float, ...], _FOR_ROUTERS] = ()
    # By which prompts take longer now than by `prompt_weights`.
    prompt_slowdown: Annotated[float, _FOR_ROUTERS] = 1.0
    num_wanted_blocks: Annotated[int, _FOR_ROUTERS] = 0  # that waiting sequences need
    # Sequences that have their whole prompt, and the sum of their context lengths.
    num_decoding: Annotated[int, Hidden("each router shows its own")] = 0
    decoding_tokens: Annotated[int, _FOR_ROUTERS] = 0
    progress: Annotated[Progress, Hidden("the state of the worker says so")] = Progress.MADE
    links: Annotated[
        tuple[KVLink, ...],
        Fact("for each peer that it reads: `peer`, and `bytes_per_s` of a first small read"),
    ] = ()
    groups: Annotated[
        tuple[GroupBlocks, ...],
        Fact("of each kind of groups of layers what it has of the pool: below"),
    ] = ()
    # From the object store into the device.
    object_read_bytes_per_s: Annotated[
        float, Fact("rate of loads from the bucket", "object_read_bytes_per_second")
    ] = 0.0
    num_low_blocks: Annotated[int, _FOR_LOW] = 0  # that they use or want, and make room with
    num_low_decoding: Annotated[int, _FOR_LOW] = 0  # among num_decoding
    low_decoding_tokens: Annotated[int, _FOR_LOW] = 0  # among decoding_tokens
    # Digests of what is in memory that requests need, and how long it takes to load another.
    loaded: Annotated[tuple[bytes, ...], _FOR_ROUTERS] = ()
    load_s: Annotated[float, _FOR_ROUTERS] = 0.0
    num_host_lacking: Annotated[
        int,
        Fact("host blocks that the machine has no memory for", "host_blocks_lacking"),
    ] = 0
    # Since its start; above 0, what it computes with now follows, as in `WorkerInfo`.
    num_weight_changes: Annotated[int, Hidden("the version is shown")] = 0
    fingerprint: Annotated[bytes, Hidden("shown as the layout")] = b""
    weights: Annotated[str, Hidden("shown as the router takes it")] = ""
    images: Annotated[tuple[int, ...], _FOR_ROUTERS] = ()  # keys of `engine.images.KeptImages`
    image_token_s: Annotated[
        float, Fact("time to encode a token of an image, recent", "image_token_seconds")
    ] = 0.0


def no_stats(worker: NodeId, epoch: int) -> WorkerStats:
    """Those of a worker that has said nothing yet, or does not live: zeros."""
    return WorkerStats(worker, epoch, *(0,) * 9)


@dataclass(frozen=True, slots=True)
class RouterUp:
    """From the controller. To a worker: publish to `router`, beginning with a snapshot. To another
    router: send it your placements."""

    router: NodeId


@dataclass(frozen=True, slots=True)
class RouterDown:
    router: NodeId


@dataclass(frozen=True, slots=True)
class ProgressRequest:
    """To a worker: do you live? Answered at once by a `ProgressReport` to `reply_to`."""

    reply_to: NodeId


@dataclass(frozen=True, slots=True)
class ProgressReport:
    worker: NodeId
    epoch: int
    num_steps: int  # that have ended since its start
    progress: Progress
    num_busy: int = 0  # requests that run or wait, and transfers and leases for other workers


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """To a worker, or to a router's process: report what you hold. Answered by an `Audit` to
    `reply_to`."""

    reply_to: NodeId


@dataclass(frozen=True, slots=True)
class Audit:
    """What a worker or a router holds at one moment, and what of it an idle one must not hold.

    A router's `counts` has `live`: requests that it serves, or that wait. A worker's has
    `device.blocks` and its parts (`device.in_use`, `device.evictable`, `device.blank`; of those in
    use, `device.left_to_reads` that do not settle), for `host` and `disk` likewise `blocks`, `used`
    and `pinned`; then `transfers` that have not settled and `leases` that have not ended."""

    worker: NodeId
    epoch: int
    counts: dict[str, int]
    left: tuple[str, ...] = ()  # one line each; empty if all is well
    wrong: tuple[str, ...] = ()  # what contradicts itself in the worker's books, busy or idle


register(WorkerStats, RouterUp, RouterDown, ProgressRequest, ProgressReport, AuditRequest, Audit)
