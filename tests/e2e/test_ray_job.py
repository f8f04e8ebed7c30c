"""`ray job submit` starts a server in the cluster that it was sent to: docs/ray.md."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import ask, wait_until
from tests.e2e.test_two_nodes import RAY_ENV, RayNode
from tests.structure import ROOT

PORT, DASHBOARD, API = 6398, 8_298, 8_798
URL = f"http://127.0.0.1:{API}"
pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("aiohttp") is None, reason="needs ray[default]"),
]


@pytest.fixture
def head(tmp_path: Path) -> Iterator[RayNode]:
    flags = (f"--port={PORT}", f"--dashboard-port={DASHBOARD}", "--include-dashboard=1")
    node = RayNode(tmp_path / "head.log", "--head", *flags, num_cpus=2)
    try:
        node.wait_for("Ray runtime started", 240)
        dashboard = f"http://127.0.0.1:{DASHBOARD}/api/version"
        wait_until(lambda: is_ready(dashboard), 120, "Ray's dashboard does not answer")
        yield node
    finally:
        node.kill(URL if is_ready(f"{URL}/health/ready") else "")


@pytest.mark.usefixtures("head")
def test_a_job_is_a_server() -> None:
    page = (ROOT / "docs/ray.md").read_text(encoding="utf-8")
    (given,) = re.findall(r"^  kvrelay (serve --address auto.*)", page, re.M)
    words = given.replace("0.0.0.0", "127.0.0.1").split()
    server = [sys.executable, "-m", "kvrelay.cluster.cli.main", *words, "--port", str(API)]
    submit = [str(Path(sys.executable).parent / "ray"), "job", "submit", "--no-wait"]
    subprocess.run(
        [*submit, "--address", f"http://127.0.0.1:{DASHBOARD}", "--", *server],
        env=os.environ | RAY_ENV,
        check=True,
        timeout=120,
    )
    wait_until(lambda: is_ready(f"{URL}/health/ready"), 300, "the server is not ready")
    assert "Paris" in ask(URL)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code in (200, 401)  # Ray wants its token
    except httpx.HTTPError:
        return False
