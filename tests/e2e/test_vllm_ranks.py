"""vLLM with two processes in a worker: its KV handed over to a worker of one and back, one of its
processes killed, and a session that goes on from disk where the numbers of ranks have changed.

As tests.e2e.test_vllm it needs KVRELAY_VLLM_PYTHON. In float32, since what ranks add up is rounded
in another order: with that, texts are those of one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from tests.e2e.serving import all_up, wait_for
from tests.e2e.test_vllm import PYTHON, START_S, assert_clean, client, has_on_disk
from tests.e2e.test_vllm import pytestmark as pytestmark
from tests.e2e.test_vllm_models import PROMPTS, checkpoint, process_of
from tests.support.vllm_settings import small

NUM_TOKENS, NUM_SEEDS = 24, 20
ARGUMENTS: dict[str, Any] = {"enforce_eager": True}


def serving(folder: Path, path: Path, ranks: tuple[int, int], **more: Any) -> Served:
    """`ranks`: of a worker for prompts and of one that decodes; 0: there is none."""
    prefill, decode = ranks
    settings = small(folder, START_S) | {
        "model.name": str(path),
        "model.served_name": "m",
        "engine.runs": "vllm",
        "engine.python": PYTHON,
        "engine.block_size": 32,
        # vLLM 0.32 raises on CPUs where a request with a seed has its prompt in several steps.
        "engine.max_num_batched_tokens": 16384,
        "engine.step_timeout_s": 300.0,
        "engine.arguments": ARGUMENTS | more,
        "router.policy": "round_robin" if prefill else "prefix",  # which hands every prompt over
        "cluster.prefill": min(prefill, 1),
        "cluster.decode": 1,
        "cluster.prefill_tensor_parallel_size": prefill,
        "cluster.decode_tensor_parallel_size": decode,
    }
    return Served(settings)


def tell(url: str, on_chunk: Any = lambda: None) -> list[str]:
    """Greedy texts after PROMPTS, and those of NUM_SEEDS draws, all at once."""

    def one(number: int) -> str:
        prompt, text = PROMPTS[number % len(PROMPTS)], ""
        # With a penalty the worker that decodes draws the first token too, as one pool does.
        drawn = {"temperature": 1.0, "presence_penalty": 0.5, "seed": number}
        how: dict[str, Any] = {"temperature": 0} if number < len(PROMPTS) else drawn
        for chunk in client(url).chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=NUM_TOKENS,
            stream=True,
            extra_body={"ignore_eos": True, "prompt_cache_key": prompt[:5]},
            **how,
        ):
            text += chunk.choices[0].delta.content or ""
            on_chunk()
        return text

    count = len(PROMPTS) + NUM_SEEDS
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(one, range(count)))


def ranks_of(name: str) -> list[psutil.Process]:
    """Processes of a worker's vLLM that run the model."""
    found = process_of(name).children(recursive=True)
    return [each for each in found if "Worker" in " ".join([each.name(), *each.cmdline()])]


def num_handed_over(url: str) -> int:
    workers = httpx.get(f"{url}/status", timeout=30, auth=OwnKey()).json()["workers"]
    return sum(worker["counters"].get("handoffs_done", 0) for worker in workers)


def kill_one(name: str) -> None:
    """A process of a worker's ranks."""
    rank = ranks_of(name)[-1]
    rank.kill()
    psutil.wait_procs([rank], timeout=60)
    assert not rank.is_running()


def is_back(name: str, status: dict[str, Any]) -> bool:
    restarts = {worker["worker"]: worker["restarts"] for worker in status["workers"]}
    return restarts[name] > 0 and all_up(status)


def resumed(url: str) -> Any:
    """The first of PROMPTS again, in its session."""
    chat: Any = client(url).chat.completions
    return chat.create(
        model="m",
        messages=[{"role": "user", "content": PROMPTS[0]}],
        temperature=0,
        max_tokens=NUM_TOKENS,
        extra_body={"ignore_eos": True, "prompt_cache_key": PROMPTS[0][:5]},
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("checkpoint"), "granite")


@pytest.fixture(scope="module")
def expected(path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one worker of one process says."""
    with serving(tmp_path_factory.mktemp("alone"), path, (0, 1)) as served:
        wait_for(served.url, all_up, START_S, "not up")
        texts = tell(served.url)
    assert len({*texts}) == len(texts)
    return texts


@pytest.mark.parametrize(
    ("ranks", "num_stages", "later", "killed"),
    [((1, 2), 1, 1, "decode"), ((2, 1), 1, 2, "prefill"), ((1, 1), 2, 1, "decode")],
)
def test_ranks_and_stages_hand_over_die_and_find_kv_of_another_number_of_them(
    tmp_path: Path,
    path: Path,
    expected: list[str],
    ranks: tuple[int, int],
    num_stages: int,
    later: int,
    killed: str,
) -> None:
    with serving(tmp_path, path, ranks, pipeline_parallel_size=num_stages) as served:
        wait_for(served.url, all_up, START_S, "not up")
        processes = [len(ranks_of(f"{role}-0")) for role in ("prefill", "decode")]
        assert num_stages == 1 or processes == [num_stages, num_stages]
        assert tell(served.url) == expected
        assert num_handed_over(served.url) >= len(expected)
        counted = [0]

        def kill_in_the_middle() -> None:
            counted[0] += 1
            if counted[0] == 8 * len(expected):
                kill_one(f"{killed}-0")

        assert tell(served.url, kill_in_the_middle) == expected
        wait_for(served.url, partial(is_back, f"{killed}-0"), START_S, "not up again")
        assert_clean(served.url)
        wait_for(served.url, partial(has_on_disk, len(PROMPTS) * 9), 60.0, "not on disk")
    with serving(tmp_path, path, (0, later)) as served:
        wait_for(served.url, all_up, START_S, "not up")
        again = resumed(served.url)
        assert again.choices[0].message.content == expected[0]
        assert again.usage.prompt_tokens_details.cached_tokens >= 9 * 32
        assert_clean(served.url)
