"""Instances as outputs have them: the keys of an object in the order of its schema."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

MAX_DEPTH = 20  # references and alternatives within each other
TYPES = {list: "array", dict: "object", str: "string", bool: "boolean", type(None): "null"}


def in_schema_order(root: Any, data: Any) -> Any:
    """Orders `data`, an instance of the schema `root`."""
    return _ordered(root, [root], data)


def _ordered(root: Any, schemas: Sequence[Any], data: Any) -> Any:
    nodes = [node for schema in schemas for node in _nodes(root, schema, data)]
    if isinstance(data, list):
        return [_ordered(root, _of_item(nodes, i), each) for i, each in enumerate(data)]
    if not isinstance(data, dict):
        return data
    known = [name for node in nodes for name in node.get("properties", {})]
    known += [name for node in nodes for name in node.get("required", [])]
    keys = [key for key in dict.fromkeys([*known, *data]) if key in data]
    return {key: _ordered(root, _of_value(nodes, key), data[key]) for key in keys}


def _nodes(root: Any, schema: Any, data: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """`schema` and all that says more of `data`, in the order of its keywords; a `oneOf` that is
    no `anyOf` counts last, wherever it is."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return
    for key in sorted(dict.fromkeys([*schema, "properties"]), key=lambda key: key == "oneOf"):
        value = schema.get(key)
        if key == "properties":
            yield schema
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            yield from _nodes(root, _found(root, value), data, depth + 1)
        elif key == "allOf":
            for each in value:
                yield from _nodes(root, each, data, depth + 1)
        elif key in ("anyOf", "oneOf"):
            best = max(value, key=lambda each: _fit(root, each, data, depth + 1))
            yield from _nodes(root, best, data, depth + 1)


def _fit(root: Any, schema: Any, data: Any, depth: int) -> float:
    """How well an alternative describes `data`: a mistake outweighs what it knows of it."""
    score = 0.0
    for node in _nodes(root, schema, data, depth):
        values = node.get("enum", [node["const"]] if "const" in node else [data])
        score -= 100 * (data not in values or not _has_type(data, node.get("type")))
        if isinstance(data, dict):
            properties = node.get("properties", {})
            score -= 100 * sum(key not in data for key in node.get("required", []))
            for key, value in data.items():
                score += 1 if key in properties else -0.1
                score += min(0.0, _fit(root, properties.get(key), value, depth + 1))
    return score


def _has_type(data: Any, named: Any) -> bool:
    found = TYPES.get(type(data), "number")
    names = named if isinstance(named, list) else [named]
    return named is None or found in names or (isinstance(data, int) and "integer" in names)


def _found(root: Any, at: str) -> Any:
    """What a `$ref` points to."""
    node = root
    for part in filter(None, at[1:].split("/")):
        part = part.replace("~1", "/").replace("~0", "~")
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _of_item(nodes: Sequence[dict[str, Any]], i: int) -> list[Any]:
    found = []
    for node in nodes:
        items = node.get("items")
        first = node.get("prefixItems", items if isinstance(items, list) else [])
        rest = node.get("additionalItems") if isinstance(items, list) else items
        found.append(first[i] if i < len(first) else rest)
    return found


def _of_value(nodes: Sequence[dict[str, Any]], key: str) -> list[Any]:
    found: list[Any] = []
    for node in nodes:
        properties = node.get("properties", {})
        others = [*node.get("patternProperties", {}).values(), node.get("additionalProperties")]
        found += [properties[key]] if key in properties else others
    return found
