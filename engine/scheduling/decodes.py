"""Steps of decodes alone: whether they are repeated, or followed before their tokens are known. And
who makes room for decodes.

Both hide the time that the host takes for a step. A repeated step samples several tokens of each
sequence without the host in between. A step that is followed has the next one waiting behind it:
that one takes the tokens where they were drawn, so the host learns and reports each at once, and
prepares a step while another one runs. What is computed for a sequence that has meanwhile ended is
thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.step import Step


def tokens_to_end(seq: Sequence, config: WorkerConfig) -> int:
    """Tokens that may be sampled for a decode before it ends, at least 1. Nothing follows the token
    that a producer samples."""
    if not seq.reserve_growth:
        return 1
    left = seq.sampling.max_tokens - seq.num_output_tokens
    return max(1, min(left, config.max_model_len - len(seq.tokens)))


def tokens_to_report(seq: Sequence, config: WorkerConfig) -> int:
    """The same, before it ends or has to be reported: a first token is at once."""
    return 1 if seq.num_output_tokens == 0 else tokens_to_end(seq, config)


def repeats(decodes: Seq[Sequence], config: WorkerConfig) -> int:
    """Passes in a row that decodes can run by themselves: no block is added or sealed, and none
    ends. With a mask, what may follow a token is not known before."""
    least = size = config.block_size
    for seq in decodes:
        least = min(least, -len(seq.tokens) % size)
        if least <= 1 or seq.sampling.is_masked:
            return 1
    return max(1, min([least, *(tokens_to_report(seq, config) for seq in decodes)]))


def draft_rooms(decodes: Seq[Sequence], config: WorkerConfig) -> list[int] | None:
    """How many draft tokens each may get: with its last token they stay in one block, and the token
    sampled after them is at most the last one that it may have. None: the logits of one sequence
    are edited or reported."""
    if not all(seq.sampling.is_plain(seq.num_output_tokens) for seq in decodes):
        return None
    size = config.block_size
    return [min(-len(seq.tokens) % size, tokens_to_report(seq, config) - 1) for seq in decodes]


def may_be_followed(decodes: Seq[Sequence]) -> bool:
    """Whether the device can draw their next tokens, and may know them before the host does."""
    return all(_is_drawn_on_device(seq, 0) for seq in decodes)


def followers(
    step: Step, in_step: Seq[Sequence], running: Seq[Sequence], config: WorkerConfig
) -> list[tuple[Sequence, int | None]] | None:
    """The decodes of the step after `step`, which is in flight over `in_step`, each with its index
    there, or None if it is not among them. None: what is to be computed next depends on the tokens
    of `step`, or is no decode."""
    if not step.may_be_followed:
        return None
    places = {seq: index for index, seq in enumerate(in_step)}
    found: list[tuple[Sequence, int | None]] = []
    for seq in running:
        index = places.get(seq)
        if index is not None and tokens_to_end(seq, config) == 1:
            continue  # it ends with the token that is under way
        if not seq.is_decoding or not _is_drawn_on_device(seq, 0 if index is None else 1):
            return None
        found.append((seq, index))
    return found[: config.max_num_batched_tokens]


def _is_drawn_on_device(seq: Sequence, num_unknown: int) -> bool:
    """`num_unknown`: tokens after those of `seq` that are under way."""
    sampling = seq.sampling
    return not sampling.is_masked and sampling.is_plain(seq.num_output_tokens + num_unknown)


def victim(running: Seq[Sequence], block_size: int) -> Sequence:
    """Who is preempted where decodes need a block. Of those that stream nothing yet the one that
    has least work to lose, else the latest arrival: a stream would be silent until others end."""
    silent = [seq for seq in running if not seq.is_stream]
    return min(
        reversed(silent or running[-1:]),
        key=lambda seq: seq.num_computed - seq.num_hits * block_size,
    )
