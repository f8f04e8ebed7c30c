"""The tools of a request, as formats know them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class InputFormat:
    """What a custom tool takes: a text that matches `definition`; without a `syntax`, any."""

    syntax: Literal["", "regex", "lark"] = ""
    definition: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)  # a JSON schema
    strict: bool = False  # arguments that do not match the schema are never written
    custom: InputFormat | None = None  # it takes a text, as its one parameter

    @property
    def is_held(self) -> bool:
        """Whether what is written for it has to match."""
        return self.strict or (self.custom is not None and self.custom.syntax != "")

    def type_of(self, parameter: str) -> str:
        """Of a parameter, as JSON Schema calls it; "" if the schema does not say it plainly."""
        kinds = self.types_of(parameter) - {"null"}
        return next(iter(kinds)) if len(kinds) == 1 else ""

    def types_of(self, parameter: str) -> frozenset[str]:
        """With an empty name for what the schema does not say plainly."""
        return _types(self._properties.get(parameter))

    def has(self, parameter: str) -> bool:
        """Whether the schema names it."""
        return parameter in self._properties

    @property
    def _properties(self) -> Mapping[str, Any]:
        properties = self.parameters.get("properties")
        return properties if isinstance(properties, Mapping) else {}


def _types(schema: Any) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset([""])
    kind, alternatives, values = (schema.get(key) for key in ("type", "anyOf", "enum"))
    if kind is None and isinstance(alternatives, list):
        return frozenset[str]().union(*map(_types, alternatives))
    if kind is None and isinstance(values, list) and all(isinstance(v, str) for v in values):
        return frozenset(["string"])
    kinds = kind if isinstance(kind, list) else [kind]
    return frozenset(each if isinstance(each, str) else "" for each in kinds)
