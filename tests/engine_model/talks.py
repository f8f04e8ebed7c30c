"""Sequences that are fed step by step to something that runs steps."""

from typing import Protocol

from engine.request import SamplingParams
from engine.step import Sampled, ScheduledSeq
from tests.engine_model.tiny import scheduled

GREEDY = SamplingParams(temperature=0.0)


class World(Protocol):
    def run(self, *seqs: ScheduledSeq, repeats: int = 1) -> list[Sampled | None]: ...


class Talk:
    """One sequence: what is known of it, and how much of that was fed."""

    def __init__(self, prompt: list[int], blocks: list[int], sampling: SamplingParams = GREEDY):
        self.tokens, self.prompt, self.blocks = list(prompt), len(prompt), blocks
        self.sampling, self.fed = sampling, 0

    def next(self, count: int | None = None) -> ScheduledSeq:
        """The share of a step that feeds `count` tokens, or all that are left."""
        end = len(self.tokens) if count is None else self.fed + count
        return scheduled(
            self.tokens[self.fed : end],
            self.fed,
            self.blocks,
            sample=end == len(self.tokens),
            context=self.tokens[:end],
            num_prompt_tokens=self.prompt,
            sampling=self.sampling,
        )

    def take(self, seq: ScheduledSeq, sampled) -> None:
        self.fed = seq.start + len(seq.tokens)
        if sampled is not None:
            self.tokens += [sampled.token, *sampled.more]
            self.fed += len(sampled.more)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :]


def step(world: World, *talks: Talk, counts=None, repeats: int = 1) -> None:
    """One step of `world` over `talks`, each fed counts[i] tokens or what it lacks."""
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
