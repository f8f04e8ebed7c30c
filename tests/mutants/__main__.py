"""`python -m tests.mutants [AREA...]`: do the tests of scheduling, KV, and requests see changes?

First the tests run once, and it is noted which statements each runs. Then a sample of each area's
mutants, drawn by a seed, is run by those tests that run the changed statement, the quickest first,
until one fails. A mutant that none notices survives, and is shown. One that a test does not end
with is noticed too. Files stay as they are: a process is forked after everything is imported, and
its functions get the mutant's code.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from rich.console import Console

from tests.mutants.change import ROOT, Mutant, mutants, mutated, replace, report_statements

AREAS = {
    "scheduling": "engine/scheduling/*.py",
    "kv": "engine/kv/*.py",
    "peer": "kvtransfer/peer/*.py",
    "tiers": "kvtransfer/tiers/*.py",
    "requests": "router/requests.py",
    "record": "router/record.py",
    "dispatch": "router/dispatch.py",
    "node": "worker/node.py",
}
TESTS = (
    "engine/test_*",
    "kvtransfer/**/test_*",
    "worker/test_*",
    "router/**/test_*",
    "lab/sim/test_*",
)
QUICK = "not gpu and not e2e and not long and not slow"
ARGS = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", "60", "-m", QUICK)
TESTS_S = 20.0  # so many seconds of tests try a mutant; further tests are left out
STARTUP_S = 30.0  # until the first test begins, on a busy machine
SLOWER = 5.0  # tests of a mutant may take so much longer


class Ran(msgspec.Struct):
    """One test: its seconds, whether it passed, and the lines of the statements that it ran."""

    seconds: float = 0.0
    passed: bool = False
    lines: dict[str, set[int]] = {}


class Traced:
    """Notes which statements each test runs."""

    def __init__(self, paths: list[str]) -> None:
        self.ran: dict[str, Ran] = {}
        self._paths = paths
        self._lines: dict[str, set[int]] = defaultdict(set)

    def pytest_collection_finish(self) -> None:
        for path in self._paths:
            report_statements(path, lambda path, line: self._lines[path].add(line))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._lines.clear()
        self.ran[item.nodeid] = Ran()
        began = time.perf_counter()
        try:
            return (yield)
        finally:
            ran = self.ran[item.nodeid]
            ran.lines = {path: set(lines) for path, lines in self._lines.items()}
            ran.seconds = time.perf_counter() - began

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.ran[report.nodeid].passed = report.passed


class Chosen:
    """Runs the mutant by these tests only, in this order, and notes who fails."""

    def __init__(self, mutant: Mutant, nodeids: list[str]) -> None:
        self.failed: list[str] = []
        self._mutant = mutant
        self._order = {nodeid: number for number, nodeid in enumerate(nodeids)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._order]
        items.sort(key=lambda item: self._order[item.nodeid])
        replace(self._mutant.path, mutated(self._mutant))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def _forked(work: Callable[[], object], timeout_s: float) -> Any:
    """What `work` returned in a forked process; None: it took longer, or broke."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        child = os.fork()
        if child == 0:
            os.setsid()
            for fd in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
            try:
                out.write_bytes(msgspec.msgpack.encode(work()))
            finally:
                os._exit(0)
        deadline = time.monotonic() + timeout_s
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return None
            time.sleep(0.02)
        return msgspec.msgpack.decode(out.read_bytes()) if out.exists() else None


def _found(pattern: str) -> list[str]:
    paths = sorted(ROOT.glob(pattern))
    return [str(path.relative_to(ROOT)) for path in paths if path.name != "__init__.py"]


def _trace(files: list[str], paths: list[str]) -> dict[str, Ran]:
    def work() -> object:
        traced = Traced(paths)
        pytest.main([*ARGS, *files], [traced])
        return {nodeid: ran for nodeid, ran in traced.ran.items() if ran.passed}

    return msgspec.convert(_forked(work, 3600.0), dict[str, Ran])


def _files(nodeids: Iterable[str]) -> list[str]:
    return sorted({nodeid.split("::")[0] for nodeid in nodeids})


def _notices(mutant: Mutant, ran: dict[str, Ran]) -> str | None:
    """Which test notices the mutant; "": none; None: no test runs the statement."""
    touching = [id for id, r in ran.items() if mutant.statement in r.lines.get(mutant.path, ())]
    chosen, total_s = [], 0.0
    for nodeid in sorted(touching, key=lambda nodeid: ran[nodeid].seconds):
        if chosen and total_s + ran[nodeid].seconds > TESTS_S:
            break
        chosen.append(nodeid)
        total_s += ran[nodeid].seconds
    if not chosen:
        return None

    def work() -> object:
        kept = Chosen(mutant, chosen)
        code = pytest.main([*ARGS, "-x", *_files(chosen)], [kept])
        return kept.failed[0] if kept.failed else "" if code == pytest.ExitCode.OK else "broken"

    found = _forked(work, STARTUP_S + SLOWER * total_s)
    return "time is up" if found is None else found


@click.command(help=__doc__)
@click.argument("areas", nargs=-1, type=click.Choice(list(AREAS)))
@click.option("--number", default=25, show_default=True, help="Mutants of each area.")
@click.option("--seed", default=1, show_default=True)
@click.option("--traced", type=click.Path(path_type=Path), help="Which statements tests run: kept.")
@click.option("--out", type=click.Path(path_type=Path), help="Which test notices which, as JSON.")
def main(
    areas: tuple[str, ...], number: int, seed: int, traced: Path | None, out: Path | None
) -> None:
    settings.register_profile(
        "mutants",
        database=None,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("mutants")
    console = Console(width=100)
    paths = [path for area in areas or AREAS for path in _found(AREAS[area])]
    if traced is not None and traced.exists():
        ran = msgspec.json.decode(traced.read_bytes(), type=dict[str, Ran])
    else:
        files = [path for folder in TESTS for path in _found(f"tests/{folder}.py")]
        every = [path for pattern in AREAS.values() for path in _found(pattern)]
        ran = _trace([path for path in files if "/test_vllm" not in path], every)
        if traced is not None:
            traced.write_bytes(msgspec.json.encode(ran))
    ran = {nodeid: each for nodeid, each in ran.items() if each.lines.keys() & {*paths}}
    with contextlib.redirect_stdout(io.StringIO()):  # imports what processes share
        pytest.main([*ARGS, "--collect-only", *_files(ran)])
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    noted: dict[str, dict[str, str | None]] = {}
    for area in areas or AREAS:
        found = [mutant for path in _found(AREAS[area]) for mutant in mutants(path)]
        sample = random.Random(seed).sample(found, min(number, len(found)))
        noted[area] = kinds = {}
        for mutant in sorted(sample, key=lambda mutant: (mutant.path, mutant.number)):
            kinds[str(mutant)] = test = _notices(mutant, ran)
            if not test:
                say(f"{'no test runs it' if test is None else 'survived'}: {mutant}")
        say(f"{area}: {sum(map(bool, kinds.values()))} of {len(kinds)}, of {len(found)} there are")
        if out is not None:
            out.write_bytes(msgspec.json.format(msgspec.json.encode(noted)))


if __name__ == "__main__":
    main()
