"""What a chat template implies: a format of calls, and whether the model reasons."""

from __future__ import annotations

import pytest

from kvrelay.cluster.api.output.dialect import FORMATS, Dialect, find_format
from kvrelay.cluster.api.output.tools import Tool
from kvrelay.cluster.api.output.xml_calls import as_json
from tests.cluster.api.output.reading import FENCED, NAMED_FIRST

# Parts of the templates that model families come with.
TEMPLATES = {
    "hermes": '{{- \'\\n<tool_call>\\n{"name": "\' + tool_call.name + \'", "arguments": \' }}',
    "qwen3_coder": "{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}<parameter=",
    "llama3_json": '{"name": function name, "parameters": dictionary of argument name and its',
    "pythonic": "{{ '<|python_start|>' + message['content'] + '<|python_end|>' }}",
    "llama4_json": "\"parameters\": dictionary of argument name {{- '<|python_start|>' }}",
    "mistral": '{{ "[TOOL_CALLS][" }}{{ "[/AVAILABLE_TOOLS]" }}',
    "deepseek": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] }}",
    "glm": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>",
    "kimi": "<|tool_calls_section_begin|>{%- for tool_call in message['tool_calls'] -%}",
    "minimax": "<minimax:tool_call>\n<invoke name=\"' + tool_call.name + '\">",
    "seed_oss": "<seed:tool_call>\n<function=example_function_name>\n<parameter=example_1>",
    "gemma4": "{{- '<|tool_call>call:' + function['name'] + '{' -}}",
    "harmony": '{{- "<|start|>assistant<|channel|>final<|message|>" + message.content }}',
}


@pytest.mark.parametrize(("name", "template"), TEMPLATES.items())
def test_a_template_implies_its_format(name: str, template: str) -> None:
    assert TEMPLATES.keys() == FORMATS.keys()
    tools = Dialect.of(f"{{% if tools %}}{template}{{% endif %}}").tools
    assert tools is not None
    assert tools.name == name
    told = Dialect.of(template).tools  # it shows no tools, so the model is told of another format
    assert told is not None
    assert told.name == ("harmony" if name == "harmony" else "hermes")
    named = Dialect.of(template, name).tools
    assert named is not None
    assert named.name == name


def test_a_tag_of_python_implies_llama() -> None:
    found = find_format("auto", "{{- '<|python_tag|>' + tool_call.name + '.call(' }}")
    assert found is not None
    assert found.name == "llama3_json"


def test_a_template_that_knows_no_format_is_told_of_hermes() -> None:
    assert find_format("auto", "{{ message.content }}") is None
    tools = Dialect.of("{{ message.content }}").tools
    assert tools is not None
    assert tools.name == "hermes"


def test_a_format_may_be_named_or_left_out() -> None:
    for name in FORMATS:
        tools = Dialect.of(TEMPLATES["hermes"], name).tools
        assert tools is not None
        assert tools.name == name
    assert Dialect.of(TEMPLATES["hermes"], "none").tools is None
    assert find_format("none", TEMPLATES["hermes"]) is None


def test_a_template_says_how_its_format_is_written() -> None:
    def begin(name: str, template: str) -> str:
        found = find_format(name, template)
        assert found is not None
        return found.syntax(Tool("ping")).begin

    assert begin("mistral", NAMED_FIRST) == "[TOOL_CALLS]ping[ARGS]"
    assert begin("mistral", "") == '{"name": "ping", "arguments": '
    sep = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
    assert begin("auto", f"{sep[0]} {FENCED}") == f"{sep[0]}function{sep[1]}ping\n```json\n"
    assert begin("deepseek", "") == f"{sep[0]}ping{sep[1]}"


def test_a_template_with_both_tags_reasons() -> None:
    both = "{{ '<think>' + reasoning + '</think>' }}"
    assert Dialect.of(both).thinks
    assert not Dialect.of("{% set content = content.split('</think>')[-1] %}").thinks
    assert not Dialect.of(both, reasoning_parser="none").thinks
    assert Dialect.of("", reasoning_parser="think").thinks == ("<think>", "</think>")
    for begin, end in (("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>")):
        assert Dialect.of(f"{{{{ '{begin}' + reasoning + '{end}' }}}}").thinks == (begin, end)


def test_ids_are_the_same_for_the_same_seed_and_of_the_form_that_a_template_takes() -> None:
    hermes, mistral = find_format("hermes", ""), find_format("mistral", "")
    assert hermes is not None
    assert mistral is not None
    assert hermes.new_id("a") == hermes.new_id("a") != hermes.new_id("b")
    assert hermes.new_id("a").startswith("call_")
    assert len(mistral.new_id("a")) == 9
    assert mistral.new_id("a").isalnum()


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "integer"}, "integer"),
        ({"type": ["string", "null"]}, "string"),
        ({"type": ["string", "integer"]}, ""),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string"),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/a"}]}, ""),
        ({"anyOf": [{"anyOf": [{"type": "array"}]}, {"type": "array"}]}, "array"),
        ({"enum": ["1", "2"]}, "string"),
        ({"enum": ["1", 2]}, ""),
        ({"type": "null"}, ""),
        ({"type": 5}, ""),
        ({"type": [{}]}, ""),
        ({}, ""),
        (True, ""),
    ],
)
def test_the_type_of_a_parameter(schema: object, kind: str) -> None:
    tool = Tool("send", {"properties": {"a": schema}})
    assert tool.type_of("a") == kind
    assert tool.has("a")
    assert not tool.has("b")


@pytest.mark.parametrize("properties", [None, 5, ["a"], "a", {}])
def test_a_schema_without_properties_has_no_parameters(properties: object) -> None:
    tool = Tool("send", {"properties": properties})
    assert not tool.has("a")
    assert tool.type_of("a") == ""


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        (" 12 ", "integer", "12"),
        ("True", "boolean", "true"),
        ("maybe", "boolean", '"maybe"'),
        ("None", "array", "null"),
        ('{"a": [1e5]}', "object", '{"a": [1e5]}'),
        ("[1, 2", "array", '"[1, 2"'),
        ("-Infinity", "number", '"-Infinity"'),
        ("[" * 100_000, "array", f'"{"[" * 100_000}"'),
        (" é\n", "", '" é\\n"'),
    ],
)
def test_a_value_that_is_written_as_text(text: str, kind: str, value: str) -> None:
    assert as_json(text, kind) == value
