"""Serves rows, and prints the command that repeats each that fails: `python -m tests.cover -h`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

from tests.cover.checkpoints import Checkpoints
from tests.cover.rows import rows
from tests.cover.serve import command_of, serve
from tests.cover.settings import parsed, shown


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cover", description=__doc__)
    parser.add_argument("--row", type=parsed, help="SETTING=VALUE ...: this one alone")
    parser.add_argument(
        "--of", type=int, choices=(2, 3), default=2, help="all pairs, or all threes"
    )
    parser.add_argument("--seed", type=int, default=0, help="other rows for the same combinations")
    parser.add_argument("--with", dest="some", default="", help="SETTING=VALUE ...: of these rows")
    parser.add_argument("--for", dest="seconds", type=float, default=0.0, help="end after so long")
    options = parser.parse_args()
    found = [options.row] if options.row else rows(options.of, options.seed)
    some = [word.split("=") for word in options.some.split()]
    found = [row for row in found if all(row[name] == value for name, value in some)]
    began, failed, num_served = time.monotonic(), [], 0
    with tempfile.TemporaryDirectory(prefix="kvrelay-cover-") as name:
        made = Checkpoints(Path(name) / "models")
        for number, row in enumerate(found):
            if options.seconds and time.monotonic() - began > options.seconds:
                break
            folder = Path(name) / str(number)
            folder.mkdir()
            start = time.monotonic()
            num_served += 1
            try:
                serve(row, made, folder)
                said = "right"
            except Exception:
                traceback.print_exc()
                failed.append(row)
                said = "WRONG"
            took = time.monotonic() - start
            print(f"{said} {took:5.1f} s: {shown(row) or 'the defaults'}", flush=True)
    print(f"{num_served} of {len(found)} rows served, {len(failed)} wrong", flush=True)
    for row in failed:
        print(command_of(row))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
