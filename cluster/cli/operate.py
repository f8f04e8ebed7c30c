"""What operators ask of a running server: `kvrelay audit`, `role`, `drain`, `restart`,
`rollback`, `scaling`.

* `audit`: does every block of the cluster add up, and does any leak? What has just ended may still
  be settling, so it looks again for a while before it complains.
* `role`: what a worker is preferred for, changed while it serves. Its weights and its KV stay where
  they are. What decodes on a worker that is to compute prompts moves to others; what finds no room
  there is finished where it is.
* `console`: the address at which an operator's browser is let in, once.
* `drain`, `restart` and `rollback`: the end of a server, and every process of it anew, with what is
  installed and set now, or was before.
* `scaling`: what the autoscaler does, and why; or whether a log of it makes sense, from which every
  decision is made again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import httpx
from rich.console import Console, Group
from rich.table import Table

from kvrelay.cluster.cli.client import (
    ask_json,
    connected,
    get_json,
    json_option,
    operations_key_option,
    print_answer,
    scalings_of,
    url_option,
)
from kvrelay.engine.kv.tier import LOWER_TIERS
from kvrelay.engine.stats import Role

ASK_AGAIN_S = 0.5
ROLE_POLL_S = 0.05
RESTART_POLL_S = 0.5
MAX_DIFFERENCES = 5  # shown


@click.command()
@url_option
@json_option
@click.option(
    "--wait-s",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    help="What is left over may take this long to settle.",
)
@operations_key_option
def audit(url: str, as_json: bool, wait_s: float, operations_key: str) -> None:
    """Count the blocks of every worker, and what is held for no request. Exits with 1 if anything
    is left over or does not add up."""
    console = Console()
    deadline = time.monotonic() + wait_s
    with connected(url, operations_key) as client:
        found = get_json(client, "/audit")
        while not found["clean"] and time.monotonic() < deadline:
            time.sleep(ASK_AGAIN_S)
            found = get_json(client, "/audit")
    if as_json:
        console.print_json(data=found)
    else:
        _show_audit(console, found)
    if not found["clean"]:
        sys.exit(1)


def _show_audit(console: Console, found: dict[str, Any]) -> None:
    console.print(audit_table(found["workers"]))
    if found["live"]:
        console.print(f"{found['live']} requests are live: what they hold is not left over")
    for line in (*found["wrong"], *([] if found["live"] else found["left"])):
        console.print(line, style="red", markup=False, soft_wrap=True)
    if found["clean"] and not found["live"]:
        console.print("nothing is left over")


def audit_table(workers: list[dict[str, Any]]) -> Table:
    """One row per worker and tier; what is counted are KV blocks."""
    table = Table()
    table.add_column("worker", no_wrap=True)
    table.add_column("tier")
    for name in ("blocks", "in use", "cached", "blank", "transfers", "leases"):
        table.add_column(name, justify="right")
    for worker in workers:
        counts = worker["counts"]
        device = [counts[f"device.{part}"] for part in ("blocks", "in_use", "evictable", "blank")]
        ends = [counts["transfers"], counts["leases"]]
        table.add_row(worker["worker"], "device", *map(str, (*device, *ends)))
        for tier in LOWER_TIERS:
            blocks = counts[f"{tier}.blocks"]
            if blocks:
                used, pinned = counts[f"{tier}.used"], counts[f"{tier}.pinned"]
                table.add_row("", tier, *map(str, (blocks, pinned, used, blocks - used)))
    return table


@click.command()
@url_option
@click.argument("worker")
@click.argument("role", type=click.Choice([str(role) for role in Role]))
@click.option(
    "--wait-s",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    help="For the router to know of it, and for what decodes there to have moved.",
)
@operations_key_option
def role(url: str, worker: str, role: str, wait_s: float, operations_key: str) -> None:
    """Prefer WORKER for prompts (prefill), for decoding (decode) or for both, from now on."""
    console = Console()
    deadline = time.monotonic() + wait_s
    with connected(url, operations_key) as client:
        began = time.monotonic()
        path = f"/workers/{quote(worker, safe='')}/role"
        was = ask_json(client, "POST", path, json={"role": role})["was"]
        while True:
            found = _worker(get_json(client, "/status"), worker)
            num_decoding = found.get("num_decoding", 0) if role == Role.PREFILL else 0
            is_done = found.get("role") == role and not num_decoding
            if is_done or time.monotonic() >= deadline:
                break
            time.sleep(ROLE_POLL_S)
    elapsed_s = time.monotonic() - began
    if found.get("role") != role:
        raise click.ClickException(f"the router does not know of it after {elapsed_s:.1f} s")
    before = "was that already" if was == role else f"was {was}"
    console.print(f"{worker}: {role} ({before}), after {elapsed_s:.2f} s", highlight=False)
    if num_decoding:
        console.print(f"{num_decoding} requests found no room elsewhere, and finish there")


def _worker(status: dict[str, Any], worker: str) -> dict[str, Any]:
    return next((w for w in status["workers"] if w["worker"] == worker), {})


@click.command()
@url_option
@operations_key_option
def drain(url: str, operations_key: str) -> None:
    """Let the server finish what it has, and end. It takes no new request from now on, and
    /health/ready says so; what is not done after cluster.drain_s is cut off."""
    with connected(url, operations_key) as client:
        ask_json(client, "POST", "/drain", json={})
    Console().print("the server takes no new requests, and ends with those it has")


@click.command()
@url_option
@operations_key_option
def console(url: str, operations_key: str) -> None:
    """Print the address of the console, with a ticket that opens it once, within two minutes."""
    with connected(url, operations_key) as client:
        ticket = ask_json(client, "POST", "/console/ticket", json={})["ticket"]
    click.echo(f"{url.rstrip('/')}/console#ticket={ticket}")


wait_option = click.option(
    "--wait-s",
    type=click.FloatRange(min=0),
    default=900.0,
    show_default=True,
    help="For all to be up again.",
)


@click.command()
@url_option
@operations_key_option
@wait_option
def restart(url: str, operations_key: str, wait_s: float) -> None:
    """Start every process anew, one after the other, with what is installed and set now; requests
    go on all the while."""
    _replace_all(url, operations_key, wait_s, "restart")


@click.command()
@url_option
@operations_key_option
@wait_option
def rollback(url: str, operations_key: str, wait_s: float) -> None:
    """Go back to the version and the settings before the last restart that changed them; requests
    go on all the while."""
    _replace_all(url, operations_key, wait_s, "rollback")


def _replace_all(url: str, operations_key: str, wait_s: float, order: str) -> None:
    console, deadline = Console(), time.monotonic() + wait_s
    with connected(url, operations_key) as client:
        before = get_json(client, "/status")
        ask_json(client, "POST", f"/{order}", json={})
        shown: set[str] = set()
        while True:
            state = _status(client)
            up = _up_again(before, state)
            for line in sorted(up - shown):
                console.print(line, highlight=False)
            shown |= up
            if why := _why_stopped(before, state):
                raise click.ClickException(f"{order} stopped: {why}")
            if _is_over(before, state):
                break
            if time.monotonic() >= deadline:
                raise click.ClickException(f"not over after {wait_s:g} s: see the server's log")
            time.sleep(RESTART_POLL_S)
    console.print("all have been started anew", highlight=False)


def follow_order(
    client: httpx.Client, order: Callable[[], Any], wait_s: float, not_done: str
) -> None:
    """Give it, and wait until it is done."""
    deadline, before = time.monotonic() + wait_s, get_json(client, "/status")
    order()
    while True:
        state = _status(client)
        if why := _why_stopped(before, state):
            raise click.ClickException(f"{not_done}: {why}")
        if _is_later(before, state) and state["restart"].get("state") == "done":
            return
        if time.monotonic() >= deadline:
            raise click.ClickException(f"not over after {wait_s:g} s: see the server's log")
        time.sleep(RESTART_POLL_S)


def _is_later(before: dict[str, Any], state: dict[str, Any]) -> bool:
    """Whether `state` tells of the restart that was ordered."""
    numbers = [each.get("restart", {}).get("number", 0) for each in (before, state)]
    return bool(numbers[1] > numbers[0])


def _why_stopped(before: dict[str, Any], state: dict[str, Any]) -> str:
    restart = state.get("restart", {})
    is_stopped = _is_later(before, state) and restart.get("state") == "stopped"
    return str(restart["why"]) if is_stopped else ""


def _status(client: httpx.Client) -> dict[str, Any]:
    """Empty while the router itself starts."""
    try:
        state: dict[str, Any] = get_json(client, "/status")
        return state
    except httpx.TransportError:
        return {}


def _up_again(before: dict[str, Any], state: dict[str, Any]) -> set[str]:
    """What is up again, one line each."""
    up = set()
    for kind, name in (("workers", "worker"), ("routers", "router")):
        old = {entry[name]: entry.get("epoch", 0) for entry in before.get(kind, ())}
        for entry in state.get(kind, ()):
            epoch = entry.get("epoch", 0)
            if entry["state"] == "up" and epoch > old.get(entry[name], 0):
                up.add(f"{entry[name]}: up")
    return up


def _is_over(before: dict[str, Any], state: dict[str, Any]) -> bool:
    """A server that does not say so ends its controller last."""
    if "restart" in before:
        return _is_later(before, state) and state["restart"].get("state") == "done"
    epochs = [each.get("controller", {}).get("epoch", 0) for each in (before, state)]
    return epochs[1] > epochs[0] and all(w["state"] == "up" for w in state["workers"])


@click.command()
@url_option
@operations_key_option
@json_option
@click.option(
    "--check",
    "log_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Make each decision of this log again instead, and compare.",
)
def scaling(url: str, operations_key: str, as_json: bool, log_file: Path | None) -> None:
    """Show what the autoscaler does or does not do, and why.

    Its log is scaling/*.jsonl in the state directory.
    """
    if log_file is not None:
        _check(Console(highlight=False), log_file)
        return
    with connected(url, operations_key) as client:
        found = scalings_of(get_json(client, "/status"))
    shown = found.get("") if found.keys() <= {""} else found
    print_answer(shown, lambda _: scaling_view(found), as_json)


def scaling_view(found: dict[str, dict[str, Any]]) -> Group | str:
    """`found`: by model; "" where there is one."""
    if not found:
        return "no autoscaler runs: scaling.enabled is false (or there is no controller)"
    return Group(*(_scaling_of(f"autoscaler of {m}".removesuffix(" of "), found[m]) for m in found))


def _scaling_of(title: str, state: dict[str, Any]) -> Group:
    """What it says now, and a row per decision that said something new, the last at the end."""
    table = Table(title=title, title_justify="left")
    for name in ("at", "why", "workers", "of them decode", "done"):
        table.add_column(name, no_wrap=name != "done")
    for each in state["decisions"]:
        done = [f"+{role}" for role in each["starts"]]
        done += [f"-{worker}" for worker in each["drains"]] + list(each["flips"])
        done += each.get("removals", ())  # a server of the last release says none
        at = time.strftime("%H:%M:%S", time.localtime(each["at_s"]))
        counts = str(each["wanted"]), str(each["wanted_decode"])
        table.add_row(at, each["reason"], *counts, ", ".join(done) or "nothing")
    limits = f"from {state['least']} to {state['most']} workers may be"
    coming = f"{state['coming']} coming, {state['draining']} draining"
    return Group(table, f"now: {state['why']}", f"{limits}; {coming}")


def _check(console: Console, log_file: Path) -> None:
    """Exit code 1: a decision differs, or there is none."""
    import msgspec

    from kvrelay.cluster.scaling.decisions import read_log
    from kvrelay.cluster.scaling.planner import replay_log

    try:
        with log_file.open("rb") as lines:
            pairs = replay_log(read_log(lines))
    except msgspec.DecodeError as error:
        raise click.ClickException(f"{log_file} is not a log of decisions: {error}") from error
    if not pairs:
        raise click.ClickException(f"{log_file} has no decision after a line with settings")
    differing = [(made, again) for made, again in pairs if made != again]
    for made, again in differing[:MAX_DIFFERENCES]:
        console.print(f"at {made.at_s:.1f} s it was: {made.text}")
        console.print(f"  and would be now: {again.text}")
    acts = sum(made.acts for made, _ in pairs)
    console.print(
        f"{len(pairs)} decisions, of them {acts} that act: "
        f"{len(pairs) - len(differing)} are the same when they are made again"
    )
    if differing:
        raise SystemExit(1)
