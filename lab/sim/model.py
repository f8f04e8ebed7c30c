"""A model small enough to be its own oracle: KV whose content proves where it came from.

A slot holds, for the token at one position, a 64-bit number chained from the slot before it, so
equal slots mean equal prefixes. "Attention" adds up all slots up to the position that is sampled;
the next token is a function of that sum. One slot that is torn, stale, unwritten or taken from
another request changes all slots after it and soon the tokens, and the oracle knows from the tokens
alone what each slot and each next token has to be. Most tokens are what their position says, so
that draft tokens are accepted now and then.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from kvrelay.engine.request import (
    NO_OUTPUTS,
    FinishReason,
    Pooling,
    PromptOutputs,
    SamplingParams,
    TokenLogprobs,
)

VOCAB_SIZE = 32
EOS = 0
PERIOD = 5  # after which most positions say it again
UNWRITTEN = 0xDEAD_DEAD_DEAD_DEAD
"""What a slot holds before its first use."""

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Attention:
    """Which slots a query reads: `window` up to its own, and the sinks. Window 0: all. Each further
    group of layers has slots of its own, with the same numbers, and a window of its own. The last
    ones may be recurrent: what they read is a state, which a block holds once, and which stands for
    all tokens up to the last one that has passed."""

    window: int = 0
    num_sinks: int = 0
    more_windows: tuple[int, ...] = ()
    num_states: int = 0  # groups

    @property
    def windows(self) -> tuple[int, ...]:
        return (self.window, *self.more_windows)

    def is_state(self, group: int) -> bool:
        return group >= len(self.windows) - self.num_states

    def read_positions(self, end: int, group: int = 0) -> list[int]:
        """By the query at `end - 1`, in order."""
        window = self.windows[group]
        first = max(0, end - window) if window else 0
        if self.is_state(group):
            return [*range(first, end)]
        return [*range(min(self.num_sinks, first)), *range(first, end)]

    def attended(self, slots: Sequence[int], end: int, *others: Sequence[int]) -> int:
        """The sum of what the query at `end - 1` reads. `others`: what further groups have in place
        of `slots`."""
        if not self.window and not self.more_windows:
            return sum(slots[:end])
        total = 0
        for group, (_, own) in enumerate(zip_longest(self.windows, (slots, *others))):
            read = slots if own is None else own
            positions = [end - 1] if self.is_state(group) else self.read_positions(end, group)
            total += sum(read[at] for at in positions)
        return total


FULL = Attention()


def slot_value(previous: int, token: int, position: int) -> int:
    """KV of `token` at `position` after a prefix whose last slot is `previous` (0: no prefix)."""
    x = (previous ^ (token * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03)) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    return x ^ (x >> 27)


def extend_slots(slots: list[int], tokens: Sequence[int]) -> None:
    """Append the slots of `tokens`, which follow the positions that `slots` covers."""
    previous = slots[-1] if slots else 0
    for position, token in enumerate(tokens, start=len(slots)):
        previous = slot_value(previous, token, position)
        slots.append(previous)


def next_token(attended: int, sampling: SamplingParams, position: int) -> int:
    """The token at `position`, given the sum of all slots before it.

    Greedy takes no seed; otherwise the draw is a function of `(seed, position)`, as in the real
    sampler. A grammar of the form "period length" forces the first `length` tokens of each `period`
    positions, and lets only odd tokens and the end follow elsewhere."""
    forced = _forced_at(sampling.grammar, position)
    if forced is not None:
        return forced
    seed = 0 if sampling.temperature == 0 else sampling.seed + 1
    value = slot_value(attended & _MASK, seed & 0xFFFF_FFFF, position)
    token = value % VOCAB_SIZE
    if sampling.grammar and token != EOS:
        return token | 1
    return token if token == EOS or value >> 32 & 3 == 0 else 1 + position % PERIOD


def _forced_at(grammar: str, position: int) -> int | None:
    if not grammar:
        return None
    period, length = map(int, grammar.split())
    return 1 + position * 7 % (VOCAB_SIZE - 1) if position % period < length else None


def forced_after(grammar: str, position: int) -> tuple[int, ...]:
    """The only tokens that may come at the positions after this one, as far as they are forced."""
    found: list[int] = []
    while (token := _forced_at(grammar, position + 1 + len(found))) is not None:
        found.append(token)
    return tuple(found)


def logprobs_of(attended: int, token: int, position: int, num_best: int) -> TokenLogprobs:
    """Those that `token` and the best ones have at `position`, given the sum of all slots before
    it."""
    values = [-(slot_value(attended & _MASK, t, position) >> 44) / 2**16 for t in range(VOCAB_SIZE)]
    best = sorted(range(VOCAB_SIZE), key=lambda t: -values[t])[:num_best]
    return TokenLogprobs(values[token], tuple((t, values[t]) for t in best))


def packed_sum(slots: Sequence[int], before: bytes = b"") -> bytes:
    """Their sum, with that of the slots `before` them."""
    total = sum(slots) + (struct.unpack("<Q", before)[0] if before else 0)
    return struct.pack("<Q", total & _MASK)


def embedding(pooling: Pooling, pooled: bytes, last: int, length: int) -> bytes:
    """Embeds a prompt of so many tokens. pooled: the sum of its slots; last: the last of them."""
    if pooling is Pooling.LAST:
        return packed_sum([last])
    return packed_sum([slot_value(struct.unpack("<Q", pooled)[0], 0, length)])


def prompt_outputs(
    prompt: Sequence[int], sampling: SamplingParams, attention: Attention = FULL
) -> PromptOutputs:
    """The oracle: what the tokens of `prompt` give."""
    if not sampling.reads_prompt:
        return NO_OUTPUTS
    slots: list[int] = []
    extend_slots(slots, prompt)
    num_best, pooling, logprobs = sampling.prompt_logprobs, sampling.pooling, []
    if num_best is not None:
        for at, token in enumerate(prompt[1:], start=1):
            total = attention.attended(slots, at)
            logprobs.append(logprobs_of(total, token, at, num_best))
    vector = embedding(pooling, packed_sum(slots), slots[-1], len(slots)) if pooling else b""
    return PromptOutputs(tuple(logprobs), vector)


def checksum(slots: Sequence[int], rank: int = 0, num_ranks: int = 1) -> int:
    """Sums up one block, whatever it holds, or what a rank has of it. As for real blocks, the
    sums of all ranks add up to that of the block."""
    own = range(rank, len(slots), num_ranks)
    return sum(slot_value(slots[at], at, slots[at] >> 48) for at in own) % (1 << 64)


def output_logprobs(
    prompt: Sequence[int], output: Sequence[int], num_best: int, attention: Attention = FULL
) -> list[TokenLogprobs]:
    """The oracle says what each token of `output` has."""
    slots: list[int] = []
    extend_slots(slots, [*prompt, *output])
    return [
        logprobs_of(attention.attended(slots, at), token, at, num_best)
        for at, token in enumerate(output, start=len(prompt))
    ]


def generate(
    prompt: Sequence[int],
    sampling: SamplingParams,
    max_model_len: int,
    attention: Attention = FULL,
) -> tuple[list[int], FinishReason]:
    """The oracle: output tokens that follow `prompt`, and why they end."""
    slots: list[int] = []
    extend_slots(slots, prompt)
    output: list[int] = []
    while True:
        token = next_token(attention.attended(slots, len(slots)), sampling, len(slots))
        output.append(token)
        may_stop = len(output) >= sampling.min_tokens or sampling.grammar
        if may_stop and token in sampling.stop_token_ids:
            return output, FinishReason.STOP
        if len(output) >= sampling.max_tokens or len(slots) + 1 >= max_model_len:
            return output, FinishReason.LENGTH
        extend_slots(slots, [token])
