"""What a cluster needs to know before it starts: the model, its memory, and the machine's GPUs.

`prepare_model` finds the checkpoint and plans its KV cache, without torch, wherever the cluster is
started. GPUs are counted without torch too, before Ray is up; where Ray runs on several machines,
it knows better.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from msgspec.structs import replace

from kvrelay.cluster.config import ClusterSection, Config
from kvrelay.cluster.config_checks import no_scaling
from kvrelay.decode_worker.vllm.form import Form, elsewhere, form_of
from kvrelay.decode_worker.vllm.parser_process import parser_process
from kvrelay.decode_worker.vllm.plan import form_lines, longest, plan_form
from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.identity import checkpoint_identity
from kvrelay.engine.model.checkpoint.drafters import check_drafter
from kvrelay.engine.model.checkpoint.resolve import commit_of, resolve_model
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.parallel.shard import check_divides, num_machines
from kvrelay.engine.stats import Role, WorkerInfo
from kvrelay.engine.support import Capability, engine_traits, model_traits, refusal_of
from kvrelay.engine.wire import channel
from kvrelay.worker.kv_plan import (
    GIB,
    BuildError,
    KVPlan,
    check_memory,
    kv_lines,
    model_config,
    plan_kv,
    resolve_max_model_len,
)

Progress = Callable[[str], None]

LOAD_BYTES_PER_S = 1e8  # of weights, from the slowest disk that is worth waiting for
VLLM_COMPILES_S = 600.0  # at its first start with a model, on a machine that is busy


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model on disk, and what its KV cache takes."""

    path: Path
    shape: ModelConfig | None  # as our engine reads it; None: another one does
    served_name: str
    max_model_len: int  # 0: the workers say it
    plan: KVPlan  # of the workers with the most ranks
    checkpoint: bytes = b""  # its identity: `engine.identity`
    commit: str = ""  # on the hub, if it comes from there
    form: Form | None = None  # as vLLM says it has it, where that runs it

    @property
    def config(self) -> ModelConfig:
        """Raises BuildError where another engine reads it."""
        if self.shape is None:
            raise BuildError(f"{self.path} is read by vLLM: engine.runs has to be 'kvrelay' here")
        return self.shape

    @property
    def load_s(self) -> float:
        """How long its weights may take to be read, and its kernels to be compiled."""
        compiled_s = VLLM_COMPILES_S if self.form is not None else 0.0
        return self.plan.weights_bytes / LOAD_BYTES_PER_S + compiled_s

    def kv_lines(self, infos: Sequence[WorkerInfo]) -> list[str]:
        """For people: what its KV costs, and how much of it fits into these workers."""
        if self.form is not None:
            return form_lines(self.form, infos)
        return kv_lines(self.config, infos)


@dataclass(frozen=True, slots=True)
class PreparedModels:
    """What is to be served, by its name in [[models]], or "" without those. A call that names no
    model gets the first."""

    by_name: dict[str, PreparedModel]

    @property
    def served_names(self) -> tuple[str, ...]:
        return tuple(each.served_name for each in self.by_name.values())

    @property
    def checkpoints(self) -> dict[str, str]:
        """Returns the identity of each, by its name."""
        return {name: each.checkpoint.hex() for name, each in self.by_name.items()}

    @property
    def paths(self) -> dict[str, Path]:
        return {name: each.path for name, each in self.by_name.items()}


channel.register(PreparedModels)


def prepare_model(
    config: Config,
    num_workers_here: int,
    progress: Progress,
    *,
    num_prefill_here: int = 0,
    on_gpu: bool = False,
    beside: Sequence[KVPlan] = (),
) -> PreparedModel:
    """The model on disk, and the plan of its KV cache. Checks that `num_workers_here`, of which
    `num_prefill_here` are started for prefill, fit into the memory of this machine, with workers of
    other models `beside` them; 0 if they run elsewhere. On GPUs only the host tier has to. May take
    minutes. Raises BuildError."""
    section = config.model
    try:
        cache_dir = Path(section.cache_dir) if section.cache_dir else None
        path = resolve_model(
            section.name,
            section.revision,
            cache_dir=cache_dir,
            progress=progress,
            runs=config.engine.runs,
        )
        planned = _planned(config, path, progress, on_gpu, is_here=num_workers_here > 0)
        progress(f"reading all of {path}")  # a later start finds the digests
        checkpoint = checkpoint_identity(path, config.engine.runs, config.engine.arguments)
    except (ModelError, OSError) as error:
        raise BuildError(str(error)) from error
    plans = planned.plans
    host_bytes = int(config.tiers.memory_gib * GIB) if num_workers_here else 0
    here = [plans[Role.DECODE]] * (num_workers_here - num_prefill_here)
    here += [plans[Role.PREFILL]] * num_prefill_here if num_prefill_here else []
    here += beside
    if on_gpu:
        host_bytes += sum(plan.copied_bytes for plan in here)
    check_memory([] if on_gpu else here, psutil.virtual_memory().available, host_bytes)
    return PreparedModel(
        path=path,
        shape=planned.shape,
        form=planned.form,
        served_name=served_names(section)[0],
        max_model_len=planned.max_model_len,
        plan=max(plans.values(), key=lambda plan: plan.num_ranks),
        checkpoint=checkpoint,
        commit=commit_of(path),
    )


