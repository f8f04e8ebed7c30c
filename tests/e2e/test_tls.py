"""TLS for the API and between processes, with certificates made at launch, on the real thing."""

from __future__ import annotations

import os
import signal
import ssl
from pathlib import Path

import httpx
import pytest

from benchmarks.serving.served import Served
from tests.e2e.serving import ask, worker_of

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(240)]


def test_requests_are_served_and_outlive_a_worker_over_tls(tmp_path: Path) -> None:
    settings = {
        "tls.api": True,
        "tls.frames": True,
        "sessions.state_dir": str(tmp_path),
        "router.policy": "round_robin",  # every prompt is handed over
        "cluster.routers": 2,
    }
    with Served(settings) as served:
        assert served.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(tmp_path / "tls" / "ca.pem"))
        with httpx.Client(verify=trusting, timeout=120) as client:
            status = client.get(f"{served.url}/status").json()
            urls = [router["url"] for router in status["routers"]]
            assert len(urls) == 2
            assert all("Paris" in ask(url, client) for url in urls)
            os.kill(worker_of(status, "decode-0")["pid"], signal.SIGKILL)
            assert "Paris" in ask(served.url, client)
