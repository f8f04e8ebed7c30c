"""`kvrelay plan`: what a model takes of a machine, before there is one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, Group
from rich.table import Table

from kvrelay.cluster.cli.flags import FlagsCommand, settings_of
from kvrelay.cluster.cli.settings import settings_options

if TYPE_CHECKING:
    from kvrelay.cluster.config import Config
    from kvrelay.worker.model_plan import KindPlan, ModelPlan

_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_KINDS = {"full": "full attention", "window": "last {:,} tokens", "state": "states"}


class PlanError(click.ClickException):
    """What was asked for cannot be planned."""

    exit_code = 2


@click.command(cls=FlagsCommand)
@click.argument("model", required=False)
@settings_options
@click.option("--gpus", metavar="NxNAME", help="As 2xH100, L40S or A100-80GB; none: a CPU.")
@click.option("--memory", metavar="SIZE", help="Of a GPU, or of the machine, as 80GiB.")
@click.option(
    "--context", "contexts", multiple=True, type=click.IntRange(min=1), help="Tokens of a sequence."
)
@click.option("--json", "as_json", is_flag=True, help="The figures as JSON.")
def plan(
    model: str | None,
    config_path: Path | None,
    overrides: dict[str, Any],
    gpus: str | None,
    memory: str | None,
    contexts: tuple[int, ...],
    as_json: bool,
    **flags: Any,
) -> None:
    """What MODEL takes: weights, KV by kind of layers, and how many sequences fit.

    MODEL is as of kvrelay serve; of a folder only config.json is read. The numbers are those by
    which workers start. Exits with 1 if something does not fit.
    """
    import msgspec

    from kvrelay.cluster.config import ConfigError, load_config
    from kvrelay.engine.model.errors import ModelError
    from kvrelay.worker.kv_plan import BuildError

    console = Console(highlight=False)
    try:
        settings = overrides | ({"model.name": model} if model else {})
        config = load_config(config_path, settings_of(flags, settings))
        num_gpus, memory_bytes = _machine(gpus, memory)
        found = plan_of(config.first, num_gpus, memory_bytes, contexts)
    except (ConfigError, ModelError, BuildError) as error:
        raise PlanError(str(error)) from error
    if as_json:
        console.print_json(data=msgspec.to_builtins(found, str_keys=True))
    else:
        console.print(plan_view(config.model.name, gpus or "", found))
        for problem in found.problems:
            console.print(problem, style="bold red", markup=False, soft_wrap=True)
    if found.problems:
        raise SystemExit(1)


def _machine(gpus: str | None, memory: str | None) -> tuple[int, int]:
    """How many GPUs, and the bytes of each, or of the machine. Raises ConfigError."""
    from kvrelay.cluster.config import ConfigError
    from kvrelay.worker.model_plan import GPU_BYTES

    num_bytes = 0
    if memory is not None:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", memory.lower())
        if found is None or found[2] not in _UNITS or not float(found[1]):
            raise ConfigError(f"--memory {memory}: expected a size, as 80GiB or 80GB")
        num_bytes = int(float(found[1]) * _UNITS[found[2]])
    if gpus is None:
        return 0, num_bytes
    count, name = re.fullmatch(r"(?:(\d+)(?:x|$))?(.*)", gpus.lower(), re.DOTALL).groups()  # type: ignore[union-attr]
    name = {"a100": "a100-80gb"}.get(name, name)
    if count == "0" or (not name and not num_bytes) or (name and name not in GPU_BYTES):
        known = ", ".join(each.upper() for each in GPU_BYTES)
        raise ConfigError(
            f"--gpus {gpus}: expected a number and a name, as 2xH100; there are {known}, and"
            " others with --memory: --gpus 2 --memory 96GiB"
        )
    return int(count or 1), num_bytes or GPU_BYTES[name]


def plan_of(
    config: Config, num_gpus: int, memory_bytes: int, contexts: tuple[int, ...] = ()
) -> ModelPlan:
    """`num_gpus` and `memory_bytes`: as of `plan_model`. Raises ModelError and BuildError."""
    from msgspec.structs import replace

    from kvrelay.cluster.prepare import num_gpus as gpus_here
    from kvrelay.cluster.prepare import uses_gpus
    from kvrelay.decode_worker.vllm.form import form_of
    from kvrelay.decode_worker.vllm.model_plan import plan_model as plan_form
    from kvrelay.engine.model.checkpoint.resolve import resolve_config
    from kvrelay.engine.stats import Role
    from kvrelay.worker.kv_plan import model_config
    from kvrelay.worker.model_plan import plan_model

    section, num_ranks = config.model, config.tensor_size_of(Role.DECODE)
    cache_dir = Path(section.cache_dir) if section.cache_dir else None
    path = resolve_config(
        section.name, section.revision, cache_dir=cache_dir, progress=lambda _: None
    )
    engine = replace(config.engine, tensor_parallel_size=num_ranks)
    machine: dict[str, Any] = {"num_gpus": num_gpus, "memory_bytes": memory_bytes}
    if engine.runs == "vllm":  # asked on this machine, whatever it is planned for
        on_gpu = uses_gpus(config, gpus_here())
        form = form_of(path, section, engine.sized(gpu=on_gpu), on_gpu=on_gpu)
        return plan_form(form, engine, path, contexts=contexts, **machine)
    return plan_model(
        model_config(path, config.engine),
        engine,
        _dtype(section.dtype, section.quantization, on_gpu=num_gpus > 0),
        section.quantization,
        contexts=contexts,
        **machine,
    )


def _dtype(dtype: str, quantization: str, *, on_gpu: bool) -> str:
    """Which a worker computes in. Raises ModelError for a quantization that it would refuse."""
    if quantization != "none":
        from kvrelay.engine.model.errors import check_one_of
        from kvrelay.engine.model.quantize import QUANTIZATIONS

        check_one_of("quantization", quantization, QUANTIZATIONS["cuda" if on_gpu else "cpu"])
    if dtype != "auto" or on_gpu:
        return "bfloat16" if dtype == "auto" else dtype
    from kvrelay.engine.model.runner import ModelRunner

    return ModelRunner.default_dtype()


def plan_view(name: str, gpus: str, plan: ModelPlan) -> Group:
    """For people: two tables and what they mean."""
    lengths = [*plan.num_sequences]
    memory = Table(title=f"{name}: {_where(gpus, plan)}", title_justify="left", show_header=False)
    memory.add_column("what")
    memory.add_column("GiB", justify="right")
    memory.add_column("how")
    how = plan.dtype if plan.quantization == "none" else f"{plan.quantization}, else {plan.dtype}"
    memory.add_row("weights", _gib(plan.weights_bytes), how)
    if plan.on_gpu:
        memory.add_row("a step", _gib(plan.step_bytes), "estimated: a worker measures it")
    memory.add_row(
        "other",
        _gib(plan.other_bytes),
        "CUDA, graphs: a worker measures these" if plan.on_gpu else "libraries",
    )
    blocks = f"{plan.num_blocks:,} blocks of {plan.block_size} tokens, {plan.kv_dtype}"
    memory.add_row("KV", _gib(plan.kv_bytes), blocks)
    if (images := plan.images) is not None:
        memory.add_row("images: tower", _gib(images.tower_bytes), "read with the first image")
        memory.add_row("  kept", _gib(images.kept_bytes), "embeddings, at most: engine.image_bytes")
        how = f"one of {images.most_pixels:,} pixels: larger ones are scaled down"
        memory.add_row("  encoding", _gib(images.encoding_bytes), how)
    table = Table()
    table.add_column("KV of layers with")
    for head in ("layers", "groups", "bytes a token", *(f"{n:,} tokens, MiB" for n in lengths)):
        table.add_column(head, justify="right")
    for kind in plan.kinds:
        sizes = (f"{kind.sequence_bytes[n] / (1 << 20):,.1f}" for n in lengths)
        each = f"{kind.bytes_per_token:,}" if kind.bytes_per_token else "-"
        table.add_row(_kind(kind), str(kind.num_layers), str(kind.num_groups), each, *sizes)
    table.add_section()
    held = (f"{plan.num_sequences[n]:,}" for n in lengths)
    table.add_row("sequences at once, a worker", "", "", "", *held)
    lines = [f"a sequence has at most {plan.max_model_len:,} tokens"] if plan.num_blocks else []
    if plan.max_num_seqs in plan.num_sequences.values():
        lines.append(f"a worker runs at most {plan.max_num_seqs} at once (engine.max_num_seqs)")
    return Group(memory, table, *lines)


def _where(gpus: str, plan: ModelPlan) -> str:
    if not plan.on_gpu:
        return "a worker on a CPU"
    ranks = f" of {plan.num_ranks} ranks" if plan.num_ranks > 1 else ""
    return f"{plan.num_workers} worker(s){ranks} on {gpus}, {_gib(plan.memory_bytes)} GiB each"


def _kind(kind: KindPlan) -> str:
    return _KINDS[kind.kind].format(kind.window)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):,.2f}"
