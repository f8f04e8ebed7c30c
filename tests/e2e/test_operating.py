"""A real server with two routers: its operators' key, and tenants that change while it serves."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.engine.wire.channel import own_version
from tests.e2e.serving import KVRELAY, urls_of, wait_until

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(180)]

KEY = "the-key-of-operators"
TENANT = '[[tenant]]\nname = "red"\nkeys = ["{}"]\n'


@pytest.fixture(scope="module")
def tenants_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    path.write_text(TENANT.format("old-key"))
    return path


@pytest.fixture(scope="module")
def served(tenants_file: Path) -> Iterator[Served]:
    settings = {
        "cluster.routers": 2,
        "cluster.prefill": 0,
        "engine.num_blocks": 256,
        "tenants.file": str(tenants_file),
        "tenants.salt_secret": "a secret of sixteen characters or more",
        "sessions.state_dir": str(tenants_file.parent),
    }
    with Served(settings, env={"KVRELAY_OPERATIONS_KEY": KEY}) as served:
        yield served


def status(url: str, path: str, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.get(f"{url}{path}", headers=headers, timeout=30).status_code


def test_operators_have_a_key_of_their_own_at_every_router(served: Served) -> None:
    for url in urls_of(served):
        for path in ("/status", "/metrics"):
            assert (status(url, path, "old-key"), status(url, path, KEY)) == (401, 200)
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200
        headers = {"authorization": f"Bearer {KEY}"}
        found = httpx.get(f"{url}/status", headers=headers, timeout=30, auth=OwnKey()).json()
        processes = [*found["workers"], *found["routers"], found["controller"]]
        assert [each["version"] for each in processes] == [own_version()] * len(processes)
    command = [*KVRELAY, "audit", "--url", served.url]
    audited = subprocess.run(
        [*command, "--operations-key", KEY], capture_output=True, text=True, check=False
    )
    assert audited.returncode == 0, audited.stdout + audited.stderr
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


def test_a_hangup_changes_the_keys_of_every_router(served: Served, tenants_file: Path) -> None:
    for url in urls_of(served):
        assert status(url, "/v1/models", "old-key") == 200
    tenants_file.write_text(TENANT.format("new-key"))
    served.process.send_signal(signal.SIGHUP)
    for url in urls_of(served):
        wait_until(lambda url=url: status(url, "/v1/models", "new-key") == 200, 20)
        assert status(url, "/v1/models", "old-key") == 401
    assert served.process.poll() is None
