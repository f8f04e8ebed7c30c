"""A measured profile as a Timing: an .npz file in the format of NVIDIA's profiler.

  prefill_isl, prefill_ttft_ms     1-D: prompts of so many tokens, and how long they take, alone
  decode_active_kv_tokens,         either the axes of a grid, with decode_itl 2-D [active, context],
  decode_context_length,           or points, with all three 1-D: a step of active / context
  decode_itl                       sequences takes decode_itl ms

`kvrelay profile` writes the same, as points, and more beside it: what a (query, key) pair takes,
what a pass of prompts and decodes saves, links and overheads. See `docs/timing.md`.

What a user writes after `--timing` becomes a Timing here:

FILE.json   {"kind": "polynomial", "prefill_ms": [a, b, c], "decode_ms": [d, e, f],
             "links": {"peer_bytes_per_s": 5e10, ...}}; "links" may be left out
FILE.npz    a measured profile, of `kvrelay profile` or of NVIDIA's profiler
GPU:MODEL   a roofline, such as h100:llama-3-8b
"""

from __future__ import annotations

import math
import zipfile
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrelay.lab.timing.roofline import GPUS, MODELS, parse_roofline
from kvrelay.lab.timing.timing import Links, Overheads, Polynomial, Timing, TimingError, read_json

REQUIRED = (
    "prefill_isl",
    "prefill_ttft_ms",
    "decode_active_kv_tokens",
    "decode_context_length",
    "decode_itl",
)
LEAST_SHARE = 0.1  # the quickest measured pass times it: below the measured range none is quicker

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interpolation:
    """Through measured points, straight between them. Beyond them it goes on as between the last
    two, but does not fall; before them as between the first two, but not below a tenth of the
    least. Invariant: `xs` ascends, and has at least one element."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def at(self, x: float) -> float:
        xs, ys = self.xs, self.ys
        if len(xs) == 1:
            return ys[0]
        right = min(max(bisect_right(xs, x), 1), len(xs) - 1)
        left = right - 1
        slope = (ys[right] - ys[left]) / (xs[right] - xs[left])
        if x > xs[-1]:
            return ys[-1] + max(0.0, slope) * (x - xs[-1])
        y = ys[left] + slope * (x - xs[left])
        return max(y, LEAST_SHARE * min(ys)) if x < xs[0] else y


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """Milliseconds of a decode step: one line over the number of sequences for each measured
    context, straight between the contexts. A step that takes a + b * batch + c * batch * context
    comes out exactly, in the measured range and outside of it. Owned by a Profile."""

    contexts: tuple[float, ...]  # ascending
    lines: tuple[Interpolation, ...]

    def at(self, batch: float, context: float) -> float:
        contexts = self.contexts
        if len(contexts) == 1:
            return self.lines[0].at(batch)
        right = min(max(bisect_right(contexts, context), 1), len(contexts) - 1)
        left = right - 1
        low, high = self.lines[left].at(batch), self.lines[right].at(batch)
        share = (context - contexts[left]) / (contexts[right] - contexts[left])
        if share > 1:
            return high + max(0.0, high - low) * (share - 1)
        return max(low + (high - low) * share, LEAST_SHARE * min(low, high))


@dataclass(frozen=True, slots=True)
class Profile:
    """A Timing that was measured. Owned by whoever read it."""

    name: str
    prefill: Interpolation  # ms over tokens of one prompt
    decode: DecodeSteps
    pair_ms: float  # what a (query, key) pair of a prompt takes
    mixed_saved_ms: float = 0.0  # by a pass of prompts and decodes: weights are read once
    links: Links = field(default_factory=Links)
    overheads: Overheads = field(default_factory=Overheads)

    def pass_s(
        self,
        prompt_tokens: int,
        prompt_pairs: float,
        num_prompts: int,
        num_decodes: int,
        kv_tokens: int,
        pool_tokens: int,
    ) -> float:
        """A prompt was measured from its start on: n tokens, n^2 / 2 pairs. What a chunk or a batch
        of prompts has more or fewer is added at `pair_ms`."""
        prompts_ms = decodes_ms = 0.0
        if prompt_tokens:
            alone_ms = self.prefill.at(prompt_tokens)
            pairs = prompt_pairs - prompt_tokens * prompt_tokens / 2.0
            prompts_ms = max(alone_ms + self.pair_ms * pairs, LEAST_SHARE * alone_ms)
        if num_decodes:
            decodes_ms = self.decode.at(num_decodes, kv_tokens / num_decodes)
        both_ms = prompts_ms + decodes_ms
        if prompts_ms and decodes_ms:
            both_ms = max(both_ms - self.mixed_saved_ms, prompts_ms, decodes_ms)
        overheads = self.overheads
        return both_ms / 1e3 + overheads.step_s + overheads.sequence_s * num_decodes


def read_profile(path: Path) -> Profile:
    """Raises TimingError if it is no profile."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays: dict[str, Any] = {name: file[name] for name in file.files}
    except OSError as error:
        raise TimingError(f"{path}: {error.strerror or error}") from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise TimingError(f"{path}: not an .npz file: {error}") from error
    return profile_of(arrays, path.name, str(path))


