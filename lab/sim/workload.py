"""Requests of one run, drawn from the seed, each with the answer that the oracle expects.

Groups share a prefix; a later turn is an earlier prompt, its answer and something new. Arrivals
come in bursts. Some are cancelled, some have a deadline too short to keep, some can never fit. Some
ask for what their prompts give. The second wave comes after the faults: all of it must succeed. In
some runs it has a crowd: tenants that all have more waiting than the workers have memory for.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import StrEnum

from kvrelay.engine.kv.scope import UNSALTED, CacheScope
from kvrelay.engine.request import FinishReason, Pooling, SamplingParams
from kvrelay.lab.sim.model import EOS, FULL, VOCAB_SIZE, Attention, generate
from kvrelay.router.messages import TenantShare

GENEROUS_S = 600.0
"""A deadline that no run reaches."""


class Poison(StrEnum):
    """What a request does to the steps in which it is sampled. It gets no token, ever."""

    ROW = "row"  # it is left out of them
    STEP = "step"  # they fail


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
    scope: CacheScope = UNSALTED
    poison: Poison | None = None
    tenant: tuple[str, TenantShare] | None = None  # in a crowd
    is_alone: bool = False  # there is one tenant
    caller: str = ""  # who of the tenant asks

    @property
    def num_tokens(self) -> int:
        """What prompt and the longest possible output have."""
        return len(self.prompt) + self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class JobLimits:
    """What fits: taken from the workers of the run."""

    max_model_len: int  # the shortest of all workers'
    longest_model_len: int
    pool_tokens: int  # in the smallest pool that decodes
    attention: Attention = FULL
    # Shares of the first wave's requests that are poison, by kind.
    poison: tuple[tuple[Poison, float], ...] = ()


def draw_jobs(
    rng: random.Random, more: random.Random, limits: JobLimits, until_s: float
) -> list[Job]:
    """20 to 60 jobs that arrive while there are faults, until `until_s`, and 4 to 8 for later.
    `more`: draws what older seeds did not have."""
    writer = _JobWriter(rng, more, limits)
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


def draw_crowd(more: random.Random, limits: JobLimits, num_tenants: int = 0) -> list[Job]:
    """Two to four tenants of unequal weights, with equally many short requests of unequal sizes,
    all waiting after the first moment; and up to three that need most of a pool, early on, or many
    where the tenants are so many."""
    count, at_s = num_tenants or more.randint(2, 4), 1.0
    tenants = [
        (f"tenant-{number}", TenantShare(weight=weight))
        for number, weight in enumerate(more.sample((1.0, 2.0, 3.0, 5.0), count))
    ]
    sizes = [more.randint(8, 32) for _ in tenants]
    turns = [n % count for n in range(count * more.randint(50, 70))]
    more.shuffle(turns)
    # They are the tenant's with the largest share, whose others may go first.
    most = max(range(count), key=lambda turn: tenants[turn][1].weight)
    early = [number for number in range(len(turns) // 4) if turns[number] == most]
    num_large = more.randint(4, 12) if num_tenants else more.randint(1, 3)
    large = set(more.sample(early, min(num_large, len(early))))
    jobs = []
    for number, turn in enumerate(turns):
        num_output = more.randint(4, 12)
        size = sizes[turn] + more.randint(0, 8)
        if number in large:
            size = min(limits.max_model_len, limits.pool_tokens) - num_output
        prompt = tuple(more.randrange(1, VOCAB_SIZE) for _ in range(size))
        sampling = SamplingParams(max_tokens=num_output, temperature=0.0)
        output, finish = generate(prompt, sampling, limits.longest_model_len, limits.attention)
        jobs.append(
            Job(
                f"c{number}",
                prompt,
                sampling,
                at_s + 0.0001 * number,
                GENEROUS_S,
                tuple(output),
                finish,
                after_faults=True,
                tenant=tenants[turn],
            )
        )
    return jobs


def draw_chat(more: random.Random, limits: JobLimits, flood: list[Job]) -> list[Job]:
    """Another caller of the crowd's only tenant, who asks for little now and then while the flood
    of the first one waits."""
    first, at_s = len(flood), flood[-1].arrive_s
    jobs = []
    for number in range(first, first + more.randint(10, 20)):
        at_s += more.uniform(0.02, 0.2)
        prompt = tuple(more.randrange(1, VOCAB_SIZE) for _ in range(more.randint(3, 7)))
        sampling = SamplingParams(max_tokens=more.randint(2, 6), temperature=0.0)
        output, finish = generate(prompt, sampling, limits.longest_model_len, limits.attention)
        job = Job(f"c{number}", prompt, sampling, at_s, GENEROUS_S, tuple(output), finish)
        jobs.append(replace(job, after_faults=True, tenant=flood[0].tenant, caller="chat"))
    return jobs


class _JobWriter:
    """Draws one job after the other. Owns the shared prefixes and the conversations so far."""

    def __init__(self, rng: random.Random, more: random.Random, limits: JobLimits) -> None:
        self._rng = rng
        self._more = more
        self._has_grammars, self._has_logprobs, self._has_least, self._has_salts = (
            more.random() < 0.5 for _ in range(4)
        )
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
        sampling = self._with_more(sampling)
        prompt = self._prompt(sampling.max_tokens, may_be_too_large=not after_faults)
        limits = self._limits
        expected, finish = generate(prompt, sampling, limits.longest_model_len, limits.attention)
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
            scope=self._scope(len(prompt)),
        )
        return job if after_faults else self._with_poison(self._with_trouble(job))

    def _with_more(self, sampling: SamplingParams) -> SamplingParams:
        more = self._more
        if self._has_grammars and more.random() < 0.3:
            period = more.randint(2, 12)
            sampling = replace(sampling, grammar=f"{period} {more.randint(0, period - 1)}")
        if self._has_logprobs and more.random() < 0.2:
            sampling = replace(sampling, logprobs=more.randint(0, 3))
        if self._has_least and more.random() < 0.3:
            sampling = replace(sampling, min_tokens=more.randint(1, sampling.max_tokens))
        return sampling

    def _scope(self, num_prompt: int) -> CacheScope:
        """A salt of one of two tenants; half of the beginnings are public."""
        more = self._more
        if not self._has_salts or more.random() < 0.3:
            return UNSALTED
        num_public = more.choice((0, more.randint(0, num_prompt)))
        return CacheScope(more.choice((b"red", b"blue")), num_public)

    def _with_poison(self, job: Job) -> Job:
        for kind, share in self._limits.poison:
            if share and self._more.random() < share:
                return replace(job, poison=kind)
        return job

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
