"""What a wheel has beside its modules: sources of kernels, and the files of the console."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrelay.cluster.api.console.routes import page_files
from tests.structure import PACKAGES, ROOT


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Yields setuptools' command that collects the files."""
    pytest.importorskip("setuptools", reason="setuptools is not installed")
    from setuptools.dist import Distribution

    monkeypatch.chdir(ROOT)
    dist: Any = Distribution({"script_name": "setup.py"})
    dist.parse_config_files()
    dist.set_defaults(name=False)
    dist.include_package_data = False  # what git or a manifest adds does not count
    command: Any = dist.get_command_obj("build_py")
    command.ensure_finalized()
    return command


def test_a_wheel_has_every_module_and_every_file_that_modules_read(build: Any) -> None:
    served = [Path("kvrelay/cluster/api/console/static", name) for name in page_files() if name]
    wanted = {path.as_posix() for path in served}
    for package in set(PACKAGES) - {"lab", "training"}:
        files = (ROOT / "kvrelay" / package).rglob("*")
        wanted |= {
            path.relative_to(ROOT).as_posix()
            for path in files
            if path.suffix in {".py", ".c", ".h", ".toml"}
        }
    found = {Path(file).as_posix() for _, _, file in build.find_all_modules()}
    for _, folder, _, names in build.data_files:
        found |= {Path(folder, name).as_posix() for name in names}
    assert not wanted - found


def test_a_wheel_has_one_name(build: Any) -> None:
    assert {package.split(".")[0] for package in build.packages} == {"kvrelay"}
