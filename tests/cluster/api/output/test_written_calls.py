"""Calls that are written by a format's own syntax are read as what was written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvrelay.cluster.api.output.dialect import FORMATS, find_format
from kvrelay.cluster.api.output.format import CallSyntax, ParameterSyntax
from kvrelay.cluster.api.output.marked_calls import Harmony
from kvrelay.cluster.api.output.tools import Tool
from tests.cluster.api.output.reading import (
    FENCED,
    NAMED_FIRST,
    calls_of,
    cut,
    parser,
    read,
    text_of,
)

Called = tuple[Tool, dict[str, Any]]
WRITTEN = [(name, "") for name in FORMATS if name not in ("pythonic", "gemma4")]
WRITTEN += [("mistral", NAMED_FIRST), ("deepseek", FENCED)]

texts = st.text(max_size=12) | st.sampled_from(
    [
        "</tool_call>",
        "<tool_call>{",
        '"}}',
        "[TOOL_CALLS]",
        "\\",
        "\n",
        "日本 👩‍👩‍👧",
        "{'a': [",
        "null",
        "1",
    ]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, width=32) | texts
values = st.recursive(
    scalars.filter(lambda value: value not in (float("inf"), float("-inf"))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
names = st.from_regex(r"[a-zA-Z0-9_.:/-]{1,20}", fullmatch=True)
keys = st.from_regex(r"[\w-]{1,8}", fullmatch=True)


@st.composite
def calls(draw: st.DrawFn) -> list[Called]:
    """Some calls of tools, which know the types of their arguments."""
    made: list[Called] = []
    for name in draw(st.lists(names, min_size=1, max_size=3, unique=True)):
        arguments = draw(st.dictionaries(keys, values, max_size=3))
        properties = {
            key: {"type": "string"} if isinstance(value, str) else {}
            for key, value in arguments.items()
        }
        made.append((Tool(name, {"type": "object", "properties": properties}), arguments))
    return made


def written(calls: Sequence[Called], syntaxes: Sequence[CallSyntax], ascii: bool) -> str:
    lines = []
    for i, ((_, arguments), syntax) in enumerate(zip(calls, syntaxes, strict=True)):
        number = f"{i}{syntax.number_end}" if syntax.number_end else ""
        text = json.dumps(arguments, ensure_ascii=ascii)
        if syntax.parameters is not None:
            pairs = arguments.items()
            text = "".join(parameter(key, value, syntax.parameters) for key, value in pairs)
        lines.append(f"{syntax.begin}{number}{text}{syntax.end}")
    return f"{syntaxes[0].first}{syntaxes[0].between.join(lines)}{syntaxes[0].last}"


def parameter(key: str, value: Any, syntax: ParameterSyntax) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    begin = f"{syntax.key_begin}{key}{syntax.key_end}{syntax.value_begin}"
    return f"{begin}{syntax.pad}{text}{syntax.pad}{syntax.value_end}\n"


def same(read: Any, made: Any) -> bool:
    """As JSON: true is not 1."""
    return json.dumps(read) == json.dumps(made)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "template"), WRITTEN)
@settings(deadline=None, max_examples=60)
@given(made=calls(), ascii=st.booleans(), places=st.lists(st.integers(1, 300), max_size=6))
def test_calls_are_read_as_they_were_written(
    name: str, template: str, made: list[Called], ascii: bool, places: list[int]
) -> None:
    form = find_format(name, template)
    assert form is not None
    parameters = form.syntax(made[0][0]).parameters
    if parameters is not None:  # a text is written as it is
        given = [value for _, arguments in made for value in arguments.values()]
        assume(not any(parameters.value_end in v for v in given if isinstance(v, str)))
    text = written(made, [form.syntax(tool) for tool, _ in made], ascii)
    before = "Let me see. " if form.syntax(made[0][0]).trigger else ""
    if isinstance(form, Harmony):
        before = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    tools = [tool for tool, _ in made]
    for parts in ([before + text], cut(before + text, places)):
        events = read(parser(name, template, tools), parts)
        assert same(calls_of(events), [(tool.name, arguments) for tool, arguments in made])
        assert text_of(events) == ("" if isinstance(form, Harmony) else before.strip())


@settings(deadline=None, max_examples=100)
@given(made=calls(), places=st.lists(st.integers(1, 300), max_size=6))
def test_calls_are_read_as_they_were_written_in_python(
    made: list[Called], places: list[int]
) -> None:
    lines = [
        f"{tool.name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for tool, arguments in made
    ]
    text = f"[{', '.join(lines)}]"
    for parts in ([text], cut(text, places), ["Hm. <|python_start|>", text, "<|python_end|>"]):
        events = read(parser("pythonic", "", [tool for tool, _ in made]), parts)
        assert same(calls_of(events), [(tool.name, arguments) for tool, arguments in made])
        assert text_of(events) in ("", "Hm.")


def test_python_calls_have_no_syntax_with_json() -> None:
    form = find_format("pythonic", "")
    assert form is not None
    with pytest.raises(NotImplementedError, match="Python's, not JSON"):
        form.syntax(Tool("ping"))
