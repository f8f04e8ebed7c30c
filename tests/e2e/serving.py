"""What tests of a running server ask it, and wait for."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.kvtransfer.store.arena import SHARED_MEMORY
from kvrelay.kvtransfer.store.folder import BLOCKS

MODEL = "smollm2-135m"
KVRELAY = [sys.executable, "-m", "kvrelay.cluster.cli.main"]
STORY = "Tell me a long story about a lighthouse keeper and a whale."
Status = dict[str, Any]


def status(url: str, key: str = "") -> Status:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer: Status = httpx.get(f"{url}/status", headers=headers, timeout=10, auth=OwnKey()).json()
    return answer


def worker_of(state: Status, name: str) -> Status:
    (worker,) = [each for each in state["workers"] if each["worker"] == name]
    return worker


def arena_of(pid: int) -> Path:
    """The file that a worker has its host memory in."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    files = {line.split()[-1] for line in maps.splitlines() if line.endswith(f"/{BLOCKS}")}
    (path,) = (path for path in files if path.startswith(str(SHARED_MEMORY)))
    return Path(path)


def samples(metrics: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Labels and value of each sample of that name; fails where there is none, as after a change
    of the name."""
    families = text_string_to_metric_families(metrics)
    found = [(s.labels, s.value) for family in families for s in family.samples if s.name == name]
    assert found, f"no sample of {name}"
    return found


def is_idle(state: Status) -> bool:
    counts = ("num_used_blocks", "num_running", "num_waiting", "num_handoffs")
    busy = sum(worker[name] for worker in state["workers"] for name in counts)
    return busy + state["num_live"] + state["num_queued"] == 0


def all_up(state: Status) -> bool:
    return all(worker["state"] == "up" for worker in state["workers"])


def slack() -> float:
    """How many times as long what needs processors may take here now: others wait for them too."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def wait_for(url: str, wanted: Callable[[Status], Any], timeout_s: float, why: str) -> None:
    """`timeout_s`: where nothing else runs."""
    started = time.monotonic()
    while not wanted(state := status(url)):
        is_late = time.monotonic() - started > timeout_s * slack()
        assert not is_late, f"{why}: {json.dumps(state)[:2000]}"
        time.sleep(0.05)


def wait_until(holds: Callable[[], Any], timeout_s: float = 60.0, why: str = "") -> None:
    """`timeout_s`: where nothing else runs."""
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started <= timeout_s * slack(), why
        time.sleep(0.1)


def urls_of(served: Served) -> list[str]:
    """Lists the addresses of all routers."""
    others = re.findall(r"router-[1-9]: (\S+)/v1", "".join(served.lines))
    return [served.url, *others]


def ask(url: str, client: Any = httpx) -> str:
    """What it says about the capital of France: Paris."""
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": MODEL, "messages": [question], "max_tokens": 30, "temperature": 0}
    answer = client.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def begin_batch(client: openai.OpenAI, bodies: list[Any]) -> str:
    """Returns its name. Rows are r0, r1 and so on."""
    rows = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    text = "\n".join(map(json.dumps, rows))
    file = client.files.create(file=("rows.jsonl", text.encode()), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    ).id


def texts_of_batch(client: openai.OpenAI, name: str) -> dict[str, str]:
    """What each row was answered. Fails where one is there twice, or not."""
    batch = client.batches.retrieve(name)
    assert (batch.status, batch.error_file_id) == ("completed", None), batch
    found = client.files.content(batch.output_file_id or "").text.splitlines()
    answers = {row["custom_id"]: row["response"]["body"] for row in map(json.loads, found)}
    assert batch.request_counts is not None
    assert len(found) == len(answers) == batch.request_counts.total
    return {row: str(body["choices"][0]["message"]["content"]) for row, body in answers.items()}


def stream(url: str, options: dict[str, Any], on_chunk: Any = None) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    text = ""
    for number, chunk in enumerate(
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": STORY}], stream=True, **options
        )
    ):
        text += chunk.choices[0].delta.content or ""
        if on_chunk is not None:
            on_chunk(number)
    return text
