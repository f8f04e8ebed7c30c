"""What the tokens of a prompt give besides its KV: their log-probabilities, and an embedding.

A prompt is computed in chunks; each gives the outputs of its own tokens. Logits are taken for a few
rows at a time: those of a whole chunk, each as wide as the vocabulary, would be hundreds of MB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvrelay.engine.model.sampling.sampler import token_logprobs
from kvrelay.engine.request import Pooling, PromptOutputs, TokenLogprobs
from kvrelay.engine.step import Sampled, ScheduledSeq, Step

ROWS = 64  # whose logits are there at a time

ToLogits = Callable[[torch.Tensor], torch.Tensor]
Sample = Callable[[torch.Tensor, list[ScheduledSeq]], Sequence[Sampled]]


def read_prompts(
    step: Step, hidden: torch.Tensor, to_logits: ToLogits, sample: Sample
) -> tuple[list[Sampled | None], dict[int, PromptOutputs]]:
    """Tokens sampled, one entry per sequence, and the outputs of prompts by the index of theirs.

    hidden: after the last norm, [R, hidden_size], of the rows of `Batch.from_step(step)`.
    to_logits: of some of its rows, float32 [rows, vocab_size], valid until its next call. sample: a
    token for each row of logits."""
    hidden = hidden.clone()  # a buffer of the operations may hold it
    last_rows: list[int] = []
    outputs: dict[int, PromptOutputs] = {}
    at = 0
    for index, seq in enumerate(step.seqs):
        positions = seq.output_positions
        if seq.outputs_from is not None:
            states = hidden[at : at + len(positions)]
            logprobs = _logprobs(seq, states, to_logits)
            outputs[index] = PromptOutputs(logprobs, _pooled(seq, states))
        at += len(seq.read_positions)
        if seq.sample:
            last_rows.append(at - 1)
    asked = [seq for seq in step.seqs if seq.sample]
    tokens = iter(sample(to_logits(hidden[last_rows]), asked) if asked else ())
    return [next(tokens) if seq.sample else None for seq in step.seqs], outputs


def _logprobs(
    seq: ScheduledSeq, states: torch.Tensor, to_logits: ToLogits
) -> tuple[TokenLogprobs, ...]:
    """Takes the tokens after those whose `states` are given, as far as they are the prompt's."""
    if seq.sampling.prompt_logprobs is None:
        return ()
    first = seq.output_positions.start + 1
    targets = seq.context[first : min(first + len(states), seq.num_prompt_tokens)]
    found: list[TokenLogprobs] = []
    for start in range(0, len(targets), ROWS):
        chunk = targets[start : start + ROWS]
        logits = to_logits(states[start : start + len(chunk)])
        found += token_logprobs(logits, chunk, seq.sampling.prompt_logprobs)
    return tuple(found)


def _pooled(seq: ScheduledSeq, states: torch.Tensor) -> bytes:
    """The embedding, if the prompt ends in this step; else what the next one goes on from."""
    pooling, positions = seq.sampling.pooling, seq.output_positions
    is_last = positions.stop == seq.num_prompt_tokens
    if pooling is None or not positions:
        return seq.pooled
    if pooling is Pooling.LAST:
        return _packed(states[-1]) if is_last else b""
    total = states.float().sum(dim=0)
    if seq.pooled:
        total += torch.from_numpy(np.frombuffer(seq.pooled, np.float32).copy()).to(total.device)
    return _packed(total / seq.num_prompt_tokens if is_last else total)


def _packed(state: torch.Tensor) -> bytes:
    return state.float().cpu().numpy().tobytes()
