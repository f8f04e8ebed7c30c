"""What sessions lose when they go on at a server that never saw them, by their object store.

    python -m benchmarks.kv.object_store [--sessions 4] [--frozen 60] [--tokens 2000]

One server has the first turns, parks the sessions and is removed. Another one, which shares nothing
with it but the bucket, is asked the same again, beside streams that have nothing to do with it:
while all is well, the store is frozen, answers 503 to everything, knows the credentials no more, or
has lost its objects. For each: the share of tokens found in a cache, the time to the first token,
and the longest silence of the streams; the answers have to be those of the first server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx

from benchmarks.elastic.load import longest_silence
from benchmarks.serving.first_light import MODEL
from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.lab.bench.load import LoadSpec, make_prompts, run_load
from tests.support.s3 import ACCESS_KEY, SECRET_KEY, S3StandIn, s3_standin

WAIT_S = 120.0
PAUSE_S = 6.0  # before a store that failed is asked again
KEYS = f"[default]\naws_access_key_id={ACCESS_KEY}\naws_secret_access_key={SECRET_KEY}\n"


PHASES: dict[str, Callable[[S3StandIn], None]] = {
    "well": lambda _: None,
    "frozen": S3StandIn.freeze,
    "503": lambda store: setattr(store, "refuse_with", HTTPStatus.SERVICE_UNAVAILABLE),
    "revoked": lambda store: setattr(store, "access_key", "another"),
    "emptied": lambda store: store.objects.clear(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=4, help="in each phase")
    parser.add_argument("--tokens", type=int, default=2000, help="of each first turn")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--frozen", type=float, default=60.0, help="seconds")
    args = parser.parse_args()
    spec = LoadSpec(
        "", MODEL, args.sessions * len(PHASES), input_len=args.tokens, seed=int(time.time())
    )
    prompts = make_prompts(spec)
    with s3_standin() as store, tempfile.TemporaryDirectory() as folder:
        with served(store, Path(folder), "first") as url:
            answers = [ask(url, number, prompt) for number, prompt in enumerate(prompts)]
            for number in range(len(prompts)):
                httpx.post(
                    f"{url}/v1/sessions/{number}/park", timeout=WAIT_S, auth=OwnKey()
                ).raise_for_status()
            wait_until_settled(store)
        print(f"{len(store.objects)} objects in the bucket")
        print(f"{'store':10}{'cached':>8}{'ttft p50':>10}{'most':>8}{'silence':>9}{'altered':>9}")
        with served(store, Path(folder), "second") as url:
            wait_until_listed(url, len(store.objects))
            for phase, (name, begin) in enumerate(PHASES.items()):
                begin(store)
                begun_at = time.monotonic()
                chosen = range(phase * args.sessions, (phase + 1) * args.sessions)
                turns = [(prompts[i], answers[i]) for i in chosen]
                asyncio.run(one_phase(url, name, turns, args))
                if name == "frozen":
                    time.sleep(max(0.0, args.frozen - (time.monotonic() - begun_at)))
                store.thaw()
                store.refuse_with, store.access_key = None, ACCESS_KEY
                time.sleep(PAUSE_S)
            audit = httpx.get(f"{url}/audit", timeout=WAIT_S, auth=OwnKey()).json()
            print("audit:", "clean" if audit["clean"] else audit)


@contextlib.contextmanager
def served(store: S3StandIn, folder: Path, name: str) -> Iterator[str]:
    credentials = folder / "credentials"
    credentials.write_text(KEYS)
    settings = {
        "sessions.state_dir": str(folder / name),
        "tiers.object_bucket": store.bucket,
        "tiers.object_endpoint": store.url,
        "tiers.object_credentials": str(credentials),
        "tiers.object_after_s": 3600.0,  # parked sessions are written at once
    }
    with Served(settings, "--prefill", "0", "--decode", "1") as server:
        yield server.url


def wait_until_settled(store: S3StandIn) -> None:
    """Until nothing has been written for a while."""
    before, deadline = -1, time.monotonic() + WAIT_S
    while (now := len(store.objects)) != before:
        assert time.monotonic() < deadline, f"objects are still written: {now}"
        before = now
        time.sleep(3.0)


def wait_until_listed(url: str, num_objects: int) -> None:
    """Until the new server knows of them."""
    deadline = time.monotonic() + WAIT_S
    while True:
        workers = httpx.get(f"{url}/status", timeout=WAIT_S, auth=OwnKey()).json()["workers"]
        found = sum((each.get("counters") or {}).get("tier_found_object", 0) for each in workers)
        if found >= num_objects:
            return
        assert time.monotonic() < deadline, f"{found:.0f} of {num_objects} objects were found"
        time.sleep(0.2)


def body(number: int, prompt: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    options = {"max_tokens": 16, "temperature": 0, "prompt_cache_key": str(number)}
    return {"model": MODEL, "messages": messages, **options, **more}


def ask(url: str, number: int, prompt: str) -> str:
    answer = httpx.post(f"{url}/v1/chat/completions", json=body(number, prompt), timeout=WAIT_S)
    text: str = answer.raise_for_status().json()["choices"][0]["message"]["content"]
    return text


async def one_phase(
    url: str, name: str, turns: list[tuple[str, str]], args: argparse.Namespace
) -> None:
    """Asks the same once more, one turn after the other, while other streams run."""
    beside = LoadSpec(
        *(url, MODEL, args.streams),
        concurrency=args.streams,
        output_len=300,
        seed=int(time.time()),
    )
    running = asyncio.ensure_future(run_load(beside))
    await asyncio.sleep(1.0)
    cached, firsts, num_altered = 0.0, [], 0
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, auth=OwnKey()) as http:
        for number, (prompt, expected) in enumerate(turns):
            asked_at = time.monotonic()
            asked = body(number, prompt, stream=True, stream_options={"include_usage": True})
            first_s, text, usage = None, "", {}
            async with http.stream("POST", "/v1/chat/completions", json=asked) as answer:
                async for chunk in chunks(answer):
                    usage = chunk.get("usage") or usage
                    for choice in chunk["choices"]:
                        if choice["delta"].get("content"):
                            first_s = first_s or time.monotonic() - asked_at
                            text += choice["delta"]["content"]
            cached += usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]
            firsts.append(first_s or float("nan"))
            num_altered += text != expected
    timings, _ = await running
    assert not any(each.error for each in timings), timings
    firsts.sort()
    print(
        f"{name:10}{cached / len(turns):8.3f}{firsts[len(firsts) // 2]:10.3f}{firsts[-1]:8.3f}"
        f"{longest_silence(timings):9.3f}{num_altered:9}"
    )


async def chunks(answer: httpx.Response) -> Any:

    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


if __name__ == "__main__":
    main()
