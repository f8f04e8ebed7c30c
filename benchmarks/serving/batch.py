"""What a batch costs the API's process in memory, and whether each row is answered once.

    python -m benchmarks.serving.batch [--rows 10000] [--upload-mib 200] [--set SECTION.KEY=VALUE]

Serves the default model, uploads a file of `--upload-mib` and deletes it, then runs a batch of
short chats by the `openai` package. Prints the resident memory of the router's process, which
serves the API: before each, the most in it, and after.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Self

import openai
import psutil

from benchmarks.serving.served import Served

MODEL = "smollm2-135m"
ENDPOINT: Any = "/v1/chat/completions"
LOOK_S = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--upload-mib", type=int, default=200)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    args = parser.parse_args()
    settings = {name: json.loads(value) for name, _, value in (s.partition("=") for s in args.set)}
    with tempfile.TemporaryDirectory() as folder:
        settings.setdefault("sessions.state_dir", folder)
        with Served(settings) as served:
            client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=600)
            process = _router_of(served)
            with Resident(process, f"upload of {args.upload_mib} MiB"):
                file = Path(folder) / "large.jsonl"
                with file.open("wb") as lines:
                    for _ in range(args.upload_mib * 1024):
                        lines.write(b"x" * 1023 + b"\n")
                kept = client.files.create(file=file, purpose="batch")
                client.files.delete(kept.id)
            with Resident(process, f"batch of {args.rows} rows"):
                _run(client, args.rows)


def _router_of(served: Served) -> psutil.Process:
    children = psutil.Process(served.process.pid).children(recursive=True)
    (found,) = (each for each in children if "cluster.processes.child router" in _line(each))
    return found


def _line(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


class Resident:
    """Prints the memory of a process before and after what is done within, and the most in it."""

    def __init__(self, process: psutil.Process, what: str) -> None:
        self._process, self._what = process, what
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._before = self._most = self._mib()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        after = self._mib()
        print(
            f"{self._what}: {self._before:.0f} MiB before, {self._most:.0f} at most "
            f"(+{self._most - self._before:.0f}), {after:.0f} after"
        )

    def _mib(self) -> float:
        return float(self._process.memory_info().rss) / 2**20

    def _look(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self._most = max(self._most, self._mib())


def _run(client: openai.OpenAI, num_rows: int) -> None:
    def row(number: int) -> str:
        chat = [{"role": "user", "content": f"{number} is"}]
        body = {"model": MODEL, "messages": chat, "max_tokens": 1 + number % 2, "temperature": 0}
        return json.dumps(
            {"custom_id": f"r{number}", "method": "POST", "url": ENDPOINT, "body": body}
        )

    text = "\n".join(map(row, range(num_rows))).encode()
    file = client.files.create(file=("rows.jsonl", text), purpose="batch")
    began_at = time.monotonic()
    batch = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(1.0)
        batch = client.batches.retrieve(batch.id)
    took_s = time.monotonic() - began_at
    found: Counter[str] = Counter()
    for name in filter(None, (batch.output_file_id, batch.error_file_id)):
        lines = client.files.content(name).text.splitlines()
        found.update(json.loads(line)["custom_id"] for line in lines)
    once = found == Counter(f"r{number}" for number in range(num_rows))
    print(f"{batch.status} in {took_s:.0f} s: {batch.request_counts}; each id once: {once}")


if __name__ == "__main__":
    main()
