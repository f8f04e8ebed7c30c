"""A load generator for any OpenAI-compatible endpoint, and what it measured.

`run_load` sends a fixed number of requests, either open loop (Poisson arrivals at a rate, whatever
the server does) or with a fixed number in flight, and times every chunk of every answer.
`summarize` turns the timings into percentiles, rates and goodput. Prompts and arrivals are a pure
function of the seed.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import httpx

# Short common words: most tokenizers make one token of each, with the space before it.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea kid body information back "
    "parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education"
)
_WORDS = _TEXT.split()
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What to send. Exactly one of `rate` and `concurrency` is set."""

    url: str  # the server's, without /v1
    model: str
    num_requests: int
    rate: float | None = None  # requests/s
    concurrency: int | None = None
    input_len: int = 128  # tokens of each prompt that no other has, about
    output_len: int = 32  # tokens
    prefix_groups: int = 0  # 0: no shared prefixes
    prefix_len: int = 0  # tokens that a group's prompts begin with, about
    endpoint: str = "chat"  # or "completions"
    stream: bool = True
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0
    timeout_s: float = 600.0
    ttft_slo_ms: float | None = None
    itl_slo_ms: float | None = None
    api_key: str | None = None


@dataclass(slots=True)
class RequestTiming:
    """What happened to one request. Times in seconds since the start of the run."""

    sent_at: float
    ended_at: float = 0.0
    chunk_at: list[float] = field(default_factory=list)  # chunks with text or tokens
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    text: str = ""
    token_ids: list[int] = field(
        default_factory=list
    )  # those of the answer, if the body asks for them
    usage: dict[str, Any] = field(default_factory=dict)  # as the server sent it
    error: str | None = None
    request_id: str = ""  # as the server calls it

    @property
    def ttft_s(self) -> float:
        return self.chunk_at[0] - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        """How long each chunk came after the one before."""
        return [later - earlier for earlier, later in pairwise(self.chunk_at)]

    @property
    def mean_itl_s(self) -> float:
        """What a request takes per output token after the first (TPOT); 0 with one token."""
        num_later = max(self.num_output_tokens, len(self.chunk_at)) - 1
        return (self.chunk_at[-1] - self.chunk_at[0]) / num_later if num_later > 0 else 0.0


def make_prompts(spec: LoadSpec) -> list[str]:
    """The prompts of a run, in the order in which they are sent."""
    rng = Random(spec.seed)
    prefixes = [" ".join(rng.choices(_WORDS, k=spec.prefix_len)) for _ in range(spec.prefix_groups)]
    prompts = []
    for i in range(spec.num_requests):
        own = rng.choices(_WORDS, k=max(1, spec.input_len - 1))
        # The number at its head sets a prompt apart from all others from its first block on.
        text = f"{i} " + " ".join(own)
        prompts.append(f"{rng.choice(prefixes)} {text}" if prefixes else text)
    return prompts


def make_arrivals(spec: LoadSpec) -> list[float]:
    """Seconds from the start at which requests are sent; a Poisson process. Open loop only."""
    assert spec.rate is not None
    rng = Random(spec.seed + 1)
    at, arrivals = 0.0, []
    for _ in range(spec.num_requests):
        arrivals.append(at)
        at += rng.expovariate(spec.rate)
    return arrivals


class Client:
    """One run under way. Owned by `run_load`."""

    def __init__(
        self, spec: LoadSpec, client: httpx.AsyncClient, on_done: Callable[[RequestTiming], None]
    ) -> None:
        self._spec = spec
        self._client = client
        self._on_done = on_done
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    async def open_loop(self, prompts: Sequence[str]) -> list[RequestTiming]:
        tasks = []
        for prompt, at in zip(prompts, make_arrivals(self._spec), strict=True):
            await asyncio.sleep(max(0.0, at - self.now()))
            tasks.append(asyncio.create_task(self.request(prompt)))
        return list(await asyncio.gather(*tasks))

    async def closed_loop(self, prompts: Sequence[str], concurrency: int) -> list[RequestTiming]:
        todo = iter(prompts)
        timings: list[RequestTiming] = []

        async def client() -> None:
            for prompt in todo:  # one iterator: every prompt is taken once
                timings.append(await self.request(prompt))

        await asyncio.gather(*(client() for _ in range(concurrency)))
        return timings

    async def request(self, prompt: str) -> RequestTiming:
        if self._spec.endpoint != "chat":
            return await self.send("/v1/completions", _body(self._spec) | {"prompt": prompt})
        return await self.chat([{"role": "user", "content": prompt}])

    async def chat(self, messages: Sequence[Mapping[str, str]], **more: Any) -> RequestTiming:
        """One request to the chat endpoint; `more` goes into its body."""
        body = _body(self._spec) | {"messages": list(messages)} | more
        return await self.send("/v1/chat/completions", body)

    async def send(self, path: str, body: dict[str, Any]) -> RequestTiming:
        """One request with just this body, timed."""
        timing = RequestTiming(sent_at=self.now())
        try:
            async with asyncio.timeout(self._spec.timeout_s):
                await self._exchange(path, body, timing)
        except TimeoutError:
            timing.error = "timeout"
        except httpx.HTTPError as error:
            timing.error = type(error).__name__
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            timing.error = "unreadable answer"
        timing.ended_at = self.now()
        if timing.error is None and not timing.chunk_at:
            timing.error = "empty answer"
        self._on_done(timing)
        return timing

    async def _exchange(self, path: str, body: dict[str, Any], timing: RequestTiming) -> None:
        async with self._client.stream("POST", path, json=body) as response:
            timing.request_id = response.headers.get("x-request-id", "")
            if response.is_error:
                await response.aread()
                timing.error = _error_kind(response)
            elif self._spec.stream:
                await self._read_stream(response, timing)
            else:
                await response.aread()
                answer = response.json()
                _count_usage(answer["usage"], timing)
                timing.text = "".join(_text_of(choice) for choice in answer["choices"])
                timing.chunk_at.append(self.now())

    async def _read_stream(self, response: httpx.Response, timing: RequestTiming) -> None:
        is_done = False
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or is_done:
                continue
            if data == "[DONE]":
                is_done = True
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                timing.error = str(chunk["error"].get("code") or "error in stream")
                return
            if chunk.get("usage"):
                _count_usage(chunk["usage"], timing)
            choices = chunk.get("choices", [])
            text = "".join(_text_of(choice) for choice in choices)
            ids = [token for choice in choices for token in choice.get("token_ids") or ()]
            if text or ids:
                timing.text += text
                timing.token_ids += ids
                timing.chunk_at.append(self.now())
        if not is_done:
            timing.error = "stream cut off"
        if timing.num_output_tokens == 0:  # a server that does not say
            timing.num_output_tokens = len(timing.chunk_at)


