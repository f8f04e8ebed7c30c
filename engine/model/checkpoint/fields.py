"""Fields of a checkpoint's JSON files, each read with a check that names the key and its value."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import gcd
from pathlib import Path
from typing import Any

from kvrelay.engine.kv.spec import KVHeads
from kvrelay.engine.model.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def count(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer; null counts as absent."""
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key} is {value!r}, a positive integer is needed")
    return value


def number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A finite number; null counts as absent."""
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 1e300:
        raise ModelError(f"config.json: {key} is {value!r}, a number is needed")
    return float(value)


def numbers(raw: Mapping[str, Any], key: str, length: int) -> tuple[float, ...]:
    value = raw.get(key)
    if not isinstance(value, list) or len(value) != length:
        found = f"{len(value)} numbers" if isinstance(value, list) else repr(value)
        raise ModelError(f"config.json: {key} is {found}, a list of {length} numbers is needed")
    return tuple(float(each) for each in value)


def ids(raw: Mapping[str, Any], key: str) -> list[int]:
    """Takes one token id or a list of them."""
    value = raw.get(key)
    if value is None:
        return []
    return [int(v) for v in value] if isinstance(value, list) else [int(value)]


def biases(raw: Mapping[str, Any]) -> dict[str, bool]:
    """Fields of ModelConfig, of all four projections of attention."""
    has = bool(raw.get("attention_bias"))
    return {"attention_bias": has, "output_bias": has}


def head_dim_of(raw: Mapping[str, Any]) -> int:
    return count(raw, "head_dim", count(raw, "hidden_size") // count(raw, "num_attention_heads"))


def refuse(raw: Mapping[str, Any], *keys: str) -> None:
    """Raises ModelError if one of `keys` is set: it would change what is computed."""
    for key in keys:
        if raw.get(key):
            raise ModelError(f"config.json: {key} {raw[key]!r} is not supported")


def layer_heads(each: Iterable[KVHeads]) -> dict[str, Any]:
    """The fields of ModelConfig for layers with these. Raises ModelError."""
    heads = tuple(each)
    odd = next((h for h in heads if h.key_dim % 2 or h.value_dim % 2), None)
    if odd:
        raise ModelError(f"config.json: heads of {odd.key_dim} and {odd.value_dim} dimensions")
    alike = len({*heads}) == 1 and heads[0].key_dim == heads[0].value_dim
    return {
        "num_kv_heads": gcd(*(h.num_heads for h in heads)),
        "head_dim": max(h.key_dim for h in heads),
        "layer_heads": () if alike else heads,
    }
