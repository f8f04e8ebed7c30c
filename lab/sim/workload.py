"""Requests of one run, drawn from the seed, each with the answer that the oracle expects.

Groups share a prefix; a later turn is an earlier prompt, its answer and something new. Arrivals
come in bursts. Some are cancelled, some have a deadline too short to keep, some can never fit. Some
ask for what their prompts give. The second wave comes after the faults: all of it must succeed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from engine.request import FinishReason, Pooling, SamplingParams
from lab.sim.model import EOS, VOCAB_SIZE, generate

GENEROUS_S = 600.0
"""A deadline that no run reaches."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request and what is to become of it. `arrive_s` counts from the start of its wave."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrive_s: float
    timeout_s: float
    expected: tuple[int, ...]
    finish: FinishReason
    after_faults: bool = False
    cancel_after_s: float | None = None  # this long after it was submitted
    cancel_at_output: int | None = None  # as soon as so many tokens have come

    @property
    def num_tokens(self) -> int:
        """Prompt and the longest possible output."""
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def is_cancelled(self) -> bool:
        return self.cancel_after_s is not None or self.cancel_at_output is not None


@dataclass(frozen=True, slots=True)
class Limits:
    """What fits: taken from the workers of the run."""

    max_model_len: int
    pool_tokens: int  # of the smallest pool that decodes


def draw_jobs(rng: random.Random, limits: Limits, until_s: float) -> list[Job]:
    """20 to 60 jobs that arrive while there are faults, until `until_s`, and 4 to 8 for later."""
    writer = _JobWriter(rng, limits)
    jobs: list[Job] = []
    at_s, last_s = 0.0, until_s * 0.6
    for number in range(rng.randint(20, 60)):
        if rng.random() < 0.3:
            at_s = rng.uniform(0.0, last_s)  # else it belongs to the burst before it
        jobs.append(writer.write(f"r{number}", at_s + rng.uniform(0.0, 0.02)))
    for number in range(rng.randint(4, 8)):
        arrive_s = rng.uniform(0.0, 0.3)
        jobs.append(writer.write(f"s{number}", arrive_s, after_faults=True))
    return jobs


class _JobWriter:
    """Draws one job after the other. Owns the shared prefixes and the conversations so far."""

    def __init__(self, rng: random.Random, limits: Limits) -> None:
        self._rng = rng
        self._limits = limits
        self._prefixes = [self._tokens(rng.randint(4, 48)) for _ in range(rng.randint(1, 5))]
        self._turns: list[tuple[int, ...]] = []

    def write(self, request_id: str, arrive_s: float, *, after_faults: bool = False) -> Job:
        rng = self._rng
        sampling = SamplingParams(
            max_tokens=rng.choice((1, 2, rng.randint(1, 24), rng.randint(8, 24))),
            temperature=rng.choice((0.0, 0.8)),
            stop_token_ids=(EOS,) if rng.random() < 0.7 else (),
            seed=rng.randrange(1 << 16),
            prompt_logprobs=rng.randint(0, 3) if rng.random() < 0.15 else None,
            pooling=rng.choice((Pooling.MEAN, Pooling.LAST)) if rng.random() < 0.1 else None,
        )
        prompt = self._prompt(sampling.max_tokens, may_be_too_large=not after_faults)
        expected, finish = generate(prompt, sampling, self._limits.max_model_len)
        self._turns.append((*prompt, *expected))
        job = Job(
            request_id,
            prompt,
            sampling,
            arrive_s,
            GENEROUS_S,
            tuple(expected),
            finish,
            after_faults,
        )
        return job if after_faults else self._with_trouble(job)

    def _with_trouble(self, job: Job) -> Job:
        rng, kind = self._rng, self._rng.random()
        if kind < 0.17:
            return replace(job, cancel_after_s=rng.choice((0.02, 0.2, 2.0)) * rng.random())
        if kind < 0.34:
            return replace(job, cancel_at_output=rng.randint(1, 8))
        if kind < 0.42:
            return replace(job, timeout_s=rng.choice((0.01, 0.1, 1.0)) * (0.1 + rng.random()))
        return job

    def _prompt(self, max_tokens: int, *, may_be_too_large: bool) -> tuple[int, ...]:
        rng, kind = self._rng, self._rng.random()
        if may_be_too_large and kind < 0.04:
            return self._tokens(rng.randint(90, 400))
        if kind < 0.2:
            prompt = self._tokens(rng.randint(1, 80))
        elif kind < 0.5 and self._turns:
            prompt = rng.choice(self._turns) + self._tokens(rng.randint(1, 8))
        else:
            prompt = rng.choice(self._prefixes) + self._tokens(rng.randint(1, 32))
        limits = self._limits
        fitting = min(limits.max_model_len, limits.pool_tokens) - max_tokens
        return prompt[: min(80, fitting)]

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(1, VOCAB_SIZE) for _ in range(count))
