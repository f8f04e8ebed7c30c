"""Adapters at a worker of vLLM: loaded before the request that needs one, in the names of its KV,
and refused in words."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kvrelay.cluster.config import build_config
from kvrelay.cluster.processes.adapter_bases import adapter_base
from kvrelay.cluster.roles import ROLES
from kvrelay.decode_worker.vllm.build import build
from kvrelay.engine.adapter_copies import kept_folder, register
from kvrelay.engine.needs import Need
from kvrelay.engine.request import Refusal
from kvrelay.engine.support import Trait, engine_traits
from tests.local.test_local import model_dir as model_dir
from tests.support import vllm_stand_in
from tests.support.adapters import write_adapter
from tests.support.local import LocalCluster
from tests.support.vllm_stand_in import next_token
from tests.worker.test_vllm_worker import GREEDY, HANDS_OVER, PROMPTS, VLLM, assert_clean

FEW = replace(GREEDY, max_tokens=8)
WITH_LORA = structs.replace(VLLM, arguments={"enable_lora": True})


def of_adapter(prompt: list[int], need: Need | None, count: int = 8) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, "" if need is None else need.digest.hex()))
    return tokens[len(prompt) :]


@pytest.fixture
def adapters(tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[Need]:
    vllm_stand_in.install(monkeypatch)
    monkeypatch.setattr("kvrelay.engine.support.LORA_ON_CPUS", True)  # the stand-in does it right

    def built(spec: Any, options: Any) -> Any:
        vllm_stand_in.EventPublisherFactory.registered.clear()
        return build(spec, ROLES, options.make_agent)

    monkeypatch.setattr("tests.support.local.build_worker", built)
    folders = [write_adapter(tmp_path / f"a{i}", model_dir, seed=i, rank=4) for i in range(2)]
    return [register(folder) for folder in folders]


@pytest.mark.parametrize("prefill", [0, 1])
def test_an_adapter_is_in_tokens_and_in_names_of_kv(
    model_dir: Path, adapters: list[Need], prefill: int
) -> None:
    cluster = LocalCluster(
        model_dir, prefill=prefill, decode=1, engine=WITH_LORA, router=HANDS_OVER
    )
    with cluster:
        for _ in range(2):  # all of their KV is there then
            futures = [
                (prompt, need, cluster.submit(prompt, FEW, adapter=need))
                for prompt in PROMPTS[1:5]
                for need in (None, *adapters)
            ]
            for prompt, need, future in futures:
                assert future.result(60.0).tokens == of_adapter(prompt, need)
        again = cluster.submit(PROMPTS[4], FEW, adapter=adapters[0]).result(60.0)
        assert again.num_cached_tokens == len(PROMPTS[4]) // 32 * 32
        for engine in vllm_stand_in.LLMEngine.made:
            assert len(engine.loras) == 2, "each is loaded once"
        assert_clean(cluster)


def test_what_was_registered_is_loaded_though_its_folder_has_changed(
    model_dir: Path, adapters: list[Need], tmp_path: Path
) -> None:
    with LocalCluster(model_dir, prefill=0, decode=1, engine=WITH_LORA) as cluster:
        shutil.rmtree(adapters[0].source)
        answer = cluster.submit(PROMPTS[1], FEW, adapter=adapters[0]).result(60.0)
        assert answer.failed is None, answer.failed
        assert answer.tokens == of_adapter(PROMPTS[1], adapters[0])
        shutil.rmtree(adapters[1].source)
        shutil.rmtree(kept_folder(adapters[1]))
        failed = cluster.submit(PROMPTS[1], FEW, adapter=adapters[1]).result(60.0).failed
        assert failed is not None
        assert failed.reason is Refusal.NEED
        assert "adapter_config.json cannot be read" in failed.detail
        assert_clean(cluster)


def test_workers_without_lora_say_what_would_be_right(
    model_dir: Path, adapters: list[Need]
) -> None:
    with LocalCluster(model_dir, prefill=0, decode=1, engine=VLLM) as cluster:
        failed = cluster.submit(PROMPTS[1], FEW, adapter=adapters[0]).result(60.0).failed
        assert failed is not None
        assert "compute no adapters" in failed.detail


def test_on_cpus_none_is_served_as_others_would_get_it() -> None:
    assert Trait.NO_LORA not in engine_traits(WITH_LORA, on_gpu=True)
    assert Trait.NO_LORA in engine_traits(WITH_LORA, on_gpu=False)
    assert Trait.NO_LORA in engine_traits(VLLM, on_gpu=True)


@pytest.mark.parametrize(
    ("arguments", "rank", "said"),
    [
        ({}, 4, "engine.arguments.enable_lora"),
        ({"enable_lora": True}, 17, "it has rank 17, and engine.arguments has max_lora_rank = 16"),
        ({"enable_lora": True, "max_lora_rank": 32}, 17, ""),
    ],
)
def test_an_adapter_is_checked_when_it_is_registered(
    model_dir: Path, tmp_path: Path, arguments: dict[str, object], rank: int, said: str
) -> None:
    folder = write_adapter(tmp_path / "a", model_dir, rank=4, ranks={"q_proj": rank})
    engine = {"runs": "vllm", "python": "p", "block_size": 32, "arguments": arguments}
    config = build_config({"engine": engine, "cluster": {"prefill": 0}}, "")
    base = adapter_base(config, model_dir)
    why = base.refuses() or base.why_not(folder)
    assert (said in why) if said else not why
