"""Strict tools: whatever their grammar lets through is read as calls that match their schemas."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np
import pytest

from kvrelay.cluster.api.constraints.calls import Before, call_grammar
from kvrelay.cluster.api.constraints.schema import SchemaError
from kvrelay.cluster.api.output.dialect import FORMATS, find_format
from kvrelay.cluster.api.output.format import ToolFormat
from kvrelay.cluster.api.output.marked_calls import Harmony
from kvrelay.cluster.api.output.tools import Tool
from tests.cluster.api.constraints.conftest import Matching
from tests.cluster.api.output.reading import calls_of, parser, read, text_of
from tests.cluster.api.output.test_written_calls import written

NUM_OUTPUTS, HINTED = 40, 0.8  # of each format; how often an output goes in a direction that ends
TAGGED = ["qwen3_coder", "glm", "minimax"]
OPTIONAL = {"anyOf": [{"type": "string", "enum": ["a", "b"]}, {"type": "null"}]}


def strict(properties: Any, **more: Any) -> Tool:
    return Tool("send", {"type": "object", "properties": properties, **more}, strict=True)


def form_of(name: str) -> ToolFormat:
    form = find_format(name, "")
    assert form is not None
    return form


def grammar_of(name: str, *tools: Tool, required: bool = True, parallel: bool = True) -> str:
    form = form_of(name)
    before = Before.CHANNELS if isinstance(form, Harmony) else Before.NOTHING
    return call_grammar(
        form, tools, lambda _: None, required=required, parallel=parallel, before=before
    )


def output_of(name: str, tool: Tool, texts: dict[str, str]) -> str:
    """A call with arguments as they are written, which is not as JSON."""
    text = written([(tool, texts)], [form_of(name).syntax(tool)], ascii=False)
    return text.replace("</arg_key><arg_value>", "</arg_key>\n<arg_value>")


# Schema of an argument, what may be written with what is read, what may not be written.
ARGUMENTS: list[tuple[Any, dict[str, Any], list[str]]] = [
    ({"type": "string"}, {"a": "a", "": "", "null": "null", "</p\n": "</p\n"}, []),
    ({"type": ["string", "null"]}, {"a": "a", "null": None, "nul": "nul"}, []),
    ({"type": "string", "enum": ["a", "é😀\n"]}, {"a": "a", "é😀\n": "é😀\n"}, ["b", '"a"', ""]),
    ({"type": ["string", "null"], "enum": ["a", None]}, {"a": "a", "null": None}, ["b", "nul"]),
    ({"type": "string", "const": "a"}, {"a": "a"}, ["b", "aa"]),
    ({"enum": ["1", "2"]}, {"1": "1"}, ['"1"', "3"]),
    ({"enum": ["1", 2]}, {'"1"': "1", "2": 2}, ["1", '"2"']),
    (OPTIONAL, {"a": "a", "null": None}, ["c", '"a"']),
    ({"type": "integer", "maximum": 5}, {"5": 5, "-1": -1}, ["6", "a", "1.5", "null"]),
    (
        {"type": "object"},
        {'{"</arg_value>": "</parameter>"}': {"</arg_value>": "</parameter>"}},
        [],
    ),
    ({"type": "boolean"}, {"true": True}, ["True", "1"]),
    ({"type": "array", "items": {"type": "string"}}, {'["a"]': ["a"]}, ["[1]", "a"]),
    ({"$ref": "#/$defs/x"}, {'"xx"': "xx"}, ["xx", '"y"']),
    (True, {"[1]": [1], '"a"': "a"}, ["a"]),
    (False, {}, ["a", "null"]),
]
DEFS = {"x": {"type": "string", "pattern": "^x+$"}}


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(("schema", "right", "wrong"), ARGUMENTS)
def test_arguments_between_tags_are_held_to_their_schema(
    matching: Matching, name: str, schema: Any, right: dict[str, Any], wrong: list[str]
) -> None:
    tool = strict({"v": schema, "n": {"type": "null"}}, **{"$defs": DEFS})
    grammar = grammar_of(name, tool)
    for text, value in right.items():
        output = output_of(name, tool, {"v": text, "n": "null"})
        assert matching.accepts(grammar, output)
        events = read(parser(name, "", [tool]), [output])
        assert calls_of(events) == [("send", {"v": value, "n": None})]
    for text in wrong:
        assert not matching.accepts(grammar, output_of(name, tool, {"v": text}))


@pytest.mark.parametrize("name", TAGGED)
def test_a_text_ends_where_it_is_read_to_end(matching: Matching, name: str) -> None:
    tool = strict({"v": {"type": "string"}})
    parameters = form_of(name).syntax(tool).parameters
    assert parameters is not None
    output = output_of(name, tool, {"v": f"a{parameters.value_end}b"})
    assert not matching.accepts(grammar_of(name, tool), output)


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    ("properties", "more", "told"),
    [
        ({"v": {"type": "string", "pattern": "a"}}, {}, "'pattern' of the text 'v'"),
        ({"v": {"type": "string", "format": "date"}}, {}, "'format' of the text 'v'"),
        ({"v": {"anyOf": [{"type": "string", "minLength": 2}]}}, {}, "'minLength' of the text"),
        ({}, {"anyOf": [{"required": ["v"]}]}, "'anyOf' of the arguments"),
        ({}, {"$ref": "#/$defs/x", "$defs": {"x": {}}}, r"'\$ref' of the arguments"),
        ({"v": {}}, {"required": ["w"]}, "'w' is required and not one of its properties"),
    ],
)
def test_what_tags_cannot_keep_is_refused_by_name(
    name: str, properties: Any, more: dict[str, Any], told: str
) -> None:
    with pytest.raises(SchemaError, match=f"^tool 'send': {told}"):
        grammar_of(name, strict(properties, **more))
    lenient = Tool("send", {"type": "object", "properties": properties, **more})
    assert grammar_of(name, lenient)


@pytest.mark.parametrize("name", ["hermes", *TAGGED])
@pytest.mark.parametrize("key", ["properties", "required", "type"])
def test_parameters_that_are_no_schema_are_refused(name: str, key: str) -> None:
    for is_strict in (True, False):
        with pytest.raises(SchemaError, match=r"^tool 'send': .+"):
            grammar_of(name, Tool("send", {key: 5}, is_strict))


def test_calls_of_kimi_are_counted(matching: Matching) -> None:
    tool = strict({})
    grammar = grammar_of("kimi", tool)
    text = written([(tool, {})] * 11, [form_of("kimi").syntax(tool)] * 11, ascii=False)
    assert ":10<" in text
    assert matching.accepts(grammar, text)
    assert not matching.accepts(grammar, text.replace(":10<", "<"))


def test_parameters_may_have_any_name(matching: Matching) -> None:
    tool = strict({'é"👾\\': {"type": "string"}}, required=['é"👾\\'])
    for name in ("hermes", *TAGGED):
        output = output_of(name, tool, {'é"👾\\': "x"})
        assert matching.accepts(grammar_of(name, tool), output)


OBJECT = {"type": "object", "additionalProperties": False}
NOTE = Tool("a:b", {**OBJECT, "properties": {"x": {"enum": ["1", "2"]}}}, strict=True)
FULL = strict(
    {
        "s": {"type": "string"},
        "n": {"type": "integer"},
        "o": {"type": "object", "additionalProperties": {"type": "null"}},
        "u": {"type": ["string", "null"]},
        "k": OPTIONAL,
    },
    required=["s", "k"],
    additionalProperties=False,
)


def is_valid(name: str, arguments: Any) -> bool:
    if name == NOTE.name:
        return arguments in ({}, {"x": "1"}, {"x": "2"})
    return (
        name == FULL.name
        and {"s", "k"} <= arguments.keys() <= {"s", "n", "o", "u", "k"}
        and isinstance(arguments["s"], str)
        and isinstance(arguments.get("n", 0), int)
        and set(arguments.get("o", {}).values()) <= {None}
        and isinstance(arguments.get("u"), str | None)
        and arguments["k"] in ("a", "b", None)
    )


def wander(matching: Matching, grammar: str, random: Random, hints: list[str]) -> str | None:
    """Any output by the grammar, mostly in the direction of `hints`; None: it has no end."""
    matcher, tokens = matching.compiled(grammar), list[int]()
    eos = matching.vocabulary.eos_token
    while len(tokens) < 120 and not matcher.is_stopped():
        if matcher.is_accepting() and random.random() < 0.05:
            break
        wanted = matching.tokens(random.choice(hints)) if random.random() < HINTED else []
        forced = matcher.compute_ff_tokens()
        count = 0 if forced else matcher.validate_tokens(wanted)
        if forced or count:
            chosen = forced or wanted[:count]
        else:
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            allowed = allowed[allowed != eos]
            if not len(allowed):
                break
            chosen = [int(random.choice(allowed))]
        assert matcher.consume_tokens(chosen)
        tokens += chosen
    return matching.vocabulary.decode_str(tokens) if matcher.is_accepting() else None


@pytest.mark.slow
@pytest.mark.parametrize("required", [True, False], ids=["required", "offered"])
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("pythonic", "gemma4")])
def test_whatever_may_be_written_is_read_as_calls_that_match(
    matching: Matching, name: str, required: bool
) -> None:
    syntax = form_of(name).syntax(FULL)
    hints = ['"', "}", "]", "null", syntax.begin, syntax.end, syntax.last, syntax.trigger]
    hints += ["<|channel|>final<|message|>", "</parameter>", "<tool_call>", form_of(name).opening]
    if syntax.parameters is not None:
        hints += [syntax.parameters.key_begin, f"{syntax.parameters.value_end}\n"]
    num_calls = 0
    for seed in range(NUM_OUTPUTS):
        parallel = seed % 2 == 0
        grammar = grammar_of(name, FULL, NOTE, required=required, parallel=parallel)
        text = wander(matching, grammar, Random(seed), [hint for hint in hints if hint])
        if text is None:
            continue
        events = read(parser(name, "", [FULL, NOTE]), [text])
        calls = calls_of(events)
        num_calls += len(calls)
        assert all(is_valid(*call) for call in calls), f"{text!r}: {json.dumps(calls)}"
        assert parallel or len(calls) <= 1, text
        assert not required or (calls and not text_of(events)), text
    assert num_calls > (5 if required else 1)
