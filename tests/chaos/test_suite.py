"""The suite itself, on a deployment that is up in a moment and fails as replicas do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.chaos.__main__ import main
from tests.chaos.clients import Stream
from tests.chaos.disks import Disk, what_is_missing
from tests.chaos.kvrelay import RAY_ENV, OnLoopback, start_ray
from tests.chaos.leaks import Growth, Sample, growth, written
from tests.chaos.peer import Deployment
from tests.chaos.services import Service
from tests.chaos.users import Batches
from tests.operations.served import free_port

DEPLOYMENT = """
name = "replicas that count"
model = "any"
ready_s = 20
[kinds]
replica = "tests.chaos.replica"
[replica]
command = ["{python}", "-m", "tests.chaos.replica", "{address}", "{port}"]
"""


def disturb(tmp_path: Path, *only: str) -> tuple[Result, list[Any]]:
    """Disturbs the deployment above, and returns what was seen."""
    (tmp_path / "peer.toml").write_text(DEPLOYMENT)
    arguments = ["--peer", str(tmp_path / "peer.toml"), "--peer-python", sys.executable]
    arguments += ["--json", str(tmp_path / "found.json"), "--streams", "4", "--minutes", "0.1"]
    done = CliRunner().invoke(main, [*arguments, *(x for each in only for x in ("--only", each))])
    return done, json.loads((tmp_path / "found.json").read_text())["seen"]


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_killed_replica_is_seen_by_its_clients_and_comes_back(tmp_path: Path) -> None:
    done, (first, *_) = disturb(tmp_path, "kill")
    assert done.exit_code == 1, f"streams were cut off: {done.output}"
    assert first["fault"] == "kill -9 of a replica"
    assert first["to"].startswith("pid ")
    assert 0 < first["failed"] < first["streams"]
    assert first["altered"] == 0
    assert first["up_after_s"] is not None


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_burst_harms_no_stream(tmp_path: Path) -> None:
    done, (first, *_) = disturb(tmp_path, "burst")
    assert done.exit_code == 0, done.output
    assert first["to"] == "64 x 200"
    assert first["streams"] > 0
    assert first["failed"] == 0


def test_the_peer_of_the_suite_is_described(tmp_path: Path) -> None:
    deployment = Deployment.read(Path(__file__).with_name("vllm.toml"))
    assert deployment.proxy is not None
    assert "{servers}" in deployment.proxy.file
    (tmp_path / "wrong.toml").write_text(DEPLOYMENT + "ports = 3")
    with pytest.raises(ValueError, match="unknown field `ports`"):
        Deployment.read(tmp_path / "wrong.toml")


@pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing())
def test_a_write_to_a_hung_disk_waits_until_it_hangs_no_more(tmp_path: Path) -> None:
    written = threading.Event()

    def write(path: Path) -> None:
        path.write_text("now")
        written.set()

    with Disk(tmp_path / "disk", 16) as disk:
        disk.hang(True)
        writer = threading.Thread(target=write, args=(disk.path / "file",))
        writer.start()
        try:
            time.sleep(0.3)
            assert not written.is_set()
        finally:
            disk.hang(False)
        writer.join(10)
        assert written.is_set()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_head_starts_again_while_raylets_of_other_hosts_have_its_address() -> None:
    """Their processes are seen here, unlike those of other machines."""
    host, port = "127.0.0.2", free_port()  # Ray has another name for 127.0.0.1
    address = f"{host}:{port}"
    raylet = ["raylet", "-c", "read line", f"--gcs-address={address}"]
    with (
        tempfile.TemporaryDirectory() as name,  # short, for Ray's sockets
        subprocess.Popen(raylet, executable="/bin/sh", stdin=subprocess.PIPE) as other,
    ):
        (folder := Path(name) / "ray").mkdir()
        (folder / "ray_current_cluster").write_text(address)
        (log := Path(name) / "log").touch()
        where = ("--head", f"--port={port}", f"--node-ip-address={host}", "--num-cpus=1")
        command = [*start_ray(), *where, "--include-dashboard=0", "--object-store-memory=80000000"]
        head = Service(command, {**os.environ, **RAY_ENV, "RAY_TMPDIR": name}, log)
        try:
            head.start("Ray runtime started")
            assert other.poll() is None
        finally:
            head.stop()
            other.kill()


def test_what_grows_is_said_with_its_slope(tmp_path: Path) -> None:
    def of(kind: str, mib_an_hour: float) -> Growth:
        samples = [Sample(at, 100 + mib_an_hour * at / 3600, 7, 3) for at in range(0, 1200, 10)]
        found = growth(kind, 1, samples)
        assert found is not None
        assert found.mib_an_hour == pytest.approx(mib_an_hour)
        return found

    assert of("router", 120.0).leaks == "+10.8% of memory"
    assert of("router", 12.0).leaks == ""
    assert of("logs", 120.0).leaks == ""
    assert growth("router", 1, [Sample(0.0, 1, 1, 1), Sample(30.0, 2, 1, 1)]) is None
    (tmp_path / "a").write_bytes(bytes(4 << 20))
    assert written([tmp_path]).mib == pytest.approx(4, abs=0.1)
    assert written([tmp_path, tmp_path / "not there"]).files == 2


def test_rows_of_a_batch_are_compared_with_what_is_said_at_rest() -> None:
    batches = Batches("m")
    batches._known = {"0": "one"}

    def stream(text: str, **more: object) -> Stream:
        response = {"status_code": 200, "body": {"choices": [{"text": text}]}}
        return batches._stream("0", {"error": None, "response": response, **more})

    assert (stream("one").error, stream("one").altered) == (None, False)
    assert stream("two").altered
    assert "late" in (stream("one", error={"code": "late"}).error or "")
    assert batches._stream("0", None).error == "row 0: None"


def test_a_system_whose_worker_has_just_been_killed_is_not_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen(["sleep", "60"]) as worker:
        parts = [{"state": "up", "pid": worker.pid}]
        controller = {"has_ray": True, "age_s": 0.1, "pid": os.getpid()}
        status = {"controller": controller, "workers": parts, "routers": []}
        monkeypatch.setattr("tests.chaos.kvrelay.get_json", lambda *_: status)
        monkeypatch.setattr(OnLoopback, "urls", ["http://127.0.0.1:1"])
        system = OnLoopback()
        assert system.is_up()
        worker.kill()
    assert not system.is_up()
