"""Outputs of every format, whole and in parts: the events are the same, however they come."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.cluster.api.output.dialect import FORMATS
from kvrelay.cluster.api.output.events import Event, Text, merged
from tests.cluster.api.output.reading import Output, cut, outputs, parser, read

OUTPUTS = outputs()
ALL = [(name, each) for name, outputs in OUTPUTS.items() for each in outputs]
IDS = [f"{name}: {each.about}" for name, each in ALL]
every_output = pytest.mark.parametrize(("name", "each"), ALL, ids=IDS)


def test_there_are_outputs_of_every_format() -> None:
    assert OUTPUTS.keys() == FORMATS.keys()
    assert len(set(IDS)) == len(IDS)


@every_output
def test_an_output_is_read_as_its_events(name: str, each: Output) -> None:
    assert read(parser(name, each.template), [each.text]) == list(each.events)


@every_output
def test_an_output_in_parts_has_the_same_events(name: str, each: Output) -> None:
    """By the character, and in any two parts."""
    assert read(parser(name, each.template), each.text) == list(each.events)
    for place in range(1, len(each.text)):
        events = read(parser(name, each.template), cut(each.text, [place]))
        assert events == list(each.events), f"in two parts, cut at {place}"


def where_read(events: list[Event], output: str) -> list[tuple[str, str]]:
    """Of each text: itself, and what stands in the output where it says that it was read."""
    found = []
    for event in events:
        if isinstance(event, Text):
            ends = [place for span in event.spans for place in span]
            assert ends == sorted(ends)
            parts = [output[begin:end] for begin, end in event.spans]
            found.append((event.text, "".join(parts)))
    return found


def is_same(name: str, said: str, there: str) -> bool:
    """Harmony's format puts an empty line between messages of the same channel."""
    added = "\n\n" if name == "harmony" else "\0"
    return said.replace(added, "") == there.replace(added, "")


@every_output
def test_a_text_says_where_it_was_read(name: str, each: Output) -> None:
    for parts in ([each.text], list(each.text)):
        found = where_read(read(parser(name, each.template), parts), each.text)
        assert all(is_same(name, text, there) for text, there in found), found


def test_spans_that_meet_are_one() -> None:
    texts: list[Event] = [Text("a", ((0, 1),)), Text("b", ((1, 2), (4, 5))), Text("c", ((6, 8),))]
    (text,) = merged(texts)
    assert isinstance(text, Text)
    assert (text.text, text.spans) == ("abc", ((0, 2), (4, 5), (6, 8)))


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(ALL), st.lists(st.integers(1, 250), max_size=8))
def test_an_output_in_any_parts_has_the_same_events(
    named: tuple[str, Output], places: list[int]
) -> None:
    name, each = named
    assert read(parser(name, each.template), cut(each.text, places)) == list(each.events)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_text_with_markers_in_it_is_read_the_same_in_any_parts(
    name: str, data: st.DataObject
) -> None:
    """Also what no model should write: nothing fails, and nothing hangs."""
    pieces = [*FORMATS[name].markers, *(each.text for each in OUTPUTS[name])]
    pieces += [*"{}[]:,()=' \\", '"', "\n", "é", "1", '"name": "f"', '"arguments": ']
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=12)))
    places = data.draw(st.lists(st.integers(1, max(1, len(text))), max_size=6))
    whole: list[Event] = read(parser(name), [text])
    assert read(parser(name), cut(text, places)) == whole
    assert read(parser(name), text) == whole
    assert all(is_same(name, said, there) for said, there in where_read(whole, text))
