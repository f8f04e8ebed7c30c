"""Another user of the machine at a server that was started as the pages say, without any key."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.serving.served import Served
from kvrelay.cluster.cli.client import status as status_command
from kvrelay.cluster.cli.operate import drain
from tests.cluster.api.http.unauthenticated import ROUTES, WAYS, attack_as_stranger
from tests.e2e.serving import KVRELAY, all_up, status

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.getuid() != 0, reason="only root is another user when it likes"),
]
TIMES = 1000


def test_another_user_operates_nothing_and_the_own_user_does(tmp_path: Path) -> None:
    with Served({"sessions.state_dir": str(tmp_path / "state")}, with_ray=False) as served:
        before = status(served.url)
        port = int(served.url.rpartition(":")[2])
        assert attack_as_stranger(port, -(-TIMES // len(WAYS))) == [], ROUTES
        assert served.process.poll() is None
        after = status(served.url)
        assert all_up(after)
        assert before.get("restart") == after.get("restart")
        for name in ("pid", "epoch"):
            assert before["controller"][name] == after["controller"][name]
        command = [
            *KVRELAY,
            "serve",
            "--port",
            "0",
            "--set",
            f"sessions.state_dir={tmp_path}/state",
        ]
        second = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert second.returncode == 1
        assert f"is in use by process {served.process.pid}" in second.stderr
        shown = CliRunner().invoke(status_command, ["--url", served.url])
        assert shown.exit_code == 0, shown.output
        assert CliRunner().invoke(drain, ["--url", served.url]).exit_code == 0
        assert served.process.wait(120) == 0
