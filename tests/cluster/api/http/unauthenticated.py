"""Another user of the machine, who tries what is for operators."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import traceback
from collections.abc import Callable

ROUTES = (
    *(("POST", f"/{name}") for name in ("drain", "restart", "rollback", "pause", "resume")),
    *(("POST", f"/{name}") for name in ("models", "v1/weights", "v1/adapters", "console/ticket")),
    *(("POST", f"/{name}") for name in ("workers/decode-0/role", "v1/unload_lora_adapter")),
    *(("DELETE", f"/{name}") for name in ("models/smollm2-135m", "v1/adapters/one")),
    *(("GET", f"/{name}") for name in ("status", "metrics", "audit", "console/snapshot")),
    *(("GET", f"/{name}") for name in ("v1/sessions", "requests", "v1/files", "v1/batches")),
)
BODY = b'{"role": "both", "name": "x", "checkpoint": "/tmp/x", "path": "/tmp/x", "lora_name": "x"}'
HEADERS = (
    "",
    "authorization: Bearer\r\n",
    "authorization: Bearer console.99999999999.00\r\n",
    "x-forwarded-for: 127.0.0.1\r\n",
)
BUSY = 8  # connections whose calls keep the server's loop busy, each time
STRANGER = 65534


def request(method: str, path: str, port: int, headers: str) -> bytes:
    has_body = method == "POST"
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n{headers}"
    head += f"content-type: application/json\r\ncontent-length: {len(BODY)}\r\n" * has_body
    return head.encode() + b"\r\n" + BODY * has_body


def is_refused(sock: socket.socket) -> bool:
    """Whether the answer is one of 401 or 403, or the connection ends without one."""
    sock.settimeout(20)
    try:
        line = sock.recv(4096).partition(b"\r\n")[0]
    except OSError:
        return True
    return not line or line.split()[1] in (b"401", b"403", b"404")


def open_wide(sock: socket.socket, data: bytes) -> bool:
    sock.sendall(data)
    return is_refused(sock)


def half_closed(sock: socket.socket, data: bytes) -> bool:
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
    return is_refused(sock)


def closed_at_once(sock: socket.socket, data: bytes) -> bool:
    sock.send(data, socket.MSG_MORE)
    return True


def aborted(sock: socket.socket, data: bytes) -> bool:
    sock.sendall(data)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return True


WAYS: tuple[Callable[[socket.socket, bytes], bool], ...] = (
    open_wide,
    half_closed,
    closed_at_once,
    aborted,
)


def attack(port: int, times: int) -> list[str]:
    """Each route so many times in each way. Returns what was answered with something else than a
    refusal; what was done without an answer, the server knows."""
    taken = []
    with contextlib.ExitStack() as stack:
        connect = lambda: socket.create_connection(("127.0.0.1", port), timeout=20)  # noqa: E731
        busy = [stack.enter_context(connect()) for _ in range(BUSY)]
        for number in range(times):
            for method, path in ROUTES:
                for way in WAYS:
                    for each in busy:
                        each.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
                    headers = HEADERS[number % len(HEADERS)]
                    with connect() as sock:
                        if not way(sock, request(method, path, port, headers)):
                            taken.append(f"{method} {path}, {way.__name__}")
                    for each in busy:
                        each.recv(1 << 16)
    return taken


def attack_as_stranger(port: int, times: int) -> list[str]:
    """`attack` by a process of another user. Needs root."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            os.write(writing, "\n".join(attack(port, times)).encode())
        except BaseException:
            os.write(writing, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text.splitlines()
