"""Types of messages as data: written down by one version, and built again by a later one."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

Schema = dict[str, Any]
"""`{"kind": ...}` of a type, with what it consists of. Objects and enums are named, and stand in
a table of their own by that name."""

_PLAIN = {
    inspect.AnyType: "any",
    inspect.NoneType: "none",
    inspect.BoolType: "bool",
    inspect.IntType: "int",
    inspect.FloatType: "float",
    inspect.StrType: "str",
    inspect.BytesType: "bytes",
    inspect.RawType: "any",
}
_BUILT = {each.__name__: each for each in (bool, int, float, str, bytes)} | {
    "any": Any,
    "none": None,
}

GIVEN = {
    "schedules": "daily 22:00-06:00 0-2",  # text that is parsed where it arrives
    **dict.fromkeys(("tool_parser", "reasoning_parser"), "auto"),  # once one of a list
}


class Table:
    """Objects and enums that types consist of, by name."""

    def __init__(self) -> None:
        self.named: dict[str, Schema] = {}

    def describe(self, kind: Any) -> Schema:
        return self._schema(inspect.type_info(kind))

    def _schema(self, info: inspect.Type) -> Schema:
        match info:
            case inspect.Metadata(type=inner):
                return self._schema(inner)
            case inspect.EnumType(cls):
                self.named[cls.__name__] = {"kind": "enum", "values": [m.value for m in cls]}
                return {"kind": "named", "name": cls.__name__}
            case inspect.StructType(cls) | inspect.DataclassType(cls):
                return self._object(cls, info)
            case inspect.CustomType(cls) if issubclass(cls, Path):
                return {"kind": "str"}
            case inspect.LiteralType(values):
                return {"kind": "literal", "values": list(values)}
            case inspect.UnionType(types):
                return {"kind": "union", "of": [self._schema(each) for each in types]}
            case inspect.TupleType(types):
                return {"kind": "tuple", "of": [self._schema(each) for each in types]}
            case inspect.CollectionType(item_type=item):
                return {"kind": "list", "of": self._schema(item)}
            case inspect.DictType(key, value):
                return {"kind": "dict", "of": [self._schema(key), self._schema(value)]}
            case inspect.NamedTupleType(cls):
                return self._object(cls, info)
            case inspect.StrType(pattern=pattern) if pattern and not re.search(pattern, ""):
                return {"kind": "str", "least": "x"}
            case inspect.IntType() | inspect.FloatType():
                least = _within(1, info.gt, info.ge, info.le)
                return {"kind": _PLAIN[type(info)]} | ({"least": least} if least != 1 else {})
        return {"kind": _PLAIN[type(info)]}

    def _object(self, cls: type, info: Any) -> Schema:
        if cls.__name__ not in self.named:
            self.named[cls.__name__] = {}  # it may have itself in it
            is_array = isinstance(info, inspect.NamedTupleType) or getattr(info, "array_like", 0)
            self.named[cls.__name__] = {
                "kind": "array" if is_array else "object",
                "fields": {
                    each.encode_name: {"required": each.required, **self._schema(each.type)}
                    for each in info.fields
                },
            }
        return {"kind": "named", "name": cls.__name__}


NOT_SENT = {  # values of enums
    # Who asks for it in an upgrade is answered by a worker of the new version, or by none.
    "Pooling": ["cls"],
    # The first two are announced as "host", blocks of the last in fields of their own.
    "Tier": ["orphaned", "packed", "object"],
    # Only to who has asked for an adapter, or for one version of the weights; and by workers that
    # the last release does not have.
    "Refusal": ["adapter_failed", "weight_version_not_found", "unsupported_parameter"],
}


class Reader:
    """Decodes as a version did whose types were written down: objects take what they know."""

    def __init__(self, named: Mapping[str, Schema]) -> None:
        self._named = named
        self._built: dict[str, Any] = {}

    def decode(self, name: str, data: bytes) -> Any:
        """Raises msgspec.ValidationError where that version would have."""
        return msgspec.msgpack.decode(data, type=self._class(name))

    def only_known(self, name: str, data: bytes) -> bytes:
        """Without what that version would not have sent."""
        return msgspec.msgpack.encode(self.decode(name, data))

    def decode_json(self, name: str, data: bytes) -> Any:
        return msgspec.json.decode(data, type=self._class(name))

    def _class(self, name: str) -> Any:
        if name in self._built:
            return self._built[name]
        schema = self._named[name]
        if schema["kind"] == "enum":
            made: Any = StrEnum(name, {f"v{i}": v for i, v in enumerate(schema["values"])})
        else:
            fields = [
                (field, self._type(each))
                if each["required"]
                else (field, typing.Union[self._type(each), msgspec.UnsetType], msgspec.UNSET)  # noqa: UP007
                for field, each in schema["fields"].items()
            ]
            made = msgspec.defstruct(
                name, fields, kw_only=True, array_like=schema["kind"] == "array"
            )
        self._built[name] = made
        return made

    def _type(self, schema: Schema) -> Any:
        of: Any = schema.get("of")
        match schema["kind"]:
            case "named":
                return self._class(schema["name"])
            case "literal":
                return typing.Literal[tuple(schema["values"])]
            case "union":
                return typing.Union[tuple(self._type(each) for each in of)]  # noqa: UP007
            case "tuple":
                return tuple[tuple(self._type(each) for each in of)]  # type: ignore[misc]
            case "list":
                return list[self._type(of)]  # type: ignore[misc]
            case "dict":
                return dict[self._type(of[0]), self._type(of[1])]  # type: ignore[misc]
        return _BUILT[schema["kind"]]

    def least(self, schema: Schema) -> Any:
        """The least that this version may send: None and nothing wherever it can be."""
        if schema["kind"] == "named":
            schema = self._named[schema["name"]]
        of: Any = schema.get("of")
        match schema["kind"]:
            case "object" | "array":
                found = {name: self.least(each) for name, each in schema["fields"].items()}
                return list(found.values()) if schema["kind"] == "array" else found
            case "union":
                nothing = {"kind": "none"} in of
                return None if nothing else self.least(of[0])
            case "tuple":
                return [self.least(each) for each in of]
            case "enum" | "literal":
                return schema["values"][0]
            case "int" | "float":
                return schema.get("least", 1)
            case "str":
                return schema.get("least", "")
        return {"bool": False, "bytes": b"", "any": "any"}.get(
            schema["kind"], [] if schema["kind"] == "list" else {}
        )


def filled(kind: Any) -> Any:
    """A message of this type in which every field has a value, also those that may be None."""
    return _value(inspect.type_info(kind), "x")


def sparse(kind: Any) -> Any:
    """One with None and nothing wherever that may be."""
    return _value(inspect.type_info(kind), "x", sparse=True)


def _value(info: inspect.Type, name: str, *, sparse: bool = False) -> Any:
    match info:
        case inspect.UnionType(types) if sparse and any(
            isinstance(each, inspect.NoneType) for each in types
        ):
            return None
        case inspect.CollectionType() if sparse:
            return () if isinstance(info, inspect.VarTupleType) else []
        case inspect.DictType() if sparse:
            return {}
        case inspect.AnyType():
            return "any"
        case inspect.NoneType():
            return None
        case inspect.BoolType():
            return True
        case inspect.IntType(gt=gt, ge=ge, le=le):
            return _within(7, gt, ge, le)
        case inspect.FloatType(gt=gt, ge=ge, le=le):
            return float(_within(0.5, gt, ge, le))
        case inspect.Metadata(type=inner):
            return _value(inner, name, sparse=sparse)
        case inspect.StrType(pattern=pattern):
            name = GIVEN.get(name, name)
            return name if pattern is None or re.search(pattern, name) else ""
        case inspect.BytesType():
            return b"\x00" + name.encode()
        case inspect.EnumType(cls):
            sent = [each for each in cls if each.value not in NOT_SENT.get(cls.__name__, ())]
            return sent[-1]
        case inspect.LiteralType(values):
            return values[0]  # the last one may be new
        case inspect.CustomType(cls) if issubclass(cls, Path):
            return Path("/folder") / name
        case inspect.UnionType(types):
            (first, *_) = [each for each in types if not isinstance(each, inspect.NoneType)]
            return _value(first, name, sparse=sparse)
        case inspect.TupleType(types):
            return tuple(_value(each, name, sparse=sparse) for each in types)
        case inspect.CollectionType(item_type=item):
            made = [_value(item, name, sparse=sparse)]
            return tuple(made) if isinstance(info, inspect.VarTupleType) else made
        case inspect.DictType(key, value):
            return {_value(key, name, sparse=sparse): _value(value, name, sparse=sparse)}
        case inspect.StructType(cls) | inspect.DataclassType(cls):
            fields: Iterable[inspect.Field] = info.fields
            return cls(
                **{each.name: _value(each.type, each.name, sparse=sparse) for each in fields}
            )
    raise NotImplementedError(f"{name}: {info}")


def _within(value: float, gt: float | None, ge: float | None, le: float | None) -> float:
    if ge is not None:
        value = max(value, ge)
    if gt is not None and value <= gt:
        value = gt + 1
    return value if le is None else min(value, le)
