"""`kvrelay explain`: where a request's time went, and why it went to the workers that served it.

An HTTP client of `/requests`. With an API key it sees the requests of that key's tenant.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import click
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvrelay.cluster.cli.client import api_key_option, json_option, line, show, url_option
from kvrelay.router.explain import seconds_text
from kvrelay.router.placement.cost import TERMS

BAR = 24  # characters for the whole of a request's time
WAITED_FOR = {  # as `router.record.WaitsFor`
    "turn": "its turn, or a worker",
    "memory": "KV memory of a worker",
    "agent": "prompts of its own agent at the workers",
    "deadline": "less work at the workers, to end in time",
    "target": "a place where its first token is on time",
}


@click.command()
@click.argument("request_id", required=False)
@url_option
@api_key_option
@json_option
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
    if request_id is None:
        show(url, api_key, "/requests", lambda a: recent_table(a["data"]), as_json, limit=last)
    else:
        path = f"/requests/{quote(request_id, safe='')}/explanation"
        show(url, api_key, path, explanation, as_json)


def recent_table(calls: list[dict[str, Any]]) -> Table:
    """Makes one row per call, the youngest first."""
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


def explanation(answer: dict[str, Any]) -> Group:
    """All that is known of one request."""
    parts: list[Any] = [line(text) for text in _head(answer)]
    parts += map(Text, _prefix(answer.get("prefix")))
    parts += map(Text, _waited(answer.get("waited_for", {})))
    parts += map(Text, _recomputed(answer.get("recomputed_tokens", {})))
    if images := answer.get("images"):
        parts.append(
            Text(f"images: {images['encoded']} encoded, {images['found']} kept from before")
        )
    parts.append(phases_table(answer))
    for attempt in answer["attempts"]:
        parts.append(line(_attempt_line(attempt), "bold"))
        decision = attempt["decision"]
        if decision is not None:
            parts.append(Text(f"{decision['reason']}."))
            parts.append(candidates_table(decision["decode_candidates"]))
            parts += [line(text, "dim") for text in _terms(decision["decode_candidates"])]
    return Group(*parts)


def _head(answer: dict[str, Any]) -> Iterator[str]:
    usage = answer["usage"]
    details = usage["prompt_tokens_details"]
    sources = details["cached_tokens_by_source"]
    cached = f"{details['cached_tokens']:,} cached"
    if sources:
        cached += ": " + ", ".join(f"{count:,} {source}" for source, count in sources.items())
    tier = answer.get("service_tier")
    of_tier = f", of tier {tier}" if tier not in (None, "default") else ""
    yield f"{answer['request']} ({answer['endpoint']}, {answer['outcome']}{of_tier})"
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


def _waited(seconds: dict[str, float]) -> Iterator[str]:
    for what, waited_s in sorted(seconds.items(), key=lambda each: -each[1]):
        yield f"queued for {seconds_text(waited_s)}: waits for {WAITED_FOR.get(what, what)}"


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


def _recomputed(tokens: dict[str, int]) -> Iterator[str]:
    for cause, count in tokens.items():
        yield f"  {count:,} tokens of it are cached, and were computed again for want of a {cause}"


def phases_table(answer: dict[str, Any]) -> Table:
    """Phases are in the order of time, with a line at the first token."""
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
    text = f"attempt {attempt['number']}: {attempt['decode']}"
    if attempt["prefill"]:
        text += f", prompt computed by {attempt['prefill']}"
    if attempt["fetch_from"]:
        text += f", prefix from {attempt['fetch_from']}"
    if attempt.get("redraws"):
        text += ", sampled on from the same distribution by other draws"
    return text + (f"; given up: {attempt['cause']}" if attempt["cause"] else "")


def _terms(candidates: list[dict[str, Any]]) -> Iterator[str]:
    """What the terms are that the costs of these have."""
    shown = {name for each in candidates for name, s in each["seconds"].items() if s > 0}
    return (f"{name}: {term.text}" for name, term in TERMS.items() if name in shown)


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
