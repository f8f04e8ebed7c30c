"""What a worker is told to become: its own size, of one configuration for all."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.cluster.config import Config, load_config
from kvrelay.cluster.control.messages import Machine, StartWorker
from kvrelay.cluster.control.specs import worker_spec
from kvrelay.cluster.control.workers import DesiredWorker
from kvrelay.cluster.prepare import PreparedModel, PreparedModels
from kvrelay.engine.stats import Role
from kvrelay.worker.kv_plan import GIB, plan_kv
from kvrelay.worker.spec import WorkerSpec
from kvrelay.worker.transfers import worker_config
from tests.worker.test_build import MODEL

CPUS, GPUS = Machine("m", "h", 8.0), Machine("m", "h", 8.0, 4.0)


def spec_of(
    config: Config, role: Role, num_ranks: int, machine: Machine, further: tuple[str, ...] = ()
) -> WorkerSpec:
    plan = plan_kv(MODEL, config.engine, "float32")
    start = StartWorker("decode-0", role, 1, "m", num_ranks, further)
    workers = [DesiredWorker("decode-0", role=role, num_ranks=num_ranks, machine_id="m")]
    models = PreparedModels({"": PreparedModel(Path("model"), MODEL, "m", 100, plan)})
    return worker_spec(start, "c", config, models, {"m": machine}, workers)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.BOTH])
def test_gpus_and_ranks_are_those_of_the_worker_whatever_its_role(role: Role) -> None:
    config = load_config(None, {"cluster.prefill_tensor_parallel_size": 2})
    for num_ranks in (1, 3):
        spec = spec_of(config, role, num_ranks, GPUS)
        assert (spec.num_gpus, spec.engine.tensor_parallel_size) == (num_ranks, num_ranks)
        spec = spec_of(config, role, num_ranks, CPUS)
        assert (spec.num_gpus, spec.engine.tensor_parallel_size) == (0, num_ranks)
        assert spec.engine.threads == 8, "of all its ranks together, which divide them"


def test_ranks_of_vllm_are_stages_times_those_that_share_a_layer() -> None:
    settings = {"engine.runs": "vllm", "engine.python": "p"}
    config = load_config(None, settings | {"engine.arguments": {"pipeline_parallel_size": 2}})
    spec = spec_of(config, Role.DECODE, 6, GPUS)
    assert (spec.num_gpus, spec.engine.tensor_parallel_size) == (6, 3)


def test_workers_of_any_size_have_kv_of_one_layout() -> None:
    config = load_config(None, {"engine.num_blocks": 8})
    specs = [spec_of(config, Role.DECODE, num_ranks, CPUS) for num_ranks in (1, 3, 9)]
    plans = [plan_kv(MODEL, spec.engine, "float32") for spec in specs]
    assert [(plan.num_ranks, plan.num_copies) for plan in plans] == [(1, 1), (3, 1), (9, 3)]
    both = list(zip(specs, plans, strict=True))
    configs = [worker_config(spec, plan, 8192, bytes(32)) for spec, plan in both]
    assert len({each.fingerprint for each in configs}) == 1
    assert len({each.compatibility for each in configs}) == 1
    assert len({each.bytes_per_block for each in configs}) == 1


def test_a_worker_on_two_machines_has_half_of_its_gpus_and_the_tiers_of_each() -> None:
    config = load_config(None, {"tiers.host_gib": 2, "tiers.disk_gib": 3})
    one = spec_of(config, Role.DECODE, 4, GPUS)
    two = spec_of(config, Role.DECODE, 4, GPUS, further=("n",))
    assert (one.num_gpus, one.num_ranks_here, one.further) == (4, 4, ())
    assert (two.num_gpus, two.num_ranks_here, two.further) == (2, 2, ("n",))
    for gib in (two.tiers.set_host_gib, two.tiers.disk_gib):
        assert two.share_of(gib) == 2 * one.share_of(gib) == 2 * int(gib * GIB)


@pytest.mark.parametrize(
    ("settings", "target_ms", "most_ms"),
    [
        ({}, 50.0, 200.0),
        ({"cluster.prefill": 0}, 0.0, 0.0),
        ({"engine.itl_target_ms": 30}, 30.0, 0.0),  # who sets it means it
        ({"engine.itl_target_ms": 30, "engine.itl_most_ms": 90}, 30.0, 90.0),
        ({"engine.itl_most_ms": 90}, 50.0, 90.0),
    ],
)
def test_how_long_steps_may_be(
    settings: dict[str, float], target_ms: float, most_ms: float
) -> None:
    engine = spec_of(load_config(None, settings), Role.DECODE, 1, CPUS).engine
    assert (engine.itl_target_ms, engine.itl_most_ms) == (target_ms, most_ms)
