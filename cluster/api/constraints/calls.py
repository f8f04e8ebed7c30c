"""Grammars of tool calls, and of the reasoning that may come before an answer.

A call that is demanded is the whole answer; calls that are only offered may follow free text, and
from their trigger on they match the tools' schemas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from kvrelay.cluster.api.constraints.lark import input_terms, without
from kvrelay.cluster.api.constraints.rules import AddedId, Rules
from kvrelay.cluster.api.constraints.schema import SchemaError, part_grammar, rewrite
from kvrelay.cluster.api.output.custom_input import INPUT
from kvrelay.cluster.api.output.events import THINK, Tags
from kvrelay.cluster.api.output.format import CallSyntax, ParameterSyntax, ToolFormat
from kvrelay.cluster.api.output.marked_calls import Harmony
from kvrelay.cluster.api.output.tools import InputFormat, Tool

SPACE = r"/[ \t\r\n]*/"  # what is read as such, not Unicode's
LINE = "\n"  # after each argument
MAX_CALLS = 64  # in one answer: a small model that has to call something may never end
COMPOSITIONS = (  # keywords that may name more of an object's properties
    *("$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties", "unevaluatedProperties"),
    *("dependencies", "dependentSchemas", "propertyNames"),
)
# Keywords of strict schemas that are refused where arguments are written between tags.
OBJECT_LIMITS = (
    *("$ref", "allOf", "anyOf", "oneOf", "not", "if", "enum", "const", "minProperties"),
    *("maxProperties", "patternProperties", "propertyNames", "dependencies", "dependentRequired"),
    *("dependentSchemas", "unevaluatedProperties"),
)
TEXT_LIMITS = (
    *("pattern", "format", "minLength", "maxLength", "enum", "const", "allOf", "oneOf", "not"),
    *("if", "$ref"),
)


class Before(Enum):
    """What may come before an answer."""

    NOTHING = "nothing"
    BEGUN = "begun"  # reasoning, of which the prompt has the beginning
    MAY_THINK = "may think"  # reasoning between its tags
    CHANNELS = "channels"  # Harmony's channel for it


def call_grammar(
    form: ToolFormat,
    tools: Sequence[Tool],
    added_id: AddedId,
    *,
    required: bool,
    parallel: bool,
    before: Before = Before.NOTHING,
    tags: Tags = THINK,
    answer: str = "",
) -> str:
    """`required`: at least one call and nothing else. `tags`: around reasoning. `answer`: a grammar
    that an answer without calls has to match; empty: free text. Raises SchemaError, which names
    the tool."""
    rules = Rules(added_id, (*form.markers, *tags), tags)
    called = [_closed(tool) for tool in tools] if required else tools
    arguments = [_arguments(rules, i, tool, form) for i, tool in enumerate(called)]
    syntaxes = [form.syntax(tool) for tool in tools]
    shape = syntaxes[0]
    one = _one_of(rules, "call", arguments, [syntax.begin for syntax in syntaxes], syntaxes)
    more = ""
    if parallel:  # what is between calls is one string with a call's begin: lexemes are greedy
        begins = [shape.between + syntax.begin for syntax in syntaxes]
        more = f"{_one_of(rules, 'next', arguments, begins, syntaxes)}{{0,{MAX_CALLS - 1}}}"
    first, last = shape.first, rules.quote(shape.last)
    if required:
        start = rules.add("calls", _joined(rules.quote(first), one, more, last))
    elif answer or not shape.trigger or before is Before.CHANNELS:
        rules.add("calls", _joined(rules.quote(first), one, more, last))
        free = "TEXT" if before is Before.CHANNELS else _no_call(rules, form)
        final = _final(rules, before, "@answer" if answer else free)
        preamble = "" if answer else _preamble(rules, before)
        start = rules.add("offered", _joined(preamble, f"(calls | {final})"))
    else:
        trigger = rules.text_until("trigger", shape.trigger)
        if first:
            rest = _joined(rules.quote(first.removeprefix(shape.trigger)), one, more, last)
        else:
            begins = [syntax.begin.removeprefix(shape.trigger) for syntax in syntaxes]
            rest = _one_of(rules, "head", arguments, begins, syntaxes)
        rules.add("rest", f"{trigger} {rest}")
        if form.opening:  # without what is first
            opening = rules.text_until("opening", form.opening)
            begins = [syntax.begin.partition(form.opening)[2] for syntax in syntaxes]
            rules.add("bare", f"{opening} {_one_of(rules, 'bare', arguments, begins, syntaxes)}")
        call = "(rest | bare)" if form.opening else "rest"
        start = rules.add("offered", f"{call}* TEXT" if parallel else f"{call} | TEXT")
    made = rules.made(_joined(_lead(form.lead), _reasoning(rules, before), start))
    return _together(made, answer) if answer else made


def answer_grammar(
    answer: str, added_id: AddedId, before: Before, tags: Tags = THINK, lead: str = ""
) -> str:
    """`answer`, a grammar, after `lead`, which is not needed, and reasoning between `tags`."""
    if before is Before.NOTHING and not lead:
        return answer
    rules = Rules(added_id, (*tags, *Harmony.markers), tags)
    final = _final(rules, before, "@answer")
    reasoning = _reasoning(rules, before)
    return _together(rules.made(_joined(_lead(lead), reasoning, final)), answer)


def _together(main: str, answer: str) -> str:
    grammar = {"lark_grammar": answer}
    if answer.startswith("{"):
        (grammar,) = json.loads(answer)["grammars"]
    grammars = [{"name": "main", "lark_grammar": main}, {**grammar, "name": "answer"}]
    return json.dumps({"grammars": grammars})


def _lead(text: str) -> str:
    return f"{json.dumps(text)}?" if text else ""


def _reasoning(rules: Rules, before: Before) -> str:
    think, think_end = rules.tags
    match before:
        case Before.BEGUN:
            return f"{rules.text_until('reasoning', think_end)} {SPACE}"
        case Before.MAY_THINK:
            until = rules.text_until("reasoning", think_end)
            return f"({rules.quote(think)} {until} {SPACE})?"
        case Before.CHANNELS:
            begin = rules.quote(f"{Harmony.channel}analysis{Harmony.message}")
            until = rules.text_until("reasoning", Harmony.end)
            return f"({begin} {until} {rules.quote(Harmony.start + 'assistant')})?"
    return ""


def _no_call(rules: Rules, form: ToolFormat) -> str:
    """Text where calls have no trigger: it does not begin as one, nor with reasoning before it."""
    body = rf"/\s*([^{{\s](.|\n)*)?/ & ~/\s*{re.escape(rules.tags[0])}(.|\n)*/"
    if form.opening:
        body += rf" & ~/(.|\n)*{re.escape(form.opening)}(.|\n)*/"
    return rules.add("NO_CALL", body)


def _preamble(rules: Rules, before: Before) -> str:
    """What Harmony may say to the user before a call."""
    if before is not Before.CHANNELS:
        return ""
    begin = rules.quote(f"{Harmony.channel}commentary{Harmony.message}")
    until = rules.text_until("preamble", Harmony.end)
    return f"({begin} {until} {rules.quote(Harmony.start + 'assistant')})?"


def _final(rules: Rules, before: Before, answer: str) -> str:
    if before is not Before.CHANNELS:
        return answer
    return _joined(rules.quote(f"{Harmony.channel}final{Harmony.message}"), answer)


def _joined(*terms: str) -> str:
    return " ".join(filter(None, terms))


def _one_of(
    rules: Rules,
    name: str,
    arguments: Sequence[str],
    begins: Sequence[str],
    syntaxes: Sequence[CallSyntax],
) -> str:
    """A rule for a call of any tool."""
    calls = []
    for i, (begin, each, syntax) in enumerate(zip(begins, arguments, syntaxes, strict=True)):
        number = f"/[0-9]{{1,4}}/ {rules.quote(syntax.number_end)}" if syntax.number_end else ""
        # In the pieces of JSON, where an answer may be an object too: lexemes are greedy.
        pieces = [begin] if syntax.trigger else re.findall(r'"[^"]*"|[^"]+', begin)
        body = _joined(*map(rules.quote, pieces), number, each, rules.quote(syntax.end))
        calls.append(rules.add(f"{name}_{i}", body))
    return rules.add(f"any_{name}", " | ".join(calls))


def _closed(tool: Tool) -> Tool:
    """`tool` without arguments that it does not name: a model that has to call writes some. Where
    its schema says more than names, they may be in any part of it."""
    schema = tool.parameters
    properties, required = schema.get("properties"), schema.get("required", [])
    if not schema:
        properties = {}
    if not isinstance(properties, dict) or not isinstance(required, list):
        return tool
    if {"additionalProperties", *COMPOSITIONS}.intersection(schema):
        return tool
    if any(name not in properties for name in required):
        return tool
    return replace(tool, parameters={**schema, "additionalProperties": False})


def _arguments(rules: Rules, index: int, tool: Tool, form: ToolFormat) -> str:
    schema: dict[str, Any] = {"type": "object", **tool.parameters}
    syntax = form.syntax(tool)
    try:
        if tool.custom is not None and tool.is_held:
            body = _input(rules, index, tool.custom, syntax.parameters)
            return rules.add(f"arguments_{index}", body)
        body = f"%json {json.dumps(part_grammar(schema, lenient=not tool.strict))}"
        if syntax.parameters is not None:
            body = _parameters(rules, index, schema, tool, syntax.parameters)
        return rules.add(f"arguments_{index}", body or '""')
    except SchemaError as error:
        raise SchemaError(f"tool '{tool.name}': {error}") from None


def _input(rules: Rules, index: int, form: InputFormat, parameters: ParameterSyntax | None) -> str:
    """The arguments of a custom tool: one text, which matches its grammar."""
    prefix = f"input{index}"
    if parameters is None:
        term, _ = input_terms(rules, prefix, form, quoted=True)
        return _joined(rules.quote(f'{{"{INPUT}": "'), term, rules.quote('"}'))
    begin = _value_begin(INPUT, parameters)
    term, is_one = input_terms(rules, prefix, form, quoted=False, end=parameters.value_end)
    end = rules.quote(f"{parameters.pad}{parameters.value_end}")
    if is_one and not end.startswith("<["):  # to the first end, and that is not within the text
        body = f"{term} & {without(parameters.value_end)}"
        text = rules.add(f"{prefix.upper()}TEXT", body)
        term, end = rules.add(f"{prefix}text", f"{text} {end}", "[lazy]"), ""
    return _joined(rules.quote(begin), term, end, rules.quote(LINE))


def _value_begin(name: str, syntax: ParameterSyntax) -> str:
    begin = f"{syntax.key_begin}{name}{syntax.key_end}"
    return begin + (f"\n{syntax.value_begin}" if syntax.value_begin else "") + syntax.pad


def _parameters(
    rules: Rules, index: int, schema: dict[str, Any], tool: Tool, syntax: ParameterSyntax
) -> str:
    rewritten = rewrite(schema, lenient=not tool.strict)
    shared = {key: rewritten[key] for key in ("$defs", "definitions") if key in rewritten}
    properties, required = rewritten.get("properties", {}), rewritten.get("required", [])
    if tool.strict:
        _refuse(rewritten, OBJECT_LIMITS, "the arguments")
        missing = [name for name in required if name not in properties]
        if missing:
            raise SchemaError(f"'{missing[0]}' is required and not one of its properties")
    terms = []
    for number, (name, each) in enumerate(properties.items()):
        if each is False:
            continue
        rule = f"parameter_{index}_{number}"
        begin, end = _value_begin(name, syntax), f"{syntax.pad}{syntax.value_end}{LINE}"
        texts = _texts(each)
        if tool.type_of(name) != "string":
            part = {**each, **shared} if isinstance(each, dict) else each
            json_schema = json.dumps(part_grammar(part, lenient=not tool.strict))
            value = f"%json {json_schema} {rules.quote(end)}"
        elif texts is not None:
            value = f"({' | '.join(map(rules.quote, texts))}) {rules.quote(end)}"
        else:
            if tool.strict:
                _refuse(each, TEXT_LIMITS, f"the text '{name}'")
            until = rules.text_until(f"{rule}_value", syntax.value_end)
            value = f"{until} {rules.quote(LINE)}"
        rules.add(rule, f"{rules.quote(begin)} {value}")
        terms.append(rule if name in required else f"{rule}?")
    return " ".join(terms)


def _texts(schema: Any) -> list[str] | None:
    """All that may be written for a text, or null for it; None: they are not listed."""
    if not isinstance(schema, dict):
        return None
    values, alternatives = schema.get("enum"), schema.get("anyOf")
    if "const" in schema:
        values = [schema["const"]]
    if schema.get("type") == "null":
        values = [None]
    if isinstance(values, list):
        return ["null" if v is None else v for v in values if v is None or isinstance(v, str)]
    if not isinstance(alternatives, list):
        return None
    found = [_texts(each) for each in alternatives]
    return None if None in found else [text for texts in found for text in texts or ()]


def _refuse(schema: dict[str, Any], keywords: Sequence[str], what: str) -> None:
    """What cannot be kept where arguments are not JSON."""
    for keyword in keywords:
        if keyword in schema:
            raise SchemaError(
                f"'{keyword}' of {what} is not supported in this model's format of tool calls"
            )
    alternatives = schema.get("anyOf")
    for each in alternatives if isinstance(alternatives, list) else ():
        _refuse(each, keywords, what)
