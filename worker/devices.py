"""The GPUs of this machine, and what of a configuration depends on their number.

Known without torch, before Ray is up. Where Ray runs on several machines, it knows better.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from kvrelay.cluster.config import ClusterSection, Config, EngineSection
from kvrelay.engine.model.parallel.shard import num_machines
from kvrelay.engine.stats import Role
from kvrelay.worker.kv_plan import BuildError

ROOT = Path("/")


def num_gpus(root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> int:
    """NVIDIA GPUs that a process here may use, as Ray counts them."""
    found = len([*(root / "proc/driver/nvidia/gpus").glob("*")])
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    named = [each.strip() for each in visible.split(",") if each.strip()]
    return min(found, named.index("-1") if "-1" in named else len(named))


def size_setting(config: Config, role: Role) -> str:
    """The setting that says how many ranks a worker has that is started for prefill or decode."""
    own = f"{role}_tensor_parallel_size"
    return f"cluster.{own}" if getattr(config.cluster, own) else "engine.tensor_parallel_size"


def sized(engine: EngineSection, *, gpu: bool) -> EngineSection:
    """`engine` with the sizes that the device decides. On a GPU kv_cache_gib may stay 0: how much
    memory is free is known once the weights are there."""
    return replace(
        engine,
        kv_cache_gib=engine.kv_cache_gib or (0.0 if gpu else 1.0),
        max_num_batched_tokens=engine.max_num_batched_tokens or (8192 if gpu else 512),
        max_num_seqs=engine.max_num_seqs or (256 if gpu else 64),
    )


def uses_gpus(config: Config, found: int) -> bool:
    """Whether workers on this machine, which has `found` GPUs, will run on them."""
    return found > 0 and config.model.device != "cpu" and not config.cluster.address


def for_gpus(config: Config, found: int) -> tuple[Config, str]:
    """`config` for this machine, and what was changed, for the operator. One GPU, and the numbers
    of workers that are set by default: one pool. Raises BuildError where workers would wait for
    GPUs for ever."""
    if not uses_gpus(config, found):
        return config, ""
    cluster = config.cluster
    prefill, decode = config.ranks_of(Role.PREFILL), config.ranks_of(Role.DECODE)
    needed = cluster.prefill * prefill + cluster.decode * decode
    if config.scaling.enabled:  # then all have one size
        needed = config.most_workers * decode
    if needed <= found:
        return config, ""
    default = ClusterSection()
    is_default = (cluster.prefill, cluster.decode) == (default.prefill, default.decode)
    # Whoever gives the pools sizes of their own wants two.
    if is_default and prefill == decode <= found and not config.scaling.enabled:
        one = replace(cluster, prefill=0, decode=1)
        told = f"{found} GPU(s), and two workers need {needed}: one pool (--prefill 0 --decode 1)"
        return replace(config, cluster=one), told
    raise BuildError(_too_few(config, needed, found))


def check_machines(config: Config) -> None:
    """Of workers that are to be divided among machines. Raises BuildError."""
    here = config.cluster.ranks_per_machine
    roles = [Role.PREFILL, Role.DECODE] if config.cluster.prefill else [Role.DECODE]
    for role in roles:
        size = config.ranks_of(role)
        number = num_machines(size, here)
        if number == 1:
            continue
        told = f"cluster.ranks_per_machine = {here} divides a {role} worker of {size} ranks"
        if size % here:
            raise BuildError(f"{told} unevenly: set it to a divisor of {size}, or to 0")
        if config.scaling.enabled:
            raise BuildError(
                f"{told} among {number} machines, and scaling.enabled asks for them one by one:"
                " set one of the two to 0 or false"
            )
        if not config.cluster.address:
            raise BuildError(
                f"{told} among {number} machines, and there is this one: join a Ray cluster of"
                f" several (--address), or lower {size_setting(config, role)}"
            )


def _too_few(config: Config, needed: int, found: int) -> str:
    cluster = config.cluster
    prefill, decode = config.ranks_of(Role.PREFILL), config.ranks_of(Role.DECODE)
    if prefill == decode or not cluster.prefill:
        who = f"{config.most_workers} worker(s) of {decode} GPU(s)"
    else:
        who = f"{cluster.prefill} prefill worker(s) of {prefill} GPU(s)"
        who += f" and {cluster.decode} decode worker(s) of {decode}"
    numbers = ["cluster.prefill", "cluster.decode"]
    if config.scaling.enabled:
        numbers.append("scaling.max_workers")
    sizes = sorted({size_setting(config, role) for role in (Role.PREFILL, Role.DECODE)})
    *lower, last = [*numbers, *sizes]
    return f"{who} need {needed}, {found} are here: lower {', '.join(lower)} or {last}"