@dataclass(frozen=True, slots=True)
class _Planned:
    plans: dict[Role, KVPlan]  # by role; prefill is in it only where it has workers
    max_model_len: int
    shape: ModelConfig | None = None
    form: Form | None = None


def _planned(
    config: Config, path: Path, progress: Progress, on_gpu: bool, *, is_here: bool
) -> _Planned:
    """By the engine that computes. Raises BuildError, ModelError."""
    engines = _engines(config, on_gpu)
    _check_parsers(config, path, progress)
    if config.engine.runs == "vllm" and not is_here and not Path(config.engine.python).exists():
        return _planned_by_vllm(config, path, engines, elsewhere(path), on_gpu)
    if config.engine.runs == "vllm":
        progress(f"asking vLLM what it keeps of {path.name}")  # a later start finds the answer
        form = form_of(path, config.model, engines[Role.DECODE], on_gpu=on_gpu)
        return _planned_by_vllm(config, path, engines, form, on_gpu)
    model, section = model_config(path, config.engine), config.model
    if section.device == "cpu" or (is_here and not on_gpu):
        _check_sizes(config, engines)
    for role, engine in engines.items():
        check_divides(model, engine.tensor_parallel_size, size_setting(config, role))
        traits = engine_traits(engine, on_gpu=on_gpu) | model_traits(model)
        if engine.drafter:
            check_drafter(engine.drafter, traits)
        if engine.quest_budget and (why := refusal_of(Capability.QUEST, traits)):
            raise BuildError(f"engine.quest_budget {engine.quest_budget:g}: {why}")
    dtype = "float32" if section.dtype == "auto" else section.dtype  # the workers choose it
    weights = dtype, section.quantization, on_gpu
    plans = {role: plan_kv(model, each, *weights) for role, each in engines.items()}
    lengths = (resolve_max_model_len(model, engines[role], plans[role]) for role in engines)
    return _Planned(plans, min(lengths), shape=model)


def _check_sizes(config: Config, engines: Mapping[Role, EngineSection]) -> None:
    """On CPUs. Raises BuildError where workers of the two pools would say other tokens."""
    sizes = {role: engine.tensor_parallel_size for role, engine in engines.items()}
    kept = config.model.quantization
    if kept == "none" or len(set(sizes.values())) == 1:
        return
    found = " and ".join(f"{size_setting(config, role)} = {sizes[role]}" for role in sizes)
    raise BuildError(
        f"{found} differ, and with model.quantization = {kept!r} the number of ranks changes tokens"
        " on CPUs: give both pools one size, or set model.quantization = 'none'"
    )


def _check_parsers(config: Config, path: Path, progress: Progress) -> None:
    """Raises BuildError where vLLM does not know those that are set, or not for this model."""
    process = parser_process(config.engine, path, config.api.vllm_parsers)
    if process is None:
        return
    progress("asking vLLM for its parsers")
    try:
        why = process.check()
    except (OSError, ValueError) as error:
        why = f"vLLM has not said whether it has its parsers: {error}"
    if why:
        raise BuildError(why)


def _planned_by_vllm(
    config: Config,
    path: Path,
    engines: Mapping[Role, EngineSection],
    form: Form,
    on_gpu: bool,
) -> _Planned:
    for engine in engines.values() if config.cluster.prefill else ():
        if why := refusal_of(Capability.HAND_OVER, form.traits(engine)):
            more = f" ({form.why_not})" if " " in form.why_not else ""
            raise BuildError(f"prefill = {config.cluster.prefill}: {why}{more}: set it to 0")
    for engine in engines.values():
        if why := no_scaling(config.scaling.enabled, form.traits(engine)):
            raise BuildError(why)
    plans = {role: plan_form(form, each, path) for role, each in engines.items()}
    lengths = (longest(form, engines[r], plans[r]) for r in engines)
    return _Planned(plans, min(lengths), form=form)


