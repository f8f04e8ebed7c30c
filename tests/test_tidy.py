"""The structure of the project, held by reading its source: imports, sizes, prints."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.structure import PACKAGES, ROOT, Structure

MAX_FUNCTION_LINES = 70
MAX_LAYERS = 11  # imports within a package

# Who may import whom, among the product's packages: itself and all before it in the chain.
MAY_IMPORT = {
    "engine": {"engine"},
    "kvtransfer": {"engine", "kvtransfer"},
    "worker": {"engine", "kvtransfer", "worker"},
    "prefill_worker": {"engine", "kvtransfer", "worker", "prefill_worker"},
    "decode_worker": {"engine", "kvtransfer", "worker", "decode_worker"},
    "router": {*PACKAGES} - {"cluster", "lab", "training"},
    "cluster": {*PACKAGES} - {"lab", "training"},
    "lab": {*PACKAGES} - {"training"},
    "training": {*PACKAGES} - {"lab"},
}
IMPURE = {"ray", "torch", "asyncio", "threading", "time", "logging", "random", "socket", "secrets"}
PURE_PLACES = (
    "worker/node",
    "worker/exchange",
    "engine/",
    "router/",
    "prefill_worker/",
    "decode_worker/",
    "kvtransfer/peer/",
)
PURE_PLACES += ("kvtransfer/tiers/", "kvtransfer/layout", "kvtransfer/messages", "kvtransfer/agent")
PURE_PLACES += ("cluster/control/controller",)
PURE_PLACES += (
    "cluster/control/autoscaling",
    "cluster/control/lease",
    "cluster/control/lifecycle",
    "cluster/control/routers",
)
PURE_PLACES += ("cluster/control/workers", "cluster/control/watches", "cluster/scaling/")
IMPURE_PLACES = (
    "engine/model/",
    "engine/wire/",
    "engine/files",
    "engine/host",
    "engine/logs",
    "engine/stderr",
    "kvtransfer/movers/",
    "decode_worker/vllm/ask",
    "decode_worker/vllm/copies",
    "decode_worker/vllm/engine",
    "decode_worker/vllm/images",
    "decode_worker/vllm/memory",
    "decode_worker/vllm/parse",
    "decode_worker/vllm/ranks",
    "decode_worker/vllm/weights",
)
HTTP = ("fastapi", "starlette", "uvicorn")
HTTP_PLACES = ("cluster/api/",)
WHAT_API_NEEDS = ("cluster.api.", "cluster.config.", "cluster.orders.", "cluster.status.")
RAY_PLACES = ("cluster/processes/ray.py",)
TORCH_PLACES = ("engine/model/", "kvtransfer/movers/", "kvtransfer/store", "training/")
TORCH_PLACES += ("decode_worker/vllm/ask", "decode_worker/vllm/memory")  # vLLM's own
MAY_PRINT = ("cluster/cli/", "lab/cli/")


def sources(*tops: str) -> list[Path]:
    return [path for top in tops for path in sorted((ROOT / top).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path) -> Iterator[str]:
    """Dotted names of everything that the file imports, at whatever depth; the product's own
    without `kvrelay.`, under which it is installed and imported."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: relative import"
            names = [node.module or ""]
        else:
            continue
        for name in names:
            assert name.split(".")[0] not in PACKAGES, f"{name_of(path)}: kvrelay.{name}"
            yield name.removeprefix("kvrelay.")


def is_pure(path: Path) -> bool:
    name = name_of(path)
    return name.startswith(PURE_PLACES) and not name.startswith(IMPURE_PLACES)


ALL = sources(*PACKAGES)


def test_imports_follow_the_chain() -> None:
    assert not [line for path in ALL for line in wrong_imports(path)]


def wrong_imports(path: Path) -> Iterator[str]:
    name = name_of(path)
    tops = {module.split(".")[0] for module in imports(path)}
    places = {"torch": TORCH_PLACES, "ray": RAY_PLACES} | dict.fromkeys(HTTP, HTTP_PLACES)
    known = {*PACKAGES, "tests", "benchmarks"}
    for top in sorted(tops):
        if top in known - MAY_IMPORT[name.split("/")[0]]:
            yield f"{name} imports {top}: against the chain"
        if top in IMPURE and is_pure(path):
            yield f"{name} imports {top}: nodes are pure"
        if top in places and not name.startswith(places[top]):
            yield f"{name} imports {top}: that is for {', '.join(places[top])}"


def test_the_api_needs_only_settings_orders_and_the_status_of_the_cluster() -> None:
    wrong = [
        f"{name_of(path)} imports {module}"
        for path in sources("cluster/api")
        for module in imports(path)
        if module.split(".")[0] == "cluster" and not f"{module}.".startswith(WHAT_API_NEEDS)
    ]
    assert not wrong


def test_no_modules_import_each_other() -> None:
    assert Structure(ROOT).cycles() == []


def test_imports_of_a_package_have_few_layers() -> None:
    structure = Structure(ROOT)
    layers = {package: structure.layers(package) for package in PACKAGES}
    assert all(layers.values())
    high = {m: n for found in layers.values() for m, n in found.items() if n > MAX_LAYERS}
    assert not high


def test_functions_are_short() -> None:
    long = []
    for path in [*ALL, *sources("tests", "benchmarks")]:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    long.append(f"{name_of(path)}:{node.lineno} {node.name}: {length} lines")
    assert not long


def test_modules_have_a_docstring_and_do_not_print() -> None:
    wrong = []
    for path in ALL:
        tree = parse(path)
        if not ast.get_docstring(tree):
            wrong.append(f"{name_of(path)} has no docstring")
        if not name_of(path).startswith(MAY_PRINT):
            calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
            prints = [each for each in calls if isinstance(each, ast.Name) and each.id == "print"]
            wrong += [f"{name_of(path)}:{each.lineno} prints" for each in prints]
        if path.stem in {"utils", "util", "helpers", "common", "misc"}:
            wrong.append(f"{name_of(path)}: a module is named after what it holds")
    assert not wrong


def test_tests_that_need_a_gpu_are_skipped_without_one() -> None:
    files = sorted((ROOT / "tests/gpu").glob("test_*.py"))
    marks = {f: f.read_text().partition("pytestmark = [")[2].partition("]")[0] for f in files}
    asked = ("pytest.mark.gpu,", "pytest.mark.skipif(not torch.cuda.is_available()")
    assert files
    assert not [
        file.name for file, mark in marks.items() if not all(each in mark for each in asked)
    ]


def test_tests_that_start_processes_are_where_make_looks_for_them() -> None:
    """`make test` runs those below E2E of the Makefile alone."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    (paths,) = (line.split()[2:] for line in text.splitlines() if line.startswith("E2E := "))
    mark = ".".join(("mark", "e2e"))
    files = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")]
    marked = [path for path in files if mark in (ROOT / path).read_text(encoding="utf-8")]
    assert len(marked) > 10
    missed = [path for path in marked if not any(path.is_relative_to(each) for each in paths)]
    assert not missed
