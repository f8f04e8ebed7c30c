"""`kvrelay top` against a running server, also in a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.cli.top import top
from tests.cluster.api.conftest import MODEL, Served, serve
from tests.cluster.api.console.demo import Fleet, demo


@pytest.fixture(scope="module")
def cluster(tokenizer: Tokenizer) -> Iterator[tuple[Served, Fleet]]:
    with demo(tokenizer, 30) as found:
        yield found


def run(*arguments: str, columns: int = 120, **options: Any) -> Result:
    return CliRunner().invoke(top, arguments, env={"COLUMNS": str(columns)}, **options)


def lines_of(output: str, role: str) -> list[str]:
    return [line for line in output.splitlines() if line.strip().startswith(f"{role}-")]


def test_once_shows_every_worker_and_the_latencies(cluster: tuple[Served, Fleet]) -> None:
    served, _ = cluster
    result = run("--url", served.url, "--once")
    assert result.exit_code == 0, result.output
    head = result.output.splitlines()[:3]
    assert head[0].startswith(MODEL)
    assert "28 of 30 workers up (10 prefill, 19 decode, 1 both)" in head[0]
    assert "queued 3" in head[1]
    assert "hit rate 68 %" in head[1]
    assert "TTFT p50/p90/p99 0." in head[2]
    assert "ITL " in head[2]
    decode = lines_of(result.output, "decode")
    assert (len(decode), len(lines_of(result.output, "prefill"))) == (20, 10)
    names = [line.split()[0] for line in decode]
    assert names == [f"decode-{i}" for i in range(20)]
    assert "down" in decode[19]
    assert "backoff" in decode[18]


def test_workers_are_sorted_as_told(cluster: tuple[Served, Fleet]) -> None:
    served, _ = cluster
    output = run("--url", served.url, "--once", "--sort", "kv").output
    rows = [line for line in output.splitlines() if "%" in line and "-" in line.split()[0]]
    shares = [int(line.partition("%")[0].split()[-1]) for line in rows]
    assert len(shares) == 30
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize("columns", [70, 80, 100, 120, 200])
def test_it_fits_the_terminal(cluster: tuple[Served, Fleet], columns: int) -> None:
    served, _ = cluster
    output = run("--url", served.url, "--once", columns=columns).output
    assert "…" not in output
    assert max(map(len, output.splitlines())) <= columns
    title = next(line for line in output.splitlines() if "KV held" in line)
    assert ("disk" in title) == (columns >= 116)
    assert "waiting" in title


def test_json_is_for_scripts(cluster: tuple[Served, Fleet]) -> None:
    served, _ = cluster
    result = run("--url", served.url, "--once", "--json")
    found = json.loads(result.output)
    assert len(found["workers"]) == 30
    assert found["workers"][0].keys() >= {"worker", "role", "state", "epoch", "num_running"}
    assert found["now"]["ttft_p99"] > found["now"]["ttft_p50"] > 0
    assert run("--url", served.url, "--json").exit_code == 2


def test_the_key_is_asked_for_and_taken(tokenizer: Tokenizer) -> None:
    with serve(tokenizer, ApiSettings(operations_key="secret-key")) as served:
        refused = run("--url", served.url, "--once")
        assert refused.exit_code == 1
        assert "for operators" in refused.output
        assert "Traceback" not in refused.output
        taken = run("--url", served.url, "--once", "--operations-key", "secret-key")
        assert taken.exit_code == 0, taken.output
        # The status of this server says less of its worker: what is not known is a dash.
        assert lines_of(taken.output, "decode")[0].split()[-2:] == ["25", "%"]


def test_no_server_is_one_plain_line() -> None:
    result = run("--url", "http://127.0.0.1:9", "--once")
    assert result.exit_code == 1
    assert result.output.startswith("Error: no server answers at")


def test_in_a_terminal_it_goes_on_until_q(cluster: tuple[Served, Fleet]) -> None:
    served, fleet = cluster
    here, there = pty.openpty()
    command = [sys.executable, "-m", "kvrelay.cluster.cli.main", "top", "--url", served.url]
    environment = {**os.environ, "COLUMNS": "100", "LINES": "24", "TERM": "xterm"}
    before = fleet.num_calls
    process = subprocess.Popen(
        [*command, "--interval-s", "0.5"], stdin=there, stdout=there, stderr=there, env=environment
    )
    os.close(there)
    try:
        shown = read_until(here, b"more workers")
        assert b"decode-0" in shown
        os.write(here, b"s")
        read_until(here, b"more workers")
        while fleet.num_calls < before + 3:
            read_until(here, b"more workers")
        os.write(here, b"q")
        read_until(here, None)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(here)


def read_until(file: int, wanted: bytes | None, timeout_s: float = 30.0) -> bytes:
    """None: until the other end is closed."""
    deadline = time.monotonic() + timeout_s
    read = b""
    while wanted is None or wanted not in read:
        assert select.select([file], [], [], deadline - time.monotonic())[0], read
        try:
            read += os.read(file, 65536)
        except OSError:  # how a terminal ends
            assert wanted is None, read
            break
    return read
