"""What a wheel of the project has of the console: it is served from the installed package."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.cluster.api.console.routes import page_files
from tests.structure import ROOT


def test_a_wheel_has_every_file_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("setuptools", reason="setuptools is not installed")
    from distutils.core import run_setup

    monkeypatch.chdir(ROOT)
    dist: Any = run_setup("setup.py", stop_after="config")
    dist.include_package_data = False  # what git or a manifest adds does not count
    build: Any = dist.get_command_obj("build_py")
    build.ensure_finalized()
    found = {
        name
        for package, _, _, names in build.data_files
        if package == "kvrelay.cluster.api.console"
        for name in names
    }
    assert {f"static/{name}" for name in page_files() if name} <= found
