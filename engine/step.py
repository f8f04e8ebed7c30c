"""One forward pass over a ragged batch: what the scheduler asks for and what comes back.

A decode step, a chunk of a prefill and a mix of both are the same thing: for each sequence, compute
`tokens` at positions `[start, start + len(tokens))`, write their KV into the blocks of the table,
and sample the next token where asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrelay.engine.images import Images, KeptImages, SeqImageRows
from kvrelay.engine.needs import Loaded, Need
from kvrelay.engine.request import PromptOutputs, Refusal, SamplingParams, TokenLogprobs

HEALTH_CHECK = "health check"  # in place of a request id
NO_TOKEN = -1  # that could be drawn: some logits are NaN, or none is finite
UNKNOWN = 0  # in place of a token that is drawn by the step before
BURST_S = 0.025  # passes in a row, at most: messages that arrive meanwhile wait for them


@dataclass(slots=True)
class ScheduledSeq:
    """What one sequence has in a step."""

    request_id: str
    tokens: list[int]  # computed in this step
    start: int  # position of tokens[0]; KV of [0, start) is in the blocks already
    # Block table; covers at least start + len(tokens) positions. -1: a block outside the windows
    # of all layers, which is not read again. Where it is a `BlockTable`, the scheduler may append
    # rows, and free rows that no later position reads, while the step runs.
    block_ids: Sequence[int]
    sample: bool  # True: `tokens` reaches the end of the sequence, sample its next token
    sampling: SamplingParams
    context: list[int]  # prompt + output up to and with `tokens`, for penalties; not to be changed
    num_prompt_tokens: int
    # Speculative decoding: tokens that may follow a decode's `tokens`, verified in the same pass
    # where the executor can. The block table covers their positions, too.
    draft_tokens: list[int] = field(default_factory=list)
    # Position from which on the prompt's tokens give outputs, those before it summed up to `pooled`
    # (float32); None: none do.
    outputs_from: int | None = None
    pooled: bytes = b""
    # Index of the same sequence in the step before, if that one still runs: the token that it
    # samples there is the input here, in place of the one in `tokens`. None: `tokens` are known.
    follows: int | None = None
    need: Need | None = None  # loaded before its first step
    images: Images | None = None  # whose tokens have other numbers in the prompt
    reads_pages: bool = False  # its outputs attend to chosen pages (Quest), where the executor can
    image_rows: SeqImageRows | None = None  # made of those before the step, for all ranks
    num_drafts: int = 0  # draft tokens that the executor's own drafter may propose, in their place
    # What the executor keeps of the sequence from step to step, by name; it ends with the sequence.
    kept: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def output_positions(self) -> range:
        """Whose outputs are taken in this step."""
        if self.outputs_from is None:
            return range(0)
        end = min(self.start + len(self.tokens), self.num_prompt_tokens)
        return range(max(self.start, self.outputs_from), end)

    @property
    def read_positions(self) -> range:
        """Whose hidden states are read: those, and the last one where a token is sampled."""
        end, outputs = self.start + len(self.tokens), self.output_positions
        if not outputs:
            return range(end - self.sample, end)
        return range(outputs.start, end if self.sample else outputs.stop)

    @property
    def input_tokens(self) -> list[int]:
        """`tokens` and the draft tokens."""
        return [*self.tokens, *self.draft_tokens] if self.draft_tokens else self.tokens

    @property
    def end(self) -> int:
        """After the last position that is computed."""
        return self.start + len(self.tokens) + max(self.num_drafts, len(self.draft_tokens))

    @property
    def most_drafts(self) -> int:
        return max(self.num_drafts, len(self.draft_tokens))

    def verify(self, sampled: Sequence[int]) -> Sampled:
        """Accept draft tokens up to the first that differs. `sampled`: a token after `tokens`, and
        one after each draft token."""
        count, stops = 1, self.sampling.stop_token_ids
        for draft_token, token in zip(self.draft_tokens, sampled, strict=False):
            if draft_token != token or token in stops or sampled[count] == NO_TOKEN:
                break
            count += 1
        return Sampled(sampled[0], more=tuple(sampled[1:count]))


def verify_drafts(seqs: Sequence[ScheduledSeq], sampled: Sequence[int]) -> list[Sampled]:
    """Compares the drafts of a pass over `seqs`, all decodes. `sampled`: a token after each input
    token of each."""
    rows = iter(sampled)
    return [seq.verify([next(rows) for _ in seq.input_tokens]) for seq in seqs]


@dataclass(slots=True)
class Step:
    step_id: int
    seqs: list[ScheduledSeq]
    checksum_blocks: list[int] = field(default_factory=list)  # checksum these after the pass
    # The pass may be run up to so often in a row, each sequence continued with the token that it
    # has just sampled, until one samples a stop token. More than once only if all are decodes.
    repeats: int = 1
    # All are decodes whose tokens the device draws by itself: the step after this one may be handed
    # out before they are known. Where that is done, no step is repeated.
    may_be_followed: bool = False
    is_health_check: bool = False  # it has no request: where it fails, the worker is not well
    low_priority: bool = (
        False  # all are prompts for other workers: on shared cores decodes go first
    )
    # Blocks that decodes fill get what the executor's drafter goes on from. False: it is not asked,
    # and to make that would take time for nothing.
    makes_slots: bool = True

    @property
    def num_tokens(self) -> int:
        return sum(len(s.tokens) for s in self.seqs)


@dataclass(frozen=True, slots=True)
class Execute:
    """Effect: run `step` on the model; answered by `StepDone`, in the order of the steps. At most
    one is in flight, and one more where `WorkerConfig.steps_ahead` is 1."""

    step: Step


@dataclass(frozen=True, slots=True)
class AbandonStep:
    """Effect: end this step at its next layer, if it runs and its executor can: what came meanwhile
    goes first. All its sequences are `waiting` in its StepDone, and come again as they were. One
    that ends by itself is done as any other."""

    step_id: int


@dataclass(frozen=True, slots=True)
class AskProgress:
    """Effect: say how far the step in flight is; answered at once by `StepProgress`."""


@dataclass(frozen=True, slots=True)
class StepProgress:
    """From the executor: so many layers were passed by all steps until now. A number that grows
    says that a step which is late goes on; one that does not says nothing on a GPU."""

    num_passed: int


@dataclass(frozen=True, slots=True)
class PrepareGrammar:
    """Effect: compile `grammar`, beside the steps, before the first one that samples by it."""

    grammar: str


@dataclass(frozen=True, slots=True)
class Sampled:
    token: int  # NO_TOKEN: `error` says why
    logprobs: TokenLogprobs | None = None
    # Tokens after it: of the repeats, equally many for every sequence of the step; or, where draft
    # tokens were accepted, one for each of them.
    more: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()  # the only tokens that the sequence's grammar lets follow
    error: str = ""
    num_drafts: int = 0  # that the executor's drafter proposed


@dataclass(frozen=True, slots=True)
class StepDone:
    """The executor's answer: one entry per sequence, None where nothing was sampled."""

    step_id: int
    sampled: list[Sampled | None]
    checksums: list[int] = field(default_factory=list)  # for Step.checksum_blocks, in order
    elapsed_s: float = 0.0
    error: str | None = None  # why the pass failed; its other results are void
    device_lost: bool = False  # and every other pass in this process will
    # Index of a sequence -> why it was left out of the pass; nothing was computed for it.
    failed: dict[int, str] = field(default_factory=dict)
    unsampled: dict[int, str] = field(default_factory=dict)  # no token could be drawn for it
    ungrammatical: dict[int, str] = field(default_factory=dict)  # failed by its own grammar
    invalid: dict[int, str] = field(default_factory=dict)  # failed by token ids of its own
    # Index of sequences that are to come again, for their grammars still compile, what they need is
    # still loaded, or the step was abandoned.
    waiting: frozenset[int] = frozenset()
    unloaded: dict[int, str] = field(default_factory=dict)  # what they need cannot be loaded
    loaded: Loaded | None = None  # None: as before
    # Index of a sequence -> outputs of its `output_positions`; the embedding is a sum as long as
    # the prompt has not ended.
    prompts: dict[int, PromptOutputs] = field(default_factory=dict)
    draft_s: float = 0.0  # the part of elapsed_s that the drafter took
    # Index of a sequence -> how many images' embeddings were begun for it, and how many of those
    # that it had not wanted before were there.
    images: dict[int, tuple[int, int]] = field(default_factory=dict)
    kept_images: KeptImages | None = None  # None: as before

    def fault(self, index: int) -> tuple[Refusal, str] | None:
        """Why the sequence at `index` was left out."""
        if index in self.failed:
            return Refusal.BLOCK_TABLE, self.failed[index]
        if index in self.unsampled:
            return Refusal.SAMPLING, self.unsampled[index]
        if index in self.invalid:
            return Refusal.INVALID_TOKENS, self.invalid[index]
        if index in self.unloaded:
            return Refusal.NEED, self.unloaded[index]
        why = self.ungrammatical.get(index)
        return None if why is None else (Refusal.GRAMMAR, why)

    @property
    def has_faults(self) -> bool:
        """Whether any sequence was left out."""
        left_out = self.failed, self.unsampled, self.invalid, self.unloaded, self.ungrammatical
        return any(left_out)


Launch = Callable[[Step], Callable[[], StepDone]]
"""Begins a step that may be followed, behind the one that runs. The call that it returns waits for
the end."""
