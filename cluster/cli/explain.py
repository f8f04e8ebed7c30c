"""`kvrelay explain`: where a request's time went, and why it went to the workers that served it.

An HTTP client of `/requests`. With an API key it sees the requests of that key's tenant.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import click
import httpx
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvrelay.cluster.cli.client import (
    api_key_option,
    get_json,
    key_headers,
    plain_errors,
    url_option,
)
from kvrelay.router.explain import seconds_text

BAR = 24  # characters for the whole of a request's time
_TIMEOUT = httpx.Timeout(30.0)


@click.command()
@click.argument("request_id", required=False)
@url_option
@api_key_option
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
@click.option(
    "--last", type=click.IntRange(min=1, max=512), help="List this many that ended last instead."
)
def explain(
    request_id: str | None, url: str, api_key: str, as_json: bool, last: int | None
) -> None:
    """Show where the time of REQUEST_ID went, who could have served it, and why the winner won.

    REQUEST_ID is the `x-request-id` of a response, or the `id` in its body.
    """
    if (request_id is None) == (last is None):
        raise click.UsageError("give either a REQUEST_ID or --last N")
    console = Console(highlight=False)
    headers = key_headers(api_key)
    with (
        plain_errors(url),
        httpx.Client(base_url=url, timeout=_TIMEOUT, headers=headers) as client,
    ):
        if request_id is None:
            answer = get_json(client, "/requests", limit=last)
        else:
            answer = get_json(client, f"/requests/{quote(request_id, safe='')}/explanation")
    if as_json:
        console.print_json(data=answer)
    elif request_id is None:
        console.print(recent_table(answer["data"]))
    else:
        _show(console, answer)


def recent_table(calls: list[dict[str, Any]]) -> Table:
    """One row per call, the youngest first."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("request", no_wrap=True)
    table.add_column("outcome", overflow="fold")
    for name in ("in", "out", "TTFT", "end to end"):
        table.add_column(name, justify="right", no_wrap=True)
    for call in calls:
        usage = call["usage"]
        ttft_s = call["ttft_s"]
        table.add_row(
            call["id"],
            call["outcome"],
            f"{usage['prompt_tokens']:,}",
            f"{usage['completion_tokens']:,}",
            "" if ttft_s is None else seconds_text(ttft_s),
            seconds_text(call["e2e_s"]),
        )
    return table


def _show(console: Console, answer: dict[str, Any]) -> None:
    for line in _head(answer):
        console.print(line, markup=False, soft_wrap=True)
    for line in _prefix(answer.get("prefix")):
        console.print(line, markup=False)
    console.print(phases_table(answer))
    for attempt in answer["attempts"]:
        console.print(_attempt_line(attempt), style="bold", markup=False, soft_wrap=True)
        decision = attempt["decision"]
        if decision is None:
            continue
        console.print(f"{decision['reason']}.", markup=False)
        console.print(candidates_table(decision["decode_candidates"]))


def _head(answer: dict[str, Any]) -> Iterator[str]:
    usage = answer["usage"]
    details = usage["prompt_tokens_details"]
    sources = details["cached_tokens_by_source"]
    cached = f"{details['cached_tokens']:,} cached"
    if sources:
        cached += ": " + ", ".join(f"{count:,} {source}" for source, count in sources.items())
    yield f"{answer['request']} ({answer['endpoint']}, {answer['outcome']})"
    yield f"{usage['prompt_tokens']:,} tokens in ({cached}), {usage['completion_tokens']:,} out"
    ttft_s = answer["ttft_s"]
    first = "no token" if ttft_s is None else f"first token after {seconds_text(ttft_s)}"
    yield f"{first}, all of it after {seconds_text(answer['e2e_s'])}"
    prediction = answer["prediction"]
    if prediction is not None:
        yield (
            f"from the decision to the first token: {seconds_text(prediction['real_s'])}, predicted"
            f" {seconds_text(prediction['predicted_s'])} ({prediction['relative_error']:.0%} off)"
        )


def _prefix(found: dict[str, Any] | None) -> Iterator[str]:
    """Which token broke the prefix, and what the client changed there."""
    if found is None:
        yield "prefix: begins as no earlier prompt that is known"
        return
    common, earlier = found["common_tokens"], found["earlier"]
    if found["is_continued"]:
        yield f"prefix: goes on after all {common:,} tokens of {earlier}"
        return
    yield f"prefix: the first {common:,} of {found['earlier_tokens']:,} tokens of {earlier}"
    yield f"  after {found['before']!r}"
    yield f"  came  {found['earlier_text']!r}"
    yield f"  comes {found['text']!r}"


def phases_table(answer: dict[str, Any]) -> Table:
    """In the order of time, with a line at the first token."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("phase", no_wrap=True)
    table.add_column("worker", overflow="fold")
    for name in ("time", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", width=BAR + 1, no_wrap=True)
    whole_s = sum(phase["seconds"] for phase in answer["phases"]) or 1.0
    before_s = 0.0
    phases = answer["phases"]
    for index, phase in enumerate(phases):
        seconds = phase["seconds"]
        share = seconds / whole_s
        start = round(before_s / whole_s * BAR)
        before_s += seconds
        bar = " " * start + "█" * (round(before_s / whole_s * BAR) - start)
        is_last = index + 1 == len(phases)
        table.add_row(
            phase["name"],
            phase["worker"],
            seconds_text(seconds),
            f"{share:.1%}",
            bar,
            end_section=is_last or phase["to_first"] != phases[index + 1]["to_first"],
        )
    table.add_row("sum", "", seconds_text(before_s), "", "")
    return table


def _attempt_line(attempt: dict[str, Any]) -> str:
    line = f"attempt {attempt['number']}: {attempt['decode']}"
    if attempt["prefill"]:
        line += f", prompt computed by {attempt['prefill']}"
    if attempt["fetch_from"]:
        line += f", prefix from {attempt['fetch_from']}"
    return line + (f"; given up: {attempt['cause']}" if attempt["cause"] else "")


def candidates_table(candidates: list[dict[str, Any]]) -> Table:
    """Who could have served it, best first; what each would have cost in all, and its parts."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("candidate", overflow="fold")
    table.add_column("tokens cached")
    table.add_column("cost", justify="right", no_wrap=True)
    table.add_column("of which")
    for candidate in candidates:
        held = candidate["cached_tokens"]
        parts = [(name, s) for name, s in candidate["seconds"].items() if s > 0]
        table.add_row(
            candidate["name"],
            ", ".join(f"{count:,} {tier}" for tier, count in held.items() if count) or "none",
            seconds_text(candidate["total_s"]),
            ", ".join(f"{name} {seconds_text(s)}" for name, s in parts),
        )
    return table
