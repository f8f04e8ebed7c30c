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
from collections.abc import Iterator
from decimal import Decimal
from math import isfinite, lcm
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import llguidance

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_SCHEMA_CHARS = 256 * 1024
MAX_DEPTH = 64
MAX_PROPERTIES = 2000  # of one object: compiling takes time by their square
MAX_OPTIONAL = 450  # of one object: each may come next, and a grammar has 2,000 ways to go on
# Of `multipleOf`, without the zeros at its end: the remainders that are told apart are computed
# before the first token. Where schemas meet, it is the least common multiple that counts.
MAX_MULTIPLE = 20_000
MAX_INTEGER = 2**53  # beyond it, integers are rounded where they are compared
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
TOO_DEEP = f"the schema is nested more than {MAX_DEPTH} deep"
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
_NUMBERS = frozenset(
    (
        *("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        "multipleOf",
    )
)
_MEET = frozenset(["allOf", "anyOf", "oneOf", "$ref", "if"])  # what is beside them holds as well
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
    if "Current row has" in first:
        return f"{first.partition(';')[0]}: require more of the properties that may come next"
    if "Too many items" in first:
        return "what may come next has too many forms: does it require itself, without an end?"
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
        raise SchemaError(TOO_DEEP) from None
    if size > MAX_SCHEMA_CHARS:
        raise SchemaError(f"the schema has {size} characters, more than {MAX_SCHEMA_CHARS}")
    rewriter = _Rewriter(schema, lenient)
    rewritten: dict[str, Any] = rewriter.schema(schema, 0)
    rewriter.check_multiples()
    return rewritten


class _Rewriter:
    def __init__(self, root: dict[str, Any], lenient: bool) -> None:
        self._root, self._lenient = root, lenient
        self._multiples: list[Decimal] = []
        self._meet = False  # whether two schemas may have to hold for one value

    def check_multiples(self) -> None:
        """Raises SchemaError."""
        if not self._multiples:
            return
        least = min(int(each.as_tuple().exponent) for each in self._multiples)
        whole = [int(each.scaleb(-least)) for each in self._multiples]
        cost = lcm(*whole) if self._meet else 0
        cost = max(_without_zeros(cost), sum(map(_without_zeros, whole)))
        if cost > MAX_MULTIPLE:
            raise SchemaError(
                f"'multipleOf' tells {cost} remainders apart, at most {MAX_MULTIPLE}: the sum of"
                " all in the schema, or their least common multiple where schemas meet"
            )

    def schema(self, node: Any, depth: int) -> Any:
        if not isinstance(node, dict):
            return node
        if depth > MAX_DEPTH:
            raise SchemaError(TOO_DEEP)
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
            elif key in _NUMBERS and self._is_rounded(key, value):
                continue
            if key == "oneOf" and "anyOf" not in node and self._exclude_each_other(value):
                key = "anyOf"
            made[key] = value
        self._check_properties(made)
        self._count_multiple(made)
        named = made.get("format")
        ignored = isinstance(named, str) and (self._lenient or named not in FORMATS)
        if ignored and named not in _SUPPORTED_FORMATS:
            del made["format"]
        return made

    def _is_rounded(self, key: str, value: Any) -> bool:
        """Whether a number is compared otherwise than it is written. Raises SchemaError, where that
        is not left out."""
        wrong = next((each for each in _whole_numbers(value) if abs(each) > MAX_INTEGER), None)
        if wrong is None or self._lenient:
            return wrong is not None
        raise SchemaError(
            f"'{key}': {str(wrong)[:40]} is beyond 2**53, where integers are not told apart: let it"
            " be a string"
        )

    def _check_properties(self, made: dict[str, Any]) -> None:
        """Raises SchemaError for what passes at first and cannot be kept later."""
        properties, patterns = made.get("properties"), made.get("patternProperties")
        if not isinstance(properties, dict):
            return
        required = made.get("required")
        needed = {each for each in required if isinstance(each, str)} if _is_list(required) else ()
        num_optional = sum(name not in needed for name in properties)
        if num_optional > MAX_OPTIONAL:
            raise SchemaError(
                f"{num_optional} properties of an object are optional, at most {MAX_OPTIONAL}:"
                " require more of them"
            )
        if not isinstance(patterns, dict):
            return
        for pattern in list(patterns):
            name = next((name for name in properties if _may_match(pattern, name)), None)
            if name is not None and self._lenient:
                del patterns[pattern]
            elif name is not None:
                raise SchemaError(
                    f"'patternProperties': {pattern!r:.80} matches the property {name!r:.80}, which"
                    " is not supported: leave out one of them"
                )

    def _count_multiple(self, made: dict[str, Any]) -> None:
        self._meet = self._meet or (len(made) > 1 and not _MEET.isdisjoint(made))
        self._meet = self._meet or (_is_list(made.get("allOf")) and len(made["allOf"]) > 1)
        number = made.get("multipleOf")
        if isinstance(number, int | float) and not isinstance(number, bool) and isfinite(number):
            self._multiples.append(abs(Decimal(repr(number))).normalize())

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


def _is_list(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _whole_numbers(value: Any) -> Iterator[int]:
    """In a JSON value."""
    if isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _whole_numbers(each)
    elif isinstance(value, int):
        yield value


def _may_match(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:  # written for another library
        return True


def _without_zeros(number: int) -> int:
    """They cost nothing: decimal digits are what is read."""
    while number and number % 10 == 0:
        number //= 10
    return number


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
    """Makes one key for values that are equal, as 1 and 1.0 are."""
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
