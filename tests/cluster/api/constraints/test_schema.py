"""JSON schemas: what is rewritten, what is kept, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.cluster.api.constraints.schema import (
    FORMATS,
    MAX_DEPTH,
    MAX_OPTIONAL,
    MAX_PROPERTIES,
    MAX_SCHEMA_CHARS,
    SchemaError,
    in_one_line,
    part_grammar,
    rewrite,
    schema_grammar,
)
from tests.cluster.api.constraints.conftest import Matching


def tagged(name: str, *values: Any, **more: Any) -> dict[str, Any]:
    """An object that has to have a property, with one of some values."""
    properties = {name: {"enum": list(values)} if len(values) > 1 else {"const": values[0]}, **more}
    return {"type": "object", "properties": properties, "required": [name]}


A, B = tagged("kind", "a", x={"type": "integer"}), tagged("kind", "b", y={"type": "string"})
STRING, LONG = {"type": "string"}, {"type": "string", "minLength": 3}
DISJOINT: list[list[Any]] = [
    [STRING, {"type": "integer"}, {"type": ["null", "array"]}],
    [{"type": "boolean"}, {"enum": [1, 2.5, "a", None]}],
    [{"const": 1}, {"const": "1"}, {"enum": [2, True]}],
    [{"type": "object"}, {"const": []}],
    [A, B],
    [tagged("kind", "a", "c"), tagged("kind", "b", "d"), tagged("kind", 1)],
    [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
    [{"$ref": "#/$defs/to~1a"}, B],
]
NOT_DISJOINT: list[list[Any]] = [
    [STRING, LONG],
    [{"type": "integer"}, {"type": "number"}],
    [{"const": 1}, {"const": 1.0}],
    [{"const": {"a": [1]}}, {"enum": [{"a": [1.0]}]}],
    [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}],
    [{"type": "object"}, {}],
    [A, {**B, "required": []}],
    [A, {**B, "type": ["object", "null"]}],
    [A, tagged("sort", "b")],
    [A, tagged("kind", "b", "a")],
    [A, True],
    [A, {"$ref": "#/$defs/loop"}],
    [A, {"$ref": "#/$defs/missing"}],
    [A, {"$ref": "http://example.com/b"}],
]
DEFS = {"a": A, "b": B, "to/a": {"$ref": "#/$defs/a"}, "loop": {"$ref": "#/$defs/loop"}}


@pytest.mark.parametrize("alternatives", DISJOINT)
def test_alternatives_that_exclude_each_other_are_any_of(alternatives: list[Any]) -> None:
    schema = {"oneOf": alternatives, "title": "x", "$defs": DEFS}
    assert rewrite(schema) == {"anyOf": alternatives, "title": "x", "$defs": DEFS}
    assert list(rewrite(schema)) == ["anyOf", "title", "$defs"]
    inner = {"type": "array", "items": {"properties": {"p": {"oneOf": alternatives}}}}
    found = rewrite({**inner, "$defs": DEFS})
    assert found["items"] == {"properties": {"p": {"anyOf": alternatives}}}


@pytest.mark.parametrize("alternatives", NOT_DISJOINT)
def test_alternatives_that_may_both_be_valid_stay(alternatives: list[Any]) -> None:
    schema = {"oneOf": alternatives, "$defs": DEFS}
    assert rewrite(schema) == schema


def test_one_of_stays_beside_any_of() -> None:
    schema = {"oneOf": [STRING, {"type": "null"}], "anyOf": [STRING]}
    assert rewrite(schema) == schema
    assert rewrite({"oneOf": []}) == {"oneOf": []}
    assert rewrite({"oneOf": 5}) == {"oneOf": 5}


def test_alternatives_by_tag_are_told_apart(matching: Matching) -> None:
    grammar = schema_grammar({"oneOf": [{"$ref": "#/$defs/a"}, B], "$defs": DEFS})
    assert matching.accepts(grammar, '{"kind": "a", "x": 1}')
    assert matching.accepts(grammar, '{"kind": "b", "y": "é"}')
    assert not matching.accepts(grammar, '{"kind": "a", "x": "1"}')
    assert not matching.accepts(grammar, '{"kind": "c"}')


def test_alternatives_that_are_not_told_apart_are_refused_by_name(matching: Matching) -> None:
    schema = {"properties": {"p": {"oneOf": [STRING, LONG]}}}
    told = in_one_line(matching.error(schema_grammar(schema)))
    assert told == (
        "a 'oneOf' whose alternatives may both be valid is not supported: let each require a "
        "property with a 'const' of its own, or use 'anyOf'"
    )
    with pytest.raises(SchemaError, match="'oneOf'"):
        part_grammar(schema)
    assert matching.accepts(schema_grammar(schema, lenient=True), '{"p": "a"}')


def test_formats_that_json_schema_does_not_define_say_nothing() -> None:
    assert rewrite({"type": "string", "format": "color"}) == STRING
    for name in FORMATS:
        assert rewrite({"format": name}) == {"format": name}
    assert rewrite({"format": "iri"}, lenient=True) == {}
    assert rewrite({"format": "date"}, lenient=True) == {"format": "date"}
    assert rewrite({"properties": {"format": {"format": 5}}}) == {
        "properties": {"format": {"format": 5}}
    }


REFUSED = [
    ({"format": "iri", "type": "string"}, "iri"),
    ({"not": STRING}, '"not"'),
    ({"if": STRING, "then": LONG}, '"if", "then"'),
    ({"type": "array", "uniqueItems": True}, '"uniqueItems"'),
    ({"type": "array", "contains": {}}, '"contains"'),
    ({"propertyNames": LONG}, '"propertyNames"'),
    ({"dependentRequired": {"a": ["b"]}}, '"dependentRequired"'),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"type": "nonsense"}, "nonsense"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "'p'"),
    ({"$ref": "#/$defs/missing"}, "/$defs/missing"),
    ({"$ref": "http://example.com/a"}, "http://example.com/a"),
    ({"properties": 5}, "properties"),
    ({"format": {}}, "'format'"),
    ({"oneOf": [{"type": 5}, STRING]}, "type"),
    ({"oneOf": [{"type": [{}]}, STRING]}, "type"),
    ({"oneOf": [{**A, "required": [{}]}, B]}, "'required'"),
]


@pytest.mark.parametrize(("schema", "named"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(schema: dict[str, Any], named: str) -> None:
    with pytest.raises(SchemaError) as told:
        part_grammar({"type": "object", "properties": {"p": schema}, "required": ["p"]})
    assert named in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("schema", [False, None, 5, "object", []])
def test_a_schema_is_an_object(schema: Any) -> None:
    with pytest.raises(SchemaError, match=r"a schema is an object, got .+"):
        rewrite(schema)


def test_a_schema_has_a_limited_depth_and_size() -> None:
    deepest: Any = True
    for _ in range(MAX_DEPTH):
        deepest = {"items": deepest}
    assert rewrite(deepest) == deepest
    with pytest.raises(SchemaError, match="nested more than 64 deep"):
        rewrite({"items": {"items": deepest}})
    endless: Any = {}
    for _ in range(5000):
        endless = {"x": endless}
    with pytest.raises(SchemaError, match="nested more than 64 deep"):
        rewrite({"default": endless})
    with pytest.raises(SchemaError, match=f"more than {MAX_SCHEMA_CHARS}"):
        rewrite({"description": "x" * MAX_SCHEMA_CHARS})
    properties = {f"p{i}": {} for i in range(MAX_PROPERTIES)}
    schema = {"properties": properties, "required": list(properties)}
    assert rewrite(schema) == schema
    with pytest.raises(SchemaError, match=r"'properties' has 2001 entries, at most 2000"):
        rewrite({"properties": properties | {"one": {}}})


NESTED = {"$ref": "#/$defs/n"}
KEPT: list[tuple[Any, list[str], list[str]]] = [
    (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": STRING},
            "required": ["b"],
        },
        ['{"a": 1, "b": ""}', '{"b": "é😀"}', '{"b": "", "c": [1]}'],
        ['{"b": "", "a": 1}', '{"a": 1}', '{"a":1,"b":""}', '{"a": "1", "b": ""}', '{"b": ""} '],
    ),
    (
        {"type": "object", "properties": {"a": False}, "additionalProperties": {"type": "null"}},
        ["{}", '{"b": null}'],
        ['{"a": null}', '{"b": 1}', "[]"],
    ),
    ({"enum": ["é\n", {"a": [1.5, None]}]}, ['"é\\n"', '{"a": [1.5, null]}'], ['"e"', "null"]),
    ({"type": "integer", "minimum": 3, "exclusiveMaximum": 12}, ["3", "11"], ["2", "12", "3.5"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"😀é日"'], ['"a"', '"abcd"']),
    ({"type": "string", "pattern": "^[a-c]+$"}, ['"abc"'], ['"abd"', '""']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2024-13-01"', '"today"']),
    ({"type": "array", "items": STRING, "maxItems": 2}, ["[]", '["a", "b"]'], ["[1]", '["a","b"]']),
    (
        {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"n": NESTED}}}},
        ['{"n": {"n": {}}}'],
        ['{"n": 1}'],
    ),
    (True, ["1", '{"a": []}'], ["nul"]),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), KEPT)
def test_an_output_is_held_to_its_schema(
    matching: Matching, schema: Any, valid: list[str], invalid: list[str]
) -> None:
    grammar = schema_grammar(schema)
    assert [text for text in valid if not matching.accepts(grammar, text)] == []
    assert [text for text in invalid if matching.accepts(grammar, text)] == []


def test_white_space_is_what_the_pattern_allows(matching: Matching) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array"}}}
    loose = schema_grammar(schema, whitespace=r"[ \n]{0,2}")
    for text in ('{"a":[]}', '{ "a": [ 1,2 ]\n}', '{\n "a":[]}'):
        assert matching.accepts(loose, text)
        assert not matching.accepts(schema_grammar(schema), text)
    assert not matching.accepts(loose, '{   "a":[]}')


KEYWORDS = ["type", "oneOf", "anyOf", "allOf", "properties", "required", "items", "enum", "const"]
KEYWORDS += ["format", "$ref", "additionalProperties", "minLength", "pattern", "a"]
words = st.sampled_from([*KEYWORDS, "object", "string", "#/properties/a", "#/oneOf/0", "date"])
junk = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | words,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=300)
@given(junk, st.booleans())
def test_whatever_a_client_sends_is_a_grammar_or_refused(schema: Any, lenient: bool) -> None:
    told = "a grammar"
    try:
        part_grammar(schema, lenient=lenient)
    except SchemaError as error:
        told = str(error)
    assert 0 < len(told) <= 300
    assert "\n" not in told


def numbers(*multiples: float, meet: bool = False) -> dict[str, Any]:
    each = [{"type": "number", "multipleOf": number} for number in multiples]
    return {"allOf": each} if meet else {"properties": {f"p{i}": e for i, e in enumerate(each)}}


@pytest.mark.parametrize(
    ("schema", "cost"),
    [
        (numbers(999_983), 999_983),
        (numbers(0.100_003), 100_003),
        (numbers(9_973, 9_967, 9_949), 29_889),
        (numbers(9_973, 101, meet=True), 1_007_273),
        ({"anyOf": [{"multipleOf": 397}], "multipleOf": 401}, 159_197),
        ({"$ref": "#/$defs/a", "multipleOf": 401, "$defs": {"a": {"multipleOf": 397}}}, 159_197),
    ],
)
def test_multiples_are_bounded_by_what_they_cost(schema: Any, cost: int) -> None:
    for make in (rewrite, schema_grammar, part_grammar):
        with pytest.raises(SchemaError, match=f"'multipleOf' tells {cost} remainders apart"):
            make(schema)


def test_multiples_that_cost_little_are_kept(matching: Matching) -> None:
    for multiple in (0.01, 0.25, 5, 1000, 3600, 86_400, 1_000_000, 0):
        assert rewrite(numbers(multiple)) == numbers(multiple)
    assert rewrite(numbers(97, 101, meet=True))
    grammar = schema_grammar({"type": "integer", "multipleOf": 86_400})
    assert matching.accepts(grammar, "172800")
    assert not matching.accepts(grammar, "172801")


@pytest.mark.parametrize(
    "key", ["const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
)
def test_integers_that_would_be_rounded_are_refused_by_keyword(key: str) -> None:
    for number in (2**53 + 1, -(2**53) - 1, 2**64, 10**30):
        with pytest.raises(SchemaError, match=rf"'{key}': {number} is beyond 2\*\*53"):
            schema_grammar({"properties": {"a": {key: number}}})
        assert rewrite({"a": 1, key: number}, lenient=True) == {"a": 1}
    assert rewrite({key: 1e300}) == {key: 1e300} or key == "multipleOf"
    assert rewrite({"properties": {key: {"default": 2**60}}})


def test_integers_in_lists_of_values_are_looked_at() -> None:
    with pytest.raises(SchemaError, match="'enum': 9007199254740993 is beyond"):
        schema_grammar({"enum": ["a", {"b": [1, 2**53 + 1]}]})


def test_a_pattern_that_matches_a_property_is_refused(matching: Matching) -> None:
    schema = {"properties": {"score": {}}, "patternProperties": {"^s": {}, "^t": {}}}
    with pytest.raises(SchemaError, match=r"'patternProperties': '\^s' matches .* 'score'"):
        schema_grammar(schema)
    kept = rewrite(schema, lenient=True)
    assert kept == {"properties": {"score": {}}, "patternProperties": {"^t": {}}}
    apart = schema_grammar({"type": "object"} | kept | {"additionalProperties": False})
    assert matching.accepts(apart, '{"score": 1, "t": 2}')
    assert not matching.accepts(apart, '{"score": 1, "u": 2}')
    with pytest.raises(SchemaError, match="'patternProperties'"):  # of another library
        schema_grammar({"properties": {"a": {}}, "patternProperties": {r"\p{L}": {}}})


def test_properties_that_are_optional_are_bounded() -> None:
    names = [f"p{i}" for i in range(600)]
    schema: dict[str, Any] = {"properties": {name: {} for name in names}}
    with pytest.raises(SchemaError, match=f"600 properties .* optional, at most {MAX_OPTIONAL}"):
        part_grammar(schema)
    assert rewrite(schema | {"required": names[MAX_OPTIONAL:]})
