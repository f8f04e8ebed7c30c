"""Ray's own autoscaler, with its provider of make-believe machines: they come and go as KVRelay's
autoscaler asks, and what it asks beyond their maximum ends nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from benchmarks.serving.served import Served
from tests.e2e.serving import ask, status, wait_until
from tests.e2e.test_two_nodes import RAY_ENV, RayNode

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(500)]

PORT = 6397
ADDRESS = f"127.0.0.1:{PORT}"
MOST_MACHINES = 2
HEAD = "f" * 51 + "00000"  # the name that the provider expects
ENV = RAY_ENV | {
    "RAY_FAKE_CLUSTER": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
}
NOTHING: dict[str, Any] = {"resources": {}, "node_config": {}, "max_workers": 0}
CONFIG: dict[str, Any] = {
    "cluster_name": "make-believe",
    "max_workers": MOST_MACHINES,
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 0.1,
    "provider": {
        "type": "fake_multinode",
        "head_node_id": HEAD,
        "launch_multiple": True,
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "gcs_address": ADDRESS,
    },
    "available_node_types": {
        "ray.head.default": NOTHING,
        "machine": {
            "resources": {"CPU": 2, "object_store_memory": 80_000_000},
            "node_config": {},
            "min_workers": 0,
            "max_workers": MOST_MACHINES,
        },
    },
    "head_node_type": "ray.head.default",
    **{key: {} for key in ("auth", "docker", "file_mounts", "cluster_synced_files")},
    "initialization_commands": [],
    **{f"{kind}setup_commands": [] for kind in ("", "head_", "worker_")},
    **{f"{kind}_start_ray_commands": [] for kind in ("head", "worker")},
}
SCALING: dict[str, object] = {
    "engine.kv_cache_gib": 0.1,
    "tiers.host_gib": 0,
    "scaling.enabled": True,
    "scaling.tick_s": 0.5,
    "scaling.idle_s": 15.0,
    "scaling.workers_per_machine": 1,
    "scaling.machine": "CPU=2",
    "scaling.pending_timeout_s": 25.0,
}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNode]:
    folder = tmp_path_factory.mktemp("ray")
    config = folder / "autoscaling.json"
    config.write_text(json.dumps(CONFIG))
    where = ("--head", f"--port={PORT}", "--include-dashboard=0", f"--autoscaling-config={config}")
    node = RayNode(folder / "head.log", *where, env=ENV, num_cpus=0)
    try:
        node.wait_for("Ray runtime started")
        yield node
    finally:
        node.kill()


def num_machines(head: RayNode) -> int:
    """Raylets beside that of the head."""
    tree = psutil.Process(head.process.pid).children(recursive=True)
    return sum(process.name() == "raylet" for process in tree) - 1


def serve(**settings: object) -> Served:
    scaling = {f"scaling.{name}": value for name, value in settings.items()}
    return Served(SCALING | scaling, "--address", ADDRESS, env=RAY_ENV)


def test_machines_come_for_workers_and_go_after_them(head: RayNode) -> None:
    assert num_machines(head) == 0
    with serve(min_workers=1, max_workers=2) as served:
        wait_until(lambda: len(homes(served)) == 2, 30, f"not on two: {served.lines}")
        assert num_machines(head) == 2
        assert "Paris" in ask(served.url)
        wait_until(lambda: len(status(served.url)["workers"]) == 1, 90, "no worker has gone")
        wait_until(lambda: num_machines(head) == 1, 90, "no machine has gone")
        time.sleep(10)  # longer than a machine may idle: this one has a worker
        assert num_machines(head) == 1
        assert "Paris" in ask(served.url)


def test_more_than_ray_may_have_ends_nothing_and_is_given_up(head: RayNode) -> None:
    with serve(min_workers=3, max_workers=4, idle_s=600.0) as served:
        wait_until(lambda: "no machine has room" in str(status(served.url)), 60, "all have room")
        up = [each for each in status(served.url)["workers"] if each["state"] == "up"]
        assert len(up) == 2
        wait_until(lambda: len(starts(served)) >= 2, 120, "what was pending was not given up")
        again = [each for each in status(served.url)["workers"] if each["state"] == "up"]
        assert [(w["worker"], w["epoch"], w["pid"]) for w in again] == [
            (w["worker"], w["epoch"], w["pid"]) for w in up
        ]
        assert num_machines(head) == MOST_MACHINES
        assert "Paris" in ask(served.url)


def homes(served: Served) -> set[str]:
    """Machines with a worker that is up."""
    workers = status(served.url)["workers"]
    return {each["machine"] for each in workers if each["state"] == "up"}


def starts(served: Served) -> list[Any]:
    """Decisions that have started a worker."""
    return [each for each in status(served.url)["scaling"]["decisions"] if each["starts"]]
