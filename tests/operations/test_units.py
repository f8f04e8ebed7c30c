"""systemd's units and the container file."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvrelay.cluster.config import ClusterSection
from kvrelay.cluster.processes.router_spec import SHUTDOWN_S
from kvrelay.cluster.processes.supervisor import END_S
from tests.structure import ROOT

UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))
CONTAINERFILE = (ROOT / "deploy/Containerfile").read_text(encoding="utf-8")


def settings(path: Path) -> dict[str, str]:
    """Reads those of [Service]; the last one where one is repeated."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign, assignment]
    parser.read(path)
    return dict(parser["Service"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_are_in_order(path: Path, tmp_path: Path) -> None:
    """As if it were installed: its command exists."""
    text = re.sub(r"^(ExecStart=)\S+", r"\1/bin/true", path.read_text(), flags=re.MULTILINE)
    (tmp_path / path.name).write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / path.name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    wrong = tmp_path / f"wrong-{path.name}"
    wrong.write_text(text.replace("KillMode=process", "KillMod=process"))
    command[-1] = str(wrong)
    assert subprocess.run(command, capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_leave_time_to_drain_and_are_started_again(path: Path) -> None:
    unit = settings(path)
    assert int(unit["TimeoutStopSec"]) > ClusterSection().drain_s + SHUTDOWN_S + 2 * END_S
    assert (unit["KillMode"], unit["Restart"]) == ("process", "always")
    assert unit["NoNewPrivileges"] == "yes"
    assert unit["User"] == "kvrelay"


def test_the_image_is_pinned_and_runs_without_root() -> None:
    sources = re.findall(r"^FROM (\S+)", CONTAINERFILE, flags=re.MULTILINE)
    assert sources[-1] == "docker.io/library/python:${PYTHON}"
    assert re.search(r"^ARG PYTHON=3\.\d+\.\d+-slim-\w+$", CONTAINERFILE, flags=re.MULTILINE)
    installs = re.findall(r"pip install .*", CONTAINERFILE)
    assert len(installs) == 3
    assert all("-c constraints.txt" in each for each in installs)
    user = CONTAINERFILE.rindex("\nUSER 10001:10001\n")
    assert "\nRUN " not in CONTAINERFILE[user:]
    assert 'ENTRYPOINT ["tini", "-g", "--"]' in CONTAINERFILE[user:]
