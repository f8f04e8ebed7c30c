"""Sequences that are fed step by step to something that runs steps."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Protocol

from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import UNKNOWN, Sampled, ScheduledSeq, Step, StepDone
from tests.engine.model.tiny import BLOCK_SIZE, VOCAB, scheduled, tokens_of

GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=1.0, seed=11)
TABLES = ([9, 4], [2, 7], [3, 8])


class World(Protocol):
    def run(self, *seqs: ScheduledSeq, repeats: int = 1) -> list[Sampled | None]: ...


class Talk:
    """One sequence: what is known of it, and how much of it is computed."""

    def __init__(self, prompt: list[int], blocks: list[int], sampling: SamplingParams = GREEDY):
        self.tokens, self.prompt, self.blocks = list(prompt), len(prompt), blocks
        self.sampling, self.num_computed = sampling, 0
        self.kept: dict[str, Any] = {}

    def next(self, count: int | None = None, draft: Sequence[int] = ()) -> ScheduledSeq:
        """The share of a step that computes `count` tokens, or all that are left, and verifies
        `draft`."""
        end = len(self.tokens) if count is None else self.num_computed + count
        return scheduled(
            self.tokens[self.num_computed : end],
            self.num_computed,
            self.blocks,
            sample=end == len(self.tokens),
            context=self.tokens if end == len(self.tokens) else self.tokens[:end],
            num_prompt_tokens=self.prompt,
            sampling=self.sampling,
            draft_tokens=list(draft),
            kept=self.kept,
        )

    def take(self, seq: ScheduledSeq, sampled) -> None:
        self.num_computed = seq.start + len(seq.tokens)
        if sampled is not None:
            self.tokens += [sampled.token, *sampled.more]
            self.num_computed += len(sampled.more)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :]


def step(world: World, *talks: Talk, counts=None, repeats: int = 1) -> None:
    """One step of `world` over `talks`, each with counts[i] tokens or all that are not computed."""
    shares = [talk.next(count) for talk, count in zip(talks, counts or [None] * 9, strict=False)]
    for talk, share, sampled in zip(
        talks, shares, world.run(*shares, repeats=repeats), strict=True
    ):
        talk.take(share, sampled)


def alone(world: World, talk: Talk, count: int) -> list[int]:
    """`count` tokens of `talk` and nothing beside it, one pass at a time."""
    while len(talk.output) < count:
        step(world, talk)
    return talk.output


def drafting(world: World, talks: Sequence[Talk], expected: Sequence[list[int]]) -> int:
    """Continue each of `talks` to its expected tokens with drafts of which some are accepted.
    Returns how many were."""
    random, num_accepted = Random(5), 0
    left = list(zip(talks, expected, strict=True))
    while left:
        shares = []
        for talk, tokens in left:
            told = len(talk.output)
            room = min(len(tokens) - told - 1, -len(talk.tokens) % BLOCK_SIZE, random.randint(0, 5))
            draft = tokens[told : told + room] if told else []
            if draft and random.random() < 0.5:
                at = random.randrange(len(draft))
                draft[at] = (draft[at] + 1) % VOCAB
            shares.append(talk.next(draft=draft))
        for (talk, _), share, sampled in zip(left, shares, world.run(*shares), strict=True):
            assert sampled is not None
            talk.take(share, sampled)
            num_accepted += len(sampled.more)
        left = [(talk, tokens) for talk, tokens in left if len(talk.output) < len(tokens)]
    return num_accepted


def three_talks() -> list[Talk]:
    prompts = (tokens_of(count, seed=seed) for count, seed in ((14, 1), (3, 2), (6, 3)))
    return [Talk(*each) for each in zip(prompts, TABLES, (GREEDY, DRAWN, GREEDY), strict=True)]


def after(talk: Talk, ahead: int, follows: int) -> ScheduledSeq:
    """The share that follows `talk` once `ahead` tokens more are drawn for it."""
    share = talk.next()
    return replace(share, start=share.start + ahead, tokens=[UNKNOWN], follows=follows)


class Launching:
    """What a worker's node does with its executor, for sequences that are all decodes."""

    def __init__(self, executor) -> None:
        self.executor, self.number = executor, 0

    def launch(self, *seqs: ScheduledSeq, checksums=(), followed=True) -> Callable[[], StepDone]:
        self.number += 1
        step = Step(self.number, list(seqs), list(checksums), may_be_followed=followed)
        return self.executor.launch(step)

    def run(self, *seqs: ScheduledSeq, repeats: int = 1) -> list[Sampled | None]:
        """A step that ends before the next begins."""
        done = self.launch(*seqs, followed=False)()
        assert done.error is None, done.error
        return done.sampled

    def begin(self) -> list[Talk]:
        """Three talks whose prompts are computed."""
        talks = three_talks()
        for talk in talks:
            step(self, talk)
        return talks
