"""docs/capacity.md: its command gives the figures of its table."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvrelay.cluster.cli.main import main
from tests.structure import ROOT

PAGE = (ROOT / "docs/capacity.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(--prefill \d --decode \d)` \| (.*?) % \| (.*?) \| (.*?) \|$", PAGE, re.M)
IN_CI = "--prefill 0 --decode 2"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("workers", "good", "ttft", "itl"),
    [pytest.param(*row, marks=() if row[0] == IN_CI else pytest.mark.long) for row in ROWS],
)
def test_a_row_is_what_the_command_says(
    workers: str, good: str, ttft: str, itl: str, tmp_path: Path
) -> None:
    (command,) = re.findall(r"^kvrelay (replay .*?\\\n.*?)--prefill", PAGE, re.M | re.S)
    arguments = shlex.split(command.replace("\\\n", ""))
    whole = [*arguments, *workers.split(), "--json", str(tmp_path / "found.json")]
    done = CliRunner().invoke(main, whole)
    assert done.exit_code == 0, done.output
    (found,) = json.loads((tmp_path / "found.json").read_text())["results"]
    share = 100 * found["goodput"]["share"]
    assert f"{share:.1f}" == good
    for shown, name, digits in ((ttft, "ttft_ms", 0), (itl, "itl_ms", 1)):
        assert shown == " / ".join(f"{found[name][p]:.{digits}f}" for p in ("p50", "p99"))


def test_the_table_has_rows_that_do_and_one_that_does_not() -> None:
    shares = [float(good) for _, good, _, _ in ROWS]
    assert min(shares) < 99 <= max(shares)
    assert IN_CI in [workers for workers, *_ in ROWS]
