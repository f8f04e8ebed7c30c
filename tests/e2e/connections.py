"""Connections between processes, opened here as well, so that they can be shut down."""

from __future__ import annotations

import ctypes
import os
import socket

import psutil
import pytest

PIDFD_GETFD = 438  # the number of the system call, on all architectures
OUR_USER_TIMEOUT_MS = 5000  # Ray's connections have none


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


def num_connections(pid: int) -> int:
    connections = connections_of(pid)
    for sock in connections:
        sock.close()
    return len(connections)


def cut(pid: int) -> int:
    """Shut down every connection of a process; how many there were."""
    connections = connections_of(pid)
    for sock in connections:
        sock.shutdown(socket.SHUT_RDWR)
        sock.close()
    return len(connections)
