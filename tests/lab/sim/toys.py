"""Nodes with no mind of their own, to try the runtime without the production ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvrelay.engine.node import Effect, Send
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import ScheduledSeq, Step


@dataclass
class Recorder:
    """Performs the effects it is told to at start, and keeps what it gets, with the time."""

    node_id: str
    effects: list[Effect] = field(default_factory=list)
    got: list[tuple[float, Any]] = field(default_factory=list)

    def start(self, now: float) -> list[Effect]:
        return list(self.effects)

    def receive(self, now: float, message: Any) -> list[Effect]:
        self.got.append((now, message))
        return message.effects if isinstance(message, Do) else []

    @property
    def messages(self) -> list[Any]:
        return [message for _, message in self.got if not isinstance(message, Do)]


@dataclass(frozen=True)
class Do:
    """To a `Recorder`: perform these."""

    effects: list[Effect]

    def __init__(self, *effects: Effect) -> None:
        object.__setattr__(self, "effects", list(effects))


@dataclass(frozen=True)
class Ping:
    number: int


def pings(to: str, count: int) -> list[Effect]:
    return [Send(to, Ping(n)) for n in range(count)]


def step_of(
    tokens: list[int], blocks: list[int], *, start: int = 0, step_id: int = 0, sample: bool = True
) -> Step:
    """A step that feeds `tokens[start:]` of one sequence."""
    seq = ScheduledSeq(
        "r", tokens[start:], start, blocks, sample, SamplingParams(temperature=0), tokens, 1
    )
    return Step(step_id, [seq])
