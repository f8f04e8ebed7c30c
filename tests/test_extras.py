"""Features that need an extra: without it, one line says what to install, and the rest works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.structure import ROOT, Structure

HIDDEN = (
    "botocore",
    "matplotlib",
    "redis",
    "opentelemetry.sdk",
    "opentelemetry.exporter",
    "aiohttp",
    "zmq",
)
HIDE = f"import sys; sys.modules.update(dict.fromkeys({HIDDEN}))\n"
KVRELAY = HIDE + "from kvrelay.cluster.cli.main import main; main()"


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`code` in a process in which the modules of the extras cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | environment,
    )


@pytest.mark.slow
def test_nothing_else_imports_an_extra() -> None:
    parts = ("redis", "redis_client", "index_keys", "session_keys", "lease")
    own = ["cluster.api.batches.shared", "cluster.api.keys.shared"]
    own += [f"cluster.state.{part}" for part in parts]
    # Which only vLLM's environment imports.
    own += [f"decode_worker.vllm.{part}" for part in ("connector", "edits")]
    modules = [name for name in Structure(ROOT).files if name not in own]
    done = run(
        HIDE + "import importlib\nfor name in sys.argv[1:]: importlib.import_module(name)",
        *[f"kvrelay.{m}" for m in modules if not m.startswith("engine.model.gpu")],
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_plot_without_matplotlib_is_refused_before_the_replay(tmp_path: Path) -> None:
    done = run(KVRELAY, "replay", "synthetic:chat", "--plot", str(tmp_path / "plot.png"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(
        "matplotlib is not installed: pip install 'kvrelay[plot]'"
    )
    assert not (tmp_path / "plot.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            "[state]\nurl = 'redis://localhost'",
            "redis is not installed: pip install 'kvrelay[redis]'",
        ),
        (
            "[tiers]\nobject_bucket = 'kv'",
            "botocore is not installed: pip install 'kvrelay[object]'",
        ),
        (
            "[tracing]\nendpoint = 'http://localhost:4318'",
            "opentelemetry.sdk is not installed: pip install 'kvrelay[tracing]'",
        ),
        (
            "[cluster]\nray_dashboard_port = 8265",
            "aiohttp is not installed: pip install 'kvrelay[dashboard]'",
        ),
        (
            "[events]\nendpoint = 'tcp://*:5557'",
            "zmq is not installed: pip install 'kvrelay[events]'",
        ),
    ],
)
def test_a_server_that_needs_an_extra_does_not_start(tmp_path: Path, table: str, said: str) -> None:
    path = tmp_path / "kvrelay.toml"
    path.write_text(table)
    done = run(KVRELAY, "serve", "--config", str(path), "--port", "0")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == f"error: {said}"
