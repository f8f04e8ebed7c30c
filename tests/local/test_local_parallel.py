"""Workers of several processes in a cluster: their KV is like any other's."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from kvrelay.cluster.config import ClusterSection, Config, ModelSection, load_config
from kvrelay.cluster.control.control_config import ControllerConfig
from kvrelay.cluster.control.controller import Controller
from kvrelay.cluster.control.messages import Machine, MachinesChanged, StartWorker
from kvrelay.cluster.control.specs import worker_spec, workers_config
from kvrelay.cluster.prepare import PreparedModels, prepare_model
from kvrelay.engine.config import EngineSection
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.parallel.runner import RanksLost
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.stats import Role
from kvrelay.kvtransfer.agent import CopyBlocks
from kvrelay.router.config import RouterConfig
from kvrelay.worker.kv_plan import SPARE_BYTES, BuildError, plan_kv
from tests.engine.model.tiny import FAMILIES, make_checkpoint, tokens_of
from tests.local.test_local_tiers import MIB, assert_clean, counted, load_all, settle
from tests.local.test_local_tiers import num_cached as num_cached_of
from tests.support.local import LocalCluster

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
HAND_OVER = RouterConfig(policy="round_robin")  # every prompt, however short
PROMPTS = [tokens_of(length, seed=length) for length in (3, 40, 150)]
ENGINE = EngineSection(threads=2, num_blocks=64)
PARALLEL = EngineSection(threads=2, num_blocks=64, tensor_parallel_size=2)


def followers() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [
        child for child in children if "kvrelay.engine.model.parallel.follower" in child.cmdline()
    ]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_checkpoint("qwen2", path)
    return path


@pytest.mark.slow
def test_two_ranks_go_on_with_the_kv_of_one_and_the_worker_ends_with_its_ranks(
    model_dir: Path,
) -> None:
    with LocalCluster(model_dir, prefill=0, engine=ENGINE) as cluster:
        expected = [answer.tokens for answer in cluster.generate(PROMPTS, GREEDY)]
    engines = {Role.DECODE: PARALLEL}
    with LocalCluster(
        model_dir,
        engine=ENGINE,
        engines=engines,
        router=HAND_OVER,
        host_bytes=1 << 20,
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "src_size", "dst_size"),
    [
        ("qwen2", 2, 1),
        # With a latent, which all ranks have.
        pytest.param("deepseek3", 2, 2, marks=pytest.mark.long),
        pytest.param("qwen2", 4, 2, marks=pytest.mark.long),  # with copies of its 2 KV heads
        pytest.param("qwen2", 2, 4, marks=pytest.mark.long),
    ],
)
def test_workers_of_any_sizes_hand_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, src_size: int, dst_size: int
) -> None:
    kind, changes = FAMILIES["qwen2"]
    monkeypatch.setitem(FAMILIES, "qwen2", (kind, changes | {"num_attention_heads": 4}))
    make_checkpoint(family, tmp_path)
    with LocalCluster(tmp_path, prefill=0, engine=ENGINE) as cluster:
        expected = [answer.tokens for answer in cluster.generate(PROMPTS, GREEDY)]
    sizes = {Role.PREFILL: src_size, Role.DECODE: dst_size}
    engines = {role: replace(ENGINE, tensor_parallel_size=size) for role, size in sizes.items()}
    with LocalCluster(tmp_path, engines=engines, router=HAND_OVER) as cluster:
        answers = cluster.generate(PROMPTS, GREEDY)
        cluster.wait_idle()
        totals = cluster.status().totals
        assert [answer.tokens for answer in answers] == expected
        assert (totals.handoffs, sum(totals.retries.values())) == (3, 0)
        cluster.check()


@pytest.mark.slow
def test_a_configuration_gives_each_role_its_size_up_to_the_kv_that_is_handed_over(
    model_dir: Path,
) -> None:
    """Settings, the model's plan, the controller, and specs from which workers are built."""
    (model_dir / "tokenizer.json").write_text("{}")
    settings = {
        "model.name": str(model_dir),
        "model.device": "cpu",
        "engine.num_blocks": 64,
        "engine.threads": 2,
    }
    config = load_config(None, settings | {"cluster.prefill_tensor_parallel_size": 2})
    model = prepare_model(config, 2, lambda _news: None, num_prefill_here=1)
    assert (model.plan.num_ranks, model.max_model_len) == (2, 512)
    controller = Controller(
        ControllerConfig({"": workers_config("", config, model)}),
    )
    models = PreparedModels({"": model})
    machines = {"m": Machine("m", "h", 2.0)}
    effects = controller.receive(0.0, MachinesChanged(tuple(machines.values())))
    specs = {
        start.role: worker_spec(start, "c", config, models, machines, controller.workers.values())
        for start in effects
        if isinstance(start, StartWorker)
    }
    engines = {role: spec.engine for role, spec in specs.items()}
    with LocalCluster(model_dir, prefill=0, engine=ENGINE) as cluster:
        expected = [answer.tokens for answer in cluster.generate(PROMPTS, GREEDY)]
    with LocalCluster(model.path, engines=engines, router=HAND_OVER) as cluster:
        assert len(followers()) == 1
        assert [answer.tokens for answer in cluster.generate(PROMPTS, GREEDY)] == expected
        cluster.wait_idle()
        totals = cluster.status().totals
        assert (totals.handoffs, sum(totals.retries.values())) == (3, 0)


