"""Waits and deadlines use a clock that nobody sets: the time of day stands only where it is meant.

It jumps where a machine is put right; a deadline by it would pass an hour early, or late.
"""

from __future__ import annotations

import ast

from tests.test_tidy import ALL, name_of, parse

STAMPS = "when something was made, for clients"
KEPT = "a time that outlives the process, in a file or a store; compared in days, or shown"
THERE = "the clock is what is looked at"
SCHEDULE = "settings say what is wanted at which time of day"
TIME_OF_DAY = {
    "cluster/api/calls": "stamps of spans",
    "cluster/api/openai": STAMPS,
    "cluster/api/batches/routes": STAMPS,
    "cluster/api/batches/runner": "when batches expire, and leases that processes share",
    "cluster/api/batches/folder": KEPT,
    "cluster/api/responses/call": "whether the process that runs a response is overdue elsewhere",
    "cluster/api/responses/conversations": STAMPS,
    "cluster/api/responses/format": STAMPS,
    "cluster/api/responses/store": KEPT,
    "cluster/api/text/chat_template": "templates write today's date",
    "cluster/api/cluster_metrics": THERE,
    "cluster/api/adapter_metrics": "vLLM's metric has the time as its value",
    "cluster/events/publisher": "vLLM's batches of events have it",
    "cluster/api/console/routes": "the axis of its charts",
    "cluster/api/console/sessions": "how long a ticket and a session are good, over restarts",
    "cluster/api/keys/keys": "when keys end, and days that usage is counted by",
    "cluster/api/keys/routes": STAMPS,
    "cluster/api/utility/model_list": STAMPS,
    "cluster/cli/backup": KEPT,
    "cluster/cli/batches": "how long a window is open, which the server has stamped",
    "cluster/cli/doctor": THERE,
    "cluster/cli/keys": "days of usage, and when a key ends",
    "cluster/cli/logs": "lines since then, as they are stamped",
    "cluster/doctor/server": THERE,
    "cluster/processes/certificates": "certificates are valid from then to then",
    "cluster/processes/control_process": SCHEDULE,
    "cluster/processes/router_process": SCHEDULE,
    "cluster/state/redis": KEPT,
    "cluster/state/session_keys": KEPT,
    "cluster/state/session_store": KEPT,
    "engine/logs": "stamps of lines, and the age of files by their own stamps",
    "kvtransfer/store/arena": KEPT,
    "kvtransfer/store/disk": KEPT,
    "worker/core_dumps": "the age of files, by their own stamps",
    "worker/process": "how long ago this process began, which the kernel stamps",
}


def reads_time_of_day(tree: ast.Module) -> bool:
    """`time.time`, called or handed on, under either name; and `datetime.now`."""
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.ImportFrom) else []
        if names and node.module == "time" and {"time", "time_ns"} & {*names}:
            return True
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "time" and node.attr in ("time", "time_ns"):
                return True
            if node.value.id in ("datetime", "date") and node.attr in ("now", "utcnow", "today"):
                return True
    return False


def test_the_time_of_day_is_read_only_where_it_is_meant() -> None:
    found = {name_of(path) for path in ALL if reads_time_of_day(parse(path))}
    wrong = [name for name in found if not name.startswith(tuple(TIME_OF_DAY))]
    unused = [place for place in TIME_OF_DAY if not any(n.startswith(place) for n in found)]
    assert (sorted(wrong), sorted(unused)) == ([], [])
