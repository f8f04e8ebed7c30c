"""A request as a worker holds it: tokens, block table, and how far its KV is computed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvrelay.engine.kv.block_hash import BlockChain
from kvrelay.engine.kv.block_table import BlockTable
from kvrelay.engine.kv.tier import Retention
from kvrelay.engine.needs import Need
from kvrelay.engine.node import NodeId
from kvrelay.engine.request import (
    FinishReason,
    PromptOutputs,
    RequestSpec,
    SamplingParams,
    TokenLogprobs,
)
from kvrelay.engine.service_class import ServiceClass
from kvrelay.engine.waiting import Passes


class SeqState(StrEnum):
    WAITING = "waiting"  # no blocks
    RUNNING = "running"  # has blocks for all its tokens; is scheduled
    REMOTE = "remote"  # has blocks; KV is being transferred or loaded
    HELD = "held"  # computed; blocks are held for a consumer
    DEAD = "dead"  # ended; blocks are freed as soon as nothing writes to them


@dataclass(slots=True, eq=False)
class Sequence:
    """One attempt at one request. Owned by one worker's scheduler.

    Invariant: `block_ids` covers `tokens` (with windows, the next ones of them) unless WAITING or
    DEAD; entries [0, num_sealed) are full, computed blocks whose hashes are
    `block_hashes[:num_sealed]`, or -1 outside the windows; `num_computed <= len(tokens)`. What
    counts entries of the table is a multiple of the number of groups (`engine.kv.window`).
    """

    spec: RequestSpec
    attempt: int
    router: NodeId
    tokens: list[int]
    num_prompt_tokens: int
    deadline: float
    arrived_at: float
    chain: BlockChain
    retention: Retention  # the worker's own, where the request has none
    reserve_growth: bool = True  # False: no token will follow the one that is sampled here
    state: SeqState = SeqState.WAITING
    block_ids: BlockTable = field(default_factory=BlockTable)
    num_hits: int = 0  # blocks that were cache hits at admission
    num_sealed: int = 0
    num_covered: int = 0  # entries, from the first, that have the blocks which are needed
    parts_at: int = 0  # entries up to where others begin as it does, and no windows were kept
    recomputed: dict[str, int] = field(default_factory=dict)  # cached tokens, by what was lacking
    passed_at: int = 0  # entries up to the last place, as far as computed, where others may part
    slid_at: int = 0  # positions that were computed when blocks outside windows were last freed
    num_computed: int = 0
    cached_by_source: dict[str, int] = field(default_factory=dict)  # cached tokens, by source
    num_arriving: int = 0  # blocks [num_sealed, num_arriving) are being loaded from lower tiers
    has_own_kv: bool = False  # some was computed for it: what it finds from then on may be that
    num_held: int = 0  # tokens whose KV is in some cache, as far as its router knew
    num_had: int = 0  # blocks that it found here when it came, if it waits for more
    not_before: float = 0.0  # it has no use for blocks until then: KV may be found
    awaits_stored: bytes = b""  # the first block that a store was asked for, until it answers
    is_remote: bool = False  # its KV comes from a producer
    is_offered: bool = False  # the producer has announced some of its blocks
    first_token_sent: bool = False  # the producer has sent it to the router
    compute_all: bool = False  # remote KV was invalid: all that is not cached is computed
    num_steps: int = 0  # in flight that write to its blocks
    num_reads: int = 0  # transfers that may write to its blocks
    num_reported: int = 0  # tokens, from the start, that the router has
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # position -> logprobs
    phases: dict[str, float] = field(default_factory=dict)  # seconds, up to the first token here
    phase_since: float = 0.0  # when the current phase began
    drafts: tuple[int, int] = (0, 0)  # accepted and rejected, of which its router knows nothing yet
    images: tuple[int, int] = (0, 0)  # encoded for its prompt, and found
    phases_reported: bool = False
    admitted_at: float | None = None
    cached_reported: bool = False
    num_preemptions: int = 0
    passes: Passes = field(default_factory=Passes)  # while it waits for memory
    forced: tuple[int, ...] = ()  # tokens that have to follow the last one
    num_outputs: int = 0  # prompt tokens, from the first, whose outputs are in the following
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooled: bytes = b""
    # (position, name of the weights that computed the tokens from there on), in order
    weights: tuple[tuple[int, str], ...] = ()
    is_pinned: bool = False  # it goes on with no other ones
    # Some of its KV is of earlier weights: nobody else gets any of it. Once it has lost that, it
    # has this chain.
    next_chain: BlockChain | None = None
    kept: dict[str, Any] = field(default_factory=dict)  # the executor's (`ScheduledSeq.kept`)

    # What every step reads of the request.
    request_id: str = field(init=False)
    sampling: SamplingParams = field(init=False)
    need: Need | None = field(init=False)
    service_class: ServiceClass = field(init=False)

    def __post_init__(self) -> None:
        spec = self.spec
        self.request_id, self.sampling = spec.request_id, spec.sampling
        self.need, self.service_class = spec.need, spec.service_class

    @property
    def is_low(self) -> bool:
        return self.service_class.is_low

    @property
    def key(self) -> tuple[str, int]:
        return (self.request_id, self.attempt)

    @property
    def num_cached(self) -> int:
        return sum(self.cached_by_source.values())

    @property
    def num_missing(self) -> int:
        """Counts known tokens without KV."""
        return len(self.tokens) - self.num_computed

    @property
    def num_to_compute(self) -> int:
        """Tokens, at least 1; of one that waits, as far as it is known."""
        held = self.num_held if self.state is SeqState.WAITING else 0
        return max(1, self.num_missing - held)

    @property
    def is_decoding(self) -> bool:
        return self.num_missing == 1

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def awaits_producer(self) -> bool:
        return self.is_remote and not self.is_offered

    @property
    def is_stream(self) -> bool:
        """Its client has tokens, and sees how long the next one takes."""
        return self.first_token_sent or self.num_output_tokens > 0

    @property
    def outputs_from(self) -> int | None:
        """Position from which on outputs of the prompt are still wanted; None: they are not."""
        is_wanted = self.sampling.reads_prompt and self.num_outputs < self.num_prompt_tokens
        return self.num_outputs if is_wanted else None

    @property
    def prompt_outputs(self) -> PromptOutputs:
        return PromptOutputs(tuple(self.prompt_logprobs), self.pooled)

    def take_outputs(self, outputs: PromptOutputs, end: int) -> None:
        """Takes those of the prompt's tokens up to `end` that were not taken before."""
        # A prompt that has lost its blocks is computed again, in other chunks.
        self.num_outputs = max(self.num_outputs, min(end, self.num_prompt_tokens))
        self.prompt_logprobs += outputs.logprobs
        self.pooled = outputs.embedding

    @property
    def block_hashes(self) -> Seq[bytes]:
        """Hashes of all full blocks of `tokens`, of every group."""
        return self.chain.extend_groups(self.tokens)

    def end_phase(self, name: str, now: float) -> None:
        """Phases follow each other without a gap, from the arrival to the first token sampled
        here. One that is entered again (after a preemption) adds up."""
        self.phases[name] = self.phases.get(name, 0.0) + now - self.phase_since
        self.phase_since = now

    def append(self, token: int, logprobs: TokenLogprobs | None) -> None:
        if logprobs is not None:
            self.logprobs[len(self.tokens)] = logprobs
        self.tokens.append(token)

    def finish_reason(self, max_model_len: int) -> FinishReason | None:
        """Why nothing follows the last token, or None."""
        count = self.num_output_tokens
        if count <= 0:
            return None
        is_full = len(self.tokens) >= max_model_len
        reason = self.sampling.finish_reason(self.tokens[-1], count)
        return FinishReason.LENGTH if reason is None and is_full else reason
