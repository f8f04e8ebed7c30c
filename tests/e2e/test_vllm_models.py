"""Models that vLLM runs, whatever our own code can read of them: chats, prompts computed by one
worker for another, a kill, and a session that goes on from disk.

As tests.e2e.test_vllm it needs KVRELAY_VLLM_PYTHON; the checkpoints are random ones, which that
environment's transformers writes."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.checkpoint.resolve import resolve_model
from kvrelay.engine.model.errors import ModelError
from tests.e2e.serving import all_up, is_idle, wait_for
from tests.e2e.test_vllm import PYTHON, START_S, assert_clean, client, has_on_disk
from tests.e2e.test_vllm import pytestmark as pytestmark
from tests.support import random_checkpoint
from tests.support.vllm_settings import small

# Some 12 blocks each, after 2 that all have.
PROMPTS = [f"{word} went by the sea. " * 60 for word in ("Anna", "Boris", "Clara", "Dora")]
NUM_TOKENS = 48


def checkpoint(folder: Path, kind: str) -> Path:
    source = resolve_model("smollm2-135m", progress=lambda _: None)
    words = [PYTHON, random_checkpoint.__file__, kind, str(source), str(folder / kind)]
    subprocess.run(words, check=True, capture_output=True, timeout=600)
    return folder / kind


def serving(folder: Path, path: Path, prefill: int, policy: str) -> Served:
    settings = small(folder, START_S) | {
        "model.name": str(path),
        "model.served_name": "m",
        "engine.runs": "vllm",
        "engine.python": PYTHON,
        "engine.block_size": 32,
        "router.policy": policy,
        "cluster.prefill": prefill,
        "cluster.decode": 1,
    }
    return Served(settings | {"engine.arguments": {"enforce_eager": True}})


def tell(url: str, on_chunk: Any = lambda: None) -> list[str]:
    """Greedy texts after each of PROMPTS, all at once."""

    def one(prompt: str) -> str:
        text = ""
        for chunk in client(url).chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=NUM_TOKENS,
            stream=True,
            extra_body={"ignore_eos": True, "prompt_cache_key": prompt[:5]},
        ):
            text += chunk.choices[0].delta.content or ""
            on_chunk()
        return text

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(one, PROMPTS))


def process_of(name: str) -> psutil.Process:
    [found] = [
        process
        for process in psutil.process_iter(["cmdline"])
        if (process.info["cmdline"] or [""])[0] == PYTHON
        and any(f"/{name}/" in word for word in process.info["cmdline"])
    ]
    return found


@pytest.mark.parametrize(
    ("kind", "is_ours"),
    [("granite", False), ("olmo2", False), ("qwen3_moe", True), ("gemma3_text", True)],
)
def test_a_model_that_vllm_runs_is_handed_over_taken_over_and_resumed(
    tmp_path: Path, kind: str, is_ours: bool
) -> None:
    path = checkpoint(tmp_path, kind)
    if not is_ours:
        with pytest.raises(ModelError, match="is not supported"):
            read_config(path)
    num_blocks = 0
    with serving(tmp_path, path, 1, "round_robin") as served:  # which hands every prompt over
        wait_for(served.url, all_up, START_S, "not up")
        expected = tell(served.url)
        assert len({*expected}) == len(PROMPTS)
        workers = httpx.get(f"{served.url}/status", timeout=30, auth=OwnKey()).json()["workers"]
        done = sum(worker["counters"].get("handoffs_done", 0) for worker in workers)
        assert done >= len(PROMPTS), workers
        counted = [0]
        decode = process_of("decode-0")

        def kill_in_the_middle() -> None:
            counted[0] += 1
            if counted[0] == 12 * len(PROMPTS):
                decode.kill()

        assert tell(served.url, kill_in_the_middle) == expected
        wait_for(served.url, all_up, START_S, "not up again")
        assert_clean(served.url)
        num_blocks = len(PROMPTS) * 9
        wait_for(served.url, partial(has_on_disk, num_blocks), 60.0, "not on disk")
    with serving(tmp_path, path, 0, "prefix") as served:
        wait_for(served.url, all_up, START_S, "not up")
        chat: Any = client(served.url).chat.completions
        again = chat.create(
            model="m",
            messages=[{"role": "user", "content": PROMPTS[0]}],
            temperature=0,
            max_tokens=NUM_TOKENS,
            extra_body={"ignore_eos": True, "prompt_cache_key": PROMPTS[0][:5]},
        )
        assert again.choices[0].message.content == expected[0]
        assert again.usage.prompt_tokens_details.cached_tokens >= 9 * 32
        assert tell(served.url) == expected  # by one pool
        wait_for(served.url, is_idle, 60.0, "not idle")
        assert_clean(served.url)
