"""Checks of a configuration that need a part of it alone: who has a name, what vLLM obeys, and
which modules have to be installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kvrelay.engine
from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.settings import ConfigError
from kvrelay.engine.support import Capability, Trait, refusal_of


def name_table(given: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Who has each name: models, aliases and adapters share one space of names. `given`: a name,
    and who has it, in words. Raises ConfigError where a name has two."""
    table: dict[str, str] = {}
    for name, who in given:
        if name in table:
            told = f"{name!r} is {table[name]}" + ("" if who == table[name] else f", and {who}")
            twice = ", twice" if who == table[name] else ""
            raise ConfigError(f"{told}{twice}: give each a name of its own")
        table[name] = who
    return table


SOURCE = Path(str(kvrelay.engine.__file__)).resolve().parents[1]


def python_with_vllm(source: Path = SOURCE) -> str:
    """The interpreter that has vLLM where engine.python names none: that of `make setup-vllm`, in
    the project's folder, or this one; "": there is none."""
    beside = source / ".venv-vllm" / "bin" / "python"
    if beside.exists():
        return str(beside)
    return sys.executable if "vllm" not in sys.modules and find_spec("vllm") else ""


@dataclass(frozen=True, slots=True)
class AtVllm:
    """What becomes of a setting where vLLM runs: it is obeyed as `text` says, or, where values are
    `taken`, all others are refused for what `text` says, with what to do `instead`."""

    text: str
    taken: tuple[Any, ...] = ()
    instead: str = "leave it out"


_SAME = AtVllm("`EngineArgs` of the same name")
_OURS = AtVllm("the worker's own, as with our engine")
_OTHER_NAMES = "it has other names for these"
_BY_ARGUMENTS = "set it by engine.arguments, as vLLM calls it"
_NO_DRAFTER = refusal_of(Capability.HEAD_DRAFTS, (Trait.VLLM,))
_STEPS = "its steps are bounded by max_num_batched_tokens alone"
_MODEL = "layers attend to what the model says"
_READS_ALL = refusal_of(Capability.QUEST, (Trait.VLLM,))
_NUM_DRAFTS = EngineSection().num_speculative_tokens

AT_VLLM: dict[str, AtVllm] = {
    "model.dtype": _SAME,
    "model.quantization": AtVllm(_OTHER_NAMES, ("none", "fp8"), _BY_ARGUMENTS),
    "engine.runs": AtVllm("that it is vLLM"),
    "engine.python": AtVllm('the interpreter that has it; "": as described above'),
    "engine.arguments": AtVllm("any of `EngineArgs`, before all others"),
    "engine.block_size": AtVllm("the same; on CPUs the next multiple of 32"),
    "engine.kv_cache_gib": AtVllm("`num_gpu_blocks_override`, in blocks of all layers"),
    "engine.num_blocks": AtVllm("`num_gpu_blocks_override`"),
    "engine.gpu_memory_utilization": AtVllm("the same, on GPUs"),
    "engine.cuda_graphs": AtVllm("`enforce_eager`, on GPUs; on CPUs always eager"),
    "engine.attention_backend": AtVllm(_OTHER_NAMES, ("auto",), _BY_ARGUMENTS),
    "engine.moe_backend": AtVllm(_OTHER_NAMES, ("auto",), _BY_ARGUMENTS),
    "engine.tensor_parallel_size": _SAME,
    "engine.kv_dtype": AtVllm("`kv_cache_dtype`: `fp8_e4m3`"),
    "engine.window": AtVllm(_MODEL, (0,)),
    "engine.sinks": AtVllm(_MODEL, (0,)),
    "engine.quest_budget": AtVllm(_READS_ALL, (0.0,)),
    "engine.quest_dense_layers": AtVllm(_READS_ALL, (EngineSection().quest_dense_layers,)),
    "engine.guard": AtVllm("nothing: block tables are vLLM's"),
    "engine.max_num_batched_tokens": AtVllm(
        "the same, at least `max_num_seqs`; not where it pools"
    ),
    "engine.itl_target_ms": AtVllm(_STEPS, (0.0,)),
    "engine.itl_most_ms": AtVllm(_STEPS, (0.0,)),
    "engine.max_num_seqs": _SAME,
    "engine.num_speculative_tokens": AtVllm(_NO_DRAFTER, (_NUM_DRAFTS, 0)),
    "engine.drafter": AtVllm(_NO_DRAFTER, ("",)),
    "engine.max_model_len": _SAME,
    "engine.max_waiting": _OURS,
    "engine.step_timeout_s": AtVllm("the worker's own; ten times that for its first step"),
    "engine.max_failed_steps": AtVllm(
        "a worker ends as soon as vLLM raises", (EngineSection().max_failed_steps,)
    ),
    "engine.adapter_bytes": AtVllm("what an adapter may take when it is registered"),
    "engine.image_bytes": AtVllm(
        "it has a cache of its own, `mm_processor_cache_gb`",
        (EngineSection().image_bytes,),
        _BY_ARGUMENTS,
    ),
    "engine.core_dumps": _OURS,
    "engine.threads": AtVllm("`OMP_NUM_THREADS`, divided among its ranks; 0: all cores"),
    "engine.lease_s": _OURS,
    "engine.handoff_timeout_s": _OURS,
    "engine.read_timeout_s": _OURS,
    "engine.read_floor_s": _OURS,
}
"""By the names of settings: all of [engine], and those of [model] that an engine obeys."""


_SIZES = {
    "tensor_parallel_size": "set engine.tensor_parallel_size, by which GPUs are counted",
    "data_parallel_size": "a worker is one replica: raise prefill or decode instead",
}


def not_of_vllm(engine: EngineSection, model: ModelSection) -> str:
    """Which setting vLLM would not obey, and what does what it does; "": none."""
    for name, instead in _SIZES.items():
        if engine.arguments.get(name, 1) != 1:
            return f"engine.arguments.{name} = {engine.arguments[name]!r}: {instead}"
    backend = engine.arguments.get("distributed_executor_backend", "mp")
    if backend not in ("mp", "uni"):
        named = f"engine.arguments.distributed_executor_backend = {backend!r}"
        return f"{named}: expected 'mp': the ranks of a worker are processes of its machine"
    size = engine.arguments.get("pipeline_parallel_size", 1)
    if not isinstance(size, int) or size < 1:
        return f"engine.arguments.pipeline_parallel_size = {size!r}: expected 1 or more"
    sections = {"engine": engine, "model": model}
    for name, at in AT_VLLM.items():
        section, _, setting = name.partition(".")
        value = getattr(sections[section], setting)
        if at.taken and value not in at.taken:
            return f"{name} = {value!r}: vLLM does not obey it: {at.text}: {at.instead}"
    return ""


def no_scaling(is_wanted: bool, traits: Iterable[Trait]) -> str:
    """Why the number of workers with these traits cannot follow the load; "": it can, or is not
    to."""
    why = refusal_of(Capability.SCALING, traits) if is_wanted else ""
    return f"scaling.enabled: {why}: set it to false" if why else ""


def require_extra(extra: str, *modules: str) -> None:
    """Import `modules`, which the extra of that name installs. Raises ConfigError."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            wanted = f"pip install 'kvrelay[{extra}]'"
            raise ConfigError(f"{name} is not installed: {wanted}") from error
