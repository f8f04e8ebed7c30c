"""Workers whose ranks are on two hosts (network namespaces): the same tokens, and a host that goes
takes its workers with it until it is back."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.model.parallel.link import SILENT_S
from kvrelay.worker.processes import RANKS_MODULE
from tests.chaos.hosts_file import kvrelay, write_hosts_file
from tests.chaos.network import Hosts, what_is_missing
from tests.e2e.parallel.test_role_sizes import NUM_BLOCKS, complete, of_one_rank_each
from tests.e2e.prompts import prompts
from tests.e2e.serving import status, wait_until
from tests.support.random_model import make_model

pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.skipif(what_is_missing() != "", reason=f"needs {what_is_missing()}"),
]

SETTINGS = """
[model]
name = "{model}"
dtype = "float32"
[engine]
num_blocks = {blocks}
tensor_parallel_size = 2
[cluster]
ranks_per_machine = 1
[router]
policy = "round_robin"
[tiers]
host_gib = 0
[sessions]
state_dir = "{folder}/state"
[api]
operations_key = "{key}"
"""
KEY = "of-the-two-hosts"


def rank_hosts() -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if RANKS_MODULE in (process.info["cmdline"] or ())]


def workers(url: str) -> dict[str, dict[str, Any]]:
    return {worker["worker"]: worker for worker in status(url, KEY)["workers"]}


def is_restarted(url: str) -> bool:
    """Both are up, one of them under a new epoch."""
    found = workers(url).values()
    return {w["state"] for w in found} == {"up"} and sum(w["epoch"] for w in found) > 2


def test_ranks_on_two_hosts_say_what_one_process_says(tmp_path: Path) -> None:
    model = make_model(tmp_path, initializer_range=0.3)
    asked = [prompt for prompt in prompts(Tokenizer(model)) if len(prompt) < 400][::3]
    expected = of_one_rank_each(model, asked)
    folder = Path("/tmp/kvrelay-ranks")
    settings = SETTINGS.format(folder=folder, model=model, blocks=NUM_BLOCKS, key=KEY)
    with Hosts(2) as hosts:
        path = write_hosts_file(folder, hosts, settings)
        kvrelay("up", path)
        url = f"http://{hosts.address(0)}:8000"
        name = status(url, KEY)["model"]
        for worker in workers(url).values():
            assert worker["tensor_parallel_size"] == 2
            assert len({worker["machine"], *worker["further_machines"]}) == 2
        assert len(rank_hosts()) == 2
        assert [complete(url, name, prompt) for prompt in asked] == expected
        totals = status(url, KEY)["totals"]
        assert (totals["handoffs"], sum(totals["retries"].values())) == (len(asked), 0)

        # A rank dies: its worker does, on both hosts, and comes back on both.
        rank_hosts()[0].children()[0].kill()
        wait_until(lambda: is_restarted(url), 90.0)
        assert complete(url, name, asked[0]) == expected[0]
        assert len(rank_hosts()) == 2

        # The hosts do not reach each other for longer than either waits for the other.
        hosts.cut(1, is_cut=True)
        time.sleep(SILENT_S + 3.0)
        hosts.cut(1, is_cut=False)
        answers: list[list[int]] = []

        def is_answered() -> bool:
            with contextlib.suppress(httpx.HTTPError, AssertionError):
                answers.append(complete(url, name, asked[1]))
            return bool(answers)

        wait_until(is_answered, 120.0)
        assert answers == [expected[1]]
        kvrelay("down", path)
        assert rank_hosts() == []
    shutil.rmtree(folder, ignore_errors=True)
