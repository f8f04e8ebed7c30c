"""Every kind of constraint that a request may name: what it lets through, and what is none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.cluster.api.constraints.grammar import KINDS, MAX_CHOICES, grammar_of
from kvrelay.cluster.api.constraints.schema import MAX_SCHEMA_CHARS, SchemaError
from tests.cluster.api.constraints.conftest import Matching

PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
TAGS = {
    "structures": [
        {"begin": "<f=a>", "schema": PERSON, "end": "</f>"},
        {"begin": "<f=é>", "end": "</f>"},
    ],
    "triggers": ["<f="],
}


def whole(kind: Any, **fields: Any) -> dict[str, Any]:
    """A structural tag of the newer form that is all of the output."""
    return {"type": "structural_tag", "format": {"type": kind, **fields}}


LARK = 'start: "a" more\nmore: /[0-9]+/ | "<" more ">"'
# Kind, value, what matches, what does not.
ACCEPTED: list[tuple[str, Any, list[str], list[str]]] = [
    ("json", PERSON, ['{"age": 5}'], ['{"age": "5"}', "{}", "5"]),
    ("json", json.dumps(PERSON), ['{"age": 5}'], ['{"age": "5"}']),
    ("json_object", True, ["{}", '{"a": [1, {"b": "}"}]}'], ["[]", '"a"', "{", "text"]),
    ("regex", r"[a-z]+é?\n", ["abé\n", "a\n"], ["a", "1\n", "é\n"]),
    ("regex", "^a/b$", ["a/b"], ["a/b/", "a"]),
    ("choice", ["yes", "no é", '"\\\n😀'], ["yes", "no é", '"\\\n😀'], ["ye", "yes!", "no e"]),
    ("grammar", LARK, ["a12", "a<<1>>"], ["a", "a<1"]),
    ("grammar", 'root ::= "a" [0-9]+', ["a1"], ["a", "b1"]),
    (
        "structural_tag",
        TAGS,
        ["no tag", 'One <f=a>{"age": 1}</f>, <f=é>[null]</f>, done.'],
        ['<f=a>{"age": "1"}</f>', "<f=b>1</f>", '<f=a>{"age": 1}', "<f=é>text</f>"],
    ),
    ("structural_tag", json.dumps(TAGS), ['<f=a>{"age": 1}</f>'], ["<f=a>1</f>"]),
    ("structural_tag", whole("json_schema", json_schema=PERSON), ['{"age": 5}'], ["{}", "text"]),
    ("structural_tag", whole("const_string", value='"é"'), ['"é"'], ["é", '"é" ']),
    ("structural_tag", whole("regex", pattern="[ab]+"), ["abba"], ["", "abc"]),
    ("structural_tag", whole("grammar", grammar='root ::= "a" [0-9]'), ["a1"], ["a"]),
]
REFUSED: list[tuple[str, Any, str]] = [
    ("json", "{", "it is not JSON: Expecting property name"),
    ("json", "[" * 100_000, "it is not JSON"),
    ("json", '"text"', "a schema is an object, got 'text'"),
    ("json", 5, "a schema is an object, got 5"),
    ("regex", "", "expected a string that is not empty, got ''"),
    ("regex", ["a"], r"expected a string that is not empty, got \['a'\]"),
    ("regex", "a" * (MAX_SCHEMA_CHARS + 1), f"characters, more than {MAX_SCHEMA_CHARS}"),
    ("choice", "yes", f"a list of 1 to {MAX_CHOICES} strings"),
    ("choice", [], f"a list of 1 to {MAX_CHOICES} strings"),
    ("choice", ["a", ""], "strings that are not empty"),
    ("choice", ["a"] * (MAX_CHOICES + 1), f"a list of 1 to {MAX_CHOICES} strings"),
    ("grammar", "root ::= ( ", "from GBNF to Lark"),
    ("structural_tag", [], "has 'structures' and 'triggers', each a list"),
    ("structural_tag", whole("const_string"), "type 'const_string' has a 'value'"),
    ("structural_tag", whole("regex", pattern=5), "expected a string that is not empty, got 5"),
    ("structural_tag", whole(["or"]), r"type \['or'\] is not supported, use 'triggered_tags'"),
    ("structural_tag", {"structures": [], "triggers": ["a"]}, "has 'structures' and 'triggers'"),
    (
        "structural_tag",
        {"structures": [{"begin": "a", "schema": {}}], "triggers": ["a"]},
        "a structure has 'begin', 'schema' and 'end'",
    ),
    (
        "structural_tag",
        {"structures": [{"begin": "ab", "end": ""}], "triggers": ["b", 5, ""]},
        "no trigger begins 'ab'",
    ),
    (
        "structural_tag",
        {"structures": [{"begin": "a", "schema": {"not": {}}, "end": "b"}], "triggers": ["a"]},
        "the structure that begins 'a': .*\"not\"",
    ),
]


def test_every_kind_is_tried() -> None:
    assert {kind for kind, *_ in ACCEPTED} == set(KINDS)


@pytest.mark.parametrize(("kind", "value", "right", "wrong"), ACCEPTED)
def test_what_a_constraint_lets_through(
    matching: Matching, kind: str, value: Any, right: list[str], wrong: list[str]
) -> None:
    grammar = grammar_of(kind, value, {})
    assert [text for text in right if not matching.accepts(grammar, text)] == []
    assert [text for text in wrong if matching.accepts(grammar, text)] == []


def test_white_space_of_json_may_be_chosen(matching: Matching) -> None:
    for kind, value in (("json", PERSON), ("json_object", True)):
        grammar = grammar_of(kind, value, {"whitespace_pattern": " *"})
        assert matching.accepts(grammar, '{   "age":5}')
        assert not matching.accepts(grammar_of(kind, value, {}), '{   "age":5}')
    with pytest.raises(SchemaError, match="'whitespace_pattern' is a string, got 5"):
        grammar_of("json", PERSON, {"whitespace_pattern": 5})


@pytest.mark.parametrize(("kind", "value", "told"), REFUSED)
def test_what_is_no_constraint_is_refused(kind: str, value: Any, told: str) -> None:
    with pytest.raises(SchemaError, match=told) as error:
        grammar_of(kind, value, {})
    assert "\n" not in str(error.value)
