"""Benchmarks start: nobody runs most of them for months, while what they measure changes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.structure import ROOT

START = """
import importlib, io, sys, traceback
from contextlib import redirect_stdout

CHILDREN = "benchmarks.engine.line", "benchmarks.router.peer"  # others start them, and ask by stdin
for name in sys.argv[1:]:
    try:
        module = importlib.import_module(name)
        if name not in CHILDREN and hasattr(module, "main"):
            sys.argv = [name, "--help"]
            with redirect_stdout(io.StringIO()):
                module.main()
    except SystemExit as ended:
        if ended.code:
            print(name, "ends with", ended.code)
    except Exception:
        print(name, traceback.format_exc())
"""


@pytest.mark.slow
def test_every_benchmark_starts() -> None:
    files = sorted((ROOT / "benchmarks").rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    command = [sys.executable, "-c", START, *(name.removesuffix(".__init__") for name in names)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert (done.stdout, done.returncode) == ("", 0), done.stdout + done.stderr
