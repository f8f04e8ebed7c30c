"""`python -m tests.operations`: alerts and dashboards on a real server, by Prometheus itself.

Checks and tests the rules with promtool, then starts a server and a Prometheus that scrapes it,
and asks for every expression: each has to give data, and one value that is a number. Needs the
binaries of Prometheus (Debian's package `prometheus`) in PATH or in the folder PROMETHEUS_HOME.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from kvrelay.cluster.state.server_lock import with_key
from tests.operations.expressions import ALERTS, expressions
from tests.operations.prometheus import FOLDER_VARIABLE, Prometheus, binary
from tests.operations.served import free_port, full_server, use

TESTS = Path(__file__).parent / "alerts_test.yaml"
SCRAPES_S = 5.0  # between the last request and the questions


def check_rules() -> bool:
    """By promtool, which says what is wrong."""
    promtool = binary("promtool")
    assert promtool is not None
    commands = (["check", "rules", str(ALERTS)], ["test", "rules", str(TESTS)])
    return all(subprocess.run([promtool, *each], check=False).returncode == 0 for each in commands)


def without_data(prometheus: Prometheus) -> list[str]:
    """A line for each expression that gives no series, or no number."""
    lines = []
    for each in expressions():
        found = prometheus.query(each.unfiltered)
        numbers = [value for _, value in found if not math.isnan(value)]
        if not numbers:
            lines.append(f"{each.place}: {len(found)} series, no number: {each.text}")
    return lines


@click.command()
def main() -> None:
    if binary("prometheus") is None or binary("promtool") is None:
        print(f"skipped: prometheus and promtool are neither in PATH nor in {FOLDER_VARIABLE}")
        raise SystemExit(0)
    is_good = check_rules()
    with tempfile.TemporaryDirectory() as folder, full_server(Path(folder)) as served:
        target = served.url.removeprefix("http://")
        with Prometheus(free_port(), [target], with_key(served.url)[1]) as prometheus:
            for _ in range(2):
                use(served)
                time.sleep(SCRAPES_S)
            lines = without_data(prometheus)
            firing = sorted(prometheus.firing())
    print(f"{len(expressions())} expressions, {len(lines)} without data")
    print("firing meanwhile:", ", ".join(firing) or "none")
    print(*lines, sep="\n")
    sys.exit(0 if is_good and not lines else 1)


if __name__ == "__main__":
    main()
