"""What a request says of its output: `response_format`, `structured_outputs`, `guided_*`, and
SGLang's `json_schema`, `regex` and `ebnf`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvrelay.cluster.api.constraints.grammar import KINDS


class AsksOutput(Protocol):
    """What is needed of a request."""

    response_format: Any
    structured_outputs: dict[str, Any] | None
    guided_json: Any
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    guided_whitespace_pattern: str | None
    json_schema: str | None
    regex: str | None
    ebnf: str | None


# Field -> kind.
_OWN_FIELDS = {
    **{f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")},
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}


@dataclass(frozen=True, slots=True)
class Constraint:
    """`kind`, `value` and `options` are those of `grammar_of`; `param` is what asked for it."""

    param: str
    kind: str
    value: Any
    options: Mapping[str, Any]


def _format_of(form: Any) -> list[Constraint]:
    """Of a `response_format`. Raises ValueError."""
    if form is None:
        return []
    kind = form.get("type") if isinstance(form, dict) else form
    match kind:
        case "text":
            return []
        case "json_object":
            return [Constraint("response_format", kind, True, {})]
        case "json_schema":
            named = form.get("json_schema")
            schema = named.get("schema", True) if isinstance(named, dict) else None
            if schema is None:
                raise ValueError("'response_format': 'json_schema' is an object with a 'schema'")
            return [Constraint("response_format", "json", schema, {})]
        case "structural_tag":
            return [Constraint("response_format", kind, form, {})]
    raise ValueError(
        f"'response_format': type {kind!r:.60} is not known, use 'text', 'json_object',"
        " 'json_schema' or 'structural_tag'"
    )


def constraint_of(request: AsksOutput) -> Constraint | None:
    """Raises ValueError."""
    options = request.structured_outputs or {}
    if options.get("disable_additional_properties"):
        name = "disable_additional_properties"
        raise ValueError(f"'structured_outputs': '{name}' is not supported; say it in the schema")
    found = [
        Constraint("structured_outputs", kind, options[kind], options)
        for kind in KINDS
        if options.get(kind) not in (None, False)
    ]
    spaced = {"whitespace_pattern": request.guided_whitespace_pattern}
    for name, kind in _OWN_FIELDS.items():
        if getattr(request, name) is not None:
            found.append(Constraint(name, kind, getattr(request, name), spaced))
    found += _format_of(request.response_format)
    if len(found) > 1:
        names = " and ".join(f"{each.kind} ({each.param})" for each in found)
        raise ValueError(f"'{found[0].param}': an output matches one thing, got {names}")
    if options and not found:
        raise ValueError(f"'structured_outputs': expected one of {', '.join(KINDS)}")
    return found[0] if found else None
