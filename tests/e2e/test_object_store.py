"""A session goes on at a machine that never saw it: its KV comes from an object store, or, whatever
that does, is computed again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from tests.e2e.serving import MODEL, is_idle, status, wait_for, wait_until
from tests.support.s3 import ACCESS_KEY, SECRET_KEY, S3StandIn, s3_standin

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(900)]

NUM_SESSIONS = 5
TEXTS = [
    f"Story {n}. " + " ".join(f"Keeper {i} of lighthouse {n} saw a whale." for i in range(80))
    for n in range(NUM_SESSIONS)
]


@pytest.fixture
def store() -> Iterator[S3StandIn]:
    with s3_standin() as server:
        yield server


@pytest.fixture
def serve(store: S3StandIn, tmp_path: Path) -> Callable[[str], Any]:
    """Starts a server on a machine of its own, as far as KV is concerned."""

    @contextmanager
    def started(name: str) -> Iterator[Served]:
        credentials = tmp_path / "credentials"
        keys = f"aws_access_key_id={ACCESS_KEY}\naws_secret_access_key={SECRET_KEY}\n"
        credentials.write_text(f"[default]\n{keys}")
        settings = {
            "cluster.prefill": 0,
            "cluster.decode": 1,
            "sessions.state_dir": str(tmp_path / name),
            "tiers.object_bucket": store.bucket,
            "tiers.object_endpoint": store.url,
            "tiers.object_credentials": str(credentials),
            "tiers.object_after_s": 3600.0,  # parked sessions are written at once
        }
        with Served(settings) as served:
            yield served

    return started


def ask(url: str, number: int) -> tuple[str, dict[str, Any]]:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": TEXTS[number]}],
        "max_tokens": 16,
        "temperature": 0,
        "prompt_cache_key": f"session-{number}",
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).json()
    return answer["choices"][0]["message"]["content"], answer["usage"]


def counted(url: str, name: str) -> int:
    return sum(int(worker["counters"].get(name, 0)) for worker in status(url)["workers"])


def test_a_session_goes_on_where_it_never_was(
    store: S3StandIn, serve: Callable[[str], Any]
) -> None:
    with serve("a") as first:
        said = [ask(first.url, number) for number in range(NUM_SESSIONS)]
        num_tokens = [usage["prompt_tokens"] for _, usage in said]
        wait_for(first.url, is_idle, 60, "it has not ended")
        for number in range(NUM_SESSIONS):
            parked = httpx.post(
                f"{first.url}/v1/sessions/session-{number}/park", timeout=120, auth=OwnKey()
            )
            assert parked.status_code == 200, parked.text
        wait_until(lambda: len(store.objects) >= sum(n // 16 for n in num_tokens), 120)
    with serve("b") as second:
        wait_until(lambda: counted(second.url, "tier_found_object") >= len(store.objects), 120)
        text, usage = ask(second.url, 0)
        details = usage["prompt_tokens_details"]
        assert text == said[0][0]
        assert details["cached_tokens_by_source"]["object"] >= 0.95 * num_tokens[0]

        def refuses(status: HTTPStatus | None = None, key: str = ACCESS_KEY) -> None:
            store.refuse_with, store.access_key = status, key

        faults: list[Callable[[], None]] = [
            store.freeze,
            lambda: refuses(HTTPStatus.SERVICE_UNAVAILABLE),
            lambda: refuses(key="revoked"),
            store.objects.clear,
        ]
        for number, fault in enumerate(faults, 1):
            fault()
            text, _ = ask(second.url, number)
            assert text == said[number][0]
            wait_for(second.url, is_idle, 60, "something is left")
            audit = httpx.get(f"{second.url}/audit", timeout=60, auth=OwnKey()).json()
            assert audit["clean"], audit
            store.thaw()
            refuses()
            time.sleep(6.0)  # it is asked again
