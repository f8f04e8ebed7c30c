"""From what a user writes after `--timing` to a Timing.

FILE.json   {"kind": "polynomial", "prefill_ms": [a, b, c], "decode_ms": [d, e, f],
             "links": {"peer_bytes_per_s": 5e10, ...}}; "links" may be left out
FILE.npz    a measured profile, of `kvrelay profile` or of NVIDIA's profiler
GPU:MODEL   a roofline, such as h100:llama-3-8b
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvrelay.lab.timing.profile import read_profile
from kvrelay.lab.timing.roofline import GPUS, MODELS, parse_roofline
from kvrelay.lab.timing.timing import Links, Polynomial, Timing, TimingError, read_json

__all__ = ["TimingError", "load_timing"]

KEYS = ("kind", "prefill_ms", "decode_ms", "links")


def load_timing(text: str) -> Timing:
    """Raises TimingError if it is none."""
    path = Path(text).expanduser()
    if path.suffix == ".npz":
        return read_profile(path)
    if path.suffix == ".json" and not _is_roofline(text):
        return _read_json(path)
    if ":" in text:
        return parse_roofline(text)
    raise TimingError(
        f"timing {text!r}: expected a .json or .npz file, or GPU:MODEL with a GPU of"
        f" {', '.join(GPUS)} and a model of {', '.join(MODELS)}, such as h100:llama-3-8b"
    )


def _is_roofline(text: str) -> bool:
    """GPU:/path/to/config.json also ends in .json."""
    return ":" in text and not Path(text).expanduser().exists()


def _read_json(path: Path) -> Polynomial:
    raw = read_json(path)
    if not isinstance(raw, dict) or raw.get("kind") != "polynomial":
        kind = raw.get("kind") if isinstance(raw, dict) else raw
        raise TimingError(f'{path}: kind = {kind!r}: expected "polynomial"')
    for key in raw:
        if key not in KEYS:
            raise TimingError(f"{path}: {key} is not known; there are {', '.join(KEYS)}")
    return Polynomial(
        prefill_ms=_three(path, raw, "prefill_ms"),
        decode_ms=_three(path, raw, "decode_ms"),
        name=path.name,
        links=_links(path, raw.get("links", {})),
    )


def _three(path: Path, raw: Mapping[str, Any], key: str) -> tuple[float, float, float]:
    value = raw.get(key)
    if not isinstance(value, list) or len(value) != 3 or not all(map(_is_number, value)):
        raise TimingError(f"{path}: {key} = {value!r}: expected three numbers")
    a, b, c = (float(each) for each in value)
    if a + b + c <= 0 or c < 0:
        raise TimingError(f"{path}: {key} = {value!r}: expected a time above 0 for every pass")
    return a, b, c


def _links(path: Path, raw: Any) -> Links:
    known = [each.name for each in fields(Links)]
    if not isinstance(raw, dict):
        raise TimingError(f"{path}: links = {raw!r}: expected an object with {', '.join(known)}")
    for key, value in raw.items():
        if key not in known:
            raise TimingError(f"{path}: links.{key} is not known; there are {', '.join(known)}")
        least = 0 if key in ("transfer_s", "message_s") else 1
        if not _is_number(value) or value < least:
            raise TimingError(f"{path}: links.{key} = {value!r}: expected at least {least}")
        if key == "bytes_per_token" and not isinstance(value, int):
            raise TimingError(f"{path}: links.{key} = {value!r}: expected a whole number")
    return Links(**raw)


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)
