"""What `benchmarks.serving.fidelity` sends to a real cluster, and how it is written down.

Conversations that begin with one of a few system prompts and go on turn by turn. What the assistant
has said so far is scripted, so that arrivals depend on nothing but the seed. A recording is a trace
in Mooncake's format, JSON lines, with blocks of 16 tokens; each line also has what the client saw.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

import httpx

from benchmarks.serving.conversations import LoadFailed, Messages, http_client
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.lab.bench.load import Client, LoadSpec, RequestTiming, make_prompts
from kvrelay.lab.replay.trace import Trace, TraceRequest

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """What is sent; words are about tokens."""

    num_requests: int = 240
    rate: float = 0.5  # requests/s, a Poisson process
    num_systems: int = 3
    system_words: int = 160
    first_words: tuple[int, int] = (40, 120)  # at least and at most
    later_words: tuple[int, int] = (15, 60)
    answer_words: tuple[int, int] = (15, 45)
    output_tokens: tuple[int, int] = (16, 64)
    num_turns: tuple[int, int] = (2, 6)
    think_s: float = 6.0  # between two turns of a conversation, at least
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Planned:
    """A request to send. `session` numbers its conversation."""

    at_s: float
    messages: Messages
    output_tokens: int
    session: int


@dataclass(slots=True)
class Recorded:
    """One line of a recording. Seconds; `timestamp` in ms, from the first request."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    session_id: str
    ttft_s: float
    gaps_s: list[float]  # between tokens
    cached_tokens: int
    cached_by_source: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Talk:
    number: int
    messages: Messages
    turns_left: int
    free_at_s: float = 0.0


def plan(spec: WorkloadSpec) -> list[Planned]:
    """Returns requests in the order of arrival. A pure function of `spec`."""
    rng = Random(spec.seed)
    systems = [_words(rng, (spec.system_words, spec.system_words)) for _ in range(spec.num_systems)]
    talks: list[_Talk] = []
    planned: list[Planned] = []
    at_s = 0.0
    for _ in range(spec.num_requests):
        ready = [talk for talk in talks if talk.turns_left and talk.free_at_s <= at_s]
        if ready:
            talk = rng.choice(ready)
            said = {"role": "assistant", "content": _words(rng, spec.answer_words)}
            asked = {"role": "user", "content": _words(rng, spec.later_words)}
            talk.messages = [*talk.messages, said, asked]
        else:
            system = {"role": "system", "content": rng.choice(systems)}
            asked = {"role": "user", "content": _words(rng, spec.first_words)}
            talk = _Talk(len(talks), [system, asked], rng.randint(*spec.num_turns))
            talks.append(talk)
        talk.turns_left -= 1
        talk.free_at_s = at_s + spec.think_s
        output_tokens = rng.randint(*spec.output_tokens)
        planned.append(Planned(at_s, talk.messages, output_tokens, talk.number))
        at_s += rng.expovariate(spec.rate)
    return planned


def _words(rng: Random, count: tuple[int, int]) -> str:
    length = rng.randint(*count)
    return make_prompts(LoadSpec("", "", 1, input_len=length, seed=rng.randrange(2**32)))[0]


async def send(
    url: str, model: str, planned: Sequence[Planned], on_done: Callable[[], None]
) -> list[RequestTiming]:
    """Send all, each at its time whatever the others do. Raises LoadFailed."""
    spec = LoadSpec(url, model, len(planned), rate=1.0)
    async with http_client(url) as http:
        await _warm(spec, http)
        client = Client(spec, http, lambda _: on_done())

        async def one(request: Planned) -> RequestTiming:
            timing = await client.chat(request.messages, max_tokens=request.output_tokens)
            if timing.error is not None:
                raise LoadFailed(f"the request at {request.at_s:.1f} s: {timing.error}")
            return timing

        async with asyncio.TaskGroup() as group:
            tasks = []
            for request in planned:
                await asyncio.sleep(max(0.0, request.at_s - client.now()))
                tasks.append(group.create_task(one(request)))
        return [task.result() for task in tasks]


async def _warm(spec: LoadSpec, http: httpx.AsyncClient) -> None:
    """The first requests connect the workers, and teach the router their rates."""
    client = Client(spec, http, lambda _: None)
    for i, words in enumerate((40, 200, 200, 100)):
        text = make_prompts(LoadSpec("", "", 1, input_len=words, seed=10**6 + i))[0]
        timing = await client.chat([{"role": "user", "content": text}], max_tokens=16)
        if timing.error is not None:
            raise LoadFailed(f"a first request: {timing.error}")


class BlockIds:
    """Numbers for blocks of 16 tokens: equal numbers mean equal tokens up to the block's end."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, tuple[int, ...]], int] = {}

    def of(self, tokens: Sequence[int]) -> list[int]:
        found: list[int] = []
        for start in range(0, len(tokens), BLOCK_TOKENS):
            before = found[-1] if found else -1
            key = (before, tuple(tokens[start : start + BLOCK_TOKENS]))
            found.append(self._ids.setdefault(key, len(self._ids)))
        return found


def record(
    tokenizer: Tokenizer, planned: Sequence[Planned], timings: Sequence[RequestTiming]
) -> list[Recorded]:
    """With the tokens that the server saw: the same template, the same tokenizer."""
    ids = BlockIds()
    began_s = min(timing.sent_at for timing in timings)
    recorded = []
    for request, timing in zip(planned, timings, strict=True):
        tokens = tokenizer.chat_prompt(request.messages).tokens
        assert len(tokens) == timing.num_prompt_tokens, (len(tokens), timing.num_prompt_tokens)
        details = timing.usage.get("prompt_tokens_details") or {}
        recorded.append(
            Recorded(
                timestamp=round((timing.sent_at - began_s) * 1e3, 3),
                input_length=len(tokens),
                output_length=timing.num_output_tokens,
                hash_ids=ids.of(tokens),
                session_id=str(request.session),
                ttft_s=timing.ttft_s,
                gaps_s=timing.gaps_s,
                cached_tokens=timing.num_cached_tokens,
                cached_by_source=dict(details.get("cached_tokens_by_source") or {}),
            )
        )
    return recorded


def write_recording(path: Path, recorded: Sequence[Recorded]) -> None:
    path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in recorded))


def read_recording(path: Path) -> list[Recorded]:
    return [Recorded(**json.loads(line)) for line in path.read_text().splitlines()]


def trace_of(recorded: Sequence[Recorded], name: str) -> Trace:
    requests = (
        TraceRequest(
            at_s=each.timestamp / 1e3,
            input_length=each.input_length,
            output_length=each.output_length,
            block_ids=tuple(each.hash_ids),
            session=each.session_id,
        )
        for each in recorded
    )
    return Trace(name, tuple(sorted(requests, key=lambda r: r.at_s)), BLOCK_TOKENS)