@pytest.mark.slow
@pytest.mark.parametrize("loses", [False, pytest.param(True, marks=pytest.mark.long)])
def test_kv_of_two_ranks_comes_back_from_host_memory_and_from_disk(
    model_dir: Path, tmp_path: Path, loses: bool
) -> None:
    """`loses`: one rank has lost what it had. The others forget it, and nothing is wrong."""
    small = replace(PARALLEL, num_blocks=24)
    tiers: dict[str, Any] = {"host_bytes": MIB, "disk_bytes": 16 * MIB}
    tiers |= {"disk_path": str(tmp_path), "disk_after_s": 0.0}
    prompts = [tokens_of(150, seed=seed) for seed in range(4)]
    num_cached = len(prompts) * (150 // 16 * 16)

    def ask(cluster: LocalCluster) -> list[list[int]]:
        found = []
        for prompt in prompts:
            found.append(cluster.generate([prompt], GREEDY)[0].tokens)
            settle(cluster)
        return found

    with LocalCluster(model_dir, prefill=0, engine=small, **tiers) as cluster:
        load_all(cluster)
        expected = ask(cluster)
        assert ask(cluster) == expected
        assert num_cached_of(cluster) == num_cached
        assert_clean(cluster)
    folders = {path.name for path in tmp_path.iterdir()}
    assert folders == {"rank-0-of-2", "rank-1-of-2"}
    if loses:
        shutil.rmtree(tmp_path / "rank-1-of-2")
    with LocalCluster(model_dir, prefill=0, engine=small, **tiers) as cluster:
        assert (counted(cluster, "disk.used") > 0) != loses
        load_all(cluster)
        assert ask(cluster) == expected
        assert loses or num_cached_of(cluster) == num_cached
        assert_clean(cluster)


@pytest.mark.long  # PYTHONPATH=. pytest -m long tests/local/test_local_parallel.py
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["falcon-h1-norm", "kimi-linear", "lfm2-bias", "qwen3-next"])
def test_states_of_ranks_are_handed_over_and_come_back_as_those_of_one(
    tmp_path: Path, family: str
) -> None:
    """Two ranks read from one, one from two and two from two; a state that is damaged on the way is
    noticed; what two have put on disk comes back to them."""
    path = tmp_path / "model"
    path.mkdir()
    make_checkpoint(family, path)
    prompts = [tokens_of(length, seed=length) for length in (3, 40, 200)]
    engine = EngineSection(threads=2, num_blocks=160, max_num_batched_tokens=64)
    two = replace(engine, tensor_parallel_size=2)
    with LocalCluster(path, prefill=0, engine=engine) as cluster:
        expected = [answer.tokens for answer in cluster.generate(prompts, GREEDY)]
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)
    corrupted: list[CopyBlocks] = []

    def corrupt(read: CopyBlocks, pool: NDArray[np.uint8]) -> None:
        if not corrupted:
            pool[read.dst[-1], 0] ^= 0x01  # the last group's block, which has states
            corrupted.append(read)

    for src, dst in ((engine, two), (two, engine), (two, two)):
        engines = {Role.PREFILL: src, Role.DECODE: dst}
        with LocalCluster(path, engines=engines, router=HAND_OVER, corrupt=corrupt) as cluster:
            answers = cluster.generate(prompts, GREEDY)
            cluster.wait_idle()
            totals = cluster.status().totals
            assert [answer.tokens for answer in answers] == expected
            assert (totals.handoffs, len(corrupted)) == (3, 1)
            cluster.check()
    tiers: dict[str, Any] = {"host_bytes": 4 * MIB, "disk_bytes": 16 * MIB, "disk_after_s": 0.0}
    tiers["disk_path"] = str(tmp_path / "disk")
    with LocalCluster(path, prefill=0, engine=two, **tiers) as cluster:
        assert [cluster.generate([each], GREEDY)[0].tokens for each in prompts] == expected
        settle(cluster)
        assert_clean(cluster)
    with LocalCluster(path, prefill=0, engine=two, **tiers) as cluster:
        load_all(cluster)
        turn = [*prompts[2], *expected[2][:6]]
        (answer,) = cluster.generate([turn], SamplingParams(max_tokens=6, temperature=0.0))
        assert answer.tokens == expected[2][6:]
        assert answer.num_cached_tokens > 0
        assert_clean(cluster)


