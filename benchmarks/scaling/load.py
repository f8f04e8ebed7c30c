"""Load whose rate changes, of prompts whose answers are known."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import httpx

from benchmarks.scaling.simulated import Sent
from kvrelay.lab.bench.load import Client, LoadSpec, RequestTiming, make_prompts

Rate = Callable[[float], float]
"""Requests a second, by the seconds since the start."""

NUM_PROMPTS = 24
INPUT, OUTPUT = 60, 32
LEAST_GAP_S = 0.02


def sine(least: float, most: float, period_s: float) -> Rate:
    """Swings between both, and begins at `least`."""
    middle, half = (most + least) / 2, (most - least) / 2
    return lambda t: middle - half * math.cos(2 * math.pi * t / period_s)


def step(before: float, after: float, at_s: float) -> Rate:
    return lambda t: before if t < at_s else after


def silence(_: float) -> float:
    return 0.0


@dataclass(slots=True)
class Outcome:
    """What became of the requests of a phase."""

    timings: list[RequestTiming] = field(default_factory=list)
    altered: int = 0

    @property
    def failed(self) -> list[str]:
        return [timing.error for timing in self.timings if timing.error is not None]

    @property
    def ttfts_s(self) -> list[float]:
        return sorted(t.ttft_s for t in self.timings if t.error is None)


class Talk:
    """A client with a fixed set of greedy requests, each with the text that it must bring."""

    def __init__(self, url: str, model: str, http: httpx.AsyncClient, seed: int) -> None:
        spec = LoadSpec(
            url, model, NUM_PROMPTS, rate=1.0, input_len=INPUT, output_len=OUTPUT, seed=seed
        )
        self._client = Client(spec, http, lambda _: None)
        self._prompts = make_prompts(spec)
        self._texts: dict[str, str] = {}
        self._rng = Random(seed)
        self._since_1970 = time.time() - self._client.now()
        self.sent: list[Sent] = []  # that were answered

    async def learn(self) -> None:
        """What each says when it runs alone."""
        for prompt in self._prompts:
            timing = await self._request(prompt)
            if timing.error is not None:
                raise RuntimeError(f"a request that ran alone failed: {timing.error}")
            self._texts[prompt] = timing.text

    async def single(self) -> RequestTiming:
        return await self._request(self._prompts[0])

    async def follow(
        self, rate: Rate, seconds: float, is_over: Callable[[], bool] = lambda: False
    ) -> Outcome:
        """Requests at this rate (a Poisson process), until `seconds` have passed or `is_over`;
        returns when all have ended."""
        outcome, began = Outcome(), time.monotonic()
        tasks: list[asyncio.Task[None]] = []
        while (now := time.monotonic() - began) < seconds and not is_over():
            present = rate(now)
            if present <= 0:
                await asyncio.sleep(0.2)
                continue
            await asyncio.sleep(min(2.0, max(LEAST_GAP_S, self._rng.expovariate(present))))
            tasks.append(asyncio.create_task(self._one(outcome)))
        await asyncio.gather(*tasks)
        return outcome

    async def _one(self, outcome: Outcome) -> None:
        prompt = self._rng.choice(self._prompts)
        timing = await self._request(prompt)
        outcome.timings.append(timing)
        outcome.altered += timing.error is None and timing.text != self._texts[prompt]

    async def _request(self, prompt: str) -> RequestTiming:
        timing = await self._client.request(prompt)
        if timing.error is None:
            number, tokens = self._prompts.index(prompt), timing.num_output_tokens
            at_s = self._since_1970 + timing.sent_at
            self.sent.append(Sent(at_s, number, timing.num_prompt_tokens, max(1, tokens)))
        return timing
