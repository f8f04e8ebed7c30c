"""A model that was trained on in its folder, one byte of one tensor: nothing of what the one before
has left is used, on either engine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cluster.roles import ROLES
from kvrelay.decode_worker.vllm.build import build
from kvrelay.engine import cache_dir
from kvrelay.engine.identity import OWN, VLLM
from tests.local.test_local import model_dir as model_dir
from tests.local.test_local import small
from tests.local.test_local_outlive import name as name
from tests.local.test_local_tiers import MIB, load_all, settle
from tests.support import vllm_stand_in
from tests.support.identity_tries import change_byte, run, tensor_bytes
from tests.support.local import LocalCluster
from tests.worker.test_vllm_worker import GREEDY, PROMPTS
from tests.worker.test_vllm_worker import VLLM as VLLM_ENGINE

PROMPT = PROMPTS[5]
SERVED: dict[str, Any] = {
    "prefill": 0,
    "host_bytes": 4 * MIB,
    "disk_bytes": 16 * MIB,
    "disk_after_s": 0.0,
}


@pytest.fixture
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == OWN:
        return small(num_blocks=64)
    vllm_stand_in.install(monkeypatch)

    def built(spec: Any, options: Any) -> Any:
        vllm_stand_in.EventPublisherFactory.registered.clear()
        return build(spec, ROLES, options.make_agent)

    monkeypatch.setattr("tests.support.local.build_worker", built)
    return VLLM_ENGINE


@pytest.mark.parametrize("engine", [OWN, VLLM], indirect=True)
def test_a_model_that_was_trained_on_in_its_folder_finds_nothing_of_before(
    model_dir: Path, tmp_path: Path, engine: Any, name: str
) -> None:
    """vLLM's was named by the heads of its files: it read all of it, and answered wrongly."""
    model, copied = tmp_path / "model", tmp_path / "elsewhere" / "model"
    shutil.copytree(model_dir, model)
    options = {**SERVED, "engine": engine, "name": name, "disk_path": str(tmp_path / "disk")}

    def served(path: Path) -> dict[str, int]:
        """Where a worker that starts with `path`, and leaves its memory, found the prompt."""
        with LocalCluster(path, **options) as cluster:
            load_all(cluster)
            [answer] = cluster.generate([PROMPT], GREEDY)
            settle(cluster)
            for built in cluster.workers.values():
                assert built.leave_kv is not None
                built.leave_kv()
        return {where: count for where, count in answer.cached_by_source.items() if count}

    assert served(model) == {}
    left = sum(served(model).values())
    assert left >= len(PROMPT) - 1 - engine.block_size, "all full blocks, by the same model"
    shutil.copytree(model, copied)
    assert sum(served(copied).values()) == left, "and by a copy of it, with other times"
    file = model / "model.safetensors"
    change_byte(file, tensor_bytes(file)[-5])
    assert served(model) == {}
    assert served(copied), "on disk there is room for both"


@pytest.mark.parametrize("runs", [OWN, VLLM])
@pytest.mark.parametrize("tries", [3, pytest.param(1000, marks=pytest.mark.long)])
def test_no_tier_gives_kv_of_another_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: str, tries: int
) -> None:
    monkeypatch.setattr(cache_dir, "LEAST_KEPT_BYTES", 0)
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    found = run(tmp_path, runs, tries, lambda _: None)
    assert not +found, found
