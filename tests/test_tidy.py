"""The structure of the project, held by reading its source: imports, sizes, prints."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.structure import PACKAGES, ROOT, Structure

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 70
MAX_LAYERS = 9  # of imports within a package

# Who may import whom, among the product's packages: itself and all before it in the chain.
MAY_IMPORT = {
    "engine": {"engine"},
    "kvtransfer": {"engine", "kvtransfer"},
    "prefill_worker": {"engine", "kvtransfer", "prefill_worker"},
    "decode_worker": {"engine", "kvtransfer", "decode_worker"},
    "router": {"engine", "kvtransfer", "prefill_worker", "decode_worker", "router"},
    "cluster": {*PACKAGES} - {"lab"},
    "lab": {*PACKAGES},
}
IMPURE = {"ray", "torch", "asyncio", "threading", "time", "logging", "random", "socket", "secrets"}
PURE_PLACES = ("engine/", "router/", "prefill_worker/", "decode_worker/", "kvtransfer/peer/")
PURE_PLACES += ("kvtransfer/tiers/", "kvtransfer/layout", "kvtransfer/messages", "kvtransfer/agent")
PURE_PLACES += ("cluster/control/controller", "cluster/control/machines")
PURE_PLACES += ("cluster/control/autoscaling", "cluster/control/drains", "cluster/control/fleet")
PURE_PLACES += ("cluster/control/worker_lives", "cluster/scaling/")
IMPURE_PLACES = ("engine/model/", "kvtransfer/agents/")
HTTP = {"fastapi", "starlette", "uvicorn"}
TORCH_PLACES = ("engine/model/", "kvtransfer/agents/", "kvtransfer/store")
MAY_PRINT = ("cluster/cli/", "lab/cli/")


def sources(*tops: str) -> list[Path]:
    return [path for top in tops for path in sorted((ROOT / top).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path) -> Iterator[str]:
    """Dotted names of everything that the file imports, at whatever depth."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: relative import"
            yield node.module or ""


def is_pure(path: Path) -> bool:
    name = name_of(path)
    return name.startswith(PURE_PLACES) and not name.startswith(IMPURE_PLACES)


ALL = sources(*PACKAGES)


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_imports_follow_the_chain(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    tops = {name.split(".")[0] for name in imports(path)}
    assert tops & set(PACKAGES) <= MAY_IMPORT[package]
    assert "tests" not in tops
    if is_pure(path):
        assert not tops & IMPURE
    if "ray" in tops:
        assert name_of(path) in ("cluster/runtime/ray.py", "cluster/runtime/ray_cluster.py")
    if tops & HTTP:
        assert name_of(path).startswith("cluster/api/")
    if "torch" in tops:
        assert name_of(path).startswith(TORCH_PLACES)


def test_no_modules_import_each_other() -> None:
    assert Structure(ROOT).cycles() == []


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_of_a_package_have_few_layers(package: str) -> None:
    layers = Structure(ROOT).layers(package)
    assert 1 < max(layers.values()) <= MAX_LAYERS, sorted(layers.items(), key=lambda each: each[1])


def test_only_the_configuration_stays_flat() -> None:
    assert {path.stem for path in (ROOT / "cluster").glob("*.py")} == {"__init__", "config"}


@pytest.mark.parametrize("path", [*ALL, *sources("tests", "benchmarks")], ids=name_of)
def test_files_and_functions_are_short(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_FILE_LINES, f"{name_of(path)} has {lines} lines"
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{name_of(path)}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_modules_say_what_they_are_and_do_not_print(path: Path) -> None:
    tree = parse(path)
    assert ast.get_docstring(tree), f"{name_of(path)} has no docstring"
    if not name_of(path).startswith(MAY_PRINT):
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert not [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]


@pytest.mark.parametrize("path", sorted((ROOT / "tests/gpu").glob("test_*.py")), ids=name_of)
def test_tests_that_need_a_gpu_are_skipped_without_one(path: Path) -> None:
    marks = path.read_text().partition("pytestmark = [")[2].partition("]")[0]
    assert "pytest.mark.gpu," in marks
    assert "pytest.mark.skipif(not torch.cuda.is_available()" in marks


def test_there_is_no_utils_module() -> None:
    assert not [path for path in ALL if path.stem in {"utils", "util", "helpers", "common", "misc"}]


def test_tests_that_start_processes_are_where_make_looks_for_them() -> None:
    """E2E of the Makefile."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    (paths,) = (line.split()[2:] for line in text.splitlines() if line.startswith("E2E := "))
    mark = ".".join(("mark", "e2e"))
    files = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")]
    marked = [path for path in files if mark in (ROOT / path).read_text(encoding="utf-8")]
    assert len(marked) > 10
    missed = [path for path in marked if not any(path.is_relative_to(each) for each in paths)]
    assert not missed
