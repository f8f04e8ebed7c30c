"""A program with another Ray than the cluster cannot join it, and says so before anything ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from kvrelay.cluster.processes.ray_access import differing_versions
from tests.e2e.serving import KVRELAY
from tests.e2e.test_two_nodes import RAY_ENV, RayNode

ADDRESS = "127.0.0.1:6397"
# What a cluster that another version has started says of itself.
CLAIM = """
import json, sys
from ray._common.usage.usage_constants import CLUSTER_METADATA_KEY as KEY
from ray._private.ray_constants import KV_NAMESPACE_CLUSTER as NAMESPACE
from ray._raylet import GcsClient
gcs = GcsClient(address=sys.argv[1])
said = json.loads(gcs.internal_kv_get(KEY, namespace=NAMESPACE)) | json.loads(sys.argv[2])
gcs.internal_kv_put(KEY, json.dumps(said).encode(), True, namespace=NAMESPACE)
"""


@pytest.fixture
def head(tmp_path: Path) -> Iterator[RayNode]:
    port = ADDRESS.partition(":")[2]
    node = RayNode(tmp_path / "head.log", "--head", f"--port={port}", "--include-dashboard=0")
    try:
        node.wait_for("Ray runtime started", 120)
        yield node
    finally:
        node.kill()


def claim(**versions: str) -> None:
    subprocess.run(
        [sys.executable, "-c", CLAIM, ADDRESS, json.dumps(versions)],
        env=os.environ | RAY_ENV,
        check=True,
        timeout=60,
    )


def check() -> subprocess.CompletedProcess[str]:
    """As `kvrelay restart` tries a new program out, beside what runs."""
    return subprocess.run(
        [*KVRELAY, "serve", "--check", "--address", ADDRESS],
        env=os.environ | RAY_ENV,
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.timeout(500)
@pytest.mark.usefixtures("head")
def test_a_program_is_tried_out_with_the_ray_that_runs() -> None:
    assert check().returncode == 0
    claim(ray_version="2.52.1", python_version="3.14.0")
    refused = check()
    assert refused.returncode == 1
    python = ".".join(map(str, sys.version_info[:3]))
    told = f"Ray 2.52.1 and Python 3.14.0, and this program has Ray {ray.__version__} and Python "
    assert f"the Ray cluster at {ADDRESS} runs {told}{python}: it cannot join" in refused.stderr


def test_only_what_differs_is_named() -> None:
    here = {"Ray": "2.60.0", "Python": "3.12.1"}
    assert differing_versions("auto", here, here) == ""
    told = differing_versions("auto", here | {"Python": "3.12.2"}, here)
    assert "runs Python 3.12.2, and this program has Python 3.12.1" in told
    assert "Ray 2" not in told
