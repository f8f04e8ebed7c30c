"""Reasoning before an answer, and what of a prompt says that it has begun."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvrelay.cluster.api.output.dialect import Dialect, OutputParser, Reading
from kvrelay.cluster.api.output.events import (
    REASONING_TAGS,
    THINK,
    Event,
    Reasoning,
    Tags,
    Text,
    merged,
)
from kvrelay.cluster.api.output.json_calls import Hermes
from kvrelay.cluster.api.output.marked_calls import Harmony
from kvrelay.cluster.api.output.tools import Tool
from tests.cluster.api.output.reading import TOOLS, call, cut, read

CALL = '<tool_call>{"name": "ping", "arguments": {}}</tool_call>'
PING = call("ping", "{}")
# Output, whether the prompt ended within the reasoning, events.
OUTPUTS: list[tuple[str, bool, list[Event]]] = [
    ("<think>\nWhy 🤔?\n</think>\n\nSo. \n", False, [Reasoning("Why 🤔?"), Text("So. \n")]),
    (" \n<think>Why?</think>So.", False, [Reasoning("Why?"), Text("So.")]),
    ("\n Why?\n\nOh. </think>\n\nSo.", True, [Reasoning("Why?\n\nOh."), Text("So.")]),
    ("<think>Why?</think>So.", True, [Reasoning("Why?"), Text("So.")]),
    ("<think>\n\n</think>\n\nSo.", False, [Text("So.")]),
    ("</think>So.", True, [Text("So.")]),
    (" So <think>no</think>", False, [Text(" So <think>no</think>")]),
    ("<think>a</think>b<think>c</think>", False, [Reasoning("a"), Text("b<think>c</think>")]),
    (f"<think>I {CALL}.</think>\n{CALL}", False, [Reasoning(f"I {CALL}."), *PING]),
    (f"<think>Why?</think>\nSo.\n{CALL}", False, [Reasoning("Why?"), Text("So."), *PING]),
    ("<think>Why </thin", False, [Reasoning("Why </thin")]),
    ("Why? ", True, [Reasoning("Why?")]),
    ("<thi", False, [Text("<thi")]),
    ("<thi", True, [Reasoning("<thi")]),
    ("", True, []),
]


@pytest.mark.parametrize(("text", "begun", "events"), OUTPUTS)
def test_reasoning_is_told_from_what_follows(text: str, begun: bool, events: list[Event]) -> None:
    def parse(parts: list[str]) -> list[Event]:
        return read(OutputParser(Hermes(), TOOLS, thinks=THINK, begun=begun), parts)

    assert parse([text]) == events
    assert parse(list(text)) == events
    for place in range(1, len(text)):
        assert parse(cut(text, [place])) == events


def test_the_name_of_a_channel_is_no_reasoning() -> None:
    text = "<|channel>thought\nWhy?<channel|>So."
    thinking = OutputParser(Hermes(), TOOLS, thinks=REASONING_TAGS["gemma4"])
    assert read(thinking, list(text)) == [Reasoning("Why?"), Text("So.")]


@pytest.mark.parametrize("tags", REASONING_TAGS.values())
def test_each_family_has_tags_of_its_own(tags: Tags) -> None:
    begin, end = tags
    text = f"{begin}Why?{end}\nSo <other>.\n{CALL}"
    events = [Reasoning("Why?"), Text("So <other>."), *PING]
    for parts in ([text], list(text)):
        assert read(OutputParser(Hermes(), TOOLS, thinks=tags), parts) == events
    dialect = Dialect(Hermes(), tags)
    assert Reading.after(dialect, f"assistant{begin}", (), calls=True).begun
    assert Reading.after(dialect, f"{begin}{end}", (), calls=True).thinks is None
    reading = Reading.after(dialect, "assistant", (), calls=True)
    assert (reading.thinks, reading.begun) == (tags, False)
    assert set(tags) <= set(reading.markers)


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=30), st.text(max_size=30), st.lists(st.integers(1, 60), max_size=5))
def test_any_reasoning_is_read_without_the_white_space_around_it(
    thought: str, answer: str, places: list[int]
) -> None:
    assume("</think>" not in thought)
    text = f"<think>\n{thought}\n</think>\n\n{answer}"
    events = read(OutputParser(thinks=THINK), cut(text, places))
    expected: list[Event] = [Reasoning(thought.strip())] if thought.strip() else []
    if answer.strip():
        expected.append(Text(answer.lstrip()))
    assert events == expected


def test_an_output_is_streamed_as_soon_as_it_is_certain() -> None:
    parser = OutputParser(Hermes(), TOOLS, thinks=THINK)
    parts = ["<think>a", "b <", "c", " </think>", "\n\nd", " e <tool", "_call>", '{"name": "ping"']
    parts += [', "arguments": {"to": "x', "y", '"}', "}", "</tool_call>"]
    assert [parser.push(part) for part in parts] == [
        [Reasoning("a")],
        [Reasoning("b")],
        [Reasoning(" <c")],
        [],
        [Text("d")],
        [Text(" e")],
        [],
        call("ping"),
        call("ping", '{"to": "x')[1:],
        call("ping", "y")[1:],
        call("ping", '"}')[1:],
        [],
        [],
    ]
    assert parser.finish() == []
    assert parser.has_calls


def test_channels_are_read_without_tools_too() -> None:
    channels = Dialect(Harmony())
    assert channels.has_channels
    assert not Dialect(Hermes()).has_channels
    reading = Reading.after(channels, "<|start|>assistant", (), calls=False)
    text = (
        "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant<|channel|>final<|message|>So."
    )
    expected = [Reasoning("Why?"), Text("So.")]
    assert read(reading.parser(), [text]) == expected
    assert read(reading.parser(), text) == expected


def test_a_prompt_says_whether_reasoning_has_begun() -> None:
    def after(end: str, thinks: bool = True) -> tuple[bool, bool]:
        dialect = Dialect(Hermes(), THINK if thinks else None)
        reading = Reading.after(dialect, end, (), calls=True)
        return reading.thinks is not None, reading.begun

    assert after("<|im_start|>assistant\n") == (True, False)
    assert after("<|im_start|>assistant\n<think>\n") == (True, True)
    assert after("<think>\n\n</think>\n\n") == (False, False)
    assert after("</think> and then <think>") == (True, True)
    assert after("</think>") == (False, False)
    assert after("<think>\n", thinks=False) == (False, False)


def test_calls_are_read_where_there_are_tools_that_may_be_called() -> None:
    tools, dialect = [Tool("ping")], Dialect(Hermes())
    assert Reading.after(dialect, "", tools, calls=True).tools is dialect.tools
    assert Reading.after(dialect, "", tools, calls=False).tools is None
    assert Reading.after(dialect, "", (), calls=True).tools is None
    assert read(Reading.after(dialect, "", tools, calls=False).parser(), [CALL]) == [Text(CALL)]
    assert read(Reading.after(dialect, "", tools, calls=True).parser(), [CALL]) == PING


def test_the_markers_of_a_reading_are_those_that_it_reads() -> None:
    assert Reading().markers == ("<think>", "</think>")
    assert Reading(Hermes()).markers == ("<tool_call>", "</tool_call>", "<think>", "</think>")


def test_neighbours_of_one_kind_are_joined_and_calls_are_not() -> None:
    events = [Text("a"), Text("b"), Reasoning("c"), Reasoning("d"), Text("e"), *PING, *PING]
    assert merged(events) == [Text("ab"), Reasoning("cd"), Text("e"), *PING, *PING]
    assert merged([*PING[:1], *PING[:1]]) == [*PING[:1], *PING[:1]]
    assert merged([]) == []
