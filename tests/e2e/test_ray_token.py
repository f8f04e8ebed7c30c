"""A Ray cluster that asks for no token is not joined, unless it is wanted."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvrelay.cluster.processes.ray_access import TokenUnknown, asks_for_token
from tests.e2e.serving import KVRELAY
from tests.e2e.test_two_nodes import RayNode

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(240)]

OPEN = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
PORTS = {"open": 6393, "closed": 6394}

Start = Callable[[str, dict[str, str]], str]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a head with that environment; returns its address."""
    nodes = []

    def begin(name: str, env: dict[str, str]) -> str:
        where = ("--head", f"--port={PORTS[name]}", "--include-dashboard=0")
        nodes.append(RayNode(tmp_path / f"{name}.log", *where, env=env))
        nodes[-1].wait_for("Ray runtime started")
        return f"127.0.0.1:{PORTS[name]}"

    yield begin
    for node in nodes:
        node.kill()


def test_serving_refuses_a_cluster_without_a_token_and_says_what_to_do(start: Start) -> None:
    address = start("open", OPEN)
    assert not asks_for_token(address)
    command = [*KVRELAY, "serve", "--port", "0", "--address", address]
    done = subprocess.run(
        command, env={**os.environ, **OPEN}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "asks for no token" in done.stderr
    for remedy in ("ray get-auth-token --generate", "RAY_AUTH_MODE=token", "--insecure-ray"):
        assert remedy in done.stderr


def test_what_is_no_ray_cluster_is_not_taken_for_one_with_a_token() -> None:
    with pytest.raises(TokenUnknown):
        asks_for_token("127.0.0.1:9", timeout_s=3.0)
