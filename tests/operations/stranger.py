"""What somebody without a key finds out, run in their place: `python3 stranger.py < QUESTIONS`.

Questions and answers are JSON. Uses the standard library only: as another user, or on another host,
KVRelay need not be readable.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import ssl
import stat
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

WAIT_S = 8.0
# One call to each service that Ray's processes have: HTTP/2 by hand, with no token.
RAY_CALLS = (
    "NodeInfoGcsService/GetAllNodeInfo",
    "JobInfoGcsService/GetAllJobInfo",
    "NodeManagerService/GetNodeStats",
    "CoreWorkerService/GetCoreWorkerStats",
    "ObjectManagerService/FreeObjects",
    "ObjectManagerService/Push",
    "ObjectManagerService/Pull",
    "ReporterService/GetTraceback",
)
UNAUTHENTICATED, UNIMPLEMENTED = 16, 12


def call_ray(host: str, port: int, method: str) -> int | None:
    """The status of a gRPC call with an empty message; None: it is no gRPC, or says nothing."""

    def text(value: bytes) -> bytes:
        return bytes([len(value)]) + value

    def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
        return (
            len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body
        )

    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/ray.rpc.{method}",
        ":authority": f"{host}:{port}",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    head = b"".join(b"\0" + text(k.encode()) + text(v.encode()) for k, v in fields.items())
    said = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"")
    said += frame(1, 4, 1, head) + frame(0, 1, 1, bytes(5))
    received = b""
    with contextlib.suppress(OSError), socket.create_connection((host, port), WAIT_S) as sock:
        sock.settimeout(WAIT_S / 2)
        sock.sendall(said)
        while not (found := re.search(rb"grpc-status.(\d+)", received, re.DOTALL)):
            data = sock.recv(65536)
            if not data:
                break
            received += data
        if found:
            return int(found[1])
    return None


def hears(host: str, port: int, said: bytes) -> bytes | None:
    """The first that comes back; None: it cannot be reached."""
    try:
        with socket.create_connection((host, port), WAIT_S) as sock:
            sock.settimeout(WAIT_S)
            sock.sendall(said)
            return sock.recv(4096)
    except TimeoutError:
        return b""
    except ConnectionResetError:
        return b""
    except OSError:
        return None


def look_at_port(host: str, port: int) -> str:
    """What answers there, to whoever has no key."""
    statuses = {method: call_ray(host, port, method) for method in RAY_CALLS}
    known = {status for status in statuses.values() if status is not None}
    open_calls = sorted(method for method, status in statuses.items() if status == 0)
    if open_calls:
        return "OPEN: gRPC " + ", ".join(open_calls)
    if UNAUTHENTICATED in known:
        return "gRPC, asks for a token"
    if known:
        return f"gRPC, knows none of the calls ({', '.join(map(str, sorted(known)))})"
    answer = hears(host, port, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    if answer is None:
        return "cannot be reached"
    if answer.startswith(b"HTTP/1"):
        return "HTTP " + answer.split(b" ", 2)[1].decode()
    return "says nothing" if not answer else f"says {answer[:12]!r}"


def ask_api(url: str, method: str, path: str) -> int:
    """The status of a call without a key."""
    body = b"{}" if method == "POST" else None
    headers = {"content-type": "application/json"} if body else {}
    request = urllib.request.Request(url + path, body, headers, method=method)
    context = ssl._create_unverified_context() if url.startswith("https") else None
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def look_at_files(roots: list[str], secrets: list[str]) -> dict[str, list[str]]:
    """What this user can read, write and connect to below `roots`; which secrets are in that."""
    found: dict[str, list[str]] = {"reads": [], "writes": [], "sockets": [], "secrets": []}
    for root in roots:
        for folder, _, names in os.walk(root):
            for name in names:
                path = Path(folder) / name
                with contextlib.suppress(OSError):
                    mode = path.lstat().st_mode
                    if stat.S_ISSOCK(mode):
                        with socket.socket(socket.AF_UNIX) as sock:
                            sock.connect(str(path))
                            found["sockets"].append(str(path))
                    elif stat.S_ISREG(mode):
                        content = path.read_bytes()[: 64 << 20]
                        found["reads"].append(str(path))
                        if any(secret.encode() in content for secret in secrets):
                            found["secrets"].append(str(path))
                    if not stat.S_ISLNK(mode) and os.access(path, os.W_OK):
                        found["writes"].append(str(path))
    return found


def look_at_processes(pids: list[int], secrets: list[str]) -> dict[str, list[int]]:
    """Whose command line has a secret in it, and whose environment this user can read."""
    found: dict[str, list[int]] = {"command": [], "environment": []}
    for pid in pids:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if any(secret.encode() in command for secret in secrets):
                found["command"].append(pid)
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/environ").read_bytes():
                found["environment"].append(pid)
    return found


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    calls = [[method, path] for method, path in asked.get("calls", [])]
    return {
        "ports": {str(port): look_at_port(asked["host"], port) for port in asked.get("ports", [])},
        "calls": [[m, p, ask_api(asked["url"], m, p)] for m, p in calls],
        "files": look_at_files(asked.get("roots", []), asked.get("secrets", [])),
        "processes": look_at_processes(asked.get("pids", []), asked.get("secrets", [])),
    }


if __name__ == "__main__":
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
