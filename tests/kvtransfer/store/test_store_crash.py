"""A process that writes a disk store is killed at random moments; the next one must be right.
`KVRELAY_CRASHES=50` kills more often."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kvtransfer.store.stores import open_store, serve

ROUNDS = int(os.environ.get("KVRELAY_CRASHES", "12"))
PATIENCE_S = 60.0  # the most that the writer may take for the lines that are waited for
MAX_LINES = 120

Listed = dict[int, bytes]


class Expected:
    """What the index may list, from what the writer said."""

    def __init__(self) -> None:
        self.listed: Listed = {}
        self.or_else: Listed = {}  # if the transaction that was on its way came through
        self.num_puts = 0

    def follow(self, said: str) -> None:
        blocks: Listed = {}
        for line in said.splitlines():
            verb, *words = line.split()
            if verb == "begin":
                pairs = (word.split("=") for word in words)
                blocks = {int(slot): bytes.fromhex(name) for slot, name in pairs}
                kept = self.listed.keys() - blocks.keys()
                self.or_else = {slot: self.listed[slot] for slot in kept}
            else:
                self.listed = self.or_else
                self.or_else = {**self.listed, **blocks} if verb == "removed" else self.listed
                self.num_puts += verb == "put"

    def compare(self, found: Listed) -> None:
        assert found in (self.listed, self.or_else)
        self.listed = self.or_else = found


def run_and_kill(folder: Path, output: Path, rng: random.Random, round_number: int) -> str:
    """What the writer said before it was killed. Each fourth one is killed whatever it is at: it
    may be starting, or opening the store."""
    with output.open("wb") as file:
        writer = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.kvtransfer.store.store_writer",
                str(folder),
                str(round_number),
            ],
            stdout=file,
        )
    try:
        if round_number % 4:
            num_lines = rng.randint(1, MAX_LINES)
            deadline = time.monotonic() + PATIENCE_S
            while output.read_bytes().count(b"\n") < num_lines:
                assert writer.poll() is None, "the writer ended by itself"
                assert time.monotonic() < deadline, "the writer does not get on"
                time.sleep(rng.uniform(0.0, 0.003))
        else:
            time.sleep(rng.uniform(0.0, 0.4))
    finally:
        writer.kill()
        writer.wait(30)
    assert writer.returncode == -signal.SIGKILL, "the writer ended by itself"
    return output.read_text()


@pytest.mark.slow
def test_a_store_survives_kill_9_at_any_moment(tmp_path: Path) -> None:
    rng = random.Random(9)
    expected = Expected()
    for round_number in range(ROUNDS):
        said = run_and_kill(tmp_path / "store", tmp_path / "said", rng, round_number)
        expected.follow(said)
        store = open_store(tmp_path / "store")
        try:
            # Only a loss of power can make written bytes go missing, so nothing is refused.
            good, refused = serve(store)
            assert not refused
            assert store.warnings == []
            expected.compare({found.slot: found.block_hash for found in store.records})
            assert good == expected.listed.keys()
        finally:
            store.close()
    assert expected.num_puts > 0
    assert expected.listed, "nothing was written, so nothing was tested"
