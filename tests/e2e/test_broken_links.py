"""Connections between processes that break while tokens flow, on the real thing."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from benchmarks.serving.served import Served
from tests.e2e.test_faults import STORY_FORMAT, all_up, is_idle, status, stream, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

PIDFD_GETFD = 438  # the number of the system call, on all architectures
OUR_USER_TIMEOUT_MS = 5000  # Ray's connections have none


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Served({"router.policy": "round_robin"}) as served:  # every prompt is handed over
        yield served.url


def connections_of(pid: int) -> list[socket.socket]:
    """Those between processes that carry our frames, as if they were opened here."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd, found = os.pidfd_open(pid), []
    try:
        for connection in psutil.Process(pid).net_connections("tcp"):
            if connection.status != psutil.CONN_ESTABLISHED:
                continue
            fd = libc.syscall(PIDFD_GETFD, pidfd, connection.fd, 0)
            if fd < 0:
                pytest.skip(f"may not touch its connections: {os.strerror(ctypes.get_errno())}")
            sock = socket.socket(fileno=fd)
            if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == OUR_USER_TIMEOUT_MS:
                found.append(sock)
            else:
                sock.close()
    finally:
        os.close(pidfd)
    return found


def cut(pid: int) -> int:
    """Shut down every connection of a process; how many there were."""
    connections = connections_of(pid)
    for sock in connections:
        sock.shutdown(socket.SHUT_RDWR)
        sock.close()
    return len(connections)


def decode_worker(url: str) -> dict[str, Any]:
    (worker,) = [w for w in status(url)["workers"] if w["worker"] == "decode-0"]
    return worker


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.9, "seed": 7, "max_tokens": 60},
        {"temperature": 0.9, "seed": 7, "max_tokens": 90, "response_format": STORY_FORMAT},
    ],
    ids=["sampled", "as JSON"],
)
def test_a_worker_whose_connections_break_goes_on_with_its_stream(
    url: str, options: dict[str, Any]
) -> None:
    undisturbed = stream(url, options)
    before, num_cut = decode_worker(url), []

    def disturb(number: int) -> None:
        if number in (10, 25, 40):
            num_cut.append(cut(before["pid"]))

    assert stream(url, options, disturb) == undisturbed
    assert all(num >= 2 for num in num_cut)
    after = decode_worker(url)
    assert (after["pid"], after["epoch"], after["restarts"]) == (before["pid"], 1, 0)
    assert status(url)["wire"]["reconnected"] > 0
    wait_for(url, all_up, 10, "a worker was lost")
    wait_for(url, is_idle, 2.0, "something is left over")
