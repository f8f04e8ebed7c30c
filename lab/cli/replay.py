"""`kvrelay replay`: what would a cluster do with this traffic? Answered without the cluster.

Reads or makes a trace, replays it under each policy that was named, and shows the figures as a
table, JSON and a picture. What is wrong with the input is one line, and exit code 2.

`kvrelay replay --autoscale`: what the autoscaler would do with this traffic, beside the best
fleet that stays as it is and an oracle that knows the trace.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from msgspec import structs
from rich.console import Console

from kvrelay.cluster.cli.settings import set_option
from kvrelay.cluster.config import ConfigError, load_config
from kvrelay.cluster.config_checks import require_extra
from kvrelay.lab.cli.figures import write_json
from kvrelay.lab.cli.progress import progress_bar, teller
from kvrelay.lab.cli.sessions import draw_of, found_at_once, session_options
from kvrelay.lab.replay.agents import Draw
from kvrelay.lab.replay.config import ORACLE, Fault, ReplayConfig
from kvrelay.lab.replay.lines import TraceError
from kvrelay.lab.replay.readers import read_trace
from kvrelay.lab.replay.report import (
    Slo,
    Summary,
    comparison_table,
    models_table,
    per_model,
    result_table,
    summary,
)
from kvrelay.lab.replay.trace import PRESETS, Trace, by_model, multiplied, preset
from kvrelay.lab.replay.why import why_table
from kvrelay.lab.timing.profile import load_timing
from kvrelay.lab.timing.timing import Timing, TimingError, overheads_of
from kvrelay.router.config import POLICIES
from kvrelay.router.scaling_config import ScalingConfig

if TYPE_CHECKING:
    from kvrelay.lab.replay.autoscale import ScaledResult
    from kvrelay.lab.replay.config import ReplayConfig
    from kvrelay.lab.replay.replay import ReplayResult


F = TypeVar("F", bound=Callable[..., Any])
MAX_STATIC_TRIES = 4
BASELINES = ("static", "oracle")


def autoscale_options(command: F) -> F:
    """The options of --autoscale, for a command."""
    above_0 = click.FloatRange(min=0, min_open=True)
    file = click.Path(path_type=Path)
    for option in reversed(
        (
            click.option("--autoscale", is_flag=True, help="Workers come and go."),
            click.option(
                "--start-s", type=above_0, help="Of a worker; default: of the timing file, or 60."
            ),
            click.option("--max-workers", type=click.IntRange(min=1), help="Default 12."),
            click.option("--min-workers", type=click.IntRange(min=0), help="Default 1."),
            click.option("--percentile", type=above_0, help="Of requests, wanted; default 90."),
            click.option(
                "--beside",
                default=",".join(BASELINES),
                show_default=True,
                help="What is replayed beside the autoscaler; none: nothing.",
            ),
            click.option("--log", "log_path", type=file, help="Write all decisions (JSON lines)."),
        )
    ):
        command = option(command)
    return command


def scaling_of(options: dict[str, Any], timing: Timing) -> ScalingConfig:
    """[scaling] of the configuration file, with the start that `timing` has measured, then the
    options. Raises ConfigError."""
    config = load_config(options["config_path"], options["overrides"]).scaling
    changes: dict[str, Any] = {
        "enabled": True,
        "ttft_target_ms": options["ttft_slo_ms"],
        "itl_target_ms": options["itl_slo_ms"],
        "start_s": options["start_s"] or overheads_of(timing).start_s or config.start_s,
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
    from kvrelay.lab.replay.report import Slo, scaled_table, scaled_tables_json

    scaling = scaling_of(options, config.timing)
    beside = {name.strip() for name in options["beside"].split(",")} - {"none", ""}
    if unknown := beside - set(BASELINES):
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
        write_json(json_path, scaled_tables_json(found, slo, scaling, config))
    if plot_path is not None:
        from kvrelay.lab.replay.plot import save_scaling_plot

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

    from kvrelay.lab.replay.autoscale import foresee, plan_of, replay_scaled, with_targets
    from kvrelay.lab.replay.report import attainment

    config = with_targets(config, scaling)
    start_s, wanted = scaling.start_s, scaling.percentile / 100.0
    with progress_bar(console) as progress:

        def run(name: str, with_config: ReplayConfig, by: Any) -> ScaledResult:
            return replay_scaled(name, trace, with_config, start_s, by, teller(progress, name))

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


SYNTHETIC = "synthetic:"
GIB = 1 << 30
DEFAULT_REQUESTS = 2_000
DEFAULT_RATE = 1.0  # requests/s
MAX_REQUESTS = 10_000_000
STATS_PER_S = 100.0  # from all workers, at most, and from each at most one: a router reads them all
_SECONDS = r"(\d+(?:\.\d+)?)"
_FAULT = re.compile(rf"kill\s+(\S+)\s+at\s+{_SECONDS}\s+for\s+{_SECONDS}")


class BadInputError(click.ClickException):
    """Ends the command with one line, and the exit code of a wrong command line."""

    exit_code = 2


def _kinds() -> str:
    lines = (f"  {SYNTHETIC + name:<20}{about}" for name, (about, _) in PRESETS.items())
    return "\n".join(("\b", "Synthetic traffic:", *lines))


KNOWN_POLICIES = (*POLICIES, ORACLE)
_COUNT = click.IntRange(min=1)
_NONE_OR_MORE = click.IntRange(min=0)
_ABOVE_0 = click.FloatRange(min=0, min_open=True)
_FILE = click.Path(path_type=Path)


@click.command("replay", epilog=_kinds())
@click.argument("traffic", metavar="TRACE|synthetic:NAME", required=False)
@click.option("--model", "models", multiple=True, metavar="NAME=TRACE", help="Traffic of a model.")
@click.option("--own", multiple=True, metavar="NAME.OPTION=VALUE", help="For that model alone.")
@click.option("--prefill", type=_NONE_OR_MORE, default=1, show_default=True, help="Workers.")
@click.option("--decode", type=_COUNT, default=1, show_default=True, help="Workers.")
@click.option("--blocks", type=_COUNT, default=400, show_default=True, help="Of each worker.")
@click.option("--block-size", type=_COUNT, default=512, show_default=True, help="Tokens.")
@click.option(
    "--timing",
    "timing_name",
    metavar="FILE|GPU:MODEL",
    default="h100:llama-3-8b",
    show_default=True,
    help="How long things take: a timing file, or a roofline.",
)
@click.option("--host-gib", type=_ABOVE_0, help="Host memory for KV, of each worker.")
@click.option("--host-blocks", type=_NONE_OR_MORE, help="The same in blocks.")
@click.option("--disk-gib", type=_ABOVE_0, help="Disk for KV, of each worker.")
@click.option("--disk-blocks", type=_NONE_OR_MORE, help="The same in blocks.")
@click.option("--policy", metavar="NAME[,NAME...]", help=f"{', '.join(KNOWN_POLICIES)}, or all.")
@click.option("--why", is_flag=True, help="Where TTFT goes, beside the oracle.")
@click.option("--speedup", type=_ABOVE_0, default=1.0, show_default=True, help="Of arrivals.")
@click.option("--copies", type=_COUNT, default=1, show_default=True, help="Of each request.")
@click.option("--max-seqs", type=_COUNT, default=64, show_default=True, help="In a step.")
@click.option("--max-batched-tokens", type=_COUNT, default=8192, show_default=True)
@click.option("--timeout-s", type=_ABOVE_0, default=600.0, show_default=True, help="Of a request.")
@click.option("--limit", type=_COUNT, help="Only the first so many requests of the trace.")
@click.option(
    "--requests",
    type=click.IntRange(1, MAX_REQUESTS),
    help=f"Of synthetic:NAME; default {DEFAULT_REQUESTS}.",
)
@click.option(
    "--rate", type=_ABOVE_0, help=f"Of synthetic:NAME, requests/s; default {DEFAULT_RATE:g}."
)
@session_options
@click.option("--seed", type=_NONE_OR_MORE, default=0, show_default=True)
@click.option("--faults", default="", metavar='"kill WORKER at S for S; ..."')
@click.option("--ttft-slo-ms", type=_ABOVE_0, default=2000.0, show_default=True)
@click.option("--itl-slo-ms", type=_ABOVE_0, default=50.0, show_default=True)
@autoscale_options
@click.option("--json", "json_path", type=_FILE, help="Write the figures there; - for stdout.")
@click.option("--plot", "plot_path", type=_FILE, help="Write a picture (PNG) there.")
@click.option("--config", "config_path", type=_FILE, help="TOML, of which [router] counts.")
@set_option
def replay_command(
    traffic: str | None, json_path: Path | None, plot_path: Path | None, **options: Any
) -> None:
    """Replay traffic against a cluster that is not there.

    TRACE is a file of Mooncake's (JSON lines) or Azure's (CSV); synthetic:NAME makes --requests of
    the kinds below. The router and the workers are those of `kvrelay serve`; only the model and the
    transfers are replaced, by how long they would take.
    """
    console = Console(stderr=True)
    loaded = load_models(traffic, options)
    own = own_options(options, loaded)
    configs = {model: _configs(own[model], model) for model in loaded}
    num_faults = sum(len(each.faults) for each, *_ in configs.values())
    if num_faults < len(parse_faults(options["faults"])):
        known = ", ".join(f"decode-{model}-0" for model in loaded)
        raise BadInputError(f"--faults {options['faults']!r}: workers are called {known}")
    for path in (json_path, plot_path):
        _check_writable(path)
    if plot_path is not None:
        try:
            require_extra("plot", "matplotlib")
        except ConfigError as error:
            raise BadInputError(str(error)) from error
    traces = {model: multiplied(trace, options["copies"]) for model, trace in loaded.items()}
    for note in dict.fromkeys(note for trace in traces.values() for note in trace.notes):
        console.print(f"note: {note}", style="yellow", markup=False, soft_wrap=True)
    if options["autoscale"]:
        if len(traces) > 1:
            names = ", ".join(traces)
            raise BadInputError(f"--autoscale replays one model, and there are {names}")
        ((model, trace),) = traces.items()
        try:
            run_autoscale(console, trace, configs[model][0], own[model], json_path, plot_path)
        except ConfigError as error:
            raise BadInputError(str(error)) from error
        return
    if options["find_at_once"]:
        for model, trace in traces.items():
            found_at_once(console, trace, configs[model], own[model]["ttft_slo_ms"], json_path)
        return
    slos = {name: Slo(each["ttft_slo_ms"], each["itl_slo_ms"]) for name, each in own.items()}
    results = {
        model: _replay_all(console, traces[model], configs[model], model) for model in traces
    }
    found = {m: [summary(each, slos[m], m) for each in results[m]] for m in results}
    if str(json_path) != "-":
        for each in found.values():
            Console().print(result_table(each[0]) if len(each) == 1 else comparison_table(each))
            if options["why"]:
                Console().print(why_table(each))
        if len(found) > 1:
            first = {model: each[0] for model, each in results.items()}
            Console().print(models_table(per_model(first, slos)))
    try:
        if json_path is not None:
            _write_json(json_path, traces, configs, found)
        if plot_path is not None:
            from kvrelay.lab.replay.plot import save_plot

            shown = [
                replace(each, policy=f"{model} {each.policy}".strip())
                for model, its in results.items()
                for each in its
            ]
            save_plot(shown, plot_path, next(iter(slos.values())))
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from error


OWN = (
    *("prefill", "decode", "blocks", "block-size", "timing", "host-gib", "host-blocks"),
    *("disk-gib", "disk-blocks", "policy", "max-seqs", "max-batched-tokens", "timeout-s"),
    *("ttft-slo-ms", "itl-slo-ms"),
)


def own_options(options: dict[str, Any], models: Collection[str]) -> dict[str, dict[str, Any]]:
    """Options of each model. Raises BadInputError."""
    found = {model: dict(options) for model in models}
    params = {param.opts[0].removeprefix("--"): param for param in replay_command.params}
    for text in options["own"]:
        name, _, value = text.partition("=")
        model, _, key = name.rpartition(".")
        if model not in found or key not in OWN:
            raise BadInputError(
                f"--own {text!r}: write NAME.OPTION=VALUE, with a model of the traffic"
                f" ({', '.join(filter(None, models)) or 'it names none'}) and one of"
                f" {', '.join(OWN)}"
            )
        param = params[key]
        try:
            found[model][str(param.name)] = param.type.convert(value, param, None)
        except click.BadParameter as error:
            raise BadInputError(f"--own {text!r}: {error.message}") from error
    return found


def load_models(traffic: str | None, options: dict[str, Any]) -> dict[str, Trace]:
    """By model; "" where the traffic names none. Raises BadInputError."""
    found = {} if traffic is None else by_model(load_traffic(traffic, options))
    for text in options["models"]:
        name, _, its = text.partition("=")
        if not name or not its or name in found:
            why = "that model has traffic already" if name in found else "write NAME=TRACE"
            raise BadInputError(f"--model {text!r}: {why}")
        found[name] = load_traffic(its, options)
        if any(request.model for request in found[name].requests):
            raise BadInputError(f"--model {text!r}: {its} says itself which model each is for")
    if not found:
        raise BadInputError("no traffic: name a trace, or --model NAME=TRACE for each model")
    if len(found) > 1 and "" in found:
        raise BadInputError("some requests name no model: all do, or none does")
    return found


def _configs(options: dict[str, Any], model: str) -> list[ReplayConfig]:
    """One for each policy. Raises BadInputError."""
    try:
        timing = load_timing(options["timing_name"])
        router = load_config(options["config_path"], options["overrides"]).router
        default = router.policy
        stats_interval_s = max(1.0, (options["prefill"] + options["decode"]) / STATS_PER_S)
        patience_s = max(router.probe_after_s, 2.5 * stats_interval_s)
        silent_s = max(router.silent_after_s, 4 * stats_interval_s)
        router = structs.replace(
            router, policy=POLICIES[0], probe_after_s=patience_s, silent_after_s=silent_s
        )
        config = ReplayConfig(
            timing=timing,
            router=router,
            num_prefill=options["prefill"],
            num_decode=options["decode"],
            num_blocks=options["blocks"],
            block_size=options["block_size"],
            max_num_seqs=options["max_seqs"],
            max_num_batched_tokens=options["max_batched_tokens"],
            num_host_blocks=_tier_blocks("host", options, timing),
            num_disk_blocks=_tier_blocks("disk", options, timing),
            speedup=options["speedup"],
            seed=options["seed"],
            faults=_faults_of(model, parse_faults(options["faults"])),
            timeout_s=options["timeout_s"],
            stats_interval_s=stats_interval_s,
            at_once=options["at_once"] or 0,
            why=options["why"],
        )
        policies = parse_policies(options["policy"] or default)
        if options["why"]:
            policies = tuple(dict.fromkeys((*policies, ORACLE)))
        return [
            replace(config, oracle=True)
            if name == ORACLE
            else replace(config, router=structs.replace(router, policy=name))
            for name in policies
        ]
    except (TimingError, ConfigError, ValueError) as error:
        raise BadInputError(str(error)) from error


def _tier_blocks(tier: str, options: dict[str, Any], timing: Timing) -> int:
    """Returns one worker's. Raises ValueError."""
    gib, blocks = options[f"{tier}_gib"], options[f"{tier}_blocks"]
    if gib is None:
        return int(blocks or 0)
    if blocks is not None:
        raise ValueError(f"--{tier}-gib {gib:g} and --{tier}-blocks {blocks}: give one of them")
    block_bytes = timing.links.bytes_per_token * options["block_size"]
    if gib * GIB < block_bytes:
        raise ValueError(
            f"--{tier}-gib {gib:g} holds no block; one has {block_bytes / GIB:.3g} GiB"
        )
    return int(gib * GIB // block_bytes)


def parse_policies(text: str) -> tuple[str, ...]:
    """`all`, or names with commas between them. Raises ValueError."""
    names = KNOWN_POLICIES if text == "all" else tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in KNOWN_POLICIES:
            raise ValueError(
                f"policy {name!r} is unknown; there are {', '.join(KNOWN_POLICIES)}, all"
            )
    return tuple(dict.fromkeys(names))


def parse_faults(text: str) -> tuple[Fault, ...]:
    """`kill WORKER at SECONDS for SECONDS`, with semicolons between several. Raises ValueError."""
    faults = []
    for part in filter(None, map(str.strip, text.split(";"))):
        match = _FAULT.fullmatch(part)
        if match is None:
            raise ValueError(f"fault {part!r}: write kill decode-3 at 600 for 30, for example")
        faults.append(Fault(match[1], float(match[2]), float(match[3])))
    return tuple(faults)


def _faults_of(model: str, faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """Those of its workers, which are called decode-MODEL-3 where traffic names models."""
    if not model:
        return faults
    own = []
    for fault in faults:
        role, _, rest = fault.worker.partition("-")
        name, _, number = rest.rpartition("-")
        if name == model:
            own.append(replace(fault, worker=f"{role}-{number}"))
    return tuple(own)


def load_traffic(traffic: str, options: dict[str, Any]) -> Trace:
    """Read or made. Raises BadInputError."""
    requests, rate, limit = options["requests"], options["rate"], options["limit"]
    wants_sessions = options["at_once"] or options["find_at_once"]
    if not traffic.startswith(SYNTHETIC):
        if requests is not None or rate is not None:
            raise BadInputError(
                "--requests and --rate are for synthetic:NAME; of a file, --limit takes the first "
                "requests and --speedup makes them come faster"
            )
        try:
            trace = read_trace(Path(traffic), limit, draw_of(options))
        except TraceError as error:
            raise BadInputError(str(error)) from error
        if wants_sessions and not trace.is_closed:
            raise BadInputError(f"--at-once is for sessions of agents, and {traffic} has none")
        if trace.is_closed and (options["copies"] != 1 or options["speedup"] != 1):
            raise BadInputError(
                "--copies and --speedup are for arrivals that are fixed; of sessions there are "
                "--sessions, --start-rate and --think-scale"
            )
        return trace
    if wants_sessions or draw_of(options) != Draw(seed=options["seed"]):
        raise BadInputError(
            "--at-once is for sessions of agents, and so are --sessions, --start-rate, "
            f"--think-scale, --max-think-s and --max-input; {traffic} has requests that come in "
            "their time"
        )
    name = traffic.removeprefix(SYNTHETIC)
    if name not in PRESETS:
        known = ", ".join(SYNTHETIC + each for each in PRESETS)
        raise BadInputError(f"there is no {traffic}; there are {known}")
    number = min(requests or DEFAULT_REQUESTS, limit or MAX_REQUESTS)
    return preset(name, number, rate or DEFAULT_RATE, options["seed"], options["block_size"])


def _check_writable(path: Path | None) -> None:
    """Before hours of work, not after them. Raises BadInputError."""
    if path is None or str(path) == "-":
        return
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadInputError(f"{path} cannot be written; name a file in a folder that is there")


def _replay_all(
    console: Console, trace: Trace, configs: Sequence[ReplayConfig], model: str
) -> list[ReplayResult]:
    from kvrelay.lab.replay.replay import replay

    with progress_bar(console) as progress:
        return [
            replay(trace, config, teller(progress, f"{model} {config.policy}".strip()))
            for config in configs
        ]


def _settings(config: ReplayConfig) -> dict[str, Any]:
    names = [
        each.name for each in fields(config) if each.name not in ("timing", "router", "faults")
    ]
    return {
        "timing": config.timing.name,
        "links": asdict(config.timing.links),
        **{name: getattr(config, name) for name in names},
        "router": {k: v for k, v in structs.asdict(config.router).items() if k != "policy"},
        "faults": [asdict(fault) for fault in config.faults],
    }


def _write_json(
    path: Path,
    traces: dict[str, Trace],
    configs: dict[str, list[ReplayConfig]],
    found: dict[str, list[Summary]],
) -> None:
    """Settings, and what came of them under each policy. All by model; of several, the settings
    too."""
    settings = {model: _settings(first) for model, (first, *_) in configs.items()}
    everything = {
        "trace": ", ".join(dict.fromkeys(trace.name for trace in traces.values())),
        "notes": [*dict.fromkeys(note for trace in traces.values() for note in trace.notes)],
        "settings": settings if len(settings) > 1 else next(iter(settings.values())),
        "results": [each for its in found.values() for each in its],
    }
    write_json(path, everything)
