"""A running server, as it says of itself; and the state store that routers share."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvrelay.cluster.doctor.disk import LEAST_FREE
from kvrelay.cluster.doctor.findings import Finding, fail, ok, skipped, warn
from kvrelay.cluster.doctor.system import GIB, MIB

MAX_CLOCK_S = 2.0
MAX_STORE_S = 0.05
MANY_RESTARTS = 3
# As the alerts have it.
MAX_CONTROLLER_AGE_S = 10.0
MAX_WRITE_S = 2.0
MAX_FILES_SHARE = 0.8
LEAST_FILES = 1000


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
        left = {each.get("model") for each in workers if each not in down}
        without = {each.get("model") for each in down} - left
        text += "".join(f"; {model} has no other" for model in sorted(filter(None, without)))
        page = "no-workers" if without else "worker-down"
        return fail(check, text, f"docs/runbooks/{page}.md")
    often = [each for each in workers if each.get("restarts", 0) >= MANY_RESTARTS]
    if often:
        text = ", ".join(f"{each['worker']}: {each['restarts']} restarts" for each in often)
        return warn(check, text, "docs/runbooks/worker-restarts.md")
    return ok(check, f"{len(workers)} up")


def check_hangs(status: Mapping[str, Any]) -> Finding:
    hung = [each for each in status["workers"] if each.get("hangs")]
    if not hung:
        return ok("hangs", "no worker was ended because it did not answer")
    text = ", ".join(f"{each['worker']}: {each['hangs']}" for each in hung)
    return warn("hangs", f"ended without an answer: {text}", "docs/runbooks/worker-silent.md")


def check_routers(status: Mapping[str, Any]) -> Finding:
    down = [each for each in status["routers"] if each["state"] != "up"]
    if down:
        text = "; ".join(
            f"{each['router']} is {each['state']} ({each.get('last_error') or 'no reason known'})"
            for each in down
        )
        return fail("routers", text, "docs/runbooks/router-process-down.md")
    return ok("routers", f"{len(status['routers'])} up")


def check_controller(status: Mapping[str, Any]) -> list[Finding]:
    """Whether it is there, and whether Ray answers it."""
    found = status["controller"]
    age_s = found.get("age_s", 0.0)
    if age_s > MAX_CONTROLLER_AGE_S or not found["known"]:
        text = f"has said nothing for {age_s:.0f} s"
        return [fail("controller", text, "docs/runbooks/controller-away.md")]
    ray = ok("Ray", "answers the controller")
    has_ray = found.get("has_ray")
    if has_ray is None:
        ray = ok("Ray", "starts, and no worker waits for it")
    elif not has_ray:
        text = "does not answer the controller: no worker can be started"
        ray = fail("Ray", text, "docs/runbooks/ray-lost.md")
    return [ok("controller", f"heard {age_s:.1f} s ago"), ray]


def check_restarts(metrics: str) -> Finding:
    """The controller's and the routers', since the server was started; see `check_workers`."""
    check = "restarts"
    often = {
        labels["process"]: int(value)
        for labels, value in _samples(metrics, "kvrelay_process_restarts_total")
        if labels["kind"] != "worker" and value >= MANY_RESTARTS
    }
    if often:
        text = ", ".join(f"{name}: {number} restarts" for name, number in often.items())
        return warn(check, text, "docs/runbooks/process-restarts.md")
    return ok(check, "few of the controller and of routers")


def check_server_room(metrics: str) -> Finding:
    """The disk of its state folder, which may be another machine's."""
    check, page = "server's state folder", "docs/runbooks/state-folder-full.md"
    free = _value(metrics, "kvrelay_state_folder_free_bytes")
    files = _value(metrics, "kvrelay_state_folder_free_files")
    late_s = _value(metrics, "kvrelay_state_folder_unwritten_seconds") or 0.0
    if free is None:
        return fail(check, "its disk does not answer", page)
    if late_s > MAX_WRITE_S:
        return fail(check, f"cannot be written, for {late_s:.0f} s now", page)
    if free < LEAST_FREE or (files is not None and files < LEAST_FILES):
        left = "" if files is None else f" and {files:.0f} files"
        return fail(check, f"has room for {free / MIB:.0f} MiB{left}", page)
    return ok(check, f"{free / GIB:.1f} GiB free")


