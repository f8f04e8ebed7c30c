"""What a format of tool calls is: how it is read, and how it is written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar

from kvrelay.cluster.api.output.events import Events
from kvrelay.cluster.api.output.reader import Read, Reader
from kvrelay.cluster.api.output.tools import Tool

Parsed = Read[None]


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a call of one tool is written: `first`, then calls with `between` them, then `last`. A
    call is `begin`, its arguments as JSON, and `end`; where calls are counted, there is a number
    between `begin` and `number_end`."""

    trigger: str  # text from which on it can only be a call; empty: it has to come first of all
    begin: str
    end: str
    between: str = ""
    first: str = ""
    last: str = ""
    parameters: ParameterSyntax | None = None  # where arguments are not JSON
    number_end: str = ""


@dataclass(frozen=True, slots=True)
class ParameterSyntax:
    """How an argument is written, one after the other: a text as it is, other values as JSON."""

    key_begin: str
    key_end: str
    value_end: str
    value_begin: str = ""
    pad: str = ""  # around a value


class ToolFormat(ABC):
    """One model family's. Immutable."""

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]]  # that may be added tokens, special or not
    lead: ClassVar[str] = ""  # with which an answer may begin: templates end prompts without it
    opening: ClassVar[str] = ""  # of a call that is read without what is `first`, or its trigger

    @abstractmethod
    def parse(self, reader: Reader, events: Events, tools: Sequence[Tool]) -> Parsed:
        """Read to the end of the output."""

    def new_id(self, seed: str) -> str:
        """Makes the id of a call; one seed always makes one id."""
        return "call_" + blake2b(seed.encode(), digest_size=12).hexdigest()

    @abstractmethod
    def syntax(self, tool: Tool) -> CallSyntax: ...
