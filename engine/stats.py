"""Facts that a worker publishes about itself, for routing, autoscaling and metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

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
    serves_adapters: bool = False
    hands_over: bool = True  # it computes prompts for others, and reads their KV
    weights: str = ""  # name of their version
    store_kind: bytes = b""  # equal where workers share an object store; b"": the fingerprint

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
    def pool_tokens(self) -> int:
        """What its pool holds of long sequences, about."""
        return self.num_blocks // self.row_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` holds at once."""
        rows = -(-num_tokens // self.block_size)
        windows = min(self.windowed_groups * rows, self.window_blocks)
        needed = self.row_blocks * rows + windows
        return min(needed, self.max_seq_blocks) if self.max_seq_blocks else needed


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
class WorkerStats:
    """What changes. Rates are moving averages in SI units; 0: nothing was measured yet."""

    worker: NodeId
    epoch: int
    num_free_blocks: int  # free or evictable
    num_cached_blocks: int  # sealed, whether in use or evictable
    num_waiting: int
    num_running: int
    num_handoffs: int  # transfers that have not settled, and sequences held for a consumer
    pending_prefill_tokens: int  # known tokens without KV
    prefill_tokens_per_s: float
    decode_step_s: float
    read_bytes_per_s: float
    event_seq: int = 0  # last KVEvents: shows the loss of one that no other follows
    counters: dict[str, float] = field(default_factory=dict)  # totals since start, for metrics
    host_read_bytes_per_s: float = 0.0  # from its host memory into the device
    disk_read_bytes_per_s: float = 0.0  # from its disk into the device
    num_host_blocks: int = 0  # that hold KV, of the host tier
    num_disk_blocks: int = 0
    disk_used_bytes: int = 0  # that these take there
    prompt_weights: tuple[float, ...] = ()  # for `cost.prompt_features`; empty: not known yet
    decode_weights: tuple[float, ...] = ()  # for `cost.decode_features`
    prompt_slowdown: float = 1.0  # by which prompts take longer now than by `prompt_weights`
    num_wanted_blocks: int = 0  # that waiting sequences need
    num_decoding: int = 0  # sequences that have their whole prompt
    decoding_tokens: int = 0  # sum of their context lengths
    progress: Progress = Progress.MADE
    links: tuple[KVLink, ...] = ()  # to the peers that it can read
    groups: tuple[GroupBlocks, ...] = ()  # where layers are in several groups
    object_read_bytes_per_s: float = 0.0  # from the object store into the device
    num_low_blocks: int = 0  # low classes of service use or want them, and make room for others
    num_low_decoding: int = 0  # among num_decoding
    low_decoding_tokens: int = 0  # among decoding_tokens
    adapters: tuple[bytes, ...] = ()  # digests of those in memory
    adapter_load_s: float = 0.0  # how long it takes to load another
    num_host_lacking: int = 0  # blocks of the host tier that the machine has no memory for
    num_weight_changes: int = 0  # since its start; above 0, what it computes with now:
    fingerprint: bytes = b""  # as in `WorkerInfo`
    weights: str = ""


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
