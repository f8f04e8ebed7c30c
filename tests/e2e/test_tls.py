"""TLS for the API and between processes, with certificates made at launch, on the real thing."""

from __future__ import annotations

import os
import signal
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.cluster.processes.certificates import make_certificate, own_names
from tests.e2e.serving import ask, worker_of

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(240)]


def certificates_of(client: httpx.Client, urls: list[str]) -> list[dict[str, float]]:
    return [client.get(f"{url}/status").json()["certificates"] for url in urls]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


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
        with httpx.Client(verify=trusting, timeout=120, auth=OwnKey()) as client:
            status = client.get(f"{served.url}/status").json()
            urls = [router["url"] for router in status["routers"]]
            assert len(urls) == 2
            assert all("Paris" in ask(url, client) for url in urls)
            os.kill(worker_of(status, "decode-0")["pid"], signal.SIGKILL)
            assert "Paris" in ask(served.url, client)
            assert status["certificates"].keys() == {"server", "ca"}

            # As if it were renewed: read by all, on other connections from then on.
            before = {worker["worker"]: worker["restarts"] for worker in status["workers"]}
            make_certificate(tmp_path / "tls", own_names(""))
            wait_for(lambda: certificates_of(client, urls) != [status["certificates"]] * 2)
            time.sleep(5)
            os.kill(worker_of(status, "prefill-0")["pid"], signal.SIGKILL)
            assert all(
                "Paris" in ask(url, httpx.Client(verify=trusting, timeout=120, auth=OwnKey()))
                for url in urls
            )

            def is_back() -> bool:
                workers = client.get(f"{served.url}/status").json()["workers"]
                return all(worker["state"] == "up" for worker in workers)

            wait_for(is_back)
            after = client.get(f"{served.url}/status").json()
            assert {w["worker"]: w["restarts"] for w in after["workers"]} == {
                "decode-0": before["decode-0"] + 1,
                "prefill-0": before["prefill-0"] + 1,
            }
