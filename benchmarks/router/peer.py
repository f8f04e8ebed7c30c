"""The peer of `routing`: fills a `RadixTree` of ai-dynamo-runtime and asks it.

Runs in an interpreter that has that package, and uses nothing else of KVRelay than
`benchmarks.router.load`. Reads one JSON object from its standard input; writes one a line: how
many blocks it has, and at last what it measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any

from benchmarks.router.load import HOT_BLOCKS, KINDS, PROMPT_BLOCKS, RoutingLoad, Session

REPORT_EVERY_S = 0.5


def hashes(names: bytes) -> list[int]:
    """Its hashes have 64 bits: the first half of each name."""
    return memoryview(names).cast("Q")[::2].tolist()


def resident_bytes() -> int:
    """Returns this process's; 0 where the system does not say so in a file."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class Peer:
    """A tree, and the number of events it was given."""

    def __init__(self) -> None:
        from dynamo._core import RadixTree

        self.tree = RadixTree()
        self.num_events = 0

    def store(self, workers: tuple[int, ...], names: bytes) -> None:
        blocks = [{"block_hash": h, "tokens_hash": h} for h in hashes(names)]
        for worker in workers:
            self.num_events += 1
            stored = {"stored": {"parent_hash": None, "blocks": blocks}}
            event = {"event_id": self.num_events, "data": stored}
            self.tree.apply_event(worker, json.dumps(event).encode())

    def fill(self, load: RoutingLoad, limit_s: float) -> tuple[list[Session], int]:
        """The sessions that were stored within the time, and the number of blocks."""
        ends_at = time.monotonic() + limit_s
        self.store(tuple(range(load.num_workers)), load.hot)
        known: list[Session] = []
        total, said_at = HOT_BLOCKS, 0.0
        for session in load.sessions():
            now = time.monotonic()
            if now >= ends_at:
                break
            if now - said_at >= REPORT_EVERY_S:
                said_at = now
                say({"blocks": total})
            self.store(session.holders, load.names(session))
            known.append(session)
            total += session.num_blocks
        self.tree.find_matches([0])  # its thread has taken every event in
        return known, total


def measure(tree: Any, load: RoutingLoad, known: list[Session], count: int) -> dict[str, Any]:
    """Seconds of each lookup, by kind and number of blocks; of the call, and with its scores."""
    found: dict[str, Any] = {}
    for num_blocks in PROMPT_BLOCKS:
        for kind in KINDS:
            calls, whole = [], []
            for names in load.prompts(kind, num_blocks, count, known):
                sequence = hashes(names)
                began = time.perf_counter()
                matches = tree.find_matches(sequence)
                called = time.perf_counter()
                matches.scores  # noqa: B018 - a dictionary is made of it
                calls.append(called - began)
                whole.append(time.perf_counter() - began)
            found[f"{kind} {num_blocks}"] = {"call_s": calls, "with_scores_s": whole}
    return found


def say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    load = RoutingLoad(asked["workers"], asked["blocks"], asked["seed"])
    peer = Peer()
    before = resident_bytes()
    began = time.perf_counter()
    known, total = peer.fill(load, asked["limit_s"])
    build_s = time.perf_counter() - began
    used = resident_bytes() - before
    say({"blocks": total})
    say(
        {
            "version": version("ai-dynamo-runtime"),
            "num_blocks": total,
            "build_s": build_s,
            "bytes_per_block": used / total,
            "lookups": measure(peer.tree, load, known, asked["lookups"]),
        }
    )


if __name__ == "__main__":
    main()
