"""`kvrelay up` on two hosts (network namespaces), from nothing to an answer, and down again."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.chaos.network import Hosts, what_is_missing
from tests.e2e.test_two_nodes import ask

pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.skipif(what_is_missing() != "", reason=f"needs {what_is_missing()}"),
]

FILE = """
[ssh]
command = ["ip", "netns", "exec", "{{host}}", "env", "RAY_TMPDIR={folder}/{{host}}"]
python = "{python}"
folder = "{folder}/kept/{{host}}"

[serve]
config = "kvrelay.toml"
args = ["--host", "0.0.0.0", "--port", "8000"]
"""
ENTRY = '[[host]]\nname = "{name}"\naddress = "{address}"\nray_args = ["--num-cpus=1"]\n'
SETTINGS = '[router]\npolicy = "round_robin"\n[sessions]\nstate_dir = "{folder}/state"\n'


def kvrelay(*args: object) -> str:
    command = [str(Path(sys.executable).parent / "kvrelay"), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_hosts_from_nothing_to_an_answer_and_back() -> None:
    folder = Path("/tmp/kvrelay-up")  # Ray's sockets have short names
    shutil.rmtree(folder, ignore_errors=True)
    with Hosts(2) as hosts:
        for name in hosts.names:
            (folder / name).mkdir(parents=True)
        text = FILE.format(folder=folder, python=sys.executable)
        for number, name in enumerate(hosts.names):
            text += ENTRY.format(name=name, address=hosts.address(number))
        (folder / "HOSTS.toml").write_text(text)
        (folder / "kvrelay.toml").write_text(SETTINGS.format(folder=folder))
        said = kvrelay("up", folder / "HOSTS.toml")
        assert "up: " in said
        url = f"http://{hosts.address(0)}:8000"
        assert "Paris" in ask(url)
        status = httpx.get(f"{url}/health", timeout=10).json()
        assert status["workers_up"] == 2
        assert kvrelay("up", folder / "HOSTS.toml").count("up: ") == 1  # nothing is started twice
        assert "Paris" in ask(url)
        kvrelay("down", folder / "HOSTS.toml")
        left = [
            process.info["cmdline"]
            for process in psutil.process_iter(["cmdline"])
            if str(folder) in " ".join(process.info["cmdline"] or ())
        ]
        assert left == []
    shutil.rmtree(folder, ignore_errors=True)
