"""What is shown of the autoscaler: its table, its metrics, and a log that is made again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry
from rich.console import Console

from kvrelay.cluster.api.cluster_metrics import ClusterCollector
from kvrelay.cluster.cli.client import status_table
from kvrelay.cluster.cli.operate import scaling, scaling_view
from kvrelay.cluster.control.autoscaling import LogScaling
from kvrelay.cluster.processes.scaling_log import ScalingLog
from kvrelay.cluster.scaling.decisions import Reason, encode_line
from kvrelay.engine.stats import Role
from tests.cluster.api.conftest import cluster_status
from tests.cluster.scaling.test_autoscaling import SCALING, ControlledWorld


@pytest.fixture
def world() -> ControlledWorld:
    """Has a world in which something happened."""
    world = ControlledWorld()
    worker = world.up()
    world.up(Role.PREFILL)
    world.drain(worker)
    world.pass_time(5)
    return world


def view(world: ControlledWorld) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.json.decode(
        msgspec.json.encode(world.controller.scaling[""].view())
    )
    return plain


def test_the_table_says_what_was_done_and_why(world: ControlledWorld) -> None:
    console = Console(width=120, record=True)
    console.print(scaling_view({"chat": view(world), "small": view(world)}))
    text = console.export_text()
    assert "autoscaler of chat" in text
    assert "autoscaler of small" in text
    assert "now: not scaling" in text
    assert "from 0 to 8 workers may be" in text


def test_status_has_a_line_on_it(world: ControlledWorld) -> None:
    console = Console(width=120, record=True)
    console.print(status_table({"scaling": view(world)}))
    assert "not scaling: " in console.export_text()
    row = {"aliases": [], "num_up": 0, "num_live": 0, "num_queued": 0, "cache_hit_rate": 0.0}
    rows = [row | {"model": each, "output_tokens": 0, "scaling": view(world)} for each in "ab"]
    console.print(status_table({"models": rows}))
    text = console.export_text()
    assert "a: not scaling: " in text
    assert "b: not scaling: " in text


def test_metrics_have_every_reason_from_the_start(world: ControlledWorld) -> None:
    registry = CollectorRegistry()
    rows = [{"model": "small"}, {"model": "chat", "scaling": view(world)}]
    ClusterCollector(registry, lambda: cluster_status({"model": "small", "models": rows}))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kvrelay_scaling_{name}", {"model": "chat"} | labels)

    for reason in Reason:
        assert value("ticks_total", reason=str(reason)) is not None
    assert (value("ticks_total", reason="stale") or 0) > 1
    for action in ("start", "drain", "flip", "remove"):  # the tests' orders are not the planner's
        assert value("actions_total", action=action) == 0
    assert value("max_workers") == SCALING.max_workers
    assert value("max_workers", model="small") is None


def test_without_an_autoscaler_there_are_no_metrics_of_it() -> None:
    registry = CollectorRegistry()
    ClusterCollector(registry, lambda: cluster_status({}))
    assert registry.get_sample_value("kvrelay_scaling_max_workers") is None


def logged(world: ControlledWorld, path: Path, max_bytes: int = 1 << 20) -> None:
    log = ScalingLog(path, max_bytes)
    for effect in world.of(LogScaling):
        log.write(effect.line)
        log._lines.join()  # it has a thread of its own


def test_a_log_is_made_again(world: ControlledWorld, tmp_path: Path) -> None:
    path = tmp_path / "scaling/server.jsonl"
    logged(world, path)
    found = CliRunner().invoke(scaling, ["--check", str(path)])
    assert found.exit_code == 0, found.output
    num = len(path.read_bytes().splitlines()) - 1
    assert f"{num} are the same" in found.output.replace("\n", " ")


def test_a_decision_that_differs_is_told(world: ControlledWorld, tmp_path: Path) -> None:
    path = tmp_path / "server.jsonl"
    logged(world, path)
    first, *lines = path.read_text().splitlines()
    lines[-1] = lines[-1].replace('"wanted":1', '"wanted":7')
    path.write_text("\n".join([first, *lines]))
    found = CliRunner().invoke(scaling, ["--check", str(path)])
    assert found.exit_code == 1
    assert "and would be now" in found.output


@pytest.mark.parametrize("text", ["", "nonsense\n", '{"snapshot": 3}\n'])
def test_what_is_no_log_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    found = CliRunner().invoke(scaling, ["--check", str(path)])
    assert found.exit_code == 1
    assert found.output.startswith("Error: ")
    assert "Traceback" not in found.output


def test_a_full_log_goes_on_beside_what_it_had(world: ControlledWorld, tmp_path: Path) -> None:
    path = tmp_path / "server.jsonl"
    line = world.of(LogScaling)[-1].line
    logged(world, path, max_bytes=len(encode_line(line)) * 4)
    assert (tmp_path / "server.old.jsonl").exists()
    assert {each.name for each in tmp_path.iterdir()} <= {"server.jsonl", "server.old.jsonl"}


def test_a_log_that_cannot_be_written_is_told_once(
    world: ControlledWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    logged(world, tmp_path / "file/server.jsonl")
    assert len(caplog.records) == 1
