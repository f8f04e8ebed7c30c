"""`/status` as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

_TIER_COLUMNS = {"num_host_blocks": "in host", "num_disk_blocks": "on disk"}
_SIZE = "tensor_parallel_size"
_ROUTER_KEYS = ("num_live", "num_queued")
_MAX_LINKS = 8  # lines; the slowest are told
_STATE_COLOURS = {
    "up": "green",
    "backoff": "yellow",
    "silent": "yellow",
    "draining": "yellow",
    "down": "red",
}


def status_table(status: dict[str, Any]) -> Group:
    """One row per worker, a row that sums them up, one per router, and what the router that was
    asked has served. Blocks are KV blocks."""
    table = Table(title=status.get("model"))
    table.add_column("worker")
    table.add_column("role")
    table.add_column("state")
    workers = status.get("workers", [])
    # Terminals are narrow: tiers that hold nothing have no column.
    tiers = [key for key in _TIER_COLUMNS if any(worker.get(key) for worker in workers)]
    names = ["blocks used", "cached", *(_TIER_COLUMNS[key] for key in tiers)]
    has_ranks = any(worker.get(_SIZE, 1) > 1 for worker in workers)
    if has_ranks:
        table.add_column("ranks", justify="right")
    for name in (*names, "running", "waiting", "hit rate"):
        table.add_column(name, justify="right")
    for worker in workers:
        table.add_row(
            worker["worker"],
            worker["role"],
            _coloured(str(worker["state"])),
            *([str(worker.get(_SIZE, "?"))] if has_ranks else []),
            *_load([worker], worker, tiers),
        )
    if len(workers) > 1:
        table.add_section()
        table.add_row("all", "", "", *([""] if has_ranks else []), *_load(workers, status, tiers))
    routers = status.get("routers")
    parts = [_routers_table(routers)] if routers else []
    links = [(worker["worker"], link) for worker in workers for link in worker.get("links", ())]
    if links:
        parts.append(_links_table(links))
    return Group(table, *parts, *_router_lines(status))


def _links_table(links: list[tuple[str, dict[str, Any]]]) -> Table:
    """One row per worker and peer that it can read, the slowest first: how fast a
    small read was when the two were connected."""
    slowest = sorted(links, key=lambda each: each[1]["bytes_per_s"])
    left = len(links) - _MAX_LINKS
    table = Table(caption=f"and {left} that are faster" if left > 0 else None)
    for name in ("KV read by", "from"):
        table.add_column(name)
    table.add_column("first read", justify="right")
    for worker, link in slowest[:_MAX_LINKS]:
        rate = link["bytes_per_s"]
        told = f"{rate / 1e9:.2f} GB/s" if rate else "not timed"
        table.add_row(worker, link["peer"], told)
    return table


def _routers_table(routers: list[dict[str, Any]]) -> Table:
    """One row per router: where its API is, and what it serves; "?" of one that does not say."""
    table = Table()
    has_store = any(router.get("store_up") is not None for router in routers)
    for name in ("router", "state", "API"):
        table.add_column(name)
    table.add_column("live", justify="right")
    table.add_column("queued", justify="right")
    if has_store:
        table.add_column("Redis")
    for router in routers:
        is_silent = router["state"] == "up" and router.get("num_live") is None
        cells = [
            str(router["router"]),
            _coloured("silent" if is_silent else router["state"]),
            router.get("url") or "",
            *("?" if router.get(key) is None else str(router[key]) for key in _ROUTER_KEYS),
        ]
        if has_store:
            store_up = router.get("store_up")
            cells.append("?" if store_up is None else _coloured("up" if store_up else "down"))
        table.add_row(*cells)
    return table


def _coloured(state: str) -> str:
    return f"[{_STATE_COLOURS.get(state, 'default')}]{state}[/]"


def _load(workers: list[dict[str, Any]], rated: dict[str, Any], tiers: Sequence[str]) -> list[str]:
    def total(key: str) -> int:
        return sum(worker.get(key, 0) for worker in workers)

    return [
        f"{total('num_used_blocks')} / {total('num_blocks')}",
        str(total("num_cached_blocks")),
        *(str(total(key)) for key in tiers),
        str(total("num_running")),
        str(total("num_waiting")),
        f"{100 * rated.get('cache_hit_rate', 0.0):.1f} %",
    ]


def _router_lines(status: dict[str, Any]) -> list[str]:
    """What the router serves, and what has become of what it served."""
    totals = status.get("totals", {})
    ended = ", ".join(f"{count} {reason}" for reason, count in totals.get("requests", {}).items())
    scaling = status.get("scaling")
    return [
        *([scaling["why"]] if scaling else []),
        f"{status.get('num_live', 0)} live, {status.get('num_queued', 0)} queued",
        f"ended: {ended or 'none'}",
        f"retries: {sum(totals.get('retries', {}).values())}",
        f"tokens: {totals.get('prompt_tokens', 0)} in ({totals.get('cached_tokens', 0)} cached), "
        f"{totals.get('output_tokens', 0)} out",
        *(
            f"avoided: KV from {link['source']} to {link['reader']}, of which"
            f" {link['lost_share']:.0%} did not come"
            for link in status.get("bad_links", ())
        ),
    ]
