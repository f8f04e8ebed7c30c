"""One forward pass over a ragged batch: what the scheduler asks for and what comes back.

A decode step, a chunk of a prefill and a mix of both are the same thing: for each sequence, feed
`tokens` at positions `[start, start + len(tokens))`, write their KV into the blocks of the table,
and sample the next token where asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.request import SamplingParams, TokenLogprobs

BURST_S = 0.025  # of passes in a row: what has arrived meanwhile waits for them


@dataclass(slots=True)
class ScheduledSeq:
    """One sequence's share of a step."""

    request_id: str
    tokens: list[int]  # fed in this step
    start: int  # position of tokens[0]; KV of [0, start) is in the blocks already
    # Block table; covers at least start + len(tokens) positions. -1: of no use any more, where
    # every layer has a window that has left it.
    block_ids: list[int]
    sample: bool  # True: `tokens` reaches the end of the sequence, sample its next token
    sampling: SamplingParams
    context: list[int]  # prompt + output up to and with `tokens`, for penalties; not to be changed
    num_prompt_tokens: int
    # Of a decode: tokens that may follow, to be fed along where the executor can (speculative
    # decoding). All have places in the block of `tokens[0]`.
    draft: list[int] = field(default_factory=list)

    @property
    def fed(self) -> list[int]:
        """`tokens` and the draft."""
        return [*self.tokens, *self.draft] if self.draft else self.tokens

    @property
    def end(self) -> int:
        """After the last position that is fed."""
        return self.start + len(self.tokens) + len(self.draft)

    def verified(self, drawn: Sequence[int]) -> Sampled:
        """What holds of `drawn`: the token after `tokens`, and those after each of `draft`."""
        count, stops = 1, self.sampling.stop_token_ids
        for guess, token in zip(self.draft, drawn, strict=False):
            if guess != token or token in stops:
                break
            count += 1
        return Sampled(drawn[0], more=tuple(drawn[1:count]))


def verified(seqs: Sequence[ScheduledSeq], drawn: Sequence[int]) -> list[Sampled]:
    """What holds for each of `seqs`, decodes, of `drawn`: a token after each that was fed."""
    rows = iter(drawn)
    return [seq.verified([next(rows) for _ in seq.fed]) for seq in seqs]


@dataclass(slots=True)
class Step:
    step_id: int
    seqs: list[ScheduledSeq]
    checksum_blocks: list[int] = field(default_factory=list)  # checksum these after the pass
    # The pass may be run up to so often in a row, each sequence fed what it has just sampled, as
    # long as nobody samples a stop token. More than once only where all are decodes.
    repeats: int = 1

    @property
    def num_tokens(self) -> int:
        return sum(len(s.tokens) for s in self.seqs)


@dataclass(frozen=True, slots=True)
class Execute:
    """Effect: run `step` on the model; answered by `StepDone`. At most one is in flight."""

    step: Step


@dataclass(frozen=True, slots=True)
class Sampled:
    token: int
    logprobs: TokenLogprobs | None = None
    # Of the repeats, as many for every sequence of the step; or what held of its own draft, and one
    # token more.
    more: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepDone:
    """The executor's answer: one entry per sequence, None where nothing was sampled."""

    step_id: int
    sampled: list[Sampled | None]
    checksums: list[int] = field(default_factory=list)  # of Step.checksum_blocks, in order
    elapsed_s: float = 0.0
    error: str | None = None  # the pass failed: none of its results hold
    # Index of a sequence -> why it was left out of the pass; nothing of it was computed.
    failed: dict[int, str] = field(default_factory=dict)
