"""Nodes and effects: decisions are pure, effects are thin.

A role (router, prefill worker, decode worker, controller) is a `Node`. It gets a message and the
time, changes its own state, and returns the effects that a runtime has to perform. It never
blocks, sleeps, reads a clock, draws from a global random source, logs or touches a socket, so the
same node runs under Ray, inside one process, and in the simulator under virtual time.

Executors (the model runner, the transfer agent) report back by messages to the node that asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

NodeId = str
"""Name of a node, unique in a cluster: "router-0", "prefill-1", "decode-0", "controller"."""


@dataclass(frozen=True, slots=True)
class Send:
    """Deliver `message` to node `to`. Delivery is at most once, in order per pair, and may fail."""

    to: NodeId
    message: Any


@dataclass(frozen=True, slots=True)
class Unsendable:
    """A `Send` that will never go out, whoever it is for: some value does not fit into a frame."""

    to: NodeId
    message: Any
    why: str  # one line


@dataclass(frozen=True, slots=True)
class Wake:
    """Deliver `Woken(tag)` to the sender after `after_s` seconds. Cannot be cancelled: a node
    ignores a wake-up that it no longer needs."""

    after_s: float
    tag: str


@dataclass(frozen=True, slots=True)
class Woken:
    """A `Wake` has come due."""

    tag: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something an operator should read in the log; it is counted under `counter`."""

    level: str  # "info" | "warning" | "error"
    counter: str
    text: str


@dataclass(frozen=True, slots=True)
class Exit:
    """The node cannot go on: end its process at once. It gets no message any more."""

    reason: str  # one line
    hangs: bool = False  # a thread of the process does not come back: see where, before it ends


Effect = Any
"""`Send`, `Wake`, `Note`, `Exit`, `Execute`, `AskProgress` and `PrepareGrammar` of `engine.step`,
or one of `kvtransfer.agent`'s effects."""


class Node(Protocol):
    """A role. The runtime calls `start` once, then `receive` for each message, never at once."""

    node_id: NodeId

    def start(self, now: float) -> list[Effect]: ...

    def receive(self, now: float, message: Any) -> list[Effect]: ...
