"""`python -m tests.runbooks [NAME...]`: faults, alerts, and what runbooks do about them.

For each runbook: the fault is injected, its alert fires within 30 s by Prometheus's own rule
engine, the commands run, their postconditions hold, and the alert clears. While one alert has yet
to clear, the next fault begins. Needs Prometheus (PATH, or PROMETHEUS_HOME); skipped without it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.report import make_console, write_json
from kvrelay.cluster.state.server_lock import with_key
from tests.operations.expressions import alert_rules
from tests.operations.prometheus import FOLDER_VARIABLE, Prometheus, binary
from tests.operations.served import free_port
from tests.runbooks.book import Book, Broken, Clue, books, clues
from tests.runbooks.faults import FAULTS, SERVERS
from tests.runbooks.world import World

FIRES_WITHIN_S = 30.0
DOCTOR_ATTEMPTS = 3
QUIET_WITHIN_S = 150.0  # an alert that an earlier fault has set off
CLEARS_WITHIN_S = 330.0  # the longest window of a rule is 5 minutes


@dataclass(slots=True)
class Result:
    """Seconds are from when the fault was there. None: it did not come so far."""

    runbook: str
    alert: str
    fired_after_s: float | None = None
    mended_after_s: float | None = None  # the postconditions hold
    cleared_after_s: float | None = None
    problem: str = ""
    began_at: float = 0.0


def check_doctor(clue: Clue | None, book: Book, world: World) -> None:
    """While the fault is there, `kvrelay doctor` names the page. Raises AssertionError."""
    try:
        if clue is not None:
            _ask_doctor(clue, book, world)
    finally:
        world.doctor_has_looked.set()


def _ask_doctor(clue: Clue, book: Book, world: World) -> None:
    command = 'kvrelay doctor --json --config "$CONFIG" --url "$URL"'
    for _ in range(DOCTOR_ATTEMPTS):  # it may look a moment too early
        done = subprocess.run(
            ["bash", "-c", command], env=world.environment, capture_output=True, text=True
        )
        found = json.loads(done.stdout or "[]")
        pages = {each["check"]: each.get("fix", "") for each in found}
        if f"docs/runbooks/{book.name}.md" in pages.get(clue.check, ""):
            return
    raise AssertionError(f"doctor names no {book.name} under {clue.check}: {pages} {done.stderr}")


def says(clue: Clue, world: World) -> bool:
    return re.search(clue.line, Path(world.environment["LOG"]).read_text()) is not None


def is_hidden(book: Book, prometheus: Prometheus) -> bool:
    """The alert is about a quantile, in which quick requests from before the fault count."""
    (expr,) = (rule["expr"] for rule in alert_rules() if rule["alert"] == book.alert)
    if "histogram_quantile" not in expr:
        return False
    return bool(prometheus.query("sum(increase(kvrelay_ttft_seconds_count[1m])) > 0"))


def carry_out(book: Book, world: World, prometheus: Prometheus) -> Result:
    result = Result(book.name, book.alert)
    try:
        prometheus.wait(
            f"{book.alert} fires before the fault, or others' requests still count",
            lambda: book.alert not in prometheus.firing() and not is_hidden(book, prometheus),
            QUIET_WITHIN_S,
        )
        world.doctor_has_looked.clear()
        with FAULTS[book.name][1](world):
            result.began_at = time.monotonic()
            is_firing = lambda: book.alert in prometheus.firing()  # noqa: E731
            _, result.fired_after_s = prometheus.wait(
                f"{book.alert} does not fire", is_firing, FIRES_WITHIN_S
            )
            clue = clues().get(book.name)
            # Some faults mend themselves: doctor looks while the page is diagnosed, not after it.
            with ThreadPoolExecutor(1) as beside:
                looking = beside.submit(check_doctor, clue, book, world)
                book.run(world.environment, before_steps=partial(wait, [looking]))
                looking.result()
            if clue is not None:
                prometheus.wait(
                    f"no line of the log has {clue.line}", partial(says, clue, world), 10
                )
            result.mended_after_s = time.monotonic() - result.began_at
        world.wait_up()
    except (Broken, TimeoutError, AssertionError) as error:
        result.problem = str(error) or repr(error)
        log = world.folder / "log"
        result.problem += f"\n--- the server's log:\n{log.read_text()[-1500:]}"
    return result


def has_cleared(result: Result) -> bool:
    """Or its runbook did not work, so that it need not."""
    return result.mended_after_s is None or result.cleared_after_s is not None


@contextmanager
def watching(results: Sequence[Result], prometheus: Prometheus) -> Iterator[None]:
    """Notes when alerts clear, while later runbooks run."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(1.0):
            firing = prometheus.firing()
            for result in list(results):
                if not has_cleared(result) and result.alert not in firing:
                    result.cleared_after_s = time.monotonic() - result.began_at

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def on_server(name: str, found: Sequence[Book], folder: Path) -> list[Result]:
    console = make_console()
    results: list[Result] = []
    with ExitStack() as stack:
        world = World(folder / name, SERVERS[name])
        stack.enter_context(world)
        _, key = with_key(world.url)
        prometheus = stack.enter_context(Prometheus(free_port(), [world.target], key))
        stack.enter_context(watching(results, prometheus))
        for book in found:
            results.append(carry_out(book, world, prometheus))
            is_bad = bool(results[-1].problem)
            console.print(line(results[-1]), style="red" if is_bad else "green", markup=False)
            if is_bad:
                world.start_again()
        deadline = time.monotonic() + CLEARS_WITHIN_S
        while not all(map(has_cleared, results)) and time.monotonic() < deadline:
            time.sleep(0.5)
    for result in results:
        if result.mended_after_s is not None and result.cleared_after_s is None:
            result.problem += f"{result.alert} does not clear"
    return results


def line(result: Result) -> str:
    if result.problem:
        return f"{result.runbook}: {result.problem}"
    return (
        f"{result.runbook}: fired after {result.fired_after_s:.1f} s, mended after"
        f" {result.mended_after_s:.1f} s"
    )


def table(results: Sequence[Result]) -> Table:
    made = Table(box=SIMPLE_HEAD, title="Runbooks: seconds from the fault")
    for name in ("runbook", "fired", "mended", "cleared", ""):
        made.add_column(name, justify="left" if name in ("runbook", "") else "right")
    for each in results:
        times = (each.fired_after_s, each.mended_after_s, each.cleared_after_s)
        shown = ("-" if value is None else f"{value:.1f}" for value in times)
        made.add_row(each.runbook, *shown, "failed" if each.problem else "")
    return made


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME...]")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the results.")
def main(names: Sequence[str], json_path: Path | None) -> None:
    """Carry out runbooks, all of them or those that are named. Exits with 1 if one fails."""
    known = books()
    if unknown := set(names) - {*FAULTS}:
        raise click.UsageError(f"no fault for {', '.join(sorted(unknown))}; {', '.join(FAULTS)}")
    if binary("prometheus") is None:
        print(f"skipped: prometheus is neither in PATH nor in {FOLDER_VARIABLE}")
        return
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        for server in SERVERS:
            wanted = [n for n, (of, _) in FAULTS.items() if of == server and n in (names or FAULTS)]
            if wanted:
                results += on_server(server, [known[name] for name in wanted], Path(folder))
    console = make_console()
    console.print(table(results))
    for result in results:
        if result.problem:
            console.print(f"{result.runbook}: {result.problem}", style="red", markup=False)
    write_json(json_path, {"runbooks": [asdict(result) for result in results]})
    sys.exit(1 if any(result.problem for result in results) else 0)


if __name__ == "__main__":
    main()
