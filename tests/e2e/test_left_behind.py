"""What a server leaves behind whose processes are all killed: `kvrelay doctor` finds it, and names
the command that removes it."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import psutil
import pytest

from benchmarks.serving.served import Served
from tests.e2e.serving import KVRELAY, arena_of, ask, status, wait_until, worker_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

KILLED_S = 30.0


def examined(config: Path) -> dict[str, dict[str, str]]:
    command = [*KVRELAY, "doctor", "--json", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return {each["check"]: each for each in json.loads(done.stdout)}


def removed_by(text: str) -> list[Path]:
    """The folders of the command in `text`."""
    _, _, paths = text.partition("rm -r ")
    return [Path(path) for path in shlex.split(paths)]


def test_doctor_finds_it_and_its_commands_remove_it(tmp_path: Path) -> None:
    disk, config = tmp_path / "kv", tmp_path / "kvrelay.toml"
    tiers = {"host_gib": 0.5, "disk_gib": 0.25, "disk_path": str(disk), "disk_after_s": 0.0}
    state_dir = str(tmp_path / "state")
    config.write_text(
        f'[sessions]\nstate_dir = "{state_dir}"\n[tiers]\n'
        + "".join(f"{name} = {json.dumps(value)}\n" for name, value in tiers.items())
    )
    settings = {f"tiers.{name}": value for name, value in tiers.items()}
    with Served({"sessions.state_dir": state_dir, **settings}) as served:
        assert "Paris" in ask(served.url)
        state = status(served.url)
        arena = arena_of(worker_of(state, "decode-0")["pid"]).parent
        wait_until(lambda: [*disk.rglob("blocks.kv")], why="nothing is written to disk")
        stores = {path.parent for path in disk.rglob("blocks.kv")}
        server = psutil.Process(served.process.pid)
        processes = [
            server,
            *server.children(recursive=True),
            *(psutil.Process(worker["pid"]) for worker in state["workers"]),
        ]
        for process in processes:
            if process.is_running():
                process.kill()
        served.process.wait(KILLED_S)
        _, alive = psutil.wait_procs(processes, KILLED_S)
        assert alive == []

    cluster = arena.parents[1]
    found = examined(config)
    memory, on_disk = found["memory left"], found["KV on disk"]
    assert memory["verdict"] == "warn"
    # Those of other clusters of this machine are not this test's.
    left = {path for path in removed_by(memory["fix"]) if cluster in path.parents}
    assert left == {arena}
    assert {*removed_by(on_disk["found"])} == stores
    subprocess.run(["rm", "-r", *left, *stores], check=True)

    found = examined(config)
    assert not any(cluster in path.parents for path in removed_by(found["memory left"]["fix"]))
    assert "no worker has left any" in found["KV on disk"]["found"]
