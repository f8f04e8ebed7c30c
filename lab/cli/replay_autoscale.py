"""`kvrelay replay --autoscale`: what the autoscaler would do with this traffic, beside the best
fleet that stays as it is and an oracle that knows the trace.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from msgspec import structs
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from kvrelay.cluster.config import ConfigError, load_config
from kvrelay.lab.replay.trace import Trace
from kvrelay.router.scaling_config import ScalingConfig

if TYPE_CHECKING:
    from kvrelay.lab.replay.autoscale.scaled import ScaledResult
    from kvrelay.lab.replay.config import ReplayConfig

F = TypeVar("F", bound=Callable[..., Any])
MAX_STATIC_TRIES = 4
BESIDE = ("static", "oracle")


def autoscale_options(command: F) -> F:
    """The options of --autoscale, for a command."""
    above_0 = click.FloatRange(min=0, min_open=True)
    file = click.Path(path_type=Path)
    for option in reversed(
        (
            click.option("--autoscale", is_flag=True, help="Workers come and go."),
            click.option("--start-s", type=above_0, help="Of a worker; default 60."),
            click.option("--max-workers", type=click.IntRange(min=1), help="Default 12."),
            click.option("--min-workers", type=click.IntRange(min=0), help="Default 1."),
            click.option("--percentile", type=above_0, help="Of requests, wanted; default 90."),
            click.option(
                "--beside",
                default=",".join(BESIDE),
                show_default=True,
                help="What is replayed beside the autoscaler; none: nothing.",
            ),
            click.option("--log", "log_path", type=file, help="Write all decisions (JSON lines)."),
        )
    ):
        command = option(command)
    return command


def scaling_of(options: dict[str, Any]) -> ScalingConfig:
    """[scaling] of the configuration file, then the options. Raises ConfigError."""
    config = load_config(options["config_path"], {}).scaling
    changes: dict[str, Any] = {
        "enabled": True,
        "ttft_target_ms": options["ttft_slo_ms"],
        "itl_target_ms": options["itl_slo_ms"],
        "start_s": options["start_s"] or config.start_s,
        "max_workers": options["max_workers"] or (config.max_workers if config.enabled else 12),
    }
    for name in ("min_workers", "percentile"):
        if options[name] is not None:
            changes[name] = options[name]
    try:
        return structs.replace(config, **changes)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def run_autoscale(
    console: Console,
    trace: Trace,
    config: ReplayConfig,
    options: dict[str, Any],
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Replay, show and write. Raises ConfigError for settings that cannot be."""
    from kvrelay.lab.replay.autoscale.report import scaled_table, scaled_tables_json
    from kvrelay.lab.replay.report import Slo

    scaling = scaling_of(options)
    beside = {name.strip() for name in options["beside"].split(",")} - {"none", ""}
    if unknown := beside - set(BESIDE):
        raise ConfigError(f"--beside {unknown.pop()!r} is unknown; there are static, oracle, none")
    slo = Slo(scaling.ttft_target_ms, scaling.itl_target_ms)
    found = _replays(console, trace, config, scaling, beside, slo)
    if str(json_path) != "-":
        Console().print(scaled_table(found, slo, scaling))
    if options["log_path"] is not None:
        from kvrelay.cluster.scaling.decisions import encode_line

        lines = [encode_line(line) + b"\n" for line in found[0].log]
        options["log_path"].write_bytes(b"".join(lines))
    if json_path is not None:
        figures = scaled_tables_json(found, slo, scaling, config)
        text = json.dumps(figures, indent=2) + "\n"
        if str(json_path) == "-":
            click.echo(text, nl=False)
        else:
            json_path.write_text(text)
    if plot_path is not None:
        from kvrelay.lab.replay.autoscale.plot import save_scaling_plot

        save_scaling_plot(found, plot_path, slo, scaling)


def _replays(
    console: Console,
    trace: Trace,
    config: ReplayConfig,
    scaling: ScalingConfig,
    beside: set[str],
    slo: Any,
) -> list[ScaledResult]:
    """The autoscaler first, then what stands beside it."""
    from dataclasses import replace

    from kvrelay.lab.replay.autoscale.foresight import foresee, plan_of
    from kvrelay.lab.replay.autoscale.report import attainment
    from kvrelay.lab.replay.autoscale.scaled import replay_scaled, with_targets

    config = with_targets(config, scaling)
    start_s, wanted = scaling.start_s, scaling.percentile / 100.0
    with _progress(console) as progress:

        def run(name: str, with_config: ReplayConfig, by: Any) -> ScaledResult:
            return replay_scaled(name, trace, with_config, start_s, by, _teller(progress, name))

        found = [run("autoscaler", config, scaling)]
        foresight = foresee(trace, config, scaling) if beside else None
        if foresight is not None and "static" in beside:
            size = foresight.least_static(wanted)
            for _ in range(MAX_STATIC_TRIES):
                prefill, decode = foresight.static(size)
                fleet = replace(config, num_prefill=prefill, num_decode=decode)
                result = run(f"static {prefill} + {decode}", fleet, None)
                if attainment(result, slo) >= wanted or size >= scaling.max_workers:
                    break
                size += 1
            found.append(result)
        if foresight is not None and "oracle" in beside:
            path = foresight.path(wanted, start_s, config.num_prefill + config.num_decode)
            found.append(run("oracle", config, plan_of(foresight, path, start_s)))
    return found


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(compact=True),
    )
    return Progress(*columns, console=console, transient=True)


def _teller(progress: Progress, name: str) -> Callable[[float, float], None]:
    task = progress.add_task(name, total=1.0, status="")
    begun_at = time.monotonic()

    def tell(share: float, virtual_s: float) -> None:
        speed = virtual_s / max(time.monotonic() - begun_at, 1e-3)
        status = f"{virtual_s:,.0f} s, {speed:,.0f} x real time"
        progress.update(task, completed=share, status=status)

    return tell
