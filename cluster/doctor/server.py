"""A running server, as it says of itself; and the state store that routers share."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvrelay.cluster.doctor.findings import Finding, fail, ok, skipped, warn

MAX_CLOCK_S = 2.0
MAX_STORE_S = 0.05
MANY_RESTARTS = 3


def check_workers(status: Mapping[str, Any]) -> Finding:
    """`status`: what `GET /status` answers."""
    check = "workers"
    workers = status["workers"]
    down = [each for each in workers if each.get("state", "up") not in ("up", "draining")]
    if down:
        text = "; ".join(
            f"{each['worker']} is {each['state']}"
            + (f" ({each['last_error']})" if each.get("last_error") else "")
            for each in down
        )
        return fail(check, text, "docs/runbooks/worker-down.md")
    often = [each for each in workers if each.get("restarts", 0) >= MANY_RESTARTS]
    if often:
        text = ", ".join(f"{each['worker']}: {each['restarts']} restarts" for each in often)
        return warn(check, text, "docs/runbooks/worker-restarts.md")
    return ok(check, f"{len(workers)} up")


def check_layouts(status: Mapping[str, Any]) -> Finding:
    """Workers with another model, data type or block size go on alone, and prompts are computed
    twice."""
    check = "KV layout"
    known = [(each["worker"], each["layout"]) for each in status["workers"] if each.get("layout")]
    layouts = Counter(layout for _, layout in known)
    if not layouts:
        return skipped(check, "no worker tells its layout")
    ((usual, _),) = layouts.most_common(1)
    others = [f"{worker} ({layout})" for worker, layout in known if layout != usual]
    if others:
        return fail(
            check,
            f"{', '.join(others)} differ from the others ({usual}) in model, dtype or blocks, and "
            "exchange no KV with them",
            "install one version everywhere, with one model and model.dtype (auto depends on the "
            "CPU), then kvrelay restart",
        )
    return ok(check, f"one, {usual}")


def check_server_clock(metrics: str, now: float) -> Finding:
    """`now`: of this machine, seconds since 1970."""
    for _, there in _samples(metrics, "kvrelay_clock_seconds"):
        return _clock("server's clock", there - now)
    return skipped("server's clock", "the server does not tell its time")


def check_store(url: str, timeout_s: float) -> list[Finding]:
    """Whether the store at `url` (`state.url`) answers, how fast, and what its clock says."""
    if not url:
        return [skipped("state store", "none is set")]
    try:
        from redis import Redis, RedisError
    except ImportError:
        return [fail("state store", "the redis package is missing", "pip install 'kvrelay[redis]'")]
    try:
        with Redis.from_url(url, socket_timeout=timeout_s) as store:
            store.ping()
            started = time.monotonic()
            seconds, micros = store.time()
            taken_s = time.monotonic() - started
    except (RedisError, OSError, ValueError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        return [fail("state store", f"does not answer: {why}", "docs/runbooks/state-store-down.md")]
    off_s = seconds + micros / 1e6 - time.time()
    answer = f"answers in {taken_s * 1000:.1f} ms"
    if taken_s > MAX_STORE_S:
        fix = "move it nearer: every router waits for it"
        return [warn("state store", answer, fix), _clock("store's clock", off_s)]
    return [ok("state store", answer), _clock("store's clock", off_s)]


def _clock(check: str, off_s: float) -> Finding:
    if abs(off_s) > MAX_CLOCK_S:
        return fail(
            check,
            f"{off_s:+.1f} s from this machine's",
            "systemctl restart systemd-timesyncd (or chrony) on the one that is off: "
            "docs/runbooks/clock-off.md",
        )
    return ok(check, f"{off_s:+.2f} s from this machine's")


def _samples(metrics: str, name: str) -> Iterable[tuple[dict[str, str], float]]:
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == name:
                yield sample.labels, sample.value
