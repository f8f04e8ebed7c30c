"""JSON schemas as grammars.

Some schemas are rewritten into what `llguidance` supports where that means the same: a `oneOf`
whose alternatives exclude each other is an `anyOf`, and a `format` that JSON Schema does not define
says nothing. Whatever else is not supported is refused by name, since an output that ignores a
keyword would not be what was asked for. `lenient` ignores it: of a tool that is not strict, the
arguments are described, not promised.

JSON is written on one line, as `json.dumps` does: chat templates render tool calls in this way, so
a model's own words are the prefix of its next turn, and more tokens are known before they are
computed. A `whitespace_pattern` allows other white space.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, cast

import llguidance

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_SCHEMA_CHARS = 256 * 1024
MAX_DEPTH = 64
MAX_PROPERTIES = 2000  # of one object: compiling takes time by their square
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
FORMATS = frozenset(  # that JSON Schema defines
    (
        *("date-time", "time", "date", "duration", "email", "idn-email", "hostname"),
        *("idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid"),
        *("uri-template", "json-pointer", "relative-json-pointer", "regex"),
    )
)
_SUPPORTED_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_TOO_DEEP = f"the schema is nested more than {MAX_DEPTH} deep"
_ONE_OF = (
    "a 'oneOf' whose alternatives may both be valid is not supported: let each require a property "
    "with a 'const' of its own, or use 'anyOf'"
)
_SUBSCHEMAS = frozenset(
    (
        *("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then"),
        *("else", "propertyNames", "unevaluatedItems", "unevaluatedProperties"),
    )
)
_LISTS = frozenset(["allOf", "anyOf", "oneOf", "prefixItems", "items"])
_MAPS = frozenset(["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"])


class SchemaError(ValueError):
    """A schema that cannot be kept; one line."""


def schema_grammar(schema: Any, *, whitespace: str | None = None, lenient: bool = False) -> str:
    """Raises SchemaError."""
    compiled = rewrite(schema, lenient=lenient)
    style: dict[str, Any] = {"whitespace_pattern": whitespace} if whitespace else {**ONE_LINE}
    if lenient:
        style |= {"lenient": True, "coerce_one_of": True}
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(
            compiled, overrides=cast("JsonCompileOptions", style)
        )
    except ValueError as error:
        raise SchemaError(in_one_line(str(error))) from None


def part_grammar(schema: Any, *, lenient: bool = False) -> dict[str, Any]:
    """A schema for `%json` in another grammar. Raises SchemaError also for what does not compile:
    an error of the whole grammar would not say which part is meant."""
    grammar = schema_grammar(schema, lenient=lenient)
    wrong = llguidance.LLMatcher.validate_grammar(grammar)
    if wrong:
        raise SchemaError(in_one_line(wrong))
    part: dict[str, Any] = json.loads(grammar)["grammars"][0]["json_schema"]
    return part


def in_one_line(error: str) -> str:
    """What the library says of a grammar, for a client."""
    first, _, rest = error.partition("\n")
    if "coerce_one_of" in first:
        return _ONE_OF
    reason = re.search(r"^error: (.*)", rest, re.MULTILINE)  # of a regular expression
    return f"{first} {reason[1]}"[:300] if reason else first[:300]


def rewrite(schema: Any, *, lenient: bool = False) -> dict[str, Any]:
    """A schema that means the same. Raises SchemaError."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise SchemaError(f"a schema is an object, got {schema!r:.60}")
    try:
        size = len(json.dumps(schema))
    except RecursionError:
        raise SchemaError(_TOO_DEEP) from None
    if size > MAX_SCHEMA_CHARS:
        raise SchemaError(f"the schema has {size} characters, more than {MAX_SCHEMA_CHARS}")
    rewritten: dict[str, Any] = _Rewriter(schema, lenient).schema(schema, 0)
    return rewritten


