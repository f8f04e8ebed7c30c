"""What the number of GPUs changes, and what is refused because of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.cluster.config import Config, load_config
from kvrelay.cluster.prepare import check_machines, for_gpus, num_gpus, uses_gpus
from kvrelay.engine.config import EngineSection
from kvrelay.engine.stats import Role
from kvrelay.worker.kv_plan import BuildError


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("", 0), ("1", 1), ("0,1", 2), ("0,1,2", 2), ("-1", 0)]
)
def test_gpus_are_those_of_the_driver_that_are_visible(
    tmp_path: Path, visible: str | None, count: int
) -> None:
    for name in ("0000:18:00.0", "0000:2a:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert num_gpus(tmp_path, environment) == count
    assert num_gpus(tmp_path / "elsewhere", environment) == 0


def config(**changes: object) -> Config:
    return load_config(None, {key.replace("__", "."): value for key, value in changes.items()})


def test_one_gpu_is_one_pool() -> None:
    fitted, told = for_gpus(config(), 1)
    assert (fitted.cluster.prefill, fitted.cluster.decode) == (0, 1)
    assert told == "1 GPU(s), and two workers need 2: one pool (--prefill 0 --decode 1)"
    four = config(engine__tensor_parallel_size=4)
    assert for_gpus(four, 4)[0].cluster.prefill == 0


@pytest.mark.parametrize(
    "settings",
    [
        config(model__device="cpu"),
        config(cluster__address="10.0.0.1:6379"),
        config(cluster__prefill=0, cluster__decode=1),
    ],
)
def test_what_fits_or_runs_elsewhere_is_left_alone(settings: Config) -> None:
    assert for_gpus(settings, 1) == (settings, "")
    assert for_gpus(config(), 0) == (config(), "")
    assert for_gpus(config(), 2) == (config(), "")
    assert not uses_gpus(config(), 0)


def test_workers_that_would_wait_for_gpus_for_ever_are_refused() -> None:
    many = config(cluster__prefill=2, cluster__decode=2, engine__tensor_parallel_size=2)
    with pytest.raises(BuildError, match=r"4 worker\(s\) of 2 GPU\(s\) need 8, 4 are here: lower"):
        for_gpus(many, 4)


def test_each_pool_counts_the_gpus_of_its_workers() -> None:
    sizes = {"cluster__prefill_tensor_parallel_size": 2, "engine__tensor_parallel_size": 4}
    fits = config(cluster__prefill=2, cluster__decode=1, **sizes)
    assert (fits.ranks_of(Role.PREFILL), fits.ranks_of(Role.DECODE)) == (2, 4)
    assert for_gpus(fits, 8) == (fits, "")
    with pytest.raises(BuildError) as caught:
        for_gpus(fits, 7)
    assert str(caught.value) == (
        "2 prefill worker(s) of 2 GPU(s) and 1 decode worker(s) of 4 need 8, 7 are here: lower"
        " cluster.prefill, cluster.decode, cluster.prefill_tensor_parallel_size or"
        " engine.tensor_parallel_size"
    )
    alone = config(cluster__prefill=0, cluster__decode=2, **sizes)
    assert for_gpus(alone, 8) == (alone, "")
    with pytest.raises(BuildError, match=r"^2 worker\(s\) of 4 GPU\(s\) need 8, 7 are here"):
        for_gpus(alone, 7)


def test_stages_of_a_pipeline_have_gpus_too() -> None:
    stages = {"engine__runs": "vllm", "engine__python": "p", "engine__tensor_parallel_size": 2}
    stages["engine__arguments"] = {"pipeline_parallel_size": 3}
    two = config(cluster__prefill=0, cluster__decode=2, **stages)
    assert (two.ranks_of(Role.DECODE), two.tensor_size_of(Role.DECODE)) == (6, 2)
    assert for_gpus(two, 12) == (two, "")
    with pytest.raises(BuildError, match=r"2 worker\(s\) of 6 GPU\(s\) need 12, 11 are here"):
        for_gpus(two, 11)


def test_pools_of_different_sizes_do_not_become_one() -> None:
    """Whoever gives them sizes wants both; where the sizes are equal, numbers are by default."""
    with pytest.raises(BuildError, match=r"of 2 GPU\(s\) and 1 .* of 1 need 3, 2 are here"):
        for_gpus(config(cluster__prefill_tensor_parallel_size=2), 2)
    same = {f"cluster__{role}_tensor_parallel_size": 2 for role in ("prefill", "decode")}
    assert for_gpus(config(**same), 2)[0].cluster.prefill == 0


def test_sizes_that_are_not_set_are_those_of_the_device() -> None:
    sizes = ("kv_cache_gib", "max_num_batched_tokens", "max_num_seqs")
    on = {gpu: EngineSection().sized(gpu=gpu) for gpu in (False, True)}
    assert [getattr(on[False], name) for name in sizes] == [1.0, 512, 64]
    assert [getattr(on[True], name) for name in sizes] == [0.0, 8192, 256]
    given = EngineSection(kv_cache_gib=3.0, max_num_batched_tokens=100, max_num_seqs=7)
    assert given.sized(gpu=True) == given.sized(gpu=False) == given


def test_what_cannot_be_divided_among_machines_is_refused() -> None:
    settings = {"engine__tensor_parallel_size": 4, "cluster__ranks_per_machine": 2}
    told = "cluster.ranks_per_machine = 2 divides a prefill worker of 4 ranks"
    with pytest.raises(BuildError) as caught:
        check_machines(config(**settings))
    assert str(caught.value) == (
        f"{told} among 2 machines, and there is this one: join a Ray cluster of several"
        " (--address), or lower engine.tensor_parallel_size"
    )
    settings["cluster__address"] = "head:6379"
    with pytest.raises(BuildError, match=f"{told} among 2 machines, and scaling.enabled asks"):
        check_machines(config(**settings, scaling__enabled=True))
    with pytest.raises(BuildError, match="decode worker of 3 ranks unevenly: set it to a divisor"):
        check_machines(config(**settings, cluster__decode_tensor_parallel_size=3))
    check_machines(config(engine__tensor_parallel_size=2, cluster__ranks_per_machine=2))
    check_machines(config(engine__tensor_parallel_size=4))
    vllm = {**settings, "engine__runs": "vllm", "engine__python": "p"}
    with pytest.raises(BuildError, match="and those of vLLM share memory: set it to 0"):
        check_machines(config(**vllm))
    check_machines(config(**settings))
    del settings["cluster__address"]
    settings["cluster__decode_tensor_parallel_size"] = 2
    check_machines(config(**settings, cluster__prefill=0))