def _body(spec: LoadSpec) -> dict[str, Any]:
    """What every request has, but for what it asks."""
    body: dict[str, Any] = {
        "model": spec.model,
        "max_tokens": spec.output_len,
        "temperature": spec.temperature,
        "stream": spec.stream,
    }
    if spec.stream:
        body["stream_options"] = {"include_usage": True}
    if spec.ignore_eos:
        body["ignore_eos"] = True
    return body


def _text_of(choice: dict[str, Any]) -> str:
    said: dict[str, Any] = choice.get("delta") or choice.get("message") or {}
    return choice.get("text") or said.get("content") or said.get("reasoning_content") or ""


def _count_usage(usage: dict[str, Any], timing: RequestTiming) -> None:
    timing.usage = usage
    timing.num_prompt_tokens = usage.get("prompt_tokens", 0)
    timing.num_output_tokens = usage.get("completion_tokens", 0)
    timing.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _error_kind(response: httpx.Response) -> str:
    try:
        code = response.json()["error"]["code"]
    except (ValueError, KeyError, TypeError):
        code = None
    return f"{response.status_code} {code}" if code else str(response.status_code)


async def run_load(
    spec: LoadSpec, on_done: Callable[[RequestTiming], None] = lambda timing: None
) -> tuple[list[RequestTiming], float]:
    """Send the load; return one timing per request, and the seconds it took altogether."""
    assert (spec.rate is None) != (spec.concurrency is None)
    headers = {"authorization": f"Bearer {spec.api_key}"} if spec.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    timeout = httpx.Timeout(spec.timeout_s, connect=min(30.0, spec.timeout_s))
    prompts = make_prompts(spec)
    async with httpx.AsyncClient(
        base_url=spec.url, headers=headers, limits=limits, timeout=timeout
    ) as client:
        run = Client(spec, client, on_done)
        if spec.concurrency is None:
            timings = await run.open_loop(prompts)
        else:
            timings = await run.closed_loop(prompts, spec.concurrency)
        return timings, run.now()


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that `percent` % of them do not exceed (nearest rank); None of none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _percentiles_ms(values_s: Sequence[float]) -> dict[str, float | None]:
    found = {f"p{p}": percentile(values_s, p) for p in PERCENTILES}
    return {name: None if value is None else round(value * 1e3, 3) for name, value in found.items()}


def summarize(spec: LoadSpec, timings: Sequence[RequestTiming], elapsed_s: float) -> dict[str, Any]:
    """What a run showed. Latencies in ms, rates per second of the whole run.

    Goodput counts requests whose TTFT and whose mean ITL are within their SLO.
    """
    good = [timing for timing in timings if timing.error is None]
    gaps = [gap for timing in good for gap in timing.gaps_s]
    num_prompt = sum(timing.num_prompt_tokens for timing in good)
    num_output = sum(timing.num_output_tokens for timing in good)
    num_within = sum(_is_within(spec, timing) for timing in good)
    has_slo = spec.ttft_slo_ms is not None or spec.itl_slo_ms is not None
    parameters = {key: value for key, value in asdict(spec).items() if key != "api_key"}
    return {
        "parameters": parameters,
        "elapsed_s": round(elapsed_s, 3),
        "num_requests": len(timings),
        "num_completed": len(good),
        "errors": dict(sorted(Counter(t.error for t in timings if t.error).items())),
        "ttft_ms": _percentiles_ms([timing.ttft_s for timing in good if spec.stream]),
        "itl_ms": _percentiles_ms(gaps),
        "e2e_ms": _percentiles_ms([timing.ended_at - timing.sent_at for timing in good]),
        "requests_per_s": round(len(good) / elapsed_s, 3),
        "output_tokens_per_s": round(num_output / elapsed_s, 3),
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "cached_tokens_share": round(sum(t.num_cached_tokens for t in good) / num_prompt, 4)
        if num_prompt
        else None,
        "goodput_per_s": round(num_within / elapsed_s, 3) if has_slo else None,
        "share_within_slo": round(num_within / len(timings), 4) if has_slo and timings else None,
    }


def _is_within(spec: LoadSpec, timing: RequestTiming) -> bool:
    ttft_ok = spec.ttft_slo_ms is None or timing.ttft_s * 1e3 <= spec.ttft_slo_ms
    itl_ok = spec.itl_slo_ms is None or timing.mean_itl_s * 1e3 <= spec.itl_slo_ms
    return ttft_ok and itl_ok