class _Rewriter:
    def __init__(self, root: dict[str, Any], lenient: bool) -> None:
        self._root, self._lenient = root, lenient

    def schema(self, node: Any, depth: int) -> Any:
        if not isinstance(node, dict):
            return node
        if depth > MAX_DEPTH:
            raise SchemaError(_TOO_DEEP)
        made: dict[str, Any] = {}
        for key, value in node.items():
            if key in _MAPS and isinstance(value, dict):
                if len(value) > MAX_PROPERTIES:
                    raise SchemaError(f"'{key}' has {len(value)} entries, at most {MAX_PROPERTIES}")
                value = {name: self.schema(each, depth + 1) for name, each in value.items()}
            elif key in _LISTS and isinstance(value, list):
                value = [self.schema(each, depth + 1) for each in value]
            elif key in _SUBSCHEMAS:
                value = self.schema(value, depth + 1)
            if key == "oneOf" and "anyOf" not in node and self._exclude_each_other(value):
                key = "anyOf"
            made[key] = value
        named = made.get("format")
        ignored = isinstance(named, str) and (self._lenient or named not in FORMATS)
        if ignored and named not in _SUPPORTED_FORMATS:
            del made["format"]
        return made

    def _exclude_each_other(self, alternatives: Any) -> bool:
        """Whether no value can be valid by two of them, as far as is easily seen."""
        if not isinstance(alternatives, list) or not alternatives:
            return False
        resolved = [self._resolve(each) for each in alternatives]
        if not all(isinstance(each, dict) for each in resolved):
            return False
        if _are_disjoint([_types(each) for each in resolved]):
            return True
        if _are_disjoint([_values(each) for each in resolved]):
            return True
        shared = set.intersection(*(set(_tags(each)) for each in resolved))
        return any(_are_disjoint([_tags(each)[name] for each in resolved]) for name in shared)

    def _resolve(self, node: Any) -> Any:
        """What a local `$ref` points to."""
        for _ in range(8):
            at = node.get("$ref") if isinstance(node, dict) else None
            if not isinstance(at, str) or not at.startswith("#/"):
                return node
            found: Any = self._root
            for part in at[2:].split("/"):
                part = part.replace("~1", "/").replace("~0", "~")
                found = found.get(part) if isinstance(found, dict) else None
            node = found
        return None


def _types(node: dict[str, Any]) -> frozenset[str] | None:
    """None: any."""
    named = node.get("type")
    if named is None:
        values = _values(node)
        return None if values is None else frozenset(_type_of(json.loads(v)) for v in values)
    types = [named] if isinstance(named, str) else named
    if not isinstance(types, list) or not all(isinstance(each, str) for each in types):
        return None
    return frozenset("number" if each == "integer" else each for each in types)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def _values(node: dict[str, Any]) -> frozenset[str] | None:
    """The only values that are valid, as JSON; None: they are not listed."""
    if "const" in node:
        return frozenset([_written(node["const"])])
    if isinstance(node.get("enum"), list):
        return frozenset(map(_written, node["enum"]))
    return None


def _written(value: Any) -> str:
    """The same for values that are equal, as 1 and 1.0 are."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(each) for each in value]
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in value.items()}
    return value


def _tags(node: dict[str, Any]) -> dict[str, frozenset[str]]:
    """Properties that an object has to have, with the only values that they may have."""
    properties, required = node.get("properties"), node.get("required")
    if node.get("type") != "object" or not isinstance(properties, dict):
        return {}
    found: dict[str, frozenset[str]] = {}
    for name in required if isinstance(required, list) else ():
        each = properties.get(name) if isinstance(name, str) else None
        values = _values(each) if isinstance(each, dict) else None
        if values is not None:
            found[name] = values
    return found


def _are_disjoint(sets: list[frozenset[str] | None]) -> bool:
    seen: set[str] = set()
    for each in sets:
        if each is None or not seen.isdisjoint(each):
            return False
        seen |= each
    return True
