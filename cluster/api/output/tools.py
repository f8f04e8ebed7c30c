"""The tools of a request, as formats know them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)  # a JSON schema
    strict: bool = False  # arguments that do not match the schema are never written

    def type_of(self, parameter: str) -> str:
        """Of a parameter, as JSON Schema calls it; "" if the schema does not say it plainly."""
        properties = self.parameters.get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if isinstance(kind, list):
            kinds = [each for each in kind if each != "null"]
            kind = kinds[0] if len(kinds) == 1 else None
        return kind if isinstance(kind, str) else ""
