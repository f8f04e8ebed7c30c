"""A real cluster whose workers have another number of ranks for each role: the same tokens."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.serving.served import Served
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.engine.config import EngineSection
from kvrelay.engine.request import SamplingParams
from kvrelay.router.config import RouterConfig
from tests.e2e.prompts import prompts
from tests.e2e.serving import status, wait_until
from tests.e2e.test_survival import was_forked
from tests.support.local import LocalCluster
from tests.support.random_model import make_model

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(600)]

MAX_TOKENS = 12
NUM_BLOCKS = 256


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads and two KV heads: the default model's nine and three are not for two ranks."""
    return make_model(tmp_path_factory.mktemp("tiny"), initializer_range=0.3)


def of_one_rank_each(model: Path, asked: list[list[int]]) -> list[list[int]]:
    ends = tuple(Tokenizer(model).eos_token_ids)
    engine, router = EngineSection(num_blocks=NUM_BLOCKS), RouterConfig(policy="round_robin")
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, stop_token_ids=ends)
    with LocalCluster(model, engine=engine, router=router) as cluster:
        return [answer.tokens for answer in cluster.generate(asked, sampling)]


def complete(url: str, model: str, prompt: list[int]) -> list[int]:
    body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    body["return_token_ids"] = True
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def stack_of(pid: int) -> str:
    """Where it begins, which is elsewhere in every process that was not forked from the same one:
    field 28 of proc_pid_stat(5), counted after the name, which is in parentheses."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[25]


def sizes(url: str) -> dict[str, tuple[int, int]]:
    """Maps each worker to what the status says, and how many processes there are: forked
    ones, where it was."""
    found = {}
    for worker in status(url)["workers"]:
        children = psutil.Process(worker["pid"]).children()
        ranks = [p for p in children if "kvrelay.engine.model.parallel.follower" in p.cmdline()]
        if was_forked(worker["pid"]):
            assert {stack_of(each.pid) for each in ranks} <= {stack_of(worker["pid"])}
        found[worker["worker"]] = worker["tensor_parallel_size"], 1 + len(ranks)
    return found


@pytest.mark.parametrize("is_default", [False, True], ids=["2 ranks and 1", "1 rank and 3"])
def test_roles_of_different_sizes_say_what_one_rank_each_says(
    tiny_dir: Path, smollm2_dir: Path, is_default: bool
) -> None:
    path, prefill, decode = (smollm2_dir, 1, 3) if is_default else (tiny_dir, 2, 1)
    asked = [prompt for prompt in prompts(Tokenizer(path)) if len(prompt) < 400][::3]
    expected = of_one_rank_each(path, asked)
    assert len({tuple(tokens) for tokens in expected}) == len(asked), "they could not differ"
    settings = {
        "model.name": str(path),
        "model.dtype": "float32",
        "engine.num_blocks": NUM_BLOCKS,
        "router.policy": "round_robin",  # every prompt is handed over
        "cluster.prefill_tensor_parallel_size": prefill,
        "cluster.decode_tensor_parallel_size": decode,
    }
    with Served(settings) as served:
        wanted = {"prefill-0": (prefill, prefill), "decode-0": (decode, decode)}
        assert sizes(served.url) == wanted
        model = status(served.url)["model"]
        assert [complete(served.url, model, prompt) for prompt in asked] == expected
        totals = status(served.url)["totals"]
        assert (totals["handoffs"], sum(totals["retries"].values())) == (len(asked), 0)

        # The size is the worker's: it keeps it in another role, and when it is started again.
        path, wanted_role = f"{served.url}/workers/prefill-0/role", {"role": "decode"}
        change = httpx.post(path, json=wanted_role, auth=OwnKey())
        assert change.status_code == 200, change.text
        before = {w["worker"]: w for w in status(served.url)["workers"]}
        os.kill(before["prefill-0"]["pid"], signal.SIGKILL)

        def is_back() -> bool:
            after = {w["worker"]: w for w in status(served.url)["workers"]}["prefill-0"]
            return (after["epoch"], after["state"], after["role"]) == (2, "up", "decode")

        wait_until(is_back)
        assert sizes(served.url) == wanted
        assert complete(served.url, model, asked[0]) == expected[0]
