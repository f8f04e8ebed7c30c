"""`kvrelay up` on two hosts (network namespaces), from nothing to an answer, and down again."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import psutil
import pytest

from tests.chaos.hosts_file import kvrelay, write_hosts_file
from tests.chaos.network import Hosts, what_is_missing
from tests.e2e.serving import ask

pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.skipif(what_is_missing() != "", reason=f"needs {what_is_missing()}"),
]

SETTINGS = '[router]\npolicy = "round_robin"\n[sessions]\nstate_dir = "{folder}/state"\n'


def test_two_hosts_from_nothing_to_an_answer_and_back() -> None:
    folder = Path("/tmp/kvrelay-up")
    with Hosts(2) as hosts:
        path = write_hosts_file(folder, hosts, SETTINGS.format(folder=folder))
        said = kvrelay("up", path)
        assert "up: " in said
        url = f"http://{hosts.address(0)}:8000"
        assert "Paris" in ask(url)
        status = httpx.get(f"{url}/health", timeout=10).json()
        assert status["workers_up"] == 2
        assert kvrelay("up", path).count("up: ") == 1  # nothing is started twice
        assert "Paris" in ask(url)
        kvrelay("down", path)
        left = [
            process.info["cmdline"]
            for process in psutil.process_iter(["cmdline"])
            if str(folder) in " ".join(process.info["cmdline"] or ())
        ]
        assert left == []
    shutil.rmtree(folder, ignore_errors=True)