def served_names(section: ModelSection) -> list[str]:
    """What clients may call the model, its own name first."""
    return section.served_name.split() or [Path(section.name).name.removesuffix(".gguf")]


def _engines(config: Config, on_gpu: bool) -> dict[Role, EngineSection]:
    """Settings of workers that are started for each role; of prefill workers only where there are
    some."""
    roles = [Role.PREFILL, Role.DECODE] if config.cluster.prefill else [Role.DECODE]
    engine = config.engine.sized(gpu=on_gpu)
    sizes = {role: config.tensor_size_of(role) for role in roles}
    return {role: replace(engine, tensor_parallel_size=size) for role, size in sizes.items()}


def prepare_models(
    config: Config, progress: Progress, *, are_here: bool, on_gpu: bool
) -> PreparedModels:
    """All that are to be served. `are_here`: workers are to be started on this machine. Raises
    BuildError."""
    prepared: dict[str, PreparedModel] = {}
    beside: list[KVPlan] = []
    left = config.most_workers if are_here else 0
    for name, own in config.by_model().items():
        num_here = min(own.most_workers, left)
        num_prefill, left = min(own.cluster.prefill, num_here), left - num_here
        model = prepare_model(
            own, num_here, progress, num_prefill_here=num_prefill, on_gpu=on_gpu, beside=beside
        )
        beside += [model.plan] * num_here
        prepared[name] = model
    return PreparedModels(prepared)


ROOT = Path("/")


def num_gpus(root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> int:
    """NVIDIA GPUs that a process here may use, as Ray counts them; of one that is
    divided (MIG), the parts that are named."""
    found = len([*(root / "proc/driver/nvidia/gpus").glob("*")])
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    named = [each.strip() for each in visible.split(",") if each.strip()]
    if named and all(each.startswith("MIG-") for each in named):
        return len(named)  # parts of a GPU, each of which is one to CUDA
    return min(found, named.index("-1") if "-1" in named else len(named))


def size_setting(config: Config, role: Role) -> str:
    """The setting that says how many ranks a worker has that is started for prefill or decode."""
    own = f"{role}_tensor_parallel_size"
    return f"cluster.{own}" if getattr(config.cluster, own) else "engine.tensor_parallel_size"


def uses_gpus(config: Config, found: int) -> bool:
    """Whether workers on this machine, which has `found` GPUs, will run on them."""
    devices = {each.model.device for each in config.by_model().values()}
    return found > 0 and devices != {"cpu"} and not config.cluster.address


def for_gpus(config: Config, found: int) -> tuple[Config, str]:
    """`config` for this machine, and what was changed, for the operator. One GPU, and the numbers
    of workers that are set by default: one pool. Raises BuildError where workers would wait for
    GPUs for ever."""
    if not uses_gpus(config, found):
        return config, ""
    needed = sum(map(_num_gpus_of, config.by_model().values()))
    if needed <= found:
        return config, ""
    if config.models:
        wanted = "lower prefill, decode or tensor_parallel_size of some"
        raise BuildError(f"workers of all models need {needed} GPUs, {found} are here: {wanted}")
    cluster = config.cluster
    prefill, decode = config.ranks_of(Role.PREFILL), config.ranks_of(Role.DECODE)
    default = ClusterSection()
    is_default = (cluster.prefill, cluster.decode) == (default.prefill, default.decode)
    # Whoever gives the pools sizes of their own wants two.
    if is_default and prefill == decode <= found and not config.scaling.enabled:
        one = replace(cluster, prefill=0, decode=1)
        told = f"{found} GPU(s), and two workers need {needed}: one pool (--prefill 0 --decode 1)"
        return replace(config, cluster=one), told
    raise BuildError(_too_few(config, needed, found))


def _num_gpus_of(config: Config) -> int:
    """That the workers of one model need."""
    if config.model.device == "cpu":
        return 0
    cluster, decode = config.cluster, config.ranks_of(Role.DECODE)
    if config.scaling.enabled:  # then all have one size
        return config.most_workers * decode
    return cluster.prefill * config.ranks_of(Role.PREFILL) + cluster.decode * decode


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
        if config.engine.runs == "vllm":
            raise BuildError(f"{told}, and those of vLLM share memory: set it to 0")
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