def test_a_size_that_does_not_divide_the_model_is_refused_before_anything_starts(
    model_dir: Path,
) -> None:
    engine = EngineSection(num_blocks=8, tensor_parallel_size=4)
    config = Config(model=ModelSection(name=str(model_dir)), engine=engine)
    (model_dir / "tokenizer.json").write_text("{}")
    with pytest.raises(BuildError, match=r"tensor_parallel_size = 4 does not divide .*: 1, 2$"):
        prepare_model(config, 1, lambda _news: None)
    sizes = ClusterSection(prefill_tensor_parallel_size=3)
    config = Config(model=ModelSection(name=str(model_dir)), cluster=sizes)
    with pytest.raises(BuildError, match=r"^cluster.prefill_tensor_parallel_size = 3 does not div"):
        prepare_model(config, 2, lambda _news: None, num_prefill_here=1)
    one_pool = replace(config, cluster=replace(sizes, prefill=0))
    assert prepare_model(one_pool, 1, lambda _news: None).plan.num_ranks == 1


def test_pools_of_quantized_weights_have_one_size(model_dir: Path) -> None:
    """On CPUs, where the number of ranks changes their tokens."""
    (model_dir / "tokenizer.json").write_text("{}")
    settings = {"model.name": str(model_dir), "model.device": "cpu", "engine.num_blocks": 64}
    settings |= {"model.quantization": "int8", "cluster.prefill_tensor_parallel_size": 2}
    with pytest.raises(BuildError) as caught:
        prepare_model(load_config(None, settings), 0, lambda _news: None)
    assert str(caught.value) == (
        "cluster.prefill_tensor_parallel_size = 2 and engine.tensor_parallel_size = 1 differ, and"
        " with model.quantization = 'int8' the number of ranks changes tokens on CPUs: give both"
        " pools one size, or set model.quantization = 'none'"
    )
    for name, value in (("engine.tensor_parallel_size", 2), ("model.quantization", "none")):
        prepare_model(load_config(None, settings | {name: value}), 0, lambda _news: None)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_kv_of_two_ranks_is_not_met_by_one_process(
    model_dir: Path, quantization: str
) -> None:
    options: dict[str, Any] = {"quantization": quantization, "prefill": 0}
    with LocalCluster(model_dir, engine=ENGINE, **options) as cluster:
        expected = [answer.tokens for answer in cluster.generate(PROMPTS, GREEDY)]
    engines = {Role.PREFILL: PARALLEL, Role.DECODE: ENGINE}
    options["prefill"] = 1
    with LocalCluster(model_dir, engines=engines, router=HAND_OVER, **options) as cluster:
        prints = {built.node.core.fingerprint for built in cluster.workers.values()}  # type: ignore[attr-defined]
        assert len(prints) == 2
        answers = cluster.generate(PROMPTS, GREEDY)
        cluster.wait_idle()
        assert cluster.status().totals.handoffs == 0
        assert [answer.tokens for answer in answers] == expected
        cluster.check()


def test_each_process_of_a_worker_takes_memory(model_dir: Path) -> None:
    model = read_config(model_dir)
    one, two = (plan_kv(model, engine, "float32") for engine in (ENGINE, PARALLEL))
    table_bytes = 4 * model.vocab_size * model.hidden_size
    assert two.needed_bytes - one.needed_bytes == SPARE_BYTES + table_bytes
    assert two.kv_bytes == one.kv_bytes
