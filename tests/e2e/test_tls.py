"""TLS for the API and between processes, with certificates made at launch, on the real thing."""

from __future__ import annotations

import os
import signal
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.serving.served import Served

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(240)]

BODY = {
    "model": "smollm2-135m",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 20,
    "temperature": 0,
}


class Bare:
    """A value as TOML has it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text


def test_requests_are_served_and_outlive_a_worker_over_tls(tmp_path: Path) -> None:
    settings = {
        "tls.api": Bare("true"),
        "tls.frames": Bare("true"),
        "sessions.state_dir": str(tmp_path),
        "router.policy": "round_robin",  # every prompt is handed over
        "cluster.routers": 2,
    }
    with Served(settings) as served:
        assert served.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(tmp_path / "tls" / "ca.pem"))
        with httpx.Client(verify=trusting, timeout=120) as client:

            def status() -> Any:
                return client.get(f"{served.url}/status").json()

            def ask(url: str) -> str:
                answer = client.post(f"{url}/v1/chat/completions", json=BODY)
                assert answer.status_code == 200, answer.text
                return str(answer.json()["choices"][0]["message"]["content"])

            urls = [router["url"] for router in status()["routers"]]
            assert len(urls) == 2
            assert all("Paris" in ask(url) for url in urls)
            (pid,) = [w["pid"] for w in status()["workers"] if w["worker"] == "decode-0"]
            os.kill(pid, signal.SIGKILL)
            assert "Paris" in ask(served.url)
