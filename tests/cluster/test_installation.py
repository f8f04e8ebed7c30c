"""An upgrade moves the link to what is installed: what runs goes on with its own version."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.cluster.config import build_config
from kvrelay.cluster.processes.orders import ControllerListens, ControlSpec, GaveUp, StartupProgress
from kvrelay.cluster.processes.supervised import Child
from kvrelay.engine import installation
from kvrelay.worker.process import Listening
from tests.support.versions import Versions

pytestmark = pytest.mark.anyio

# Imports one half of its package before the link moves, and starts a child after that.
PROGRAM = """
import os, runpy, subprocess, sys
installation = runpy.run_path(sys.argv[2])
import package, package.inner
installation["pin_installation"]()
os.remove(sys.argv[1])
os.symlink("2.0", sys.argv[1])
import package.inner.late, beside
child = "import package.inner.late as late; print(late.VERSION)"
subprocess.run([sys.executable, "-c", child], check=True)
given = installation["GIVEN_PATH"]
print(package.inner.late.VERSION, beside.VERSION, given.split(os.pathsep)[0], sys.executable)
"""


def test_what_is_imported_late_and_what_is_started_is_of_the_version_that_runs(
    tmp_path: Path,
) -> None:
    for version in ("1.0", "2.0"):
        folder = tmp_path / version / "package" / "inner"
        folder.mkdir(parents=True)
        for file in (folder / "__init__.py", folder.parent / "__init__.py"):
            file.touch()
        for file in (folder / "late.py", tmp_path / version / "beside.py"):
            file.write_text(f"VERSION = '{version}'")
        (tmp_path / version / "python").symlink_to(sys.executable)
    (current := tmp_path / "current").symlink_to("1.0")
    path = os.pathsep.join([str(current), *filter(None, sys.path)])
    done = subprocess.run(
        [current / "python", "-c", PROGRAM, current, installation.__file__],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    python = tmp_path / "1.0" / "python"
    assert done.stdout.split() == ["1.0", "1.0", "1.0", str(current), str(python)], done.stderr


async def test_a_controller_goes_on_with_its_own_modules_when_the_link_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It imports the module that joins Ray last, and got that of another version."""
    versions = Versions(tmp_path)
    versions.use("")
    other = tmp_path / "other" / "kvrelay" / "cluster" / "processes"
    other.mkdir(parents=True)
    (other / "ray.py").write_text("raise ImportError('of another version')")
    config = build_config({"cluster": {"address": "127.0.0.1:1"}}, "test")
    spec = ControlSpec(
        cluster="kvrelay-test",
        epoch=1,
        config=config,
        kept_file=tmp_path / "controller",
        listening=Listening("127.0.0.1", b"token", 1 << 20),
        host="127.0.0.1",
        routers=("router-0",),
        running_routers=(),
    )
    said: asyncio.Queue[object] = asyncio.Queue()
    controller = Child("controller", said.put_nowait, said.put_nowait)
    with monkeypatch.context() as started:
        for name, value in versions.env.items():
            started.setenv(name, value)
        await controller.start("controller", None)
    try:
        async with asyncio.timeout(120):
            heard_at = controller.heard_at
            while controller.heard_at == heard_at:  # it runs, and waits for its order
                await asyncio.sleep(0.02)
            versions.use("other")
            controller.send(spec)
            first = await said.get()
            second = await said.get()
        assert not isinstance(first, GaveUp), first.reason
        assert isinstance(first, ControllerListens)
        assert second == StartupProgress("ray", "joining 127.0.0.1:1", False)
    finally:
        controller.kill()
        await controller.ended(20)
