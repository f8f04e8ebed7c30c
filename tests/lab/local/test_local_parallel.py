"""Workers of several processes in a cluster: their KV is like any other's."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.config import Config, EngineSection, ModelSection
from cluster.worker.build import open_runner, prepare_model
from cluster.worker.kv_plan import SPARE_BYTES, BuildError, plan_kv
from engine.model.checkpoint.families import read_config
from engine.model.errors import ModelError
from engine.model.parallel.runner import RanksLost
from engine.request import SamplingParams
from engine.stats import Role
from lab.local import LocalCluster
from router.config import RouterConfig
from tests.cluster.worker.test_build import spec_of
from tests.engine.model.tiny import make_checkpoint, tokens_of

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
HAND_OVER = RouterConfig(policy="round_robin")  # every prompt, however short
PROMPTS = [tokens_of(length, seed=length) for length in (3, 40, 150)]
ENGINE = EngineSection(num_blocks=64)
PARALLEL = EngineSection(num_blocks=64, tensor_parallel_size=2)


def followers() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if "engine.model.parallel.follower" in child.cmdline()]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_checkpoint("qwen2", path)
    return path


def test_two_ranks_go_on_with_the_kv_of_one_and_the_worker_ends_with_its_ranks(
    model_dir: Path,
) -> None:
    with LocalCluster(model_dir, prefill=0, engine=ENGINE, threads=2) as cluster:
        expected = [answer.tokens for answer in cluster.generate(PROMPTS, GREEDY)]
    engines = {Role.DECODE: PARALLEL}
    with LocalCluster(
        model_dir, engine=ENGINE, engines=engines, router=HAND_OVER, threads=2, host_bytes=1 << 20
    ) as cluster:
        answers = cluster.generate(PROMPTS, GREEDY)
        again = cluster.generate(PROMPTS, GREEDY)
        cluster.wait_idle()
        totals = cluster.status().totals
        assert [answer.tokens for answer in answers] == expected
        assert [answer.tokens for answer in again] == expected
        assert (totals.handoffs, sum(totals.retries.values())) == (6, 0)

        (follower,) = followers()
        follower.kill()
        deadline = time.monotonic() + 30.0
        while "decode-0" not in cluster.host.failed:
            assert time.monotonic() < deadline, "nobody noticed"
            time.sleep(0.01)
        with pytest.raises(RanksLost, match="rank 1"):
            cluster.check()
    assert not followers()


def test_a_size_that_does_not_divide_the_model_is_refused_before_anything_starts(
    model_dir: Path,
) -> None:
    engine = EngineSection(num_blocks=8, tensor_parallel_size=4)
    config = Config(model=ModelSection(name=str(model_dir)), engine=engine)
    (model_dir / "tokenizer.json").write_text("{}")
    with pytest.raises(BuildError, match=r"tensor_parallel_size = 4 does not divide .*: 1, 2$"):
        prepare_model(config, 1, lambda _news: None)


def test_ranks_on_gpus_are_refused_where_kv_would_have_to_move(model_dir: Path) -> None:
    plan = plan_kv(read_config(model_dir), PARALLEL, "bfloat16")
    alone: dict[str, Any] = {"on_gpu": True, "device": "cuda", "engine": PARALLEL}
    for changes in ({"num_peers": 1}, {"host_bytes": 1 << 30}):
        with pytest.raises(ModelError, match=r"= 2 on GPUs serves without KV transfer: it needs"):
            open_runner(spec_of(**alone, **changes), model_dir, plan, "bfloat16", 64)


def test_each_process_of_a_worker_takes_memory(model_dir: Path) -> None:
    model = read_config(model_dir)
    one, two = (plan_kv(model, engine, "float32") for engine in (ENGINE, PARALLEL))
    table_bytes = 4 * model.vocab_size * model.hidden_size
    assert two.needed_bytes - one.needed_bytes == SPARE_BYTES + table_bytes
    assert two.kv_bytes == one.kv_bytes
