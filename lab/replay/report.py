"""From a `ReplayResult` to figures: plain data for JSON, and tables of at most 80 columns.

Times count from a request's arrival. What was refused, and what never ended, is in no percentile.
Where workers come and go there are attainment, GPU-hours and reversals too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvrelay.lab.replay.at_once import Try
from kvrelay.lab.replay.autoscale import ScaledResult
from kvrelay.lab.replay.config import ReplayConfig
from kvrelay.lab.replay.replay import ReplayResult, Sample
from kvrelay.lab.replay.why import summary_of
from kvrelay.router.scaling_config import ScalingConfig

Summary = dict[str, Any]
PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Slo:
    """A request is good if it got all its tokens, the first one within `ttft_ms`, and the others
    at most `itl_ms` apart in its own mean."""

    ttft_ms: float = 2000.0
    itl_ms: float = 50.0

    def met_by(self, sample: Sample) -> bool:
        if not is_complete(sample):
            return False
        assert sample.ttft_s is not None
        assert sample.e2e_s is not None
        gaps = max(1, sample.num_output - 1)
        mean_itl_s = (sample.e2e_s - sample.ttft_s) / gaps
        return sample.ttft_s * 1e3 <= self.ttft_ms and mean_itl_s * 1e3 <= self.itl_ms


def is_complete(sample: Sample) -> bool:
    return sample.refused is None and sample.ttft_s is not None and sample.e2e_s is not None


def summary(result: ReplayResult, slo: Slo = Slo(), model: str = "") -> Summary:
    """What a replay has shown, ready for JSON. A figure of nothing is None. `model`: of several."""
    samples = result.samples
    done = [sample for sample in samples if is_complete(sample)]
    refused = [sample for sample in samples if sample.refused is not None]
    return {
        "trace": result.trace,
        "model": model,
        "policy": result.policy,
        "timing": result.timing,
        "speedup": result.speedup,
        "requests": len(samples),
        "completed": len(done),
        "unfinished": len(samples) - len(done) - len(refused),
        "ttft_ms": _times(sample.ttft_s for sample in done),
        "second_token_ms": _times(sample.second_s for sample in done),
        "itl_ms": _weighted_times(result.itl_s, result.itl_counts),
        "e2e_ms": _times(sample.e2e_s for sample in done),
        **_reuse(done),
        "goodput": _goodput(samples, slo, result.virtual_s),
        "refused": _refused(refused),
        "output_tokens_per_s": _rate(sum(s.num_output for s in samples), result.virtual_s),
        "prediction_error": _prediction_error(done),
        "per_tenant": _shares(samples, slo, lambda sample: sample.tenant),
        "per_priority": _shares(samples, slo, lambda sample: sample.priority),
        **_why(done),
        **_by_turn(result, done),
        "retries": dict(result.retries),
        "counters": dict(result.counters),
        "virtual_s": result.virtual_s,
        "wall_s": result.wall_s,
        "speed": _rate(result.virtual_s, result.wall_s),  # times real time
        "events": result.num_events,
        "peak_rss_bytes": result.peak_rss_bytes,
    }


def _why(done: Sequence[Sample]) -> Summary:
    whys = [sample.why for sample in done if sample.why is not None]
    return {"why": summary_of(whys)} if whys else {}


def _by_turn(result: ReplayResult, done: Sequence[Sample]) -> Summary:
    """What agents' sessions have shown; of other traces nothing."""
    if not result.is_closed:
        return {}
    sessions: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in result.samples:
        sessions[sample.session or sample.request_id].append(sample)
    groups = {
        "first": [sample for sample in done if not sample.turn],
        "later": [sample for sample in done if sample.turn],
    }
    reusable = sum(sample.reusable for sample in done)
    reused = sum(min(sample.reusable, sum(sample.cached.values())) for sample in done)
    seconds = [
        max(s.at_s + (s.e2e_s or s.refused_s or 0.0) for s in its) - min(s.at_s for s in its)
        for its in sessions.values()
    ]
    gpu_s = len(result.load.workers) * result.virtual_s
    return {
        "turns": {
            name: {
                "requests": len(group),
                "ttft_ms": _times(sample.ttft_s for sample in group),
                **_reuse(group),
            }
            for name, group in groups.items()
        },
        "sessions": {
            "sessions": len(sessions),
            "unasked": result.num_unasked,  # turns of sessions that a refusal has ended
            "seconds": _spread(seconds),
            "gpu_s": gpu_s / len(sessions),  # all workers, busy or not
            "reusable_tokens": reusable,
            "reused_share": _rate(reused, reusable),
        },
    }


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None


