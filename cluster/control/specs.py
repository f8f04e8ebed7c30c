"""What workers are built from: the settings, a machine, and who shares that with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec.structs import replace

from kvrelay.cluster.config import Config
from kvrelay.cluster.control.control_config import WorkersConfig
from kvrelay.cluster.control.messages import Machine, StartWorker
from kvrelay.cluster.control.workers import DesiredWorker, worker_name
from kvrelay.cluster.prepare import PreparedModel, PreparedModels
from kvrelay.cluster.scaling.planner import chunk_target_s
from kvrelay.engine.stats import Role
from kvrelay.worker.spec import WorkerSpec

ITL_TARGET_MS = 50.0  # of decode workers, where prefill workers are there for long prompts
ITL_MOST_MS = 200.0  # while prompts have waited for long
PEER_GONE_S = 5.0  # until a stopped process that the controller has ended is gone, with its links


def workers_config(name: str, config: Config, model: PreparedModel) -> WorkersConfig:
    """What the settings say of a model's workers, before any is there."""
    cluster, scaling = config.cluster, config.scaling
    roles = [(Role.PREFILL, cluster.prefill), (Role.DECODE, cluster.decode)]
    return WorkersConfig(
        first=tuple((worker_name(role, name, i), role) for role, n in roles for i in range(n)),
        start_timeout_s=cluster.start_timeout_s + model.load_s,
        prefill_ranks=config.ranks_of(Role.PREFILL),
        decode_ranks=config.ranks_of(Role.DECODE),
        ranks_per_machine=cluster.ranks_per_machine,
        use_gpus=config.model.device != "cpu",
        scaling=scaling if scaling.enabled else None,
        drain_timeout_s=config.api.request_timeout_s,
        restart_drain_s=cluster.drain_s,
        workers_per_machine=scaling.workers_per_machine,
    )


def worker_spec(
    start: StartWorker,
    cluster: str,
    config: Config,
    models: PreparedModels,
    machines: Mapping[str, Machine],
    workers: Collection[DesiredWorker],
) -> WorkerSpec:
    """`config`, `models`: of all; `machines`: by their id; `workers`: all that are wanted."""
    most_workers, scales = config.most_workers, config.scales
    config, planned = config.by_model()[start.model], models.by_name[start.model]
    machine = machines[start.machine_id]
    threads = config.engine.threads or max(1, int(machine.num_cpus))
    size = start.num_ranks // config.engine.num_stages
    engine = replace(config.engine, tensor_parallel_size=size, threads=threads)
    if engine.itl_target_ms == 0 and config.scaling.enabled:
        engine = replace(engine, itl_target_ms=1e3 * chunk_target_s(config.scaling))
    elif engine.itl_target_ms == 0 and config.cluster.prefill > 0:
        most_ms = engine.itl_most_ms or ITL_MOST_MS
        engine = replace(engine, itl_target_ms=ITL_TARGET_MS, itl_most_ms=most_ms)
    on_gpu = machine.num_gpus > 0 and config.model.device != "cpu"
    if scales:  # any may become a decode worker, and there may be so many
        num_sharing = -(-most_workers // max(1, len(machines)))
    else:
        num_sharing = num_sharing_tiers(start, workers)
    # Ray shows a worker its own GPUs only, so they are the first there.
    device = "cuda" if on_gpu else config.model.device.replace("auto", "cpu")
    return WorkerSpec(
        cluster=cluster,
        worker=start.worker,
        role=start.role,
        epoch=start.epoch,
        model_dir=str(planned.path),
        checkpoint=planned.checkpoint,
        commit=planned.commit,
        model=replace(config.model, device=device),
        engine=engine,
        tiers=config.tiers,
        num_sharing=num_sharing,
        num_peers=most_workers - 1,
        left_reads_s=config.router.silent_after_s + config.cluster.silent_grace_s + PEER_GONE_S,
        machine=start.machine_id,
        further=start.further,
        log=config.log,
        fork_server=config.cluster.fork_server and engine.runs == "kvrelay",
        weights=start.weights,
        num_gpus=start.num_ranks // (1 + len(start.further)) if on_gpu else 0,
    )


def num_sharing_tiers(start: StartWorker, workers: Iterable[DesiredWorker]) -> int:
    """Workers among which the tiers of a machine are divided; 0: the one that starts has no part.

    The decode workers of a machine share them evenly, because sessions come back to them. Prefill
    workers share them where there is no decode worker. All that belong on the machine count,
    whether they are up or not, so that a worker that comes back finds its tiers as large as before.
    """
    here = [w.role for w in workers if start.machine_id in w.machines]
    if start.role is Role.PREFILL and Role.DECODE in here:
        return 0
    return here.count(start.role)
