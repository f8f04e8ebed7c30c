"""What a head is worth: how many of its draft tokens are accepted, and what that may gain.

An answer that is there already is decoded again in rounds: the head drafts k tokens, those that the
answer has are accepted, and one more token comes of the model itself. Drafts are drawn as the model
draws, with the same luck of each (seed, position, token).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kvrelay.engine.model.sampling.sampler import key_of, luck
from kvrelay.training.draft.data import Answers, Batch
from kvrelay.training.draft.head import Head
from kvrelay.training.draft.target import Sample, Target

MOST_DRAFTS = 4


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What was found of answers at one temperature."""

    temperature: float
    num_tokens: int
    by_place: tuple[float, ...]  # shares of the drafts before which all were accepted
    per_round: tuple[float, ...]  # tokens that a round of 1, 2, ... drafts gives

    def gains(self, row_s: Sequence[float], draft_s: float) -> list[float]:
        """How many times as fast a sequence alone is decoded, for each number of drafts; row_s: of
        a step of 1, 2, ... rows; draft_s: of a pass of the head."""
        return [
            tokens * row_s[0] / (row_s[count] + count * draft_s)
            for count, tokens in enumerate(self.per_round, 1)
        ]


def draft_share(head: Head, target: Target) -> float:
    """What a draft takes of a step of one row, if both are bound by reading their weights."""
    return sum(each.numel() for each in head.parameters()) / target.config.num_parameters


def accepted(head: Head, target: Target, answers: Iterable[Answers]) -> list[Acceptance]:
    """Compares temperatures, in ascending order."""
    lengths: dict[float, list[list[int]]] = {}
    for each in answers:
        for sample, states in each:
            found = _accepted_drafts(head, target, sample, states)
            lengths.setdefault(sample.temperature, []).append(found)
    return [_acceptance(temperature, lengths[temperature]) for temperature in sorted(lengths)]


def _accepted_drafts(head: Head, target: Target, sample: Sample, states: torch.Tensor) -> list[int]:
    """How many drafts are accepted after each token of the answer but the last."""
    batch = Batch.of([(sample, states)])
    device = head.fc.weight.device
    drafts: list[torch.Tensor] = []  # for each place, [L]
    times = chances(head, target, sample) if sample.temperature else None

    def draft(index: int, hidden: torch.Tensor) -> torch.Tensor:
        logits = head.logits(hidden[0]).float().cpu()
        if times is not None:  # the race of `engine.model.sampling.sampler`
            logits = (logits / sample.temperature).softmax(-1) / times
        best = logits.argmax(-1)
        drafts.append(best if head.d2t is None else head.d2t.cpu()[best])
        embedded: torch.Tensor = target.table[drafts[-1]].to(device).float().unsqueeze(0)
        return embedded

    with torch.inference_mode():
        embedded = target.table[batch.tokens].to(device).float()
        outputs = head.unroll(
            embedded, target.unnormed(batch.hidden).to(device), MOST_DRAFTS, draft
        )
        draft(MOST_DRAFTS - 1, outputs[-1])
    came = torch.tensor(sample.tokens)
    count = len(came) - 1  # slots
    holds = torch.ones(count, dtype=torch.bool)
    lengths = torch.zeros(count, dtype=torch.int64)
    for place, tokens in enumerate(drafts):
        # A round that begins at slot i (from 0) drafts its token of `place` at slot i + place, for
        # token i + place + 2.
        right = torch.zeros(count, dtype=torch.bool)
        right[: max(0, count - place - 1)] = tokens[place : count - 1] == came[place + 2 :]
        holds &= right
        lengths += holds
    return lengths[sample.num_prompt_tokens - 1 :].tolist()


def chances(head: Head, target: Target, sample: Sample) -> torch.Tensor:
    """The times of each draft word after each slot if all were alike, [L, draft_vocab]."""
    keys = [key_of(sample.seed, position) for position in range(2, len(sample.tokens) + 1)]
    found = luck(keys, target.config.vocab_size, torch.zeros(1))
    found = found if head.d2t is None else found[:, head.d2t.cpu()]
    return -torch.log1p(-found)


def _acceptance(temperature: float, lengths: list[list[int]]) -> Acceptance:
    every = torch.tensor([n for each in lengths for n in each])
    by_place = tuple(
        float((every > place).sum() / max(1, int((every >= place).sum())))
        for place in range(MOST_DRAFTS)
    )
    per_round = []
    for most in range(1, MOST_DRAFTS + 1):
        rounds = tokens = 0
        for each in lengths:
            at = 0
            while at < len(each):
                gained = min(each[at], most) + 1
                rounds, tokens, at = rounds + 1, tokens + gained, at + gained
        per_round.append(tokens / rounds)
    return Acceptance(temperature, len(every), by_place, tuple(per_round))