def _times(seconds: Iterable[float | None]) -> dict[str, float | None]:
    return _spread(np.array([s for s in seconds if s is not None]) * 1e3)


def _spread(values: ArrayLike) -> dict[str, float | None]:
    """Returns mean and percentiles, which are interpolated."""
    found = np.asarray(values, dtype=np.float64)
    if not found.size:
        return {"mean": None, **{f"p{percent}": None for percent in PERCENTS}}
    percentiles = np.percentile(found, PERCENTS)
    return {
        "mean": float(found.mean()),
        **{f"p{p}": float(value) for p, value in zip(PERCENTS, percentiles, strict=True)},
    }


def weighted_percentiles(
    values: NDArray[np.floating], counts: NDArray[np.integer], percents: ArrayLike
) -> NDArray[np.float64]:
    """Each of `values` was seen `counts` times; there is at least one. The n-th percentile is the
    smallest value that at least n percent do not exceed."""
    order = np.argsort(values, kind="stable")
    cumulated = np.cumsum(counts[order], dtype=np.int64)
    wanted = np.ceil(np.asarray(percents) / 100 * cumulated[-1] - 1e-9)
    at = np.searchsorted(cumulated, np.maximum(wanted, 1))
    return np.asarray(values[order][at], dtype=np.float64)


def _weighted_times(
    seconds: NDArray[np.float32], counts: NDArray[np.int32]
) -> dict[str, float | None]:
    if not counts.sum():
        return _spread([])
    found = weighted_percentiles(seconds, counts, PERCENTS) * 1e3
    return {
        "mean": float(np.average(seconds.astype(np.float64), weights=counts)) * 1e3,
        **{f"p{p}": float(value) for p, value in zip(PERCENTS, found, strict=True)},
    }


def _reuse(done: Sequence[Sample]) -> Summary:
    """The fraction of prompt tokens that were not computed."""
    prompt_tokens = sum(sample.input_length for sample in done)
    cached: Counter[str] = Counter()
    for sample in done:
        cached.update(sample.cached)
    return {
        "prompt_tokens": prompt_tokens,
        "prefix_reuse": _rate(cached.total(), prompt_tokens),
        "prefix_reuse_by_tier": {
            tier: tokens / prompt_tokens for tier, tokens in cached.most_common()
        },
    }


def _goodput(samples: Sequence[Sample], slo: Slo, virtual_s: float) -> Summary:
    good = [sample for sample in samples if slo.met_by(sample)]
    return {
        "ttft_slo_ms": slo.ttft_ms,
        "itl_slo_ms": slo.itl_ms,
        "requests": len(good),
        "share": _rate(len(good), len(samples)),  # among all that came, refused ones too
        "requests_per_s": _rate(len(good), virtual_s),
        "tokens_per_s": _rate(sum(sample.num_output for sample in good), virtual_s),
    }


def _refused(refused: Sequence[Sample]) -> Summary:
    by_reason: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in refused:
        by_reason[sample.refused or ""].append(sample)
    return {
        reason: {
            "requests": len(group),
            "after_ms": _times(sample.refused_s for sample in group),
            "retry_after_s": _spread(
                [s.retry_after_s for s in group if s.retry_after_s is not None]
            ),
        }
        for reason, group in sorted(by_reason.items(), key=lambda item: -len(item[1]))
    }


def _prediction_error(done: Sequence[Sample]) -> dict[str, float | None]:
    """Compares the router's predicted time to the first token with the real one, relative to it."""
    errors = [
        abs(sample.predicted_ttft_s - sample.ttft_s) / sample.ttft_s
        for sample in done
        if sample.predicted_ttft_s is not None and sample.ttft_s
    ]
    found = _spread(errors)
    return {"median": found["p50"], "p90": found["p90"]}