def profile_of(arrays: Mapping[str, Any], name: str, where: str) -> Profile:
    """Reads the arrays of a file. Raises TimingError."""
    isl, ttft, active, context, itl = (_numbers(arrays, each, where) for each in REQUIRED)
    if isl.ndim != 1 or isl.shape != ttft.shape or not isl.size:
        raise TimingError(
            f"{where}: prefill_isl has the shape {isl.shape} and prefill_ttft_ms {ttft.shape}:"
            " expected two lists of one length"
        )
    prefill = _line(isl, ttft)
    fields_of = {kind: _known(arrays, kind, where) for kind in (Links, Overheads)}
    pair_ms = _scalar(arrays, "prefill_pair_ms", where)
    return Profile(
        name=name,
        prefill=prefill,
        decode=_decode_steps(active, context, itl, where),
        pair_ms=_fitted_pair_ms(prefill) if pair_ms is None else pair_ms,
        mixed_saved_ms=_scalar(arrays, "mixed_saved_ms", where) or 0.0,
        links=Links(**fields_of[Links]),
        overheads=Overheads(**fields_of[Overheads]),
    )


def _decode_steps(active: Array, context: Array, itl: Array, where: str) -> DecodeSteps:
    if itl.ndim == 2 and itl.shape == (active.size, context.size):
        active, context = np.meshgrid(active.ravel(), context.ravel(), indexing="ij")
    elif not (active.shape == context.shape == itl.shape):
        raise TimingError(
            f"{where}: decode_itl has the shape {itl.shape}: expected"
            f" {(active.size, context.size)}, of decode_active_kv_tokens and"
            " decode_context_length, or all three of one length"
        )
    if not itl.size or not (context > 0).all():
        raise TimingError(f"{where}: decode_context_length: expected contexts above 0")
    batch = (active / context).ravel()
    context, itl = context.ravel(), itl.ravel()
    contexts = np.unique(context)
    groups = [context == each for each in contexts]
    if batch.max() > batch.min() and any(np.unique(batch[group]).size < 2 for group in groups):
        return _fitted_steps(batch, context, itl)
    lines = tuple(_line(batch[group], itl[group]) for group in groups)
    return DecodeSteps(tuple(map(float, contexts)), lines)


def _fitted_steps(batch: Array, context: Array, itl: Array) -> DecodeSteps:
    """Points too few for a line each: the nearest a + b * batch + c * batch * context."""
    terms = np.stack([np.ones_like(batch), batch, batch * context], axis=1)
    found, *_ = np.linalg.lstsq(terms, itl, rcond=None)
    at = np.array([batch.min(), batch.max()])
    contexts = np.unique(np.array([context.min(), context.max()]))
    least = LEAST_SHARE * float(itl.min())
    lines = [
        _line(at, np.maximum(least, found[0] + found[1] * at + found[2] * at * each))
        for each in contexts
    ]
    return DecodeSteps(tuple(map(float, contexts)), tuple(lines))


def _line(x: Array, y: Array) -> Interpolation:
    """Points in order; of several at the same x, their mean."""
    xs = np.unique(x)
    return Interpolation(tuple(map(float, xs)), tuple(float(y[x == each].mean()) for each in xs))


def _fitted_pair_ms(prefill: Interpolation) -> float:
    """From how the time of a prompt curves: a + b n + pair_ms n^2 / 2. 0 where it does not."""
    if len(prefill.xs) < 3:
        return 0.0
    return float(max(0.0, 2.0 * np.polyfit(prefill.xs, prefill.ys, 2)[0]))


def _numbers(arrays: Mapping[str, Any], name: str, where: str) -> Array:
    if name not in arrays:
        raise TimingError(f"{where}: {name} is missing; expected {', '.join(REQUIRED)}")
    try:
        found: Array = np.asarray(arrays[name], dtype=np.float64)
    except (TypeError, ValueError):
        raise TimingError(f"{where}: {name}: expected numbers") from None
    if not np.isfinite(found).all() or (found < 0).any():
        raise TimingError(f"{where}: {name}: expected finite numbers that are not negative")
    return found


def _scalar(arrays: Mapping[str, Any], name: str, where: str) -> float | None:
    if name not in arrays:
        return None
    found = _numbers(arrays, name, where)
    if found.size != 1:
        raise TimingError(f"{where}: {name} has {found.size} numbers: expected one")
    return float(found.item())


def _known(arrays: Mapping[str, Any], kind: type, where: str) -> dict[str, Any]:
    """What the file says of the fields of Links or Overheads; the rest keeps its default."""
    found: dict[str, Any] = {}
    for each in fields(kind):
        value = _scalar(arrays, each.name, where)
        if value is not None:
            found[each.name] = int(value) if each.name == "bytes_per_token" else value
    return found


def arrays_of(
    prefill: Mapping[int, float],
    decode: Mapping[tuple[int, int], float],
    extra: Mapping[str, float],
) -> dict[str, Array]:
    """What goes into a file. `prefill`: ms by tokens; `decode`: ms by (batch, context); `extra`:
    `prefill_pair_ms`, `mixed_saved_ms`, fields of Links and Overheads."""
    batch, context = (np.array([point[i] for point in decode], np.float64) for i in (0, 1))
    return {
        "prefill_isl": np.array(list(prefill), np.float64),
        "prefill_ttft_ms": _array(list(prefill.values())),
        "decode_active_kv_tokens": batch * context,
        "decode_context_length": context,
        "decode_itl": _array(list(decode.values())),
        **{name: np.array(value, np.float64) for name, value in extra.items()},
    }


def _array(values: Sequence[float]) -> Array:
    return np.array(values, np.float64)


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
