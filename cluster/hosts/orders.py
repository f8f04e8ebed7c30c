"""What is asked of a machine, and what it answers: JSON on standard input and output."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct


class Order(Struct, frozen=True, tag=True):
    """`folder`: there, for logs and what is kept."""

    folder: str


class Hello(Order, frozen=True):
    """Who are you?"""


class GiveToken(Order, frozen=True):
    """Have this token for Ray from now on. Where there is another, nothing is changed."""

    token: str


class StartRay(Order, frozen=True):
    """Start Ray with these arguments, unless it runs; answered when it has joined."""

    args: tuple[str, ...]
    timeout_s: float


class StartServer(Order, frozen=True):
    """Start `kvrelay serve`, unless it runs; answered when it is ready. `settings`: of its file."""

    settings: str
    args: tuple[str, ...]
    timeout_s: float


class Stop(Order, frozen=True):
    """End what was started here: the server first, then Ray."""

    what: str  # "server" or "ray"
    timeout_s: float


AnyOrder = Hello | GiveToken | StartRay | StartServer | Stop


class Answer(Struct, frozen=True):
    """`error`: one line; "" if it was done. `news`: for people."""

    error: str = ""
    news: str = ""
    facts: dict[str, Any] = {}


def encode(value: AnyOrder | Answer) -> bytes:
    return msgspec.json.encode(value)


def decode_order(data: bytes) -> AnyOrder:
    """Raises msgspec.DecodeError."""
    order: AnyOrder = msgspec.json.decode(data, type=AnyOrder)
    return order


def decode_answer(data: bytes) -> Answer:
    """Of the last line: a login shell may have said something before. Raises
    msgspec.DecodeError."""
    lines = data.strip().splitlines() or [b""]
    return msgspec.json.decode(lines[-1], type=Answer)