def check_server_files(metrics: str) -> Finding:
    check = "server's open files"
    shares = []
    for who, number, most in (
        ("router", "process_open_fds", "process_max_fds"),
        ("controller", "kvrelay_controller_open_files", "kvrelay_controller_max_files"),
    ):
        found, limit = _value(metrics, number), _value(metrics, most)
        if found is not None and limit:
            shares.append((found / limit, f"{who}: {found:.0f} of {limit:.0f}"))
    text = ", ".join(shown for _, shown in shares) or "not said"
    if max((share for share, _ in shares), default=0.0) > MAX_FILES_SHARE:
        return fail(check, text, "docs/runbooks/files-run-out.md")
    return ok(check, text)


def check_server_log(metrics: str) -> Finding:
    check = "server's log"
    lost = sum(value for _, value in _samples(metrics, "kvrelay_log_lines_dropped_total"))
    if lost:
        return warn(check, f"{lost:.0f} lines are lost", "docs/runbooks/log-lost.md")
    return ok(check, "no line is lost")


def check_layouts(status: Mapping[str, Any]) -> Finding:
    """Workers with another model, data type or block size go on alone, and prompts are computed
    twice."""
    check = "KV layout"
    by_model: dict[str, list[tuple[str, str]]] = {}
    for each in status["workers"]:
        if each.get("layout"):
            known = by_model.setdefault(each.get("model", ""), [])
            known.append((each["worker"], each["layout"]))
    if not by_model:
        return skipped(check, "no worker tells its layout")
    shown, others = [], []
    for model, known in by_model.items():
        ((usual, _),) = Counter(layout for _, layout in known).most_common(1)
        shown.append(f"{usual} ({model})" if model else usual)
        others += [f"{worker} ({layout})" for worker, layout in known if layout != usual]
    usual = ", ".join(shown)
    if others:
        return fail(
            check,
            f"{', '.join(others)} differ from the others ({usual}) in model, dtype or blocks, and "
            "exchange no KV with them",
            "install one version everywhere, with one model and model.dtype (auto depends on the "
            "CPU), then kvrelay restart",
        )
    return ok(check, f"one of each model: {usual}" if len(shown) > 1 else f"one, {usual}")


def check_server_clock(metrics: str, now: float) -> Finding:
    """`now`: of this machine, seconds since 1970."""
    for _, there in _samples(metrics, "kvrelay_clock_seconds"):
        return _clock("server's clock", there - now)
    return skipped("server's clock", "the server does not tell its time")


def check_store(url: str, timeout_s: float, check: str = "state store") -> list[Finding]:
    """Whether the store at `url` answers, how fast, and what its clock says."""
    if not url:
        return [skipped(check, "none is set")]
    try:
        from redis import RedisError

        from kvrelay.cluster.state.redis_client import connect
    except ImportError:
        return [fail(check, "the redis package is missing", "pip install 'kvrelay[redis]'")]
    try:
        with connect(url, timeout_s) as store:
            store.ping()
            started = time.monotonic()
            seconds, micros = store.time()
            taken_s = time.monotonic() - started
    except (RedisError, OSError, ValueError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        return [fail(check, f"does not answer: {why}", "docs/runbooks/state-store-down.md")]
    off_s = seconds + micros / 1e6 - time.time()
    answer = f"answers in {taken_s * 1000:.1f} ms"
    if taken_s > MAX_STORE_S:
        fix = "move it nearer: every router waits for it"
        return [warn(check, answer, fix), _clock("store's clock", off_s)]
    return [ok(check, answer), _clock("store's clock", off_s)]


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


def _value(metrics: str, name: str) -> float | None:
    return next((value for _, value in _samples(metrics, name)), None)
