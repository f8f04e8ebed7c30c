"""How one model writes: its format of tool calls, and whether it reasons first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.cluster.api.output.format import THINK, THINK_END, ToolFormat
from kvrelay.cluster.api.output.json_calls import Hermes
from kvrelay.cluster.api.output.marked_calls import Harmony
from kvrelay.cluster.api.output.parser import OutputParser, find_format
from kvrelay.cluster.api.output.tools import Tool


@dataclass(frozen=True, slots=True)
class Dialect:
    tools: ToolFormat | None = None  # None: calls are not told apart from text
    thinks: bool = False  # reasoning comes first, in tags

    @classmethod
    def of(
        cls, template: str, tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> Dialect:
        """What a chat template implies; either may be set by name instead, or "none"."""
        tools = find_format(tool_parser, template)
        if tools is None and tool_parser == "auto":
            tools = Hermes()  # what models are told whose template knows no tools
        thinks = THINK in template and THINK_END in template
        if reasoning_parser != "auto":
            thinks = reasoning_parser == "think"
        return cls(tools, thinks)

    @property
    def has_channels(self) -> bool:
        """Then every output is read by its format, with or without tools."""
        return isinstance(self.tools, Harmony)


@dataclass(frozen=True, slots=True)
class Reading:
    """How the outputs of one request are read."""

    tools: ToolFormat | None = None  # None: without calls
    given: Sequence[Tool] = ()
    thinks: bool = False
    begun: bool = False  # the prompt ended within the reasoning
    most_calls: int | None = None  # that an answer has; those that follow are left out

    @classmethod
    def after(
        cls, dialect: Dialect, prompt_end: str, given: Sequence[Tool], *, calls: bool
    ) -> Reading:
        """`prompt_end`: what the template adds after the last message (see
        `cluster.api.text.tokenizer.ChatPrompt`). `calls`: whether any are allowed."""
        opened, closed = prompt_end.rfind(THINK), prompt_end.rfind(THINK_END)
        thinks = dialect.thinks and closed <= opened
        wanted = dialect.has_channels or (calls and bool(given))
        tools = dialect.tools if wanted else None
        return cls(tools, given, thinks, thinks and opened >= 0)

    def new_id(self, seed: str) -> str:
        """Of a call; the same for the same seed."""
        return self.tools.new_id(seed) if self.tools else seed

    def parser(self) -> OutputParser:
        return OutputParser(
            *(self.tools, self.given),
            thinks=self.thinks,
            begun=self.begun,
            most_calls=self.most_calls,
        )

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that are read."""
        return (*(self.tools.markers if self.tools else ()), THINK, THINK_END)
