"""A real server with all that metrics tell of: tiers, Redis, tenants, KV that is handed over."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from tests.cluster.state.stores import Server as Redis

MODEL = "smollm2-135m"
STORY = "Tell me about the rivers of the world, one after the other. "


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def full_server(folder: Path) -> Iterator[Served]:
    redis = Redis(folder)
    redis.start()
    settings = {
        "engine.num_blocks": 256,
        "engine.max_model_len": 2048,
        "router.policy": "round_robin",  # every prompt is handed over
        "tiers.host_gib": 0.05,
        "tiers.disk_gib": 0.05,
        "tiers.disk_path": str(folder / "disk"),
        "tiers.disk_after_s": 0.1,
        "state.url": redis.url,
        "scaling.enabled": True,
        "scaling.min_workers": 2,
        "scaling.max_workers": 2,
        "sessions.state_dir": str(folder),
        "tls.frames": True,  # with certificates that are made, whose end is a metric
    }
    try:
        with Served(settings) as served:
            yield served
    finally:
        redis.kill()


def use(served: Served, num_requests: int = 4) -> None:
    """Requests by each API; prompts that share a prefix."""
    for number in range(num_requests):
        content = STORY * 3 + "Now number " + "x" * number
        chat: dict[str, Any] = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 12,
        }
        chat["prompt_cache_key"] = f"talk-{number % 2}"
        text: dict[str, Any] = {"prompt": content, "max_tokens": 8}
        for path, body in (("chat/completions", chat), ("completions", text)):
            body["model"] = MODEL
            answer = httpx.post(f"{served.url}/v1/{path}", json=body, timeout=60)
            assert answer.status_code == 200, answer.text


def scrape(served: Served) -> list[Sample]:
    text = httpx.get(f"{served.url}/metrics", timeout=20, auth=OwnKey()).text
    return [each for family in text_string_to_metric_families(text) for each in family.samples]
