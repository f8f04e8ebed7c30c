"""A replay's figures for reading: one replay in full, or several side by side, in 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvrelay.lab.replay.report import Summary

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
        f"{found['trace']}: {found['requests']:,} requests{speedup}; {what}; {found['timing']}",
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


def _refused(found: Summary) -> Value:
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
    ("refused\n", _refused, lambda value: f"{value or 0:,.0f}", min),
)