def _shares(
    samples: Sequence[Sample], slo: Slo, group_of: Callable[[Sample], str | int]
) -> dict[str, Summary]:
    """What each group of requests asked for and got."""
    groups: defaultdict[Any, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[group_of(sample)].append(sample)
    all_output = sum(sample.num_output for sample in samples)
    return {
        str(name): _share(group, slo, len(samples), all_output)
        for name, group in sorted(groups.items())
    }


def _share(group: Sequence[Sample], slo: Slo, num_all: int, all_output: int) -> Summary:
    done = [sample for sample in group if is_complete(sample)]
    return {
        "requests": len(group),
        "requests_share": len(group) / num_all,
        "output_tokens_share": _rate(sum(sample.num_output for sample in group), all_output),
        "refused": sum(sample.refused is not None for sample in group),
        "good_share": sum(map(slo.met_by, group)) / len(group),
        "prefix_reuse": _reuse(done)["prefix_reuse"],
        "ttft_ms": _times(sample.ttft_s for sample in done),
    }


def attainment(found: ScaledResult, slo: Slo) -> float:
    """Share of all requests, refused ones included, within both targets."""
    samples = found.result.samples
    return sum(map(slo.met_by, samples)) / max(1, len(samples))


def figures(found: ScaledResult, slo: Slo) -> dict[str, Any]:
    """Describes one replay, for JSON."""
    all_figures = summary(found.result, slo)
    decisions = [line.decision for line in found.log if line.decision is not None]
    return {
        "name": found.name,
        "attainment": attainment(found, slo),
        "gpu_hours": found.gpu_hours,
        "reversals": found.reversals,
        "reversals_per_hour": found.reversals_per_hour,
        "starts": found.num_starts,
        "most_workers": max(paid for _, _, paid in found.history),
        "decisions": dict(Counter(str(each.reason) for each in decisions)),
        "replay": all_figures,
    }


def scaled_tables_json(
    found: Sequence[ScaledResult], slo: Slo, scaling: ScalingConfig, config: ReplayConfig
) -> dict[str, Any]:
    return {
        "trace": found[0].result.trace,
        "timing": found[0].result.timing,
        "ttft_slo_ms": slo.ttft_ms,
        "itl_slo_ms": slo.itl_ms,
        "percentile": scaling.percentile,
        "start_s": scaling.start_s,
        "first_fleet": [config.num_prefill, config.num_decode],
        "results": [figures(each, slo) for each in found],
    }


def scaled_table(found: Sequence[ScaledResult], slo: Slo, scaling: ScalingConfig) -> Group:
    """For the terminal, in 80 columns."""
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("fleet", no_wrap=True, max_width=18)
    counts = ("attained", "GPU\nhours", "reversals\nan hour", "starts", "most")
    heads = (*counts, "TTFT s\np99", "ITL ms\np99")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for each in found:
        row = figures(each, slo)
        ttft, itl = row["replay"]["ttft_ms"]["p99"], row["replay"]["itl_ms"]["p99"]
        table.add_row(
            Text(each.name),
            f"{row['attainment']:.3f}",
            f"{row['gpu_hours']:.2f}",
            f"{row['reversals_per_hour']:.1f}",
            f"{row['starts']:,}",
            f"{row['most_workers']:,}",
            "-" if ttft is None else f"{ttft / 1e3:.2f}",
            "-" if itl is None else f"{itl:.1f}",
        )
    first = found[0].result
    title = Text(
        f"{first.trace}: {len(first.samples):,} requests; {first.timing}; workers start in "
        f"{scaling.start_s:g} s",
        style="bold",
    )
    note = (
        f"attained: TTFT within {slo.ttft_ms:g} ms and tokens {slo.itl_ms:g} ms apart at most, in "
        f"the mean; {scaling.percentile:g} % are wanted"
    )
    return Group(title, table, Text(note))


def per_model(results: Mapping[str, ReplayResult], slos: Mapping[str, Slo]) -> dict[str, Summary]:
    """What each of several models was asked, and what came of it. Both: by model."""
    samples = [sample for each in results.values() for sample in each.samples]
    all_output = sum(sample.num_output for sample in samples)
    return {
        name: _share(each.samples, slos[name], len(samples), all_output)
        for name, each in results.items()
    }


def models_table(groups: Mapping[str, Summary]) -> Group:
    """Shows what `per_model` has found."""
    return Group("", _groups_table("model", groups))


def at_once_json(trace: str, found: Mapping[str, Sequence[Try]], ttft_ms: float) -> Summary:
    return {
        "trace": trace,
        "ttft_p90_slo_ms": ttft_ms,
        "policies": {
            name: {
                "sessions_at_once": max((t.at_once for t in tries if t.passed), default=0),
                "tries": [
                    {
                        "sessions_at_once": each.at_once,
                        "passed": each.passed,
                        "late": each.late,
                        "requests": each.requests,
                        "virtual_s": each.virtual_s,
                    }
                    for each in tries
                ],
            }
            for name, tries in found.items()
        },
    }


def at_once_table(trace: str, found: Mapping[str, Sequence[Try]], ttft_ms: float) -> Group:
    """Shows the number of sessions found for each policy, and what was tried."""
    table = _table("policy")
    for column in ("sessions at once", "tried (late turns)"):
        table.add_column(column, justify="right")
    for name, figures in at_once_json(trace, found, ttft_ms)["policies"].items():
        tried = ", ".join(f"{t['sessions_at_once']} ({t['late']})" for t in figures["tries"])
        table.add_row(Text(name), f"{figures['sessions_at_once']:,}", tried)
    title = Text(f"{trace}: p90 of TTFT within {ttft_ms:g} ms", style="bold")
    return Group(title, table)


MAX_GROUPS = 10  # tenants, priorities, retries and reasons shown; JSON has all
_TIMES = (
    ("ttft_ms", "TTFT"),
    ("second_token_ms", "second token"),
    ("itl_ms", "ITL"),
    ("e2e_ms", "end to end"),
)
_SPREAD = ("mean", "p50", "p90", "p99")


def result_table(found: Summary) -> Group:
    """Shows what one replay has found."""
    table = _table("")
    for part in _SPREAD:
        table.add_column(part, justify="right", min_width=9)
    for key, name in _TIMES:
        table.add_row(name, *(_time(found[key][part]) for part in _SPREAD))
    for name, group in found.get("turns", {}).items():
        table.add_row(f"TTFT, {name}", *(_time(group["ttft_ms"][part]) for part in _SPREAD))
    parts: list[RenderableType] = [_title(found, found["policy"]), table, _facts(found)]
    for key, name in (("per_tenant", "tenant"), ("per_priority", "priority")):
        if len(found[key]) > 1:
            parts += ["", _groups_table(name, found[key])]
    return Group(*parts)


def comparison_table(found: Sequence[Summary]) -> Group:
    """Replays of one trace that differ in their policy. The best of each column is bold."""
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("policy", no_wrap=True, max_width=14)
    columns = []
    for header, value_of, shown, best_of in _COMPARED:
        table.add_column(header, justify="right", no_wrap=True)
        values = [value_of(one) for one in found]
        known = {value for value in values if value is not None}
        best = best_of(known) if len(known) > 1 else None
        columns.append(
            [
                Text(shown(value), style="bold green" if value == best is not None else "")
                for value in values
            ]
        )
    for one, *cells in zip(found, *columns, strict=True):
        table.add_row(Text(one["policy"]), *cells)
    goodput, errors = found[0]["goodput"], [one for one in found if one["unfinished"]]
    lines = [
        f"good: TTFT within {goodput['ttft_slo_ms']:g} ms, tokens {goodput['itl_slo_ms']:g} ms "
        "apart at most, in the mean",
        *(f"{one['policy']}: {one['unfinished']:,} requests never ended" for one in errors),
    ]
    title = _title(found[0], f"{len(found)} policies")
    return Group(title, table, Text("\n".join(lines)))


def _title(found: Summary, what: str) -> Text:
    speedup = "" if found["speedup"] == 1 else f", {found['speedup']:g} times as fast"
    return Text(
        f"{': '.join(filter(None, (found['model'], found['trace'])))}:"
        f" {found['requests']:,} requests{speedup}; {what}; {found['timing']}",
        style="bold",
    )


def _facts(found: Summary) -> Table:
    """What is not a time, by name."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in _named_facts(found):
        table.add_row(Text(name, style="dim"), Text(fact))
    return table


def _named_facts(found: Summary) -> list[tuple[str, str]]:
    goodput, error = found["goodput"], found["prediction_error"]
    completed = f"{found['completed']:,} of {found['requests']:,}"
    if found["unfinished"]:
        completed += f"; {found['unfinished']:,} never ended"
    tiers = _listed({k: _percent(v) for k, v in found["prefix_reuse_by_tier"].items()})
    facts = [
        ("completed", completed),
        *(("refused", _refusal(reason, group)) for reason, group in found["refused"].items()),
        (
            "goodput",
            f"{_percent(goodput['share'])} of requests: {_number(goodput['requests_per_s'])} "
            f"requests/s, {_number(goodput['tokens_per_s'])} tokens/s (TTFT within "
            f"{goodput['ttft_slo_ms']:g} ms, mean ITL within {goodput['itl_slo_ms']:g} ms)",
        ),
        ("output", f"{_number(found['output_tokens_per_s'])} tokens/s"),
        ("prefix reuse", _percent(found["prefix_reuse"]) + (f": {tiers}" if tiers else "")),
    ]
    if sessions := found.get("sessions"):
        facts.append(
            (
                "sessions",
                f"{sessions['sessions']:,}, of {_number(sessions['seconds']['mean'])} s in the mean"
                f" and {_number(sessions['gpu_s'])} GPU-seconds; {sessions['unasked']:,} turns not"
                f" asked; of {sessions['reusable_tokens']:,} tokens that were there before"
                f" {_percent(sessions['reused_share'])} were reused",
            )
        )
    if error["median"] is not None:
        wrong = f"{_percent(error['median'])} (median), {_percent(error['p90'])} (p90)"
        facts.append(("prediction", f"of TTFT is off by {wrong}"))
    if found["retries"]:
        facts.append(("retries", _listed({k: f"{v:,}" for k, v in found["retries"].items()})))
    facts.append(
        (
            "simulated",
            f"{found['virtual_s']:,.0f} s in {found['wall_s']:,.1f} s, {_number(found['speed'])} "
            f"times real time; {found['events']:,} events; {found['peak_rss_bytes'] >> 20:,} MiB",
        )
    )
    return facts


def _refusal(reason: str, group: Summary) -> str:
    text = f"{group['requests']:,} {reason}, after {_time(group['after_ms']['p50'])} (p50)"
    retry = group["retry_after_s"]
    if retry["p50"] is not None:
        text += f", to retry after {retry['p50']:.3g} s (p50), {retry['p99']:.3g} s (p99)"
    return text


def _groups_table(name: str, groups: Mapping[str, Summary]) -> Table:
    """Tenants or priorities, those with most requests first."""
    table = _table(name)
    for column in ("requests", "of all", "of tokens", "refused", "good", "reuse", "TTFT p50"):
        table.add_column(column, justify="right", no_wrap=True)
    ranked = sorted(groups.items(), key=lambda item: -item[1]["requests"])
    for group, figures in ranked[:MAX_GROUPS]:
        table.add_row(
            Text(group or "-"),
            f"{figures['requests']:,}",
            _percent(figures["requests_share"]),
            _percent(figures["output_tokens_share"]),
            f"{figures['refused']:,}",
            _percent(figures["good_share"]),
            _percent(figures["prefix_reuse"]),
            _time(figures["ttft_ms"]["p50"]),
        )
    if len(ranked) > MAX_GROUPS:
        table.caption = f"and {len(ranked) - MAX_GROUPS} more"
    return table


def _table(first: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column(first, no_wrap=True, max_width=16)
    return table


def _number(value: float | None) -> str:
    """Writes three significant digits of it."""
    if value is None:
        return "-"
    if value >= 99.95:
        return f"{value:,.0f}"
    if value >= 0.9995:
        return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    return f"{value:.3f}" if value else "0"


def _time(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "-"
    if milliseconds < 999.5:
        return f"{_number(milliseconds)} ms"
    return f"{_number(milliseconds / 1e3)} s"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _listed(named: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {text}" for name, text in named.items())


Value = float | None


def _figure(key: str, part: str, scale: float = 1.0) -> Callable[[Summary], Value]:
    def value_of(found: Summary) -> Value:
        value = found[key][part]
        return None if value is None else float(value) / scale

    return value_of


def _bare_percent(share: Value) -> str:
    return _percent(share).removesuffix(" %")


def _num_refused(found: Summary) -> Value:
    return float(sum(group["requests"] for group in found["refused"].values()))


# Header, value, how it is shown, and which value is the best.
_COMPARED: tuple[
    tuple[str, Callable[[Summary], Value], Callable[[Value], str], Callable[..., Any]], ...
] = (
    ("TTFT s\nmean", _figure("ttft_ms", "mean", 1e3), _number, min),
    ("\np50", _figure("ttft_ms", "p50", 1e3), _number, min),
    ("\np99", _figure("ttft_ms", "p99", 1e3), _number, min),
    ("2nd s\np50", _figure("second_token_ms", "p50", 1e3), _number, min),
    ("ITL ms\nmean", _figure("itl_ms", "mean"), _number, min),
    ("\np99", _figure("itl_ms", "p99"), _number, min),
    ("e2e s\nmean", _figure("e2e_ms", "mean", 1e3), _number, min),
    ("reuse\n%", lambda found: found["prefix_reuse"], _bare_percent, max),
    ("good\n%", _figure("goodput", "share"), _bare_percent, max),
    ("refused\n", _num_refused, lambda value: f"{value or 0:,.0f}", min),
)
